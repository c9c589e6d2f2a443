"""`kserve lock`: writes and checks the file that says which bytes a kernel is."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from kserve import catalog, protocol
from kserve.artifact import DECLARED
from kserve.cli.show import say, table
from kserve.cli.wishes import add_wish, wishes
from kserve.client.connection import Connection
from kserve.client.direct import Wanted, resolve
from kserve.client.launch import Kernel
from kserve.config import Settings, environment_variables, load_settings
from kserve.definition import EXTENSION
from kserve.errors import RequestError
from kserve.knobs import overrides_in
from kserve.lockfile import Lock, Locked, LockedArtifact, read_lock

_DEFAULT_FILE = "kserve.lock"


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kserve lock`."""
    add_wish(parser, required=False)
    parser.add_argument("--all", action="store_true", help="add every kernel that the store holds")
    parser.add_argument("--file", type=Path, help=f"the lock file; KSERVE_LOCK, else {_DEFAULT_FILE} here")
    parser.add_argument("--check", action="store_true", help="fail when this node would run other bytes than the file names")
    parser.add_argument("--update", action="store_true", help="accept what this node builds now, for every entry")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    settings = load_settings()
    path = arguments.file or settings.lock or Path(_DEFAULT_FILE)
    if arguments.name or arguments.all:
        lock = read_lock(path) if path.exists() else Lock(path, ())
        lock = _write(lock, _held(settings) if arguments.all else _named(arguments, settings), settings)
    else:
        lock = read_lock(path)
        if arguments.check:
            _check(lock)
        elif arguments.update:
            lock = _updated(lock, settings)
    _show(arguments, lock)
    return 0


def _named(arguments: argparse.Namespace, settings: Settings) -> list[Wanted]:
    if not arguments.target:
        raise RequestError("kserve lock NAME needs a target", hint=f"kserve lock {arguments.name} --target cuda:sm_90")
    return wishes(arguments, settings)


def _held(settings: Settings) -> list[Wanted]:
    """Every kernel of the store, as it was built."""
    found = {}
    known = {entry.name for _, _, entry in catalog.every_entry(settings)}
    for artifact in Connection(settings).call("GET", protocol.ARTIFACTS, start=True)["artifacts"]:
        if artifact["debug"]:  # its bytes are for tools on this machine
            continue
        # A unit goes with its extension; one that was built through a door is in no catalog.
        if artifact["language"] == EXTENSION and (artifact["name"] not in known or artifact["variant"] != DECLARED):
            continue
        axes = catalog.definition_of(catalog.find(artifact["name"], settings).folder).axes
        spec = {name: value for name, value in artifact["spec"].items() if name in axes}
        wish = Wanted(artifact["name"], artifact["target"], spec)
        found[wish.name, wish.target, json.dumps(spec, sort_keys=True)] = wish
    return list(found.values())


def _updated(lock: Lock, settings: Settings) -> Lock:
    return _write(lock, [Wanted(one.name, one.target, dict(one.spec)) for one in lock.kernels], settings)


def _write(lock: Lock, wanted: list[Wanted], settings: Settings) -> Lock:
    """Build what is missing, write the file, pin what it names."""
    for wish in wanted:
        _refuse_overrides(wish.name, settings)
    kernels = resolve(wanted, load=False, locked=False)
    lock = lock.with_kernels([_locked(wish, kernel, settings) for wish, kernel in zip(wanted, kernels, strict=True)])
    lock.write()
    body = {"keys": sorted(lock.keys), "note": f"lock {lock.path.name}"}
    with contextlib.closing(Connection(settings)) as connection:
        connection.call("POST", protocol.PINS, body, start=True)
    return lock


def _refuse_overrides(name: str, settings: Settings) -> None:
    """Raises: RequestError where this shell's own values of knobs would be locked for everybody."""
    found = overrides_in(catalog.find(name, settings).variables, environment_variables())
    if found:
        variables = ", ".join(f"{override.variable}={override.text}" for override in found.values())
        raise RequestError(
            f"{name} cannot be locked while {variables} overrides its tuning",
            hint="unset it; kserve tune stores a tuning, which can be locked",
        )


def _locked(wish: Wanted, kernel: Kernel, settings: Settings) -> Locked:
    found = catalog.find(wish.name, settings)
    definition = catalog.definition_of(found.folder)
    defaults = {name: axis.default for name, axis in definition.axes.items() if axis.default is not None}
    spec = {axis: value for axis, value in kernel.manifest.spec.items() if axis in definition.axes}
    target = kernel.manifest.target
    return Locked(wish.name, wish.target, target, spec, defaults, _artifacts(kernel), kernel.knobs, found.variables)


def _artifacts(kernel: Kernel) -> tuple[LockedArtifact, ...]:
    manifests = [kernel.manifest, *([kernel.generic] if kernel.generic else [])]
    return tuple(LockedArtifact(manifest.variant, manifest.key, manifest.digest) for manifest in manifests)


def _check(lock: Lock) -> None:
    """Raises: LockMismatch for the first entry that this node builds otherwise."""
    wanted = [Wanted(one.name, one.target, dict(one.spec), knobs=one.knobs) for one in lock.kernels]
    for locked, kernel in zip(lock.kernels, resolve(wanted, load=False, locked=False), strict=True):
        lock.check(locked, [(artifact.key, artifact.digest) for artifact in _artifacts(kernel)])


def _show(arguments: argparse.Namespace, lock: Lock) -> None:
    if arguments.json:
        plain: list[dict[str, Any]] = [
            {**one._asdict(), "artifacts": [part._asdict() for part in one.artifacts]} for one in lock.kernels
        ]
        say(json.dumps({"file": str(lock.path), "kernels": plain}, indent=2))
        return
    rows = [
        [one.name, one.target, " ".join(f"{k}={v}" for k, v in one.spec.items()), one.artifacts[0].key[:12], part.digest[:12]]
        for one in lock.kernels
        for part in one.artifacts[:1]
    ]
    say(f"{lock.path}: {len(lock.kernels)} kernels\n" + table(["NAME", "TARGET", "SPEC", "KEY", "DIGEST"], rows))
