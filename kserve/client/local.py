"""What this process reads without asking anybody: its settings, the stores it may trust, the stamps of its kernels' files."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

from kserve.alias import Alias, changed_since, is_as_it_was, request_digest
from kserve.artifact import Artifact, Manifest, manifest_from_bytes
from kserve.config import (
    Settings,
    built_in_roots,
    environment_of_process,
    environment_variables,
    imported_version,
    load_settings,
)
from kserve.errors import CorruptArtifact, ForeignPeer, StoreError
from kserve.ownership import identities, refuse_foreign
from kserve.store.files import FileStore

if TYPE_CHECKING:
    from kserve.client.direct import Wanted
    from kserve.lockfile import Lock

# A source or a compiler that is replaced is noticed this much later by a process that has just looked.
_TRUSTED_S = 1.0


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
