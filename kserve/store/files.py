"""FileStore: records as plain files, the truth of a node.

    payload/<2>/<sha256>          the compiler's bytes, so that the vendor's tools read them
    source/<2>/<sha256>           a source or header as it was uploaded
    manifest/<2>/<key>.json       the commit mark, always written last
    quarantine/                   damaged records, kept for a look
    tmp/                          unfinished writes and the workers' staging directories
    lock                          held by the daemon for its life
    KSERVE_STORE                  says that this directory is a store

A record is written to `tmp/`, synced and renamed, so a reader sees all of it or nothing. No path inside is absolute: the
directory can be moved, copied or mounted read-only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kserve.errors import StoreError
from kserve.ownership import private_directory
from kserve.store.base import KINDS, check_content, checked, checked_kind, matches

MARKER = "KSERVE_STORE"


class FileStore:
    """A store in a directory.

    Args:
        root:     the directory.
        writable: False for a client, which reads and never repairs.
    Raises:
        ForeignPeer, StoreError: a writable store's directory is not ours alone, or cannot be made.
    """

    def __init__(self, root: Path, *, writable: bool) -> None:
        self.root = root
        self.writable = writable
        self.n_quarantined = 0
        if writable:
            private_directory(root)
            _claim(root)
            for name in (*KINDS, "quarantine", "tmp"):
                private_directory(root / name)

    def path(self, name: str) -> Path:
        """Where that record lies, or would."""
        kind, _, digest = checked(name).partition("/")
        return self.root / kind / digest[:2] / (digest + (".json" if kind == "manifest" else ""))

    def get(self, name: str) -> bytes | None:
        path = self.path(name)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:  # no record, whoever made it
            self.quarantine(name)
            return None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        if matches(name, content):
            return content
        self.quarantine(name)
        return None

    def put(self, name: str, content: bytes) -> None:
        path = self._writable_path(name)
        check_content(name, content)
        temporary = self.root / "tmp" / f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                _sync_directory(path.parent.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            _sync_directory(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StoreError(f"{path} cannot be written: {error.strerror}") from None

    def delete(self, name: str) -> None:
        path = self._writable_path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be removed: {error.strerror}") from None

    def _writable_path(self, name: str) -> Path:
        path = self.path(name)
        if not self.writable:
            raise StoreError(f"store {self.root} was opened to read: {name} cannot be changed")
        return path

    def keys(self, kind: str) -> Iterator[str]:
        for directory in sorted((self.root / checked_kind(kind)).glob("??")):
            names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
            for digest in (name.removesuffix(".json") for name in names):
                with contextlib.suppress(ValueError):  # a file that is no record
                    if self.path(f"{kind}/{digest}").name in names:
                        yield digest

    def quarantine(self, name: str) -> None:
        """Move a damaged record out of the way; a reader without the right to leaves it."""
        if not self.writable:
            return
        path = self.path(name)
        with contextlib.suppress(OSError):
            path.rename(self.root / "quarantine" / f"{path.name}.{os.urandom(4).hex()}")
            self.n_quarantined += 1

    def size_bytes(self) -> int:
        """Bytes of all records as they lie on the disk (allocated blocks)."""
        total = 0
        for kind in KINDS:
            for directory in (self.root / kind).glob("??"):
                with contextlib.suppress(FileNotFoundError):
                    total += sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
        return total


def _claim(root: Path) -> None:
    """Mark the directory as a store. Raises: StoreError when it holds something and is none: nothing in it is touched."""
    marker = root / MARKER
    try:
        if not marker.exists():
            if any(root.iterdir()):
                raise StoreError(
                    f"directory {root} is not empty and no kserve store: nothing in it was touched",
                    hint="set KSERVE_STORE to a directory of its own",
                )
            marker.write_text("This directory is a kserve store: docs/architecture.md says what lies in it.\n")
            marker.chmod(0o400)
    except OSError as error:
        raise StoreError(f"directory {root} cannot be used as a store: {error.strerror}") from None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
