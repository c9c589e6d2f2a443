"""Keeps a store within its bounds: what nothing names goes first, then the artifacts used longest ago.

The last use of an artifact is the modification time of its manifest file. Eviction never disturbs a process that has loaded
one: it holds the bytes. A pinned artifact stays.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from kserve.artifact import Manifest, manifest_from_bytes
from kserve.errors import CorruptArtifact, StoreError
from kserve.store.base import KINDS
from kserve.store.files import FileStore
from kserve.store.index import Index, Usage

logger = logging.getLogger("kserve")
# After a collection this share of the bound is in use: the next one is a while away.
_LOW_MARK = 0.9
# A record that no manifest names yet may belong to a build that is running.
_YOUNG_S = 3600.0


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

    def reconcile(self) -> None:
        """Make the index again from the files."""
        reason, began = self._index.stale, time.monotonic()
        sizes = {name: found.st_blocks * 512 for name, found in self._records(KINDS)}
        references = Counter(
            name
            for key in self._files.keys("manifest")
            if (manifest := self._manifest(key)) is not None
            for name in records_of(manifest)
        )
        self._index.rebuild(sizes, references)
        logger.info(
            'index rebuilt artifacts=%d records=%d size_bytes=%d seconds=%.2f reason="%s"',
            *(sum(name.startswith("manifest/") for name in sizes), len(sizes), sum(sizes.values())),
            *(time.monotonic() - began, reason),
        )

    def collect(self, bounds: Bounds, *, keep: Collection[str] = ()) -> Collected:
        """Remove what is too much, if anything is.

        Args:
            keep: keys that stay, besides the pinned ones.
        """
        before = self._index.usage()
        if before is None or not bounds.exceeded(before):
            return Collected([], 0, 0)
        n_unnamed = self.remove_unnamed()
        spared = {*keep, *self._files.keys("pin")}
        oldest_first = (key for _, key in self._by_last_use() if key not in spared)
        keys = self._evict_while(oldest_first, lambda usage: bounds.exceeded(usage, share=_LOW_MARK))
        after = self._index.usage() or before
        found = Collected(keys, n_unnamed, before.size_bytes - after.size_bytes)
        logger.info("collected artifacts=%d unnamed=%d freed_bytes=%d", len(keys), n_unnamed, found.freed_bytes)
        if bounds.exceeded(after):
            logger.warning("bound exceeded size_bytes=%d files=%d: the rest is pinned or in use", *after)
        return found

    def _evict_while(self, keys: Iterator[str], too_much: Callable[[Usage], bool]) -> list[str]:
        evicted: list[str] = []
        for key in keys:
            usage = self._index.usage()
            if usage is None or not too_much(usage):
                break
            if self.evict(key):
                evicted.append(key)
        return evicted

    def evict(self, key: str) -> bool:
        """Remove one artifact, its manifest first, and whatever no other one names. False where there was none."""
        manifest = self._manifest(key)
        try:
            self._delete(f"manifest/{key}")
        except StoreError as error:
            logger.warning("kept key=%s error=%s", key[:12], error.message)
            return False
        for name in self._index.released(records_of(manifest)) if manifest else ():
            if not name.startswith("source/") or self._age_s(name) > _YOUNG_S:
                self._delete_quietly(name)
        return manifest is not None

    def remove_unnamed(self) -> int:
        """Remove records that no manifest names and that are no part of a running build; how many."""
        n_removed = 0
        for name, found in list(self._records(("payload", "source"))):
            if time.time() - found.st_mtime > _YOUNG_S and not self._index.is_referenced(name):
                n_removed += self._delete_quietly(name)
        return n_removed

    def _by_last_use(self) -> list[tuple[float, str]]:
        return sorted((found.st_mtime, name.partition("/")[2]) for name, found in self._records(("manifest",)))

    def _records(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
        for kind in kinds:
            for key, found in self._files.stats(kind):
                yield f"{kind}/{key}", found

    def _manifest(self, key: str) -> Manifest | None:
        try:
            return manifest_from_bytes(self._files.get(f"manifest/{key}") or b"", key=key)
        except (CorruptArtifact, StoreError):
            return None

    def _age_s(self, name: str) -> float:
        try:
            return time.time() - self._files.path(name).stat().st_mtime
        except OSError:
            return 0.0

    def _delete(self, name: str) -> None:
        self._files.delete(name)
        self._index.removed(name)

    def _delete_quietly(self, name: str) -> bool:
        try:
            self._delete(name)
        except StoreError as error:
            logger.warning("kept record=%s error=%s", name, error.message)
            return False
        return True


def records_of(manifest: Manifest) -> tuple[str, ...]:
    """The records that a manifest names: its payload, its attachments, its sources; each once."""
    payloads = {manifest.digest, *manifest.attachments.values()}
    sources = {digest for label, digest in manifest.components.items() if label.startswith("source.")}
    return (*(f"payload/{digest}" for digest in sorted(payloads)), *(f"source/{digest}" for digest in sorted(sources)))
