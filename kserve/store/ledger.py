"""The account of a store's records: what each takes, who names it, what all take together. Kept as text, in one transaction."""

from __future__ import annotations

from typing import Any, NamedTuple

from kserve.store.base import CONTENT_ADDRESSED, checked

_TOTAL = "total"
# The size of a record that manifests name and that is not there.
_GONE = -1


class Usage(NamedTuple):
    """What the records take: allocated bytes, files; the artifacts among them."""

    size_bytes: int
    n_files: int
    n_artifacts: int


class Record(NamedTuple):
    """One record: bytes on the disk, how many manifests name it, what it names itself."""

    size_bytes: int = _GONE
    n_named: int = 0
    names: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        return self.size_bytes != _GONE

    def to_text(self) -> str:
        return " ".join((str(self.size_bytes), str(self.n_named), *self.names))


def read_record(text: str) -> Record:
    """The record that `to_text` described. Raises: ValueError."""
    size, n_named, *names = text.split(" ")
    return Record(int(size), int(n_named), tuple(_content(name) for name in names))


def _content(name: str) -> str:
    if checked(name).partition("/")[0] not in CONTENT_ADDRESSED:
        raise ValueError(f"record {name} is named as if it were content")
    return name


class Ledger:
    """The records for the length of one transaction: each is read once and written once.

    Args:
        cache: texts by key, with get, set and delete.
    Raises: ValueError for an entry that is none.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._records: dict[str, Record] = {}
        self.usage = Usage(*(int(part) for part in cache.get(_TOTAL, "0 0 0").split(" ")))
        if min(self.usage) < 0:
            raise ValueError(f"the records take {self.usage}")

    def add(self, name: str, size_bytes: int, names: tuple[str, ...]) -> None:
        """A record is there, in place of the one that was."""
        before = self._get(name)
        self._count(name, before, -1)
        for named in before.names:
            self._name(named, -1)
        after = self._records[name] = self._get(name)._replace(size_bytes=size_bytes, names=names)
        for named in names:
            self._name(named, 1)
        self._count(name, after, 1)

    def remove(self, name: str) -> list[str]:
        """A record is gone; what it named and nothing names any more."""
        before = self._get(name)
        self._count(name, before, -1)
        self._records[name] = before._replace(size_bytes=_GONE, names=())
        for named in before.names:
            self._name(named, -1)
        return [named for named in before.names if self._is_free(self._records[named])]

    def write(self) -> None:
        """Write down every change."""
        for name, record in self._records.items():
            if record.is_there or record.n_named:
                self._cache.set(f"record/{name}", record.to_text())
            else:
                self._cache.delete(f"record/{name}")
        self._cache.set(_TOTAL, " ".join(map(str, self.usage)))

    def _get(self, name: str) -> Record:
        if name not in self._records:
            text = self._cache.get(f"record/{name}")
            self._records[name] = Record() if text is None else read_record(text)
        return self._records[name]

    def _name(self, name: str, change: int) -> None:
        record = self._get(name)
        self._records[name] = record._replace(n_named=max(0, record.n_named + change))

    def _count(self, name: str, record: Record, sign: int) -> None:
        if record.is_there:
            size, n_files, n_artifacts = self.usage
            is_artifact = name.startswith("manifest/")
            self.usage = Usage(size + sign * record.size_bytes, n_files + sign, n_artifacts + sign * is_artifact)

    @staticmethod
    def _is_free(record: Record) -> bool:
        return record.is_there and record.n_named == 0
