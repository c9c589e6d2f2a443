"""`kserve cache`: what is in the store."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from urllib.parse import quote, urlencode

from kserve import protocol
from kserve.cli.show import fields, say, table
from kserve.client.connection import Connection
from kserve.config import load_settings
from kserve.errors import STATUS, RequestError

_VERIFY_TIMEOUT_S = 3600.0


def add_commands(parser: argparse.ArgumentParser, command: Any) -> None:
    """Add `ls` and `show`; `command` makes a sub-parser, as `cli._command` does."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ls = command(commands, "ls", _ls, "list the artifacts in the store")
    ls.add_argument("--name", default="", help="only this kernel's")
    ls.add_argument("--target", default="", help="only those for this target")
    show = command(commands, "show", _show, "show one artifact")
    show.add_argument("key", help="a key, or at least the first 6 digits of it")
    for kind in ("log", "ptx"):
        show.add_argument(f"--{kind}", action="store_true", help=f"print its {kind} and nothing else")
    verify = command(commands, "verify", _verify, "check every record of the store against its digest")
    verify.add_argument("--sample", type=int, metavar="N", help="check at most N records of each kind, drawn at random")
    why = command(commands, "why", _why, "say what makes one key differ from another")
    why.add_argument("key", help="a key, or at least the first 6 digits of it")
    why.add_argument("other", nargs="?", help="the key to compare with; left out, the nearest of the same kernel")


def _ls(arguments: argparse.Namespace) -> int:
    path = f"{protocol.ARTIFACTS}?{urlencode({'name': arguments.name, 'target': arguments.target})}"
    found = Connection(load_settings()).call("GET", path, start=True)
    if arguments.json:
        say(json.dumps(found, indent=2))
        return 0
    rows = [
        [a["key"][:12], a["name"], a["target"], a["variant"], f"{a['size_bytes']} B", _ago(a["created_at"]), _spec(a["spec"])]
        for a in found["artifacts"]
    ]
    say(table(["KEY", "NAME", "TARGET", "VARIANT", "SIZE", "BUILT", "SPEC"], rows))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    found = Connection(load_settings()).call("GET", f"{protocol.ARTIFACTS}/{quote(arguments.key, safe='')}", start=True)
    manifest, attachments = found["manifest"], found["attachments"]
    if arguments.json:
        say(json.dumps(found, indent=2))
        return 0
    for kind in ("log", "ptx"):
        if getattr(arguments, kind):
            if kind not in attachments:
                raise RequestError(
                    f"{manifest['name']} for {manifest['target']} has no {kind}", facts={"has": ", ".join(attachments)}
                )
            say(attachments[kind] or "")
            return 0
    contract = manifest["contract"]
    parameters = [f"{p['name']}: {p['dtype'] or p['kind']}{_facts(p)}" for p in contract["params"]]
    head = {
        "name": f"{manifest['name']} ({manifest['variant']} facts)",
        "key": manifest["key"],
        "digest": manifest["digest"],
        "target": manifest["target"],
        "spec": _spec(manifest["spec"]),
        "size": f"{manifest['size_bytes']} B, {contract['format']}, built {_ago(manifest['created_at'])}",
        "resources": ", ".join(f"{name} {value}" for name, value in manifest["resources"].items()),
        "symbol": contract["symbol"],
        "parameters": ", ".join(parameters),
        "launch": f"grid ({', '.join(contract['grid'])}), block ({', '.join(contract['block'])}), "
        f"shared {contract['shared_bytes']} B",
        "world": "closed" if manifest["closed_world"] else "not enforced",
        "attached": ", ".join(f"{kind} ({len(text or '')} characters)" for kind, text in attachments.items()),
    }
    say(fields(head) + "\n\nkey components\n" + fields({f"  {k}": v for k, v in sorted(manifest["components"].items())}))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    query = f"?sample={arguments.sample}" if arguments.sample is not None else ""
    found = Connection(load_settings()).call("POST", protocol.VERIFY + query, wait_s=_VERIFY_TIMEOUT_S, start=True)
    bad = [*found["damaged"], *(f"manifest/{key} (its payload is missing)" for key in found["orphaned"])]
    text = [f"{found['n_checked']} records checked, {len(bad)} bad", *(f"  {name}" for name in bad)]
    say(json.dumps(found, indent=2) if arguments.json else "\n".join(text))
    return STATUS["corrupt-artifact"][1] if bad else 0


def _why(arguments: argparse.Namespace) -> int:
    query = {"key": arguments.key, **({"other": arguments.other} if arguments.other else {})}
    found = Connection(load_settings()).call("GET", f"{protocol.WHY}?{urlencode(query)}", start=True)
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


def _facts(param: dict[str, Any]) -> str:
    facts = [f"align {param['align']}"] if param["align"] else []
    facts += [f"divisible by {param['divisible_by']}"] if param["divisible_by"] else []
    return f" ({', '.join(facts)})" if facts else ""


def _spec(spec: dict[str, Any]) -> str:
    return " ".join(f"{axis}={str(value).lower() if isinstance(value, bool) else value}" for axis, value in spec.items())


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"
