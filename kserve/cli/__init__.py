"""The command `kserve`: up, down, status, build, kernels, tune, ncu, sanitize, lock, profile, report, doctor, cache."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import kserve
from kserve import protocol
from kserve.artifact import DEBUGS
from kserve.catalog import every_entry, overridable
from kserve.cli import cache, doctor, lock, profile, report, tools, tune
from kserve.cli.show import fields, say, table
from kserve.cli.wishes import add_wish, every_wish, wishes
from kserve.client.connection import Connection
from kserve.client.direct import resolve
from kserve.client.launch import Kernel
from kserve.client.report import reports_of
from kserve.client.start import log_path, start_daemon
from kserve.config import Settings, environment_variables, is_setting, load_settings
from kserve.errors import DaemonUnreachable, InvalidDefinition, KserveError, RequestError, ServiceError
from kserve.kernel_schema import kernel_schema
from kserve.server import boot

_DOWN_TIMEOUT_S = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status (the table is in `errors.py`)."""
    own, tool_options = tools.split_options(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(own, argparse.Namespace(tool_options=tool_options))
    try:
        return int(arguments.run(arguments) or 0)
    except KserveError as error:
        if getattr(arguments, "json", False):
            print(json.dumps({"error": error.to_wire()}))
        else:
            print(f"kserve: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = None  # or the interpreter would try to flush it
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kserve", description="GPU kernels compiled once and launched everywhere.")
    parser.add_argument("--version", action="version", version=f"kserve {kserve.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = _command(commands, "up", _up, "run the daemon (in the foreground)")
    up.add_argument("--detach", action="store_true", help="run it in the background and return when it answers")
    up.add_argument("--idle", type=float, metavar="SECONDS", help="end after this long without a request; 0 for never")

    _command(commands, "down", _down, "end the daemon, running builds included")
    _command(commands, "status", _status, "what the daemon is doing")
    kernels = _command(commands, "kernels", _kernels, "list the kernels that can be asked for")
    kernels.add_argument("--schema", action="store_true", help="print the JSON schema of kernel.toml instead")

    build = _command(commands, "build", _build, "build kernels, or find them in the store")
    add_wish(build, required=True)
    build.add_argument("--all", action="store_true", help="every kernel with its defaults, for each target it is made for")
    build.add_argument("--debug", choices=DEBUGS, default="", help="a variant for tools that show sources or check accesses")
    build.add_argument("--timeout", type=float, metavar="SECONDS", help="how long to wait for the build")

    tune.add_command(_command(commands, "tune", tune.run, "find the best values of a kernel's knobs on this device"))
    ncu = _command(commands, "ncu", tools.profile, "profile one launch of a kernel with ncu", json_flag=False)
    text = "check one launch of a kernel with compute-sanitizer"
    tools.add_commands(ncu, _command(commands, "sanitize", tools.sanitize, text, json_flag=False))

    lock.add_command(_command(commands, "lock", lock.run, "write or check the file that says which bytes a kernel is"))
    _command(commands, "report", report.every, "what kernels cost the processes that use this store")
    why_cold = _command(commands, "why-cold", report.one, "where one process lost its time, kernel by kernel")
    why_cold.add_argument("pid", type=int, help="of a process that lives and has loaded a kernel")
    doctor.add_commands(_command(commands, "doctor", None, "what this machine has", json_flag=False), _command)
    profile.add_command(_command(commands, "profile", profile.run, "where a step of a model spends its time"))
    cache.add_commands(_command(commands, "cache", None, "look into the store", json_flag=False), _command)
    return parser


def _command(commands: Any, name: str, run: Any, text: str, *, json_flag: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    if json_flag:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _up(arguments: argparse.Namespace) -> int:
    idle_s = None if arguments.idle is None else arguments.idle or float("inf")
    if idle_s is not None and not idle_s > 0:
        raise RequestError(f"--idle cannot be {arguments.idle}", facts={"allowed": "seconds, or 0 for never"})
    settings = load_settings({"idle_s": idle_s})
    if arguments.detach:
        return _up_detached(arguments, settings)
    return boot.run(settings)


def _up_detached(arguments: argparse.Namespace, settings: Settings) -> int:
    word = "is up already"
    connection = Connection(settings)
    try:
        running = connection.call("GET", protocol.STATUS)
    except DaemonUnreachable:
        word = "is up"
        start_daemon(settings, idle_s=settings.idle_s)
        running = connection.call("GET", protocol.STATUS)
    text = f"kserve {running['version']} {word}: pid {running['pid']}, log {log_path(settings)}"
    return _report(arguments, {"pid": running["pid"], "version": running["version"], "started": word == "is up"}, text)


def _down(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    connection = Connection(settings, any_protocol=True)
    try:
        pid = connection.call("POST", protocol.SHUTDOWN)["pid"]
    except DaemonUnreachable:
        if settings.socket.exists() and _alive(settings):
            raise
        return _report(arguments, {"stopped": False}, "no daemon is running")
    connection.close()
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while _alive(settings):
        if time.monotonic() > deadline:
            raise ServiceError(f"daemon {pid} did not end in {_DOWN_TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return _report(arguments, {"stopped": True, "pid": pid}, f"daemon {pid} has ended")


def _alive(settings: Any) -> bool:
    """Whether a daemon holds the store: the lock on its directory says so, whatever became of its socket."""
    import fcntl

    try:
        directory = os.open(settings.store, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(directory)
    return False


def _status(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    found = Connection(settings).call("GET", protocol.STATUS)
    found["processes"] = [
        {"pid": plain["pid"], "program": plain["program"], "ops": plain.get("ops", {})} for plain in reports_of(settings)
    ]
    store = found["store"]
    text = fields(
        {
            "version": f"{found['version']}, pid {found['pid']}, up {found['uptime_s']:.0f} s",
            "socket": found["socket"],
            "store": f"{store['path']}: {store['n_artifacts']} artifacts, {store['n_pinned']} pinned",
            "use": f"{store['size_bytes'] / 1e6:.1f} of {store['max_bytes'] / 1e6:.0f} MB, "
            f"{store['n_files']} of {store['max_files']} files",
            "layers": ", ".join(store["layers"]) or "none",
            "refused": "; ".join(store["refused_layers"].values()) or "none",
            "quarantine": f"{store['n_in_quarantine']} files, {store['n_quarantined']} since the start",
            "state": store["degraded"] or "sound",
            "index": store["index"],
            "builds": f"{found['n_running']} running, {found['n_queued']} queued, {found['jobs']} at once",
            "counters": _counted(found["counters"]),
            "ever": _counted(found["lifetime"]),
            "workers": ", ".join(f"{w['language']} (pid {w['pid']}, {w['n_jobs']} jobs)" for w in found["workers"]) or "none",
        }
    )
    text = "\n".join([text, *report.lines_of(found["processes"])])
    return _report(arguments, found, text)


def _counted(counters: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counters.items())) or "none yet"


def _kernels(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        say(json.dumps(kernel_schema(), indent=2))
        return 0
    rows: list[list[str]] = []
    plain: list[dict[str, Any]] = []
    broken: list[InvalidDefinition] = []
    for folder, definition, entry in every_entry(load_settings(), broken):
        axes = {axis.name: axis for axis in definition.axes.values()}
        variables = overridable(entry.name, folder, {knob.name: knob.alias for knob in entry.knobs.values()})
        shown = [name if axis.default is None else f"{name}={axis.default}" for name, axis in axes.items()]
        rows.append([entry.name, definition.language, " ".join(shown), " ".join(entry.knobs), entry.summary])
        allowed = {name: {"allowed": axis.allowed, "default": axis.default} for name, axis in axes.items()}
        row = {"name": entry.name, "language": definition.language, "summary": entry.summary, "axes": allowed}
        knobs = {
            knob.name: {"allowed": knob.allowed, "default": knob.default.text, "variables": variables[knob.name]}
            for knob in entry.knobs.values()
        }
        plain.append({**row, "folder": str(folder), "knobs": knobs})
    strays = _strays({name for row in plain for knob in row["knobs"].values() for name in knob["variables"]})
    for message in [*map(str, broken), *strays]:
        print(f"kserve: {message}", file=sys.stderr)
    listed = {"kernels": plain, "broken": [error.to_wire() for error in broken]}
    _report(arguments, listed, table(["NAME", "LANGUAGE", "AXES", "KNOBS", "SUMMARY"], rows))
    return broken[0].exit_status if broken else 0


def _strays(known: set[str]) -> list[str]:
    """A line for each variable that looks like one of ours and is none: a misspelled override changes nothing, silently."""
    ours = [name for name in environment_variables() if name.startswith("KSERVE_")]
    return [f"{name} is no setting, and overrides no knob" for name in ours if not is_setting(name) and name not in known]


def _build(arguments: argparse.Namespace) -> int:
    if not (arguments.name or arguments.all):
        raise RequestError("kserve build needs a kernel, or --all", hint="kserve kernels lists them")
    named = every_wish if arguments.all else wishes
    kernels = resolve(named(arguments, load_settings(), debug=arguments.debug), timeout_s=arguments.timeout, load=False)
    plain = [describe(kernel) for kernel in kernels]
    rows = [
        [k["name"], k["target"], k["origin"], f"{k['seconds']:.3f} s", f"{k['size_bytes']} B", k["key"][:12], k["digest"][:12]]
        for k in plain
    ]
    head = ["NAME", "TARGET", "ORIGIN", "TIME", "SIZE", "KEY", "DIGEST"]
    spilling = [k for k in plain if k["resources"].get("spill_bytes")]
    spills = [f"{k['name']} for {k['target']} spills {k['resources']['spill_bytes']} bytes a thread" for k in spilling]
    text = "\n".join([table(head, rows), *spills])
    return _report(arguments, plain[0] if len(plain) == 1 and not arguments.all else {"kernels": plain}, text)


def describe(kernel: Kernel) -> dict[str, Any]:
    """The stable JSON fields of one kernel."""
    found = {
        "name": kernel.name,
        "key": kernel.key,
        "digest": kernel.digest,
        "target": str(kernel.target),
        "origin": kernel.origin,
        "size_bytes": kernel.manifest.size_bytes,
        "seconds": round(kernel.seconds, 6),
        "resources": kernel.resources,
        "spec": kernel.manifest.spec,
        "knobs": kernel.knobs,
        "debug": kernel.manifest.debug,
    }
    generic = kernel.generic
    found["generic"] = None if generic is None else {"key": generic.key, "digest": generic.digest}
    return found


def _report(arguments: argparse.Namespace, plain: Any, text: str) -> int:
    say(json.dumps(plain, indent=2) if arguments.json else text)
    return 0
