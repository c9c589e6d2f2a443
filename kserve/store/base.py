"""The store contract: bytes to bytes, four methods.

A record's name is `kind/hex`. There is no `contains`: checking and then reading is a race. A store knows nothing of kernels;
the kinds in CONTENT_ADDRESSED are named by the SHA-256 of their bytes, and a store never returns other bytes for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from kserve.key import digest_of

CONTENT_ADDRESSED = ("payload", "source", "toolchain")
KINDS = (*CONTENT_ADDRESSED, "manifest", "pin", "alias", "tuning")
_NAME = re.compile(rf"({'|'.join(KINDS)})/[0-9a-f]{{64}}")
_KEY = re.compile(r"[0-9a-f]{64}")


class Store(Protocol):
    """Bytes by name."""

    def get(self, name: str) -> bytes | None:
        """The record's bytes; None when it is not there or was damaged."""

    def put(self, name: str, content: bytes) -> None:
        """Write or replace a record; on return it survives a crash.

        Raises: StoreError when it cannot be written; ValueError when a content-addressed name stands for other bytes.
        """

    def delete(self, name: str) -> None:
        """Remove a record; one that is not there is no error."""

    def keys(self, kind: str, prefix: str = "") -> Iterator[str]:
        """The hex part of every record of that kind that begins so, in no order. A ValueError for no kind."""


class MemoryStore:
    """A store in a dictionary: for tests, and for a node whose disk refuses writes."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def get(self, name: str) -> bytes | None:
        return self._records.get(checked(name))

    def put(self, name: str, content: bytes) -> None:
        self._records[checked(name)] = check_content(self, name, content)

    def delete(self, name: str) -> None:
        self._records.pop(checked(name), None)

    def keys(self, kind: str, prefix: str = "") -> Iterator[str]:
        group = checked_kind(kind) + "/"
        return iter([name.removeprefix(group) for name in self._records if name.startswith(group + prefix)])


def checked_kind(kind: str) -> str:
    """The kind itself; a ValueError when there is none of that name."""
    if kind not in KINDS:
        raise ValueError(f"record kind {kind!r}: expected one of {', '.join(KINDS)}")
    return kind


def is_key(text: str) -> bool:
    """Whether the text is the hex part of a record's name."""
    return _KEY.fullmatch(text) is not None


def checked(name: str) -> str:
    """The name itself; a ValueError for anything but `kind/64 hex`, so that no name can leave the store."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"record name {name!r}: expected one of {', '.join(KINDS)}, a slash and 64 hex digits")
    return name


def matches(name: str, content: bytes) -> bool:
    """Whether the bytes are the ones a content-addressed name stands for."""
    kind, _, digest = name.partition("/")
    return kind not in CONTENT_ADDRESSED or digest_of(content) == digest


def check_content(store: Store, name: str, content: bytes) -> bytes:
    """The bytes themselves; a ValueError when a content-addressed name stands for others, or has others in that store."""
    if not matches(name, content):
        raise ValueError(f"record {name} was given bytes of digest {digest_of(content)}")
    if name.startswith(CONTENT_ADDRESSED) and store.get(name) not in (None, content):
        raise ValueError(f"record {name} has other bytes of the same digest: nothing was replaced")
    return content
