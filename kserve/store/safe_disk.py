"""What may go into a diskcache database and come out of it: text. diskcache's own default is pickle (CVE-2025-69872)."""

from __future__ import annotations

from typing import Any

import diskcache

_MOST_INLINE = 1 << 30  # nothing is ever put into a file beside the database
_MODE_RAW = 1


class SafeDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Keys and values of text, inside the database. Anything else is refused, in and out.

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
        if read or type(value) is not str:
            raise TypeError(f"an index value is a text, not {type(value).__name__}")
        self.min_file_size = _MOST_INLINE
        return super().store(value, read, key)

    def fetch(self, mode: object, filename: object, value: object, read: object) -> str:
        if mode != _MODE_RAW or filename is not None or read or type(value) is not str:
            raise ValueError("the index holds a value that is not a plain text")
        return value

    def filename(self, *_: object) -> tuple[str, str]:
        raise ValueError("the index keeps nothing in files of its own")

    def remove(self, file_path: object) -> None:
        """A file name in a row is not ours: nothing is removed."""
