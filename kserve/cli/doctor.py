"""`kserve doctor`: what this machine has, and why a part of it is used or not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kserve.cli.show import say, table
from kserve.config import load_settings, named_toolkits
from kserve.toolchain.cuda_root import PIECES, Candidate, Toolkit, candidates
from kserve.toolchain.torch_facts import find_torch


def add_commands(parser: argparse.ArgumentParser, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `kserve doctor toolchain`."""
    inner = parser.add_subparsers(required=True, metavar="COMMAND")
    command(inner, "toolchain", _toolchain, "which CUDA toolkit extensions are built with, and why")


def _toolchain(arguments: argparse.Namespace) -> int:
    torch = find_torch(sys.path)
    looked_at = candidates(
        named_toolkits(load_settings()), [Path(entry) for entry in sys.path if entry], cuda=torch.cuda if torch else ""
    )
    serving = _serving(looked_at)
    plain = {
        "torch": torch and torch.to_json(),
        "candidates": [_described(one, serving) for one in looked_at],
        "pieces": _pieces(serving) if serving else {},
    }
    say(json.dumps(plain, indent=2) if arguments.json else _text(plain))
    return 0


def _serving(looked_at: list[Candidate]) -> Toolkit | None:
    for one in looked_at:
        if one.toolkit is not None or one.named:
            return one.toolkit
    return None


def _described(one: Candidate, serving: Toolkit | None) -> dict[str, Any]:
    state = "used" if one.toolkit is not None and one.toolkit is serving else "rejected" if one.rejected else "not needed"
    version = one.toolkit.version if one.toolkit else ""
    return {"origin": one.origin, "place": one.place, "version": version, "state": state, "reason": one.rejected}


def _pieces(toolkit: Toolkit) -> dict[str, str]:
    found = {piece: toolkit.where(piece) for piece in PIECES}
    return {piece: str(path) if path else "missing" for piece, path in found.items()}


def _text(plain: dict[str, Any]) -> str:
    torch = plain["torch"]
    built = f"torch {torch['version']}, built with CUDA {torch['cuda'] or 'none'}, in {torch['root']}" if torch else "no torch"
    rows = [[one["origin"], one["version"], one["state"], one["place"], one["reason"]] for one in plain["candidates"]]
    parts = [built, table(["ORIGIN", "RELEASE", "STATE", "PLACE", "WHY NOT"], rows)]
    if plain["pieces"]:
        parts.append(table(["PIECE", "FROM"], [[piece, where] for piece, where in plain["pieces"].items()]))
    return "\n\n".join(parts)
