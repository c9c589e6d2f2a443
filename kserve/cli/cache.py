"""`kserve cache`: what is in the store."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any
from urllib.parse import urlencode

from kserve import protocol
from kserve.cli import artifact
from kserve.cli.show import ago, say, spec_text, table
from kserve.client.connection import Connection
from kserve.config import load_settings
from kserve.errors import STATUS

# A large store takes minutes to read.
_LONGEST_S = 3600.0


def add_commands(parser: argparse.ArgumentParser, command: Any) -> None:
    """Add `ls` and `show`; `command` makes a sub-parser, as `cli._command` does."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ls = command(commands, "ls", _ls, "list the artifacts in the store")
    ls.add_argument("--name", default="", help="only this kernel's")
    ls.add_argument("--target", default="", help="only those for this target")
    show = command(commands, "show", artifact.show, "show one artifact")
    artifact.add_arguments(show)
    verify = command(commands, "verify", _verify, "check every record of the store against its digest")
    verify.add_argument("--sample", type=int, metavar="N", help="check at most N records of each kind, drawn at random")
    verify.add_argument("--rebuild", action="store_true", help="build the artifacts again, too, and compare the bytes")
    prune = command(commands, "prune", _prune, "remove artifacts; without a choice, only what is over the bounds or unused")
    prune.add_argument("key", nargs="*", help="keys, or at least the first 6 digits of them")
    prune.add_argument("--name", default="", help="only this kernel's")
    prune.add_argument("--target", default="", help="only those for this target")
    prune.add_argument("--unused-days", type=float, default=0.0, metavar="N", help="only those that nobody used for N days")
    prune.add_argument("--all", action="store_true", help="every artifact that is not pinned")
    prune.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    pin = command(commands, "pin", _pin, "never evict these artifacts")
    pin.add_argument("key", nargs="*", help="keys, or at least the first 6 digits of them; without any: list the pins")
    pin.add_argument("--note", default="by hand", help="who wants that")
    unpin = command(commands, "unpin", _unpin, "let these artifacts be evicted again")
    unpin.add_argument("key", nargs="+", help="keys, or at least the first 6 digits of them")
    quarantine = command(commands, "quarantine", _quarantine, "list the damaged records that were put aside")
    quarantine.add_argument("--purge", action="store_true", help="remove them")
    why = command(commands, "why", _why, "say what makes one key differ from another")
    why.add_argument("key", help="a key, or at least the first 6 digits of it")
    why.add_argument("other", nargs="?", help="the key to compare with; left out, the nearest of the same kernel")


def _ls(arguments: argparse.Namespace) -> int:
    path = f"{protocol.ARTIFACTS}?{urlencode({'name': arguments.name, 'target': arguments.target})}"
    found = _ask("GET", path)
    if arguments.json:
        say(json.dumps(found, indent=2))
        return 0
    rows = [
        [
            a["key"][:12],
            a["name"],
            a["target"],
            f"{a['variant']} {a['debug']}".rstrip(),
            f"{a['size_bytes']} B",
            ago(a["created_at"]),
            "*" * a["pinned"],
            spec_text(a["spec"]),
        ]
        for a in found["artifacts"]
    ]
    say(table(["KEY", "NAME", "TARGET", "VARIANT", "SIZE", "BUILT", "PIN", "SPEC"], rows))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    query = {"rebuild": int(arguments.rebuild), **({} if arguments.sample is None else {"sample": arguments.sample})}
    found = _ask("POST", f"{protocol.VERIFY}?{urlencode(query)}")
    bad = [*found["damaged"], *(f"manifest/{key} (its payload is missing)" for key in found["orphaned"])]
    text = [f"{found['n_checked']} records checked, {len(bad)} bad", *(f"  {name}" for name in bad)]
    text += _rebuilt(found) if arguments.rebuild else []
    say(json.dumps(found, indent=2) if arguments.json else "\n".join(text))
    if bad or found.get("differing"):
        return STATUS["corrupt-artifact"][1]
    return STATUS["build-failed"][1] if found.get("failed") else 0


def _rebuilt(found: dict[str, Any]) -> list[str]:
    differing, failed, skipped = found["differing"], found["failed"], found["skipped"]
    counts = f"{len(differing)} differing, {len(failed)} failed, {len(skipped)} skipped"
    text = [f"built again: {found['n_rebuilt'] - len(differing)} equal, {counts}"]
    text += [f"  differs  {_entry(row)}: stored {row['digest'][:12]}, rebuilt {row['rebuilt'][:12]}" for row in differing]
    for word, rows in (("failed", failed), ("skipped", skipped)):
        text += [f"  {word:<7}  {_entry(row)}: {row['reason']}" for row in rows]
    return text


def _entry(row: dict[str, Any]) -> str:
    return f"{row['key']} {row['name']} for {row['target']} ({row['variant']} facts)"


def _ask(method: str, path: str, body: Any = None) -> Any:
    """The daemon's answer; one is started when there is none."""
    with contextlib.closing(Connection(load_settings())) as connection:
        return connection.call(method, path, body, wait_s=_LONGEST_S, start=True)


def _call(arguments: argparse.Namespace, path: str, body: Any = None, *, method: str = "POST") -> Any:
    """The daemon's answer, printed as it is where JSON is wanted."""
    found = _ask(method, path, body)
    if arguments.json:
        say(json.dumps(found, indent=2))
    return found


def _prune(arguments: argparse.Namespace) -> int:
    body = {
        "keys": arguments.key,
        "name": arguments.name,
        "target": arguments.target,
        "unused_s": arguments.unused_days * 86400,
        "all": arguments.all,
        "dry_run": arguments.dry_run,
    }
    found = _call(arguments, protocol.PRUNE, body)
    if not arguments.json:
        word = "would be removed" if found["dry_run"] else f"removed, {found['freed_bytes'] / 1e6:.1f} MB freed"
        kept = f", {len(found['pinned'])} pinned ones kept" if found["pinned"] else ""
        say("\n".join([f"{len(found['keys'])} artifacts {word}{kept}", *(f"  {key[:12]}" for key in found["keys"])]))
    return 0


def _pin(arguments: argparse.Namespace) -> int:
    if not arguments.key:
        found = _call(arguments, protocol.PINS, method="GET")
        if not arguments.json:
            say(table(["KEY", "NOTE"], [[key[:12], note] for key, note in found["pins"].items()]))
        return 0
    found = _call(arguments, protocol.PINS, {"keys": arguments.key, "note": arguments.note})
    if not arguments.json:
        say("\n".join(f"pinned {key[:12]}" for key in found["pinned"]))
    return 0


def _unpin(arguments: argparse.Namespace) -> int:
    found = _call(arguments, protocol.PINS + "/remove", {"keys": arguments.key})
    if not arguments.json:
        say("\n".join(f"unpinned {key[:12]}" for key in found["unpinned"]) or "none of these is pinned")
    return 0


def _quarantine(arguments: argparse.Namespace) -> int:
    if arguments.purge:
        found = _call(arguments, protocol.QUARANTINE + "/purge")
        text = f"{found['n_files']} files removed, {found['freed_bytes'] / 1e6:.1f} MB freed"
    else:
        found = _call(arguments, protocol.QUARANTINE, method="GET")
        rows = [[file["name"], f"{file['size_bytes']} B", ago(file["put_aside_at"])] for file in found["files"]]
        text = table(["FILE", "SIZE", "PUT ASIDE"], rows)
    if not arguments.json:
        say(text)
    return 0


def _why(arguments: argparse.Namespace) -> int:
    query = {"key": arguments.key, **({"other": arguments.other} if arguments.other else {})}
    found = _ask("GET", f"{protocol.WHY}?{urlencode(query)}")
    if arguments.json:
        say(json.dumps(found, indent=2))
        return 0
    say(f"{found['key'][:12]} was built because: {found['reason'] or 'not recorded'}")
    if found["other"] is None:
        say("no other artifact of this kernel is known")
    else:
        say(f"it differs from {found['other'][:12]} in")
        say("\n".join(f"  {line}" for line in found["differences"]) or "  nothing")
    return 0
