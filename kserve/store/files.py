"""FileStore: records as plain files, the truth of a node.

    payload/<2>/<sha256>          the compiler's bytes, so that the vendor's tools read them
    source/<2>/<sha256>           a source or header as it was uploaded
    manifest/<2>/<key>.json       the commit mark, always written last; its modification time is the last use
    alias/<2>/<request>           which keys a request had, and the stamps that say whether it still has them (alias.py)
    toolchain/<2>/<sha256>        the stamps of one compiler's files
    pin/<2>/<key>                 this artifact is never evicted; who wants that
    index/                        the daemon's memory of sizes and references (index.py)
    quarantine/                   damaged records, kept for a look
    tmp/                          unfinished writes and the workers' staging directories
    debug/<key>/                  the sources of a debug variant, which its bytes name by their place here (debug_sources.py)
    lock                          pid of the daemon, which holds a lock on the directory for its life
    KSERVE_STORE                  says that this directory is a store

A record is written to `tmp/`, synced and renamed, so a reader sees all of it or nothing. No path inside is absolute: the
directory can be moved, copied or mounted read-only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kserve.errors import StoreError
from kserve.key import digest_of
from kserve.ownership import identities, network_file_system, private_directory, refuse_foreign
from kserve.store.base import CONTENT_ADDRESSED, KINDS, check_content, checked, checked_kind, is_key, matches

MARKER = "KSERVE_STORE"
_SUFFIXES = {"manifest": ".json"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_ELSEWHERE = "set KSERVE_STORE to a directory of its own that this user can write to"
_PROBE_BYTES = 64 << 10


class FileStore:
    """A store in a directory.

    Bytes at rest may change under any process that can write to them: every `get` hashes what it read.

    Args:
        root:     the directory.
        writable: False for a client, which reads and never repairs.
    Attributes:
        on_quarantine: called with the name of every record that is put aside.
    Raises:
        ForeignPeer, StoreError: a writable store's directory is not ours alone, cannot be made, or is on a network file system.
    """

    def __init__(self, root: Path, *, writable: bool) -> None:
        self.root = root
        self._temporary = str(root / "tmp")
        self.writable = writable
        self.n_quarantined = 0
        self.on_quarantine: Callable[[str], object] = str
        self._swapping = _lock(writable=writable)  # held for the moment in which a name gets another file, or none
        self._is_set_up = False
        if writable:
            _refuse_network(root)
            private_directory(root)
            _refuse_other_content(root)
            try:
                self._set_up()
            except OSError as error:  # one that was a store before, or has no room now, becomes one when the disk takes it
                if error.errno not in _NO_ROOM and not (root / MARKER).exists():
                    raise StoreError(f"directory {root} cannot be used as a store: {error.strerror}", hint=_ELSEWHERE) from None

    def _set_up(self) -> None:
        """Mark the directory as a store, make what belongs into it. Raises: OSError; ForeignPeer for what is not ours alone."""
        # First of all: who finds anything else here without it refuses the directory.
        with contextlib.suppress(FileExistsError), open(self.root / MARKER, "x", opener=_as_reader) as file:
            file.write("This directory is a kserve store: docs/architecture.md says what lies in it.\n")
        for name in (*KINDS, "quarantine", "tmp"):
            path = self.root / name
            path.mkdir(mode=0o700, exist_ok=True)
            refuse_foreign(path, path.lstat(), uids=identities())
        self._is_set_up = True

    @property
    def debug_root(self) -> str:
        """Where the sources of debug variants lie, a folder for each key."""
        return os.path.realpath(self.root / "debug")

    def path(self, name: str) -> Path:
        """Where that record lies, or would."""
        return Path(self._place(name))

    def _place(self, name: str) -> str:
        """The same as a text: a hit reads a handful of records, and a Path costs more than its file."""
        kind, _, digest = checked(name).partition("/")
        return f"{self.root}/{kind}/{digest[:2]}/{digest}{_SUFFIXES.get(kind, '')}"

    def get(self, name: str) -> bytes | None:
        return self._checked_read(name)[0]

    def is_damaged(self, name: str) -> bool:
        """Whether the record was damaged, and is put aside now; one that is not there was not."""
        return self._checked_read(name)[1]

    def _checked_read(self, name: str) -> tuple[bytes | None, bool]:
        """The record's bytes, and whether what lay there was none and was put aside."""
        path = self._place(name)
        try:
            content = _read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None, False
        except IsADirectoryError:  # no record, whoever made it
            self.quarantine(name)
            return None, True
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        if matches(name, content):
            return content, False
        if self.quarantine(name, was=content):
            return None, True
        return self._checked_read(name)  # written again since

    def put(self, name: str, content: bytes, *, durable: bool = True) -> None:
        path = self._writable_place(name)
        check_content(self, name, content)
        folder, base = os.path.split(path)
        temporary = os.path.join(self._temporary, f"{base}.{os.getpid()}.{os.urandom(4).hex()}")  # noqa: PTH118 - as above
        try:
            self._make_folder(folder)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
                if durable:
                    os.fsync(descriptor)
            with self._swapping:
                os.rename(temporary, path)  # noqa: PTH104 - as above
            # What a manifest names comes before it, and is found missing when a power cut took only that: it is built again.
            if durable and not name.startswith(CONTENT_ADDRESSED):
                _sync_directory(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108 - as above
            raise StoreError(f"{path} cannot be written: {error.strerror}") from None

    def _make_folder(self, folder: str) -> None:
        """The directory of a record, and those above it where somebody has removed them. Raises: OSError."""
        if self._is_set_up and os.path.isdir(folder):  # noqa: PTH112 - as above
            return
        kind = os.path.dirname(folder)  # noqa: PTH120 - as above
        if not (self._is_set_up and os.path.isdir(kind)):  # noqa: PTH112 - as above
            self._set_up()
        if not os.path.isdir(folder):  # noqa: PTH112 - as above
            os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103 - as above
            _sync_directory(kind)

    def delete(self, name: str, *, was: bytes | None = None) -> None:
        """Remove the record; with `was` only while it holds those bytes."""
        path = Path(self._writable_place(name))
        try:
            with self._swapping:
                if was is None or path.read_bytes() == was:
                    path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{path} cannot be removed: {error.strerror}") from None

    def _writable_place(self, name: str) -> str:
        place = self._place(name)
        if not self.writable:
            raise StoreError(f"store {self.root} was opened to read: {name} cannot be changed")
        return place

    def size_on_disk(self, name: str) -> int:
        """Bytes that the record takes on the disk. Raises: OSError when it is not there."""
        return os.stat(self._place(name)).st_blocks * 512  # noqa: PTH116 - as above

    def keys(self, kind: str, prefix: str = "") -> Iterator[str]:
        return (key for key, _ in self._entries(kind, prefix) if key.startswith(prefix))

    def stats(self, kind: str, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Every such record with what the file system says of it; one that goes meanwhile is left out.

        Args:
            prefix: the beginning of the hex part, two digits or none.
        """
        for key, entry in self._entries(kind, prefix):
            with contextlib.suppress(FileNotFoundError):
                yield key, entry.stat(follow_symlinks=False)

    def _entries(self, kind: str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        suffix = _SUFFIXES.get(checked_kind(kind), "")
        directories = [self.root / kind / prefix[:2]] if len(prefix) > 1 else self._directories(kind)
        for directory in directories:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # gone, no part of a store, shut
                for entry in os.scandir(directory):
                    key = entry.name.removesuffix(suffix)
                    if entry.name == key + suffix and is_key(key) and key.startswith(directory.name):
                        yield key, entry

    def _directories(self, kind: str) -> list[Path]:
        return sorted((self.root / kind).glob("??"))

    def shards(self, kind: str) -> list[str]:
        """The directories of that kind, as `kind/<2>`."""
        return [f"{kind}/{directory.name}" for directory in self._directories(kind)]

    def quarantine(self, name: str, *, was: bytes | None = None) -> bool:
        """Move a damaged record out of the way; a reader without the right to leaves it.

        Args:
            was: the bytes that were read.
        Returns: False when others lie there by now, which are left.
        """
        if not self.writable:
            return True
        path = self.path(name)
        with contextlib.suppress(OSError), self._swapping:
            if was is not None and path.read_bytes() != was:
                return False
            path.rename(self.root / "quarantine" / f"{path.name}.{os.urandom(4).hex()}")
            self.n_quarantined += 1
            self.on_quarantine(name)
        return True

    def touch(self, name: str) -> bool:
        """Make now the time of the record's last use, where this user may. Whether the record is there."""
        try:
            os.utime(self._place(name))
        except OSError:
            return bool(self.stamp(name))
        return True

    def stamp(self, name: str) -> tuple[int, ...]:
        """Size, times and inode of the record's file: bytes that were written since have another stamp. Empty for none."""
        try:
            found = os.stat(self._place(name))  # noqa: PTH116 - as above
        except OSError:
            return ()
        return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def shape(self) -> str:
        """A text that differs when a record was added or removed, or the whole store is a copy: its directories' stamps."""
        stamps = [str(self.root.stat().st_dev)]
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / kind) as entries:
                found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
                stamps += [f"{kind}/{name} {stat.st_ino} {stat.st_mtime_ns}" for name, stat in found]
        return digest_of("\n".join(stamps).encode())

    def probe(self) -> None:
        """Write, sync and remove as much as a record. Raises: StoreError when the disk refuses."""
        path = self.root / "tmp" / f"probe.{os.urandom(4).hex()}"
        if not self.writable:
            raise StoreError(f"store {self.root} was opened to read")
        try:
            with path.open("xb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"store {self.root} takes no writes: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def put_aside(self) -> list[tuple[Path, os.stat_result]]:
        """The files in quarantine with what the file system says of them, oldest first."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.root / "quarantine") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed since
                    found.append((entry.stat(follow_symlinks=False), Path(entry.path)))
        return [(path, stat) for stat, path in sorted(found, key=lambda item: item[0].st_ctime)]


def _read(path: str) -> bytes:
    """The file's bytes in as few system calls as can be: a hit reads three records, and file objects ask six things of each."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        parts = [os.read(descriptor, size + 1)]
        while parts[-1] and sum(map(len, parts)) != size:  # a large file comes in pieces
            parts.append(os.read(descriptor, size + 1))
        return b"".join(parts) if len(parts) > 1 else parts[0]
    finally:
        os.close(descriptor)


def _as_reader(path: str, flags: int) -> int:
    return os.open(path, flags, 0o400)


def _lock(*, writable: bool) -> contextlib.AbstractContextManager[object]:
    """A reader changes nothing, and its start is spared the import."""
    if not writable:
        return contextlib.nullcontext()
    import threading

    return threading.Lock()


def _refuse_network(root: Path) -> None:
    kind = network_file_system(root)
    if kind:
        raise StoreError(
            f"store {root} lies on a network file system ({kind}): its locks do not hold between machines",
            hint="set KSERVE_STORE to a local directory; a shared one may be a read-only layer: KSERVE_STORE=/local:/shared",
        )


def _refuse_other_content(root: Path) -> None:
    """Raises StoreError when the directory holds something and is no store: nothing in it is touched."""
    try:
        others = any(path.name != MARKER for path in root.iterdir())
        if others and not (root / MARKER).exists():
            raise StoreError(f"directory {root} is not empty and no kserve store: nothing in it was touched", hint=_ELSEWHERE)
    except OSError as error:
        raise StoreError(f"directory {root} cannot be used as a store: {error.strerror}", hint=_ELSEWHERE) from None


def _sync_directory(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
