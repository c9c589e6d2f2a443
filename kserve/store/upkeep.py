"""What a daemon does for its store besides reading and writing: bounds, pins, eviction by hand, quarantine, the index.

One lock: nobody publishes while records are removed. It may be held for seconds, so every method that takes it belongs into a
thread of its own; those that do not say so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kserve.artifact import Manifest
from kserve.errors import StoreError
from kserve.store.base import KINDS
from kserve.store.collect import Bounds, Collected, Collector, batches, records_of
from kserve.store.files import FileStore
from kserve.store.index import Index
from kserve.store.ledger import Usage

logger = logging.getLogger("kserve")
# The files show a use to the minute; between that the memory of this process does.
_TOUCH_S = 60.0
_MOST_REMEMBERED = 10_000
_CLOSING_S = 1.0
# An index that broke is made again after this long, and never for more than a tenth of the time.
_MENDING_S = 2.0
_REST = 10
# What is put aside is for a look, not for ever.
_MOST_ASIDE = 1000


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
        self.index = Index(files.root / "index", shape=files.shape)
        self._in_use = in_use
        self._lock = threading.RLock()
        self._collector = Collector(files, self.index)
        # key -> when it was used, in seconds since 1970; when the files were last told so, monotonic.
        self._used: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._lost: deque[str] = deque()
        files.on_quarantine = self._lost.append
        self._on_evicted: list[Callable[[str], None]] = []
        self._mender: threading.Thread | None = None
        self._mend_after = 0.0
        self._is_closed = False

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Call it with the key of every artifact that is evicted."""
        self._on_evicted.append(tell)

    def tend(self) -> None:
        """What has to be done now and then: mend the index, account for what was lost, keep the quarantine short.

        Raises: StoreError.
        """
        if self._is_closed:
            return
        if (self.index.stale or not self.index.is_open) and time.monotonic() > self._mend_after:
            self.mend()
        if self._lost:
            with self._lock:
                self._settle()
        if len(aside := self.files.put_aside()) > _MOST_ASIDE:
            self._purge(aside[: len(aside) - _MOST_ASIDE])

    def mend(self) -> None:
        """Begin `start` in a thread of its own, unless it runs: the end of the daemon does not wait for it. Takes no lock."""
        if self._mender is None or not self._mender.is_alive():
            self._mender = threading.Thread(target=self.start, name="upkeep", daemon=True)
            self._mender.start()

    def start(self) -> None:
        """Make the index agree with the files, where it may not, and the store fit its bounds."""
        began = time.monotonic()
        try:
            if not self.index.is_open and not self._is_closed:
                with self._lock:
                    self.index.open()
            if self.index.stale and self.index.is_open:
                self._collector.reconcile(self._lock)
            self.collect()
        except OSError as error:
            logger.warning("upkeep failed store=%s error=%s", self.files.root, error)
        now = time.monotonic()
        self._mend_after = now + max(_MENDING_S, _REST * (now - began))

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the store for one publication; it fits its bounds again before the next one begins."""
        with self._lock:
            self._settle()
            yield
            self.collect()

    def written(self, names: Iterable[str], manifest: Manifest | None = None) -> None:
        """Records reached the disk while the store was held; the manifest among them, if one is."""
        sizes = {}
        for name in names:
            with contextlib.suppress(OSError):
                sizes[name] = self.files.size_on_disk(name)
        self.index.added(sizes, names={f"manifest/{manifest.key}": records_of(manifest)} if manifest else {})

    def touch(self, key: str) -> None:
        """An artifact was used. Takes no lock."""
        now = time.monotonic()
        self._used[key] = time.time()
        if now - self._shown.get(key, -_TOUCH_S) < _TOUCH_S:
            return
        if len(self._shown) >= _MOST_REMEMBERED:
            self._shown.clear()
            self._used.clear()
        self._shown[key] = now
        self.files.touch(f"manifest/{key}")

    def drop(self, manifest: Manifest) -> None:
        """Remove an artifact that is worth nothing, unless it was built again since. What it leaves is accounted for later.

        Takes no lock that anybody holds for long.

        Raises: StoreError.
        """
        name = f"manifest/{manifest.key}"
        self.files.delete(name, was=manifest.to_bytes())
        self._lost.append(name)

    def _settle(self) -> None:
        """Account for the records that were lost since, those aside that were written again."""
        names = {self._lost.popleft() for _ in range(len(self._lost))}
        if gone := [name for name in names if not self.files.stamp(name)]:
            self._collector.forget(gone)

    def collect(self) -> Collected:
        """Evict what is over the bounds."""
        with self._lock:
            found = self._collector.collect(self.bounds, keep=frozenset(self._in_use()), used=self._used)
        self._tell(found.keys)
        return found

    def prune(self, keys: Iterable[str]) -> Pruned:
        """Remove these artifacts, pinned ones aside, and every record that nothing names."""
        gone, pinned, freed = [], [], 0
        for some in batches(sorted(set(keys))):  # who publishes gets his turn between two of them
            with self._lock, self._freeing() as freed_here:
                pins, in_use = self.pins(), frozenset(self._in_use())
                pinned += [key for key in some if key in pins]
                gone += self._collector.evict(key for key in some if key not in pins and key not in in_use)
            freed += freed_here()
        with self._lock, self._freeing() as freed_here:
            self._settle()
            n_unnamed = self._collector.remove_unnamed() + (self._collector.forget_aliases() if gone else 0)
        freed += freed_here()
        self._tell(gone)
        logger.info("pruned artifacts=%d unnamed=%d freed_bytes=%d", len(gone), n_unnamed, freed)
        return Pruned(gone, pinned, n_unnamed, freed)

    @contextlib.contextmanager
    def _freeing(self) -> Iterator[Callable[[], int]]:
        """Afterwards says how many bytes less the records take."""
        before = after = self.index.usage()
        yield lambda: before.size_bytes - after.size_bytes if before and after else 0
        after = self.index.usage()

    def _tell(self, keys: Iterable[str]) -> None:
        for key in keys:
            for tell in self._on_evicted:
                tell(key)

    def pins(self) -> set[str]:
        """The keys that are never evicted. Takes no lock."""
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
                self.index.removed([f"pin/{key}"])
            self.collect()

    def discard(self, name: str) -> None:
        """Remove a record that nothing names. Raises: StoreError."""
        with self._lock:
            self.files.delete(name)
            self.index.removed([name])

    def purge_quarantine(self) -> tuple[int, int]:
        """Remove what was put aside; files and bytes. Takes no lock. Raises: StoreError."""
        return self._purge([*self.files.put_aside()])

    @staticmethod
    def _purge(aside: list[tuple[Path, os.stat_result]]) -> tuple[int, int]:
        for path, _ in aside:
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"{path} cannot be removed: {error.strerror}") from None
        return len(aside), sum(found.st_blocks * 512 for _, found in aside)

    def usage(self) -> Usage:
        """What the records take; counted on the spot when the index does not know. Takes no lock."""
        known = self.index.usage()
        if known is not None:
            return known
        found = {kind: [entry.st_blocks * 512 for _, entry in self.files.stats(kind)] for kind in KINDS}
        return Usage(sum(map(sum, found.values())), sum(map(len, found.values())), len(found["manifest"]))

    def close(self) -> None:
        """Write the index down; one that is still being made again is left to the next daemon."""
        self._is_closed = True
        if self._lock.acquire(timeout=_CLOSING_S):
            self._settle()
            self.index.close()
            self._lock.release()
