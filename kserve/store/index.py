"""The daemon's private index over its store: sizes, references, counters, remembered failures. Only here and in `safe_disk.py`
is diskcache known.

The files are the truth and this is a memory of them, so that collecting needs no look at every one: a missing or damaged index
is made again. Text only, inside the database. The daemon is its only opener.

    record/<kind>/<hex>   bytes on the disk, how many manifests name it, and what a manifest names
    total                 sums over the records
    count/<counter>       events since the store was made
    failure/<key>         a remembered compile error, as JSON, with an expiry
    shape                 what the store's directories looked like when the index was closed; empty while it is open
    boot                  the run of the machine in which it was opened last
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import diskcache

from kserve.errors import KserveError
from kserve.ownership import private_directory
from kserve.store.ledger import Ledger, Record, Usage, read_record
from kserve.store.safe_disk import SafeDisk

logger = logging.getLogger("kserve")
SCHEMA = "2"
_LOCK_TIMEOUT_S = 10.0
_PATIENCE_S = 0.5  # a start waits no longer for somebody who looks into the database
# Room for a new database: with less the disk is full, and what is there is no worse for it.
_PROBE_BYTES = 256 << 10
# No mapped file and no shared memory: one that somebody cuts short would kill the process (SIGBUS). No syncs: after a power cut
# the records are counted again.
_OPTIONS = {
    "eviction_policy": "none",
    "cull_limit": 0,
    "statistics": 0,
    "sqlite_journal_mode": "persist",
    "sqlite_synchronous": 0,
    "sqlite_mmap_size": 0,
    "sqlite_cache_size": 1024,
    "sqlite_auto_vacuum": 0,
}
# What a damaged database, a full disk or a foreign row may raise.
_BROKEN = (sqlite3.Error, diskcache.Timeout, OSError, ValueError, TypeError, AttributeError, LookupError)
_PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY})
# In SQL, for a range of keys: diskcache walks over every one of them, at 75 µs each.
_ROWS = "SELECT key, raw, mode, filename, value FROM Cache WHERE key >= ? AND key < ? AND (value LIKE ? OR mode != 1)"
_SHARDS = "SELECT DISTINCT substr(key, 8, instr(substr(key, 8), '/') + 2) FROM Cache WHERE key >= ? AND key < ?"
_LAST = "\U0010ffff"  # no character of a key comes after it
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_Found = TypeVar("_Found")


class Index:
    """The index in one directory.

    A fault of the disk or the database closes it: every question is then answered as by an empty index, and `open` makes it
    again. Thread-safe.

    Args:
        shape: what the store's directories look like now: a text that differs when a record came or went.
    Attributes:
        stale: why it has to be compared with the files before its numbers count; empty when it need not.
    """

    def __init__(self, directory: Path, *, shape: Callable[[], str]) -> None:
        self._directory = directory
        self._database = directory / diskcache.core.DBNAME
        self._shape = shape
        self._cache: diskcache.Cache | None = None
        self._is_damaged = False
        self.stale = ""
        self.open()

    def open(self) -> None:
        """Open the database, or a new one in place of a damaged one."""
        for _ in range(2):
            try:
                self._make_room()
                self._cache = cache = self._opened()
                self.stale = self._compared(cache)
                cache.set("shape", "")
                return
            except (*_BROKEN, KserveError) as error:
                self._fail(error)
                self.stale = f"unusable: {error}"
            if not self._is_damaged:
                break

    def _make_room(self) -> None:
        """A directory of ours that takes a new database; whatever else lies there is removed."""
        is_plain = not self._directory.is_symlink() and all(_is_plain(path) for path in _entries(self._directory))
        if self._is_damaged or not is_plain:
            _remove(self._directory)
        try:
            private_directory(self._directory)
        except KserveError:  # a file, or a directory of somebody else's
            _remove(self._directory)
            private_directory(self._directory)
        # diskcache tries for minutes on a directory that takes no writes: ask first.
        probe = self._directory / "probe"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        self._is_damaged = False

    def _opened(self) -> diskcache.Cache:
        is_new = not self._database.exists()
        if not is_new:
            _inspect(self._database)
        cache = diskcache.Cache(str(self._directory), timeout=_LOCK_TIMEOUT_S, disk=SafeDisk, **_OPTIONS)
        if is_new:
            cache.set("schema", SCHEMA)
        elif cache.get("schema") != SCHEMA:
            raise ValueError("the index has another schema")
        return cache

    def _compared(self, cache: diskcache.Cache) -> str:
        """Why it may differ from the files."""
        shape, boot = cache.get("shape"), _boot()
        why = "missing" if shape is None else "not closed" if not shape else "" if shape == self._shape() else "files changed"
        if why == "not closed" and cache.get("boot") != boot:  # a power cut: what reached the disk may be of any age
            self._forget_records()
        cache.set("boot", boot)
        return why

    def _forget_records(self) -> None:
        """Counters stay. Raises: ValueError when not even they can be trusted."""
        with contextlib.closing(_connected(self._database)) as connection, connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise ValueError("the index was torn by a power cut")
            connection.execute("DELETE FROM Cache WHERE key >= 'record/' AND key < ? OR key = 'total'", ("record/" + _LAST,))

    def _fail(self, error: BaseException) -> None:
        """Close it over an error; one that a new database would not have had condemns this one."""
        cache, self._cache = self._cache, None
        code = getattr(error, "sqlite_errorcode", None)
        is_passing = isinstance(error, diskcache.Timeout | OSError | KserveError) if code is None else code & 0xFF in _PASSING
        self._is_damaged = not is_passing
        self.stale = f"broken: {error!r}"
        logger.warning("index closed=%s error=%r", self._directory, error)
        if cache is not None:
            with contextlib.suppress(*_BROKEN):
                cache.close()

    @property
    def is_open(self) -> bool:
        return self._cache is not None

    def close(self) -> None:
        """Say which files it describes, and close."""
        if not self.stale:
            self._do(lambda cache: cache.set("shape", self._shape()), otherwise=False)
        cache, self._cache = self._cache, None
        if cache is not None:
            with contextlib.suppress(*_BROKEN):
                cache.close()

    def _do(self, action: Callable[[diskcache.Cache], _Found], *, otherwise: _Found) -> _Found:
        cache = self._cache
        if cache is None:
            return otherwise
        try:
            return action(cache)
        except _BROKEN as error:
            if self._cache is cache:
                self._fail(error)
            return otherwise

    def added(self, sizes: Mapping[str, int], *, names: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Records were written, or written again.

        Args:
            sizes: record name -> bytes on the disk.
            names: for each manifest among them, what it names.
        """

        def action(ledger: Ledger) -> None:
            for name, size in sizes.items():
                ledger.add(name, size, (names or {}).get(name, ()))

        self._change(action, None)

    def removed(self, names: Iterable[str]) -> list[str]:
        """Records are gone; the records that one of them named and no manifest names any more."""

        def action(ledger: Ledger) -> list[str]:
            return [free for name in names for free in ledger.remove(name)]

        return self._change(action, [])

    def _change(self, action: Callable[[Ledger], _Found], otherwise: _Found) -> _Found:
        """Run it over the records in one transaction."""

        def changed(cache: diskcache.Cache) -> _Found:
            with cache.transact():
                ledger = Ledger(cache)
                found = action(ledger)
                ledger.write()
            return found

        return self._do(changed, otherwise=otherwise)

    def usage(self) -> Usage | None:
        """What the records take; None when that is not known."""
        if self.stale:
            return None
        return self._do(lambda cache: Ledger(cache).usage, otherwise=None)

    def records(self, shard: str) -> dict[str, Record]:
        """What is known of the records of `kind/<2>`."""
        return self._do(lambda _: {name: read_record(text) for name, text in self._rows("record/", shard)}, otherwise={})

    def shards(self) -> set[str]:
        """Every `kind/<2>` that it knows records of."""
        return self._do(lambda _: {shard for (shard,) in self._asked(_SHARDS, "record/")}, otherwise=set())

    def unnamed(self, kind: str) -> list[str]:
        """The records of that kind that no manifest names."""
        return self._do(lambda _: [name for name, _ in self._rows("record/", f"{kind}/", ending=" 0")], otherwise=[])

    def agrees(self) -> None:
        """It was compared with the files: its numbers count."""
        if self._cache is not None:
            self.stale = ""

    def count(self, counters: Mapping[str, int]) -> bool:
        """Add to the counters of this store; whether they were kept."""

        def action(cache: diskcache.Cache) -> bool:
            with cache.transact():
                for name, number in counters.items():
                    cache.set(f"count/{name}", str(int(cache.get(f"count/{name}", "0")) + number))
            return True

        return self._do(action, otherwise=False)

    def counters(self) -> dict[str, int]:
        """Every counter since the store was made."""
        return self._do(lambda _: {name: int(text) for name, text in self._rows("count/")}, otherwise={})

    def remember_failure(self, key: str, error: str, *, for_s: float) -> None:
        """Keep a compile error, as JSON text, for so long."""
        self._do(lambda cache: cache.set(f"failure/{key}", error, expire=for_s), otherwise=False)

    def failures(self) -> list[tuple[str, str, float]]:
        """(key, error, seconds since 1970 when it expires) of every failure that is still remembered."""

        def action(cache: diskcache.Cache) -> list[tuple[str, str, float]]:
            cache.expire()
            found = [(key, cache.get(f"failure/{key}", expire_time=True)) for key, _ in self._rows("failure/")]
            return [(key, error, until or 0.0) for key, (error, until) in found if error is not None]

        return self._do(action, otherwise=[])

    def _rows(self, group: str, prefix: str = "", *, ending: str = "") -> list[tuple[str, str]]:
        """(key without its group, text) of the keys that begin so, whose texts end so."""
        disk = SafeDisk(str(self._directory))
        return [
            (disk.get(key, raw).removeprefix(group), disk.fetch(mode, filename, value, read=False))
            for key, raw, mode, filename, value in self._asked(_ROWS, group + prefix, "%" + ending)
        ]

    def _asked(self, question: str, prefix: str, *more: str) -> list[Any]:
        with contextlib.closing(_connected(self._database)) as connection:
            return connection.execute(question, (prefix, prefix + _LAST, *more)).fetchall()


def _boot() -> str:
    try:
        return _BOOT.read_text()
    except OSError:
        return ""


def _connected(database: Path, *, timeout_s: float = _LOCK_TIMEOUT_S) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.as_uri()}?mode=rw", timeout=timeout_s, uri=True)


def _inspect(database: Path) -> None:
    """Raises ValueError for a setting that diskcache does not have, which would become an attribute of the cache, and
    sqlite3.Error for a database that is none, or that somebody holds: diskcache would try for a minute."""
    with contextlib.closing(_connected(database, timeout_s=_PATIENCE_S)) as connection:
        found = {key for (key,) in connection.execute("SELECT key FROM Settings")}
        connection.execute(f"PRAGMA journal_mode = {_OPTIONS['sqlite_journal_mode']}")
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
    foreign = found - {*diskcache.core.DEFAULT_SETTINGS, *diskcache.core.METADATA}
    if foreign:
        raise ValueError(f"the index holds the settings {foreign}")


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _remove(directory: Path) -> None:
    """Remove the index and nothing else: a link in its place is only unlinked."""
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)
