"""`kserve cache show`: one artifact, down to its machine code."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any
from urllib.parse import quote

from kserve import protocol
from kserve.cli.show import ago, fields, say, spec_text
from kserve.client.connection import Connection
from kserve.config import load_settings
from kserve.errors import RequestError

# A disassembler is given a minute.
_LONGEST_S = 90.0
_TEXTS = ("log", "ptx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kserve cache show`."""
    parser.add_argument("key", help="a key, or at least the first 6 digits of it")
    for kind in (*_TEXTS, "sass"):
        parser.add_argument(f"--{kind}", action="store_true", help=f"print its {kind} and nothing else")


def show(arguments: argparse.Namespace) -> int:
    """Run the command."""
    kinds = [kind for kind in _TEXTS if getattr(arguments, kind)]
    path = f"{protocol.ARTIFACTS}/{quote(arguments.key, safe='')}"
    with contextlib.closing(Connection(load_settings())) as connection:
        if arguments.sass:
            content = connection.call_raw("GET", f"{path}/sass", wait_s=_LONGEST_S, start=True)
            say(json.dumps({"sass": content.decode()}, indent=2) if arguments.json else content.decode())
            return 0
        query = "" if kinds else "?instructions=1"
        found = connection.call("GET", path + query, wait_s=_LONGEST_S, start=True)
    if arguments.json:
        say(json.dumps(found, indent=2))
    else:
        say("\n".join(_text(found, kind) for kind in kinds) or _described(found))
    return 0


def _text(found: dict[str, Any], kind: str) -> str:
    manifest, attachments = found["manifest"], found["attachments"]
    if kind not in attachments:
        raise RequestError(f"{manifest['name']} for {manifest['target']} has no {kind}", facts={"has": ", ".join(attachments)})
    return attachments[kind] or ""


def _described(found: dict[str, Any]) -> str:
    manifest, attachments = found["manifest"], found["attachments"]
    contract = manifest["contract"]
    parameters = [f"{p['name']}: {p['dtype'] or p['kind']}{_facts_of(p)}" for p in contract["params"]]
    debug = manifest["components"].get("debug")
    head = {
        "name": f"{manifest['name']} ({manifest['variant']} facts{f', {debug}' if debug else ''})",
        "key": manifest["key"],
        "digest": manifest["digest"],
        "target": manifest["target"],
        "spec": spec_text(manifest["spec"]),
        "size": f"{manifest['size_bytes']} B, {contract['format']}, built {ago(manifest['created_at'])}",
        **_resources(manifest["resources"]),
        **_facts(found["facts"]),
        "symbol": contract["symbol"],
        **(
            {"needs": ", ".join(f"{need} {text}" for need, text in contract["needs"].items() if text)}
            if contract["needs"]
            else {}
        ),
        "parameters": ", ".join(parameters),
        "launch": f"grid ({', '.join(contract['grid'])}), block ({', '.join(contract['block'])}), "
        f"shared {contract['shared_bytes']} B",
        "world": "closed" if manifest["closed_world"] else "not enforced",
        "attached": ", ".join(f"{kind} ({len(text or '')} characters)" for kind, text in attachments.items()),
    }
    components = {f"  {label}": text for label, text in sorted(manifest["components"].items())}
    return fields(head) + "\n\nkey components\n" + fields(components)


def _resources(resources: dict[str, int]) -> dict[str, str]:
    units = {
        "registers": "a thread",
        "spill_bytes": "B a thread",
        "stack_bytes": "B a thread",
        "shared_bytes": "B a block, static",
    }
    names = {"spill_bytes": "spills", "stack_bytes": "stack", "shared_bytes": "shared"}
    return {names.get(name, name): f"{value} {units.get(name, '')}".rstrip() for name, value in resources.items()}


def _facts(facts: dict[str, Any]) -> dict[str, str]:
    return {"occupancy": _occupancy(facts["occupancy"]), **_instructions(facts["instructions"])}


def _occupancy(found: dict[str, Any]) -> str:
    if "unavailable" in found:
        return str(found["unavailable"])
    at_most = f"at most, before the shared memory that depends on {found['depends_on']}: " if found["depends_on"] else ""
    share = f"{found['warps']} of {found['most_warps']} warps ({found['percent']} %)"
    return f"{at_most}{found['blocks_per_sm']} blocks a multiprocessor, {share}; limited by {found['limiter']}"


def _instructions(found: dict[str, Any]) -> dict[str, str]:
    if "unavailable" in found:
        hint = f" ({found['hint']})" if "hint" in found else ""
        return {"instructions": f"{found['unavailable']}{hint}"}
    named = [name for name, count in found.items() if count and name not in ("total", "matrix") and not name[-1].isdigit()]
    classes = [f"{found[name]} {name.replace('_', ' ')}{_widths(found, name)}" for name in named]
    return {
        "matrix": f"yes, {found['matrix']} instructions" if found["matrix"] else "no matrix instructions",
        "instructions": f"{found['total']}: {', '.join(classes)}",
    }


def _widths(found: dict[str, int], kind: str) -> str:
    """` (64 of 32, 1 of 128 bits)` for a class that is counted by the bits of an access."""
    widths = {name.removeprefix(f"{kind}_"): count for name, count in found.items() if name.startswith(f"{kind}_")}
    return f" ({', '.join(f'{count} of {bits}' for bits, count in widths.items())} bits)" if widths else ""


def _facts_of(param: dict[str, Any]) -> str:
    facts = [f"align {param['align']}"] if param["align"] else []
    facts += [f"divisible by {param['divisible_by']}"] if param["divisible_by"] else []
    return f" ({', '.join(facts)})" if facts else ""
