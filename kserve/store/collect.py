"""Keeps a store within its bounds: what nothing names goes first, then the artifacts used longest ago.

The last use of an artifact is the modification time of its manifest file, or a later one that the daemon remembers. Eviction
never disturbs a process that has loaded one: it holds the bytes. A pinned artifact stays.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from kserve.alias import alias_from_bytes
from kserve.artifact import Manifest, manifest_from_bytes
from kserve.errors import CorruptArtifact, StoreError
from kserve.store.base import KINDS, is_key
from kserve.store.files import FileStore
from kserve.store.index import Index
from kserve.store.ledger import Usage

logger = logging.getLogger("kserve")
# After a collection this share of the bound is in use: the next one is a while away.
_LOW_MARK = 0.9
# So many artifacts are removed in one transaction, and no more than one in so many of the store.
_MOST_AT_ONCE = 200
_SHARE = 1000
# A record that no manifest names yet may belong to a build that is running.
_YOUNG_S = 3600.0
# What manifests name. The few records of compilers stay.
_NAMED = ("payload", "source")
# A store whose bound is exceeded by what may not go says so this often.
_WARNING_S = 60.0


class Bounds(NamedTuple):
    """What a store may take on the disk: allocated bytes, files."""

    max_bytes: int
    max_files: int

    def exceeded(self, usage: Usage, *, share: float = 1.0) -> bool:
        return usage.size_bytes > share * self.max_bytes or usage.n_files > share * self.max_files


class Collected(NamedTuple):
    """What a collection removed: keys of artifacts, records that nothing named, allocated bytes of both."""

    keys: list[str]
    n_unnamed: int
    freed_bytes: int


class Collector:
    """Removes records of one store and keeps its index true. The caller lets nobody publish meanwhile."""

    def __init__(self, files: FileStore, index: Index) -> None:
        self._files = files
        self._index = index
        self._warned = -_WARNING_S

    def reconcile(self, lock: contextlib.AbstractContextManager[object]) -> None:
        """Make the index agree with the files, a directory at a time: whoever publishes waits for the `lock` a moment only."""
        reason, began = self._index.stale, time.monotonic()
        known = self._index.shards()
        for kind in KINDS:  # content before the manifests that name it
            for shard in sorted({*self._files.shards(kind), *(shard for shard in known if shard.startswith(f"{kind}/"))}):
                with lock:
                    self._reconcile(shard)
        with lock:
            self._index.agrees()
            usage = self._index.usage() or Usage(0, 0, 0)
        logger.info(
            'index rebuilt artifacts=%d records=%d size_bytes=%d seconds=%.2f reason="%s"',
            *(usage.n_artifacts, usage.n_files, usage.size_bytes, time.monotonic() - began, reason),
        )

    def _reconcile(self, shard: str) -> None:
        kind, _, prefix = shard.partition("/")
        found = {f"{kind}/{key}": entry.st_blocks * 512 for key, entry in self._files.stats(kind, prefix)}
        known = {name: record.size_bytes for name, record in self._index.records(shard).items() if record.is_there}
        if gone := known.keys() - found.keys():
            self._index.removed(gone)
        new = {name: size for name, size in found.items() if known.get(name) != size}
        manifests = {name: self._manifest(name) for name in new if kind == "manifest"}
        self._index.added(new, names={name: records_of(manifest) for name, manifest in manifests.items() if manifest})

    def collect(self, bounds: Bounds, *, keep: Collection[str] = (), used: Mapping[str, float] | None = None) -> Collected:
        """Remove what is too much, if anything is.

        Args:
            keep: keys that stay, besides the pinned ones.
            used: key -> seconds since 1970 of a use that the files do not show yet.
        """
        before = self._index.usage()
        if before is None or not bounds.exceeded(before):
            return Collected([], 0, 0)
        n_unnamed = self.remove_unnamed()
        spared = {*keep, *self._files.keys("pin")}
        oldest_first = (key for _, key in self._by_last_use(used or {}) if key not in spared)
        keys = self._evict_while(oldest_first, lambda usage: bounds.exceeded(usage, share=_LOW_MARK))
        if keys:
            n_unnamed += self.forget_aliases()
        after = self._index.usage() or before
        found = Collected(keys, n_unnamed, before.size_bytes - after.size_bytes)
        if keys or n_unnamed:
            logger.info("collected artifacts=%d unnamed=%d freed_bytes=%d", len(keys), n_unnamed, found.freed_bytes)
        if bounds.exceeded(after) and time.monotonic() - self._warned > _WARNING_S:
            self._warned = time.monotonic()
            logger.warning("bound exceeded size_bytes=%d files=%d: the rest is pinned or in use", *after[:2])
        return found

    def forget_aliases(self) -> int:
        """Remove what leads to artifacts that are gone; how many."""
        idle, signposts = [], set()
        for name in [f"alias/{key}" for key in self._files.keys("alias")]:
            alias = alias_from_bytes(self._read_quietly(name))
            if alias and alias.variants and all(self._files.stamp(f"manifest/{variant[0]}") for variant in alias.variants):
                signposts.add(f"alias/{alias.behind}")
            else:
                idle.append(name)
        gone = [name for name in idle if name not in signposts]  # one leads to the answers behind it too
        for some in batches(gone):
            self._index.removed([name for name in some if self._delete(name)])
        return len(gone)

    def _read_quietly(self, name: str) -> bytes:
        with contextlib.suppress(StoreError):
            return self._files.get(name) or b""
        return b""

    def _evict_while(self, keys: Iterator[str], too_much: Callable[[Usage], bool]) -> list[str]:
        evicted: list[str] = []
        while (usage := self._index.usage()) is not None and too_much(usage):
            some = list(islice(keys, 1 + usage.n_artifacts // _SHARE))
            if not some:
                break
            evicted += self.evict(some)
        return evicted

    def evict(self, keys: Iterable[str]) -> list[str]:
        """Remove artifacts, each manifest first, and whatever no other one names; those that were there."""
        evicted: list[str] = []
        for some in batches(keys):
            there = {key for key in some if self._files.stamp(f"manifest/{key}")}
            gone = [key for key in some if self._evict(key)]
            self.forget(f"manifest/{key}" for key in gone)
            evicted += [key for key in gone if key in there]
        return evicted

    def _evict(self, key: str) -> bool:
        logger.debug("evict key=%s", key)
        return self._delete(f"manifest/{key}")

    def forget(self, names: Iterable[str]) -> None:
        """Records are gone: so is what they named and no manifest names any more, sources of this hour aside."""
        free = self._index.removed(names)
        if not self._index.stale:  # else a manifest that is not counted yet may name it
            old = [name for name in free if name.startswith("payload/") or self._age_s(name) > _YOUNG_S]
            self._index.removed([name for name in old if self._delete(name)])

    def remove_unnamed(self) -> int:
        """Remove records that no manifest names and that are no part of a running build; how many."""
        if self._index.stale:
            return 0
        known = {name for kind in _NAMED for name in self._index.unnamed(kind)}
        old = [name for name in known if self._age_s(name) > _YOUNG_S]
        n_removed = 0
        for some in batches(old):
            gone = [name for name in some if self._delete(name)]
            self._index.removed(gone)
            n_removed += len(gone)
        return n_removed

    def _by_last_use(self, used: Mapping[str, float]) -> list[tuple[float, str]]:
        return sorted((max(found.st_mtime, used.get(key, 0.0)), key) for key, found in self._files.stats("manifest"))

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return manifest_from_bytes(self._files.get(name) or b"", key=name.partition("/")[2])
        except (CorruptArtifact, StoreError):
            return None

    def _age_s(self, name: str) -> float:
        try:
            return time.time() - self._files.path(name).lstat().st_mtime
        except OSError:
            return 0.0

    def _delete(self, name: str) -> bool:
        try:
            self._files.delete(name)
        except StoreError as error:
            logger.warning("kept record=%s error=%s", name, error.message)
            return False
        return True


def batches(names: Iterable[str]) -> Iterator[list[str]]:
    """As many as are removed in one transaction."""
    waiting = iter(names)
    while some := list(islice(waiting, _MOST_AT_ONCE)):
        yield some


def records_of(manifest: Manifest) -> tuple[str, ...]:
    """The records that a manifest names: its payload, its attachments, its sources; each once."""
    payloads = {manifest.digest, *manifest.attachments.values()}
    sources = {digest for label, digest in manifest.components.items() if label.startswith("source.")}
    names = (*(f"payload/{digest}" for digest in sorted(payloads)), *(f"source/{digest}" for digest in sorted(sources)))
    return tuple(name for name in names if is_key(name.partition("/")[2]))
