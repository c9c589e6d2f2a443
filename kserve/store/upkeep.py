"""What a daemon does for its store besides reading and writing: bounds, pins, eviction by hand, quarantine, the index.

One lock: nobody publishes while records are removed. Every method may be called from a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kserve.artifact import Manifest
from kserve.errors import StoreError
from kserve.store.base import KINDS
from kserve.store.collect import Bounds, Collected, Collector, records_of
from kserve.store.files import FileStore
from kserve.store.index import Index, Usage

logger = logging.getLogger("kserve")
# A recency of a minute's grain is enough to order evictions, and spares a write a hit.
_TOUCH_S = 60.0
_MOST_TOUCHED = 10_000
_CLOSING_S = 1.0


class Pruned(NamedTuple):
    """What was removed by hand: keys; keys that were pinned and stayed; records that nothing named; bytes."""

    keys: list[str]
    pinned: list[str]
    n_unnamed: int
    freed_bytes: int


class Upkeep:
    """The upkeep of one writable store.

    Args:
        in_use: the keys that are being built or waited for: they are not evicted.
    """

    def __init__(self, files: FileStore, bounds: Bounds, *, in_use: Callable[[], Iterable[str]]) -> None:
        self.files = files
        self.bounds = bounds
        self.index = Index(files.root / "index")
        self._in_use = in_use
        self._lock = threading.RLock()
        self._collector = Collector(files, self.index)
        self._touched: dict[str, float] = {}
        files.on_quarantine = self.index.removed
        self._on_evicted: list[Callable[[str], None]] = []

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Call it with the key of every artifact that is evicted."""
        self._on_evicted.append(tell)

    def start(self) -> None:
        """Make the index true, where it may not be, and the store fit its bounds."""
        if not self.files.writable:
            return
        with self._lock:
            if not self.index.is_open:
                self.index.open()
            if self.index.stale and self.index.is_open:
                self._collector.reconcile()
        self.collect()

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the store for one publication; it fits its bounds again before the next one begins."""
        with self._lock:
            yield
            self.collect()

    def written(self, names: Iterable[str], manifest: Manifest | None = None) -> None:
        """Records reached the disk; with them the manifest that names its own."""
        sizes = {}
        for name in names:
            with contextlib.suppress(OSError):
                sizes[name] = self.files.path(name).stat().st_blocks * 512
        self.index.added(sizes, references=records_of(manifest) if manifest else ())

    def touch(self, key: str) -> None:
        """An artifact was used."""
        now = time.monotonic()
        if now - self._touched.get(key, -_TOUCH_S) < _TOUCH_S:
            return
        if len(self._touched) >= _MOST_TOUCHED:
            self._touched.clear()
        self._touched[key] = now
        self.files.touch(f"manifest/{key}")

    def collect(self) -> Collected:
        """Evict what is over the bounds."""
        with self._lock:
            found = self._collector.collect(self.bounds, keep=frozenset(self._in_use()))
        self._tell(found.keys)
        return found

    def prune(self, keys: Iterable[str]) -> Pruned:
        """Remove these artifacts, pinned ones aside, and every record that nothing names."""
        with self._lock:
            before = self.index.usage()
            pins, in_use = self.pins(), frozenset(self._in_use())
            wanted = sorted(set(keys) - in_use)
            gone = [key for key in wanted if key not in pins and self._collector.evict(key)]
            n_unnamed = self._collector.remove_unnamed()
            after = self.index.usage()
        self._tell(gone)
        freed = before.size_bytes - after.size_bytes if before and after else 0
        logger.info("pruned artifacts=%d unnamed=%d freed_bytes=%d", len(gone), n_unnamed, freed)
        return Pruned(gone, [key for key in wanted if key in pins], n_unnamed, freed)

    def drop(self, key: str) -> None:
        """Remove an artifact that is worth nothing."""
        with self._lock:
            self._collector.evict(key)

    def _tell(self, keys: Iterable[str]) -> None:
        for key in keys:
            for tell in self._on_evicted:
                tell(key)

    def pins(self) -> set[str]:
        """The keys that are never evicted."""
        return set(self.files.keys("pin"))

    def pin(self, keys: Iterable[str], note: str) -> None:
        """Never evict these. Raises: StoreError."""
        with self._lock:
            for key in keys:
                self.files.put(f"pin/{key}", note.encode())
                self.written([f"pin/{key}"])

    def unpin(self, keys: Iterable[str]) -> None:
        """Let these be evicted again. Raises: StoreError."""
        with self._lock:
            for key in keys:
                self.files.delete(f"pin/{key}")
                self.index.removed(f"pin/{key}")

    def purge_quarantine(self) -> tuple[int, int]:
        """Remove what was put aside; files and bytes. Raises: StoreError."""
        n_files = freed = 0
        for path in self.files.put_aside():
            try:
                size = path.lstat().st_blocks * 512
                path.unlink()
            except OSError as error:
                raise StoreError(f"{path} cannot be removed: {error.strerror}") from None
            n_files, freed = n_files + 1, freed + size
        return n_files, freed

    def usage(self) -> Usage:
        """What the records take; counted on the spot when the index does not know."""
        known = self.index.usage()
        if known is not None:
            return known
        found = [entry.st_blocks * 512 for kind in KINDS for _, entry in self.files.stats(kind)]
        return Usage(sum(found), len(found))

    def close(self) -> None:
        """Write the index down; one that is still being made again is left to the next daemon."""
        if self._lock.acquire(timeout=_CLOSING_S):
            self.index.close()
            self._lock.release()
