"""The daemon's private index over its store: sizes, references, counters, remembered failures. Only here is diskcache known.

The files are the truth and this is a memory of them, so that collecting needs no look at every one: a missing or damaged index
is made again. Text, bytes and numbers only: `SafeDisk` refuses pickle both ways and every path (CVE-2025-69872 is the default
mode of diskcache). The daemon is its only opener.

    record/<kind>/<hex>   bytes a record takes on the disk
    reference/<name>      how many manifests name that record
    total/…               sums over the records
    count/<counter>       events since the store was made
    failure/<key>         a remembered compile error, as JSON, with an expiry
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import diskcache

logger = logging.getLogger("kserve")
SCHEMA = 1
_MOST_INLINE = 1 << 30  # nothing is ever put into a file beside the database
_MODE_RAW = 1
_LOCK_TIMEOUT_S = 10.0
# What a damaged database, a full disk or a foreign row may raise.
_BROKEN = (sqlite3.Error, diskcache.Timeout, OSError, ValueError, TypeError)
_Found = TypeVar("_Found")


class Usage(NamedTuple):
    """What the records take: allocated bytes, files."""

    size_bytes: int
    n_files: int


class SafeDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Keys of text; values of text, bytes and numbers, inside the database. Anything else is refused, in and out.

    Raises: TypeError or ValueError, before anything is decoded, opened or removed.
    """

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise TypeError(f"an index key is a text, not {key!r}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if not raw or type(key) is not str:
            raise ValueError("the index holds a key that is no text")
        return key

    def store(self, value: object, read: object, key: object = None) -> Any:
        if read or type(value) not in (str, bytes, int, float):
            raise TypeError(f"an index value is a text, bytes or a number, not {type(value).__name__}")
        self.min_file_size = _MOST_INLINE
        return super().store(value, read, key)

    def fetch(self, mode: object, filename: object, value: object, read: object) -> Any:
        if mode != _MODE_RAW or filename is not None or read:
            raise ValueError("the index holds a value that is not a plain one")
        return super().fetch(mode, filename, value, read)

    def filename(self, *_: object) -> tuple[str, str]:
        raise ValueError("the index keeps nothing in files of its own")

    def remove(self, file_path: object) -> None:
        """A file name in a row is not ours: nothing is removed."""


class Index:
    """The index in one directory.

    A fault of the disk or the database closes it: every question is then answered as by an empty index, and `reopen` makes
    it again. Thread-safe.

    Attributes:
        stale: why it has to be rebuilt from the files before its numbers count; empty when it need not.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cache: diskcache.Cache | None = None
        self.stale = ""
        self.open()

    def open(self) -> None:
        """Open the database, or a new one in place of a damaged one."""
        fresh = not self._directory.is_dir()
        for last in (False, True):
            try:
                self._cache = self._opened()
                was_clean = self._cache.get("clean") == SCHEMA
                self.stale = "" if was_clean else "missing" if fresh else "not closed"
                self._cache.set("clean", 0)
                return
            except _BROKEN as error:
                self._forget()
                if last or not _removed(self._directory):
                    self.stale = f"unusable: {error}"
                    logger.warning("index unusable=%s error=%s", self._directory, error)
                    return
                fresh = True

    def _opened(self) -> diskcache.Cache:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        # diskcache tries for minutes on a directory that takes no writes: ask first.
        probe = self._directory / "probe"
        probe.write_bytes(b"")
        probe.unlink()
        return diskcache.Cache(
            str(self._directory), timeout=_LOCK_TIMEOUT_S, disk=SafeDisk, eviction_policy="none", cull_limit=0, statistics=0
        )

    def _forget(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            with contextlib.suppress(*_BROKEN):
                cache.close()

    @property
    def is_open(self) -> bool:
        return self._cache is not None

    def close(self) -> None:
        """Say that everything was written down, and close."""
        if not self.stale:
            self._do(lambda cache: cache.set("clean", SCHEMA), None)
        self._forget()

    def _do(self, action: Callable[[diskcache.Cache], _Found], otherwise: _Found) -> _Found:
        if self._cache is None:
            return otherwise
        try:
            return action(self._cache)
        except _BROKEN as error:
            self.stale = f"broken: {error}"
            logger.warning("index closed=%s error=%s", self._directory, error)
            self._forget()
            return otherwise

    def added(self, sizes: Mapping[str, int], *, references: tuple[str, ...] = ()) -> None:
        """Records were written; a manifest among them names `references`.

        Args:
            sizes: record name -> bytes on the disk.
        """

        def action(cache: diskcache.Cache) -> None:
            with cache.transact():
                for name, size in sizes.items():
                    before = cache.get(f"record/{name}")
                    cache.set(f"record/{name}", size)
                    _add(cache, size - (before or 0), n_files=int(before is None))
                for name in references:
                    cache.incr(f"reference/{name}")

        self._do(action, None)

    def removed(self, name: str) -> None:
        """A record is gone."""

        def action(cache: diskcache.Cache) -> None:
            with cache.transact():
                size = cache.pop(f"record/{name}")
                if size is not None:
                    _add(cache, -size, n_files=-1)

        self._do(action, None)

    def released(self, names: tuple[str, ...]) -> list[str]:
        """A manifest that named these is gone: those that no other one names."""

        def action(cache: diskcache.Cache) -> list[str]:
            free = []
            with cache.transact():
                for name in names:
                    if cache.decr(f"reference/{name}", default=1) <= 0:
                        cache.delete(f"reference/{name}")
                        free.append(name)
            return free

        return self._do(action, [])

    def is_referenced(self, name: str) -> bool:
        """Whether a manifest names that record; true when that cannot be told."""
        return bool(self._do(lambda cache: cache.get(f"reference/{name}", default=0) > 0, otherwise=True))

    def usage(self) -> Usage | None:
        """What the records take; None when that is not known."""
        if self.stale:
            return None
        return self._do(lambda cache: Usage(cache.get("total/bytes", 0), cache.get("total/files", 0)), None)

    def rebuild(self, sizes: Mapping[str, int], references: Mapping[str, int]) -> None:
        """Replace everything known about the records by what a look at all files gave; counters and failures stay."""

        def action(cache: diskcache.Cache) -> None:
            with cache.transact():
                for key in [key for key in cache.iterkeys() if key.startswith(("record/", "reference/", "total/"))]:
                    cache.delete(key)
                for name, size in sizes.items():
                    cache.set(f"record/{name}", size)
                for name, count in references.items():
                    cache.set(f"reference/{name}", count)
                _add(cache, sum(sizes.values()), n_files=len(sizes))

        self._do(action, None)
        if self._cache is not None:
            self.stale = ""

    def count(self, counters: Mapping[str, int]) -> None:
        """Add to the counters of this store."""

        def action(cache: diskcache.Cache) -> None:
            with cache.transact():
                for name, number in counters.items():
                    cache.incr(f"count/{name}", number)

        self._do(action, None)

    def counters(self) -> dict[str, int]:
        """Every counter since the store was made."""
        return dict(self._rows("count/"))

    def remember_failure(self, key: str, error: str, *, for_s: float) -> None:
        """Keep a compile error, as JSON text, for so long."""
        self._do(lambda cache: cache.set(f"failure/{key}", error, expire=for_s), None)

    def failures(self) -> list[tuple[str, str, float]]:
        """(key, error, seconds since 1970 when it expires) of every failure that is still remembered."""

        def action(cache: diskcache.Cache) -> list[tuple[str, str, float]]:
            cache.expire()
            found = [(key, cache.get(key, expire_time=True)) for key in cache.iterkeys() if key.startswith("failure/")]
            return [(key.partition("/")[2], str(error), until or 0.0) for key, (error, until) in found if error is not None]

        return self._do(action, [])

    def _rows(self, prefix: str) -> Iterator[tuple[str, int]]:
        def action(cache: diskcache.Cache) -> list[tuple[str, int]]:
            keys = [key for key in cache.iterkeys() if key.startswith(prefix)]
            return [(key.removeprefix(prefix), int(cache.get(key, 0))) for key in keys]

        nothing: list[tuple[str, int]] = []
        return iter(self._do(action, nothing))


def _add(cache: diskcache.Cache, size_bytes: int, *, n_files: int) -> None:
    cache.incr("total/bytes", size_bytes)
    cache.incr("total/files", n_files)


def _removed(directory: Path) -> bool:
    """Remove the index and nothing else: a link in its place is only unlinked."""
    try:
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        else:
            shutil.rmtree(directory)
    except OSError:
        return False
    return True
