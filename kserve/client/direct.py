"""The direct road: a kernel from the store's files, without a daemon.

An alias says which keys a request had; the stamps of its sources and of its compiler say that it still has them. A lock file
says it without any of these. Everything read is verified. Whatever is in doubt is left to the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kserve.alias import Alias, alias_from_bytes, answer_digest
from kserve.artifact import DEBUGS, Artifact, LaterArtifact, from_compact
from kserve.client.launch import Kernel, Roads
from kserve.client.loader import driver
from kserve.client.local import Local, local
from kserve.client.report import Call, Loaded, report
from kserve.errors import CorruptArtifact, InvalidSpec, LoadError, LockMismatch
from kserve.store.base import is_key
from kserve.target import parse_target

if TYPE_CHECKING:
    from kserve.client.given import Given
    from kserve.lockfile import Lock, Locked

Variants = Sequence[Artifact | LaterArtifact]


class Wanted(NamedTuple):
    """One wish: an entry's name, a target, a value for each axis.

    Fields:
        debug: which debug variant; empty for none.
        knobs: values for knobs, of the tuner or a lock; they count more than any variable or tuning.
        sizes: the bucket a tuning is looked for in.
        given: its files, where they lie in no folder of the catalog.
    """

    name: str
    target: str
    spec: dict[str, Any]
    debug: str = ""
    knobs: Mapping[str, int] = {}
    sizes: Mapping[str, int] = {}
    given: Given | None = None


def resolve(wanted: list[Wanted], *, timeout_s: float | None = None, load: bool = True, locked: bool = True) -> list[Kernel]:
    """Find, build where that is needed, and load kernels.

    Args:
        timeout_s: None for the settings' own.
        load:      False leaves the driver alone, for builds ahead of time.
        locked:    False leaves the lock file alone, for who writes it.
    Raises: the first error of any of them, BuildTimeout when builds outlast the deadline (they go on), LockMismatch.
    """
    began = time.monotonic()
    here = local()
    lock = here.lock if locked else None
    for wish in wanted:
        _check_debug(wish, lock)
    names = {position: lock.find(wish.name, wish.spec, wish.target) for position, wish in enumerate(wanted)} if lock else {}
    wanted = [_under(lock, names[position], wish, here) if lock else wish for position, wish in enumerate(wanted)]
    found: dict[int, Variants] = {}
    why = dict.fromkeys(range(len(wanted)), "")
    chosen_by = dict.fromkeys(why, "")
    for position, wish in enumerate(wanted):
        try:
            found[position], chosen_by[position] = (_named(here, names[position]), "locked") if names else _aliased(here, wish)
        except _Doubt as doubt:
            why[position] = str(doubt)
    origins = dict.fromkeys(why, "disk")
    looked = time.monotonic()
    open_ones = [position for position in why if position not in found]
    if open_ones:
        from kserve.client.resolve import ask

        deadline = began + (here.settings.client_timeout_s if timeout_s is None else timeout_s)
        answers = ask([wanted[position] for position in open_ones], deadline=deadline)
        for position, answer in zip(open_ones, answers, strict=True):
            origins[position], found[position], chosen_by[position] = answer[:3]
            if lock:
                lock.check(names[position], [(one.manifest.key, one.manifest.digest) for one in answer.artifacts])
    asked = time.monotonic()
    kernels = [kernel_of(found[position], origin=origins[position], began=began, load=load) for position in why]
    lines = [_line(kernel, why[position], chosen_by[position]) for position, kernel in enumerate(kernels)]
    report().add(Call(time.time(), looked - began, asked - looked, time.monotonic() - asked, lines), here.settings)
    return kernels


def _check_debug(wish: Wanted, lock: Lock | None) -> None:
    """Raises: InvalidSpec for a debug variant that does not exist, LockMismatch for any under a lock."""
    if wish.debug not in ("", *DEBUGS):
        raise InvalidSpec(f"{wish.name}: debug cannot be {wish.debug!r}", facts={"allowed": ", ".join(DEBUGS)})
    if wish.debug and lock:
        raise LockMismatch(
            f"{wish.name} with debug={wish.debug} is refused: {lock.path} is in force, and a lock names no debug variants",
            hint="unset KSERVE_LOCK for this process",
        )


def _line(kernel: Kernel, why: str, chosen_by: str) -> Loaded:
    manifest = kernel.manifest
    values = " ".join(f"{name}={value}" for name, value in kernel.knobs.items())
    knobs = f"{values} ({chosen_by})" if chosen_by and values else ""
    return Loaded(kernel.name, manifest.target, kernel.key, kernel.origin, "served", why, manifest.reason, knobs)


def _under(lock: Lock, locked: Locked, wish: Wanted, here: Local) -> Wanted:
    """The wish with the locked values of its knobs. Raises: LockMismatch when it, or a variable, asks for others."""
    from kserve.client.choice import named_values

    values, by = named_values(wish.knobs, locked.variables, here.variables)
    lock.check_knobs(locked, values, by)
    return wish._replace(knobs=locked.knobs)


class _Doubt(Exception):
    """Why the store's files alone do not answer a wish."""


def _named(here: Local, locked: Locked) -> list[Artifact]:
    """What the lock names. Raises: _Doubt where not all of it is in the store."""
    found = [_artifact(here, part.key) for part in locked.artifacts]
    if any(one.manifest.debug for one in found):
        raise LockMismatch(f"{locked.name} for {locked.target} is a debug variant: a lock cannot name one")
    if [one.manifest.digest for one in found] != [part.digest for part in locked.artifacts]:
        raise _Doubt("the store has other bytes than the lock names")
    return found


def _aliased(here: Local, wish: Wanted) -> tuple[Variants, str]:
    """What the wish's alias names, and who chose the values of its knobs. Raises: _Doubt."""
    if wish.debug:
        raise _Doubt("it is a debug variant, which the daemon alone serves")
    if not here.stores:
        raise _Doubt("there is no store yet that this process can trust")
    request, chosen_by = here.request_digest(wish), ""
    roots = [""] if wish.given else here.roots  # what a wish brings itself is stamped by its path
    alias = _alias(here, request, roots)
    if alias.signpost is not None:
        from kserve.client.choice import values_at

        values, chosen_by = values_at(alias.signpost, wish, here.variables, here.read)
        if values is None:
            raise _Doubt(chosen_by)
        if values:
            alias = _alias(here, answer_digest(request, values), roots)
        elif not alias.variants:
            raise _Doubt("it is the first such request to this store")
    if not alias.variants:
        raise _Doubt("the alias has another form")
    declared, *others = alias.variants
    return [_held(here, declared), *(_held_for_later(here, wish, found) for found in others)], chosen_by


def _alias(here: Local, name: str, roots: list[str]) -> Alias:
    """The alias, while everything it was made of is as it was. Raises: _Doubt."""
    content = here.stores[0].get(f"alias/{name}")
    alias = None if content is None else alias_from_bytes(content)
    if alias is None:
        raise _Doubt("it is the first such request to this store")
    if changed := here.changed_since(alias.stamps, roots):
        raise _Doubt(f"{changed} has changed")
    if not here.is_same_compiler(alias):
        raise _Doubt(f"the {alias.language} compiler has changed")
    return alias


def _held(here: Local, found: list[Any]) -> Artifact:
    """The variant that an alias holds in short, with its verified bytes. Raises: _Doubt where they are not in the store."""
    try:
        manifest = from_compact(found, here.manifest)
    except CorruptArtifact as error:
        raise _Doubt(error.message) from None
    payload = here.read(f"payload/{manifest.digest}")
    if payload is None or not here.touch(f"manifest/{manifest.key}"):
        raise _Doubt(f"entry {manifest.key[:12]} is missing or damaged")
    return Artifact(manifest, payload)


def _held_for_later(here: Local, wish: Wanted, found: list[Any]) -> LaterArtifact:
    """The same, read when a launch needs it. Raises: _Doubt where its files are not there even now."""
    key, digest = (*found, "", "")[:2]
    if not (is_key(str(key)) and is_key(str(digest))):
        raise _Doubt("the alias has another form")
    if not (here.touch(f"manifest/{key}") and any(store.stamp(f"payload/{digest}") for store in here.stores)):
        raise _Doubt(f"entry {key[:12]} is missing or damaged")

    def read() -> Artifact:
        try:
            return _held(here, found)
        except _Doubt as doubt:
            return _asked_again(here, wish, key, why=str(doubt))

    return LaterArtifact(digest, read)


def _asked_again(here: Local, wish: Wanted, key: str, *, why: str) -> Artifact:
    """The artifact of that key, from the daemon. Raises: LoadError where the wish has other keys by now; what asking does."""
    from kserve.client.resolve import ask

    answer = ask([wish], deadline=time.monotonic() + here.settings.client_timeout_s)[0]
    for one in answer.artifacts:
        if one.manifest.key == key:
            return one
    raise LoadError(
        f"{wish.name} cannot be launched with arguments that its declared facts do not hold for: {why}, and it cannot be built"
        " again from what its sources or its compiler are now",
        hint="kserve.client.forget() and get_kernel again",
    )


def _artifact(here: Local, key: str) -> Artifact:
    found = here.artifact(key)
    if found is None:
        raise _Doubt(f"entry {key[:12]} is missing or damaged")
    return found


def kernel_of(artifacts: Variants, *, origin: str, began: float, load: bool) -> Kernel:
    """The kernel over these variants, loaded on the current device where it fits one."""
    device = _device_for(artifacts[0]) if load else None
    roads = Roads(artifacts, device=device, launcher=local().settings.launcher)
    return Kernel(roads, origin=origin, seconds=time.monotonic() - began)


def _device_for(artifact: Artifact | LaterArtifact) -> int | None:
    """The current device when it runs this binary; None when there is no device, or it does not."""
    manifest = artifact.manifest
    if manifest.contract.format == "so":
        raise LoadError(f"{manifest.name} is an extension, no kernel", hint=f"get_extension({manifest.name!r}) loads it")
    try:
        found = driver()
        device = found.current_device()
        fits = parse_target(manifest.target).runs_on(found.target_of(device).capability)
    except LoadError:
        return None
    return device if fits else None
