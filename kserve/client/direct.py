"""The direct road: a kernel from the store's files, without a daemon.

An alias says which keys a request had; the stamps of its sources and of its compiler say that it still has them. A lock file
says it without any of these. Everything read is verified. Whatever is in doubt is left to the daemon.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kserve.alias import Alias, alias_from_bytes, answer_digest, changed_since, is_as_it_was, request_digest
from kserve.artifact import DEBUGS, Artifact, LaterArtifact, Manifest, from_compact, manifest_from_bytes
from kserve.client.launch import Kernel, Roads
from kserve.client.loader import driver
from kserve.client.report import Call, Loaded, report
from kserve.config import (
    Settings,
    built_in_roots,
    environment_of_process,
    environment_variables,
    imported_version,
    load_settings,
)
from kserve.errors import CorruptArtifact, ForeignPeer, InvalidSpec, LoadError, LockMismatch, StoreError
from kserve.ownership import identities, refuse_foreign
from kserve.store.base import is_key
from kserve.store.files import FileStore
from kserve.target import parse_target

if TYPE_CHECKING:
    from kserve.client.given import Given
    from kserve.lockfile import Lock, Locked

Variants = Sequence[Artifact | LaterArtifact]
# A source or a compiler that is replaced is noticed this much later by a process that has just looked.
_TRUSTED_S = 1.0


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


class Local:
    """What this process reads without asking anybody: its settings, the stores it may trust, where its kernels lie."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.settings: Settings = load_settings()
        self.environment = environment_of_process(self.settings)
        self.variables = environment_variables()
        self.roots = [os.path.realpath(root) for root in (*self.settings.kernel_path, *built_in_roots())]
        self.places = (self.settings.store, *self.settings.layers)
        self._uids = identities(self.settings.trusted_uids) | {0}
        self._stores: list[FileStore] = []
        self._trusted: dict[str, float] = {}
        self._looked_until = 0.0
        self._looked: dict[tuple[str, int], bool] = {}
        self._unchanged: set[tuple[str, ...]] = set()

    @functools.cached_property
    def lock(self) -> Lock | None:
        """The lock in force. Raises: RequestError when it cannot be read."""
        return _lock_of(self.settings)

    @property
    def stores(self) -> list[FileStore]:
        """The stores this process may trust; one that was not there at first may be by now."""
        if len(self._stores) < len(self.places):
            self._stores = [FileStore(place, writable=False) for place in self.places if _is_trusted(place, self._uids)]
        return self._stores

    def request_digest(self, wish: Wanted) -> str:
        """The name of the wish's alias."""
        name, roots = (wish.given.identity, []) if wish.given else (wish.name, self.roots)
        return request_digest(name, wish.spec, wish.target, roots=roots, environment=self.environment)

    def read(self, name: str) -> bytes | None:
        """The record from the first store that has it whole."""
        for store in self.stores:
            try:
                content = store.get(name)
            except StoreError:
                continue
            if content is not None:
                return content
        return None

    def artifact(self, key: str) -> Artifact | None:
        """The verified artifact of that key; None where a part of it is missing or damaged. Its use is noted."""
        content = self.read(f"manifest/{key}")
        try:
            manifest = None if content is None else manifest_from_bytes(content, key=key)
        except CorruptArtifact:
            return None
        payload = self.read(f"payload/{manifest.digest}") if manifest else None
        if manifest is None or payload is None:
            return None
        self.touch(f"manifest/{key}")
        return Artifact(manifest, payload)

    def manifest(self, key: str) -> Manifest:
        """The whole manifest of an entry. Raises: CorruptArtifact when it is gone or damaged."""
        return manifest_from_bytes(self.read(f"manifest/{key}") or b"", key=key)

    def touch(self, name: str) -> bool:
        """Note a use; whether the record is in the first store. A process comes here once for each kernel."""
        return self.stores[0].touch(name)

    def changed_since(self, stamps: str, roots: list[str]) -> str:
        """The first file that is not as it was; empty when all are. A program that loads many kernels looks once."""
        now = time.monotonic()
        if now >= self._looked_until:
            self._looked, self._unchanged, self._looked_until = {}, set(), now + _TRUSTED_S
        looked, unchanged, place = self._looked, self._unchanged, (*roots, stamps)
        if place in unchanged:
            return ""
        changed = changed_since(stamps, roots, looked)
        if changed:
            self._looked_until = 0.0
        else:
            unchanged.add(place)
        return changed

    def is_same_compiler(self, alias: Alias) -> bool:
        """Whether the files of the alias's compiler are as they were, and nobody here has imported another version."""
        imported = imported_version(alias.language)
        if imported and imported.partition("+")[0] != alias.version.partition("+")[0]:
            return False
        if time.monotonic() < self._trusted.get(alias.toolchain, 0.0):
            return True
        content = self.read(f"toolchain/{alias.toolchain}")
        if content is None or not _stamps_hold(content):
            return False
        self._trusted[alias.toolchain] = time.monotonic() + _TRUSTED_S
        return True


def _stamps_hold(content: bytes) -> bool:
    import json

    stamps: dict[str, list[int]] = json.loads(content)
    return all(is_as_it_was(path, stated) for path, stated in stamps.items())


def _lock_of(settings: Settings) -> Lock | None:
    if settings.lock is None:
        return None
    from kserve.lockfile import read_lock

    return read_lock(settings.lock)


def _is_trusted(root: Any, uids: frozenset[int]) -> bool:
    try:
        refuse_foreign(root, root.stat(), uids=uids)
    except (ForeignPeer, OSError):
        return False
    return True


_locals: dict[int, Local] = {}


def local() -> Local:
    """This process's own, the same for all its threads; a forked child gets another."""
    pid = os.getpid()
    return _locals.get(pid) or _locals.setdefault(pid, Local())


def leave() -> None:
    """Forget it: the next one reads the settings again."""
    _locals.clear()


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
