"""Where builds work: the private directory of one build, and the disk it lies on.

src/      the declared files, under their relative names, and nothing else: the compiler's current directory. Where they are
          elsewhere already, for a debug variant or for builds of the same files, a link to that folder
out/      what the build gives: payload, result.json, one file an attachment
scratch/  HOME, TMPDIR and the compilers' own caches
log.txt   everything the compiler printed
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from kserve.alias import is_as_it_was, stamp
from kserve.errors import ForeignPeer, StoreError
from kserve.ownership import identities, private_directory, refuse_foreign

logger = logging.getLogger("kserve")
LOG_NAME = "log.txt"
_LONGEST_LOG = 256 << 10
# What a build may write: with less room than this its disk is as good as full.
_ROOM_BYTES = 32 << 20
_ROOM_FILES = 100
# Folders of sources that are kept while no build uses them.
_MOST_TREES = 8
_Made = TypeVar("_Made")


class Staging:
    """A staging directory, 0700 and with a name nobody can guess.

    Args:
        sources: the folder that holds the files already, where they stay after the build.
        leave:   called once when the directory is removed.
    Raises: StoreError when it cannot be made or filled.
    """

    def __init__(
        self,
        parent: Path,
        files: Mapping[str, bytes],
        *,
        sources: Path | None = None,
        leave: Callable[[], object] | None = None,
    ) -> None:
        self.root = parent
        self._leave = leave
        try:
            self.root = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
            for folder in ("out", "scratch"):
                (self.root / folder).mkdir(mode=0o700)
            if sources is not None:
                (self.root / "src").symlink_to(sources)
                return
            _write_files(self.root / "src", files)
        except OSError as error:
            if self.root != parent:
                self.remove()
            raise StoreError(f"a build cannot be staged in {parent}: {error}") from None

    def begin_log(self, text: str) -> None:
        """What stands before the compiler's own words."""
        if text:
            with contextlib.suppress(OSError):  # a log is a help
                (self.root / LOG_NAME).write_text(text + "\n")

    def log(self) -> str:
        """What the compiler printed so far: the end of it when it is very long."""
        try:
            with (self.root / LOG_NAME).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LONGEST_LOG))
                return file.read(min(size, _LONGEST_LOG)).decode(errors="replace")  # no buffer for the longest one each time
        except OSError:
            return ""

    def result(self) -> dict[str, Any] | None:
        """The worker's answer, or None when it died before it wrote one."""
        try:
            found = json.loads((self.root / "out" / "result.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def output(self, name: str) -> bytes:
        return (self.root / "out" / name).read_bytes()

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class _Tree:
    """A folder of sources that several builds read. Theirs is a link to it, and their closed world lets nobody write to it.

    Raises: OSError when it cannot be made.
    """

    def __init__(self, parent: Path, files: Mapping[str, bytes]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="src-", dir=parent))
        self.folder = self.root / "src"
        self.n_users = 0
        try:
            _write_files(self.folder, files)
            for name in files:
                (self.folder / name).chmod(0o400)
        except OSError:
            self.remove()
            raise
        # Directories as well: a file that is added to one could be found before a declared one.
        self._stamps = {str(path): stamp(str(path)) for path in (self.folder, *self.folder.rglob("*"))}

    @property
    def is_whole(self) -> bool:
        """Whether the files are as they were written, and there are no others."""
        return all(is_as_it_was(path, stated) for path, stated in self._stamps.items())

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class Scratch:
    """The place for staging and workers' files: `tmp/` of the store, or while its disk refuses a directory under TMPDIR.

    Args:
        home: `tmp/` of the store.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._trees: dict[tuple[Path, str], _Tree] = {}

    @property
    def refused(self) -> str:
        """Why nothing can be staged in the store now; empty when it can. With little room left a build would be lost."""
        with contextlib.suppress(OSError):  # one that is gone, or never was for want of room
            self.home.mkdir(mode=0o700, exist_ok=True)
        try:
            found = os.statvfs(self.home)
        except OSError as error:
            return f"{self.home} cannot be used: {error.strerror}"
        free, n_free = found.f_bavail * found.f_frsize, found.f_favail
        if free < _ROOM_BYTES or (found.f_files and n_free < _ROOM_FILES):
            return f"the disk of {self.home} is full: {free} bytes and {n_free} files are left"
        return "" if os.access(self.home, os.W_OK | os.X_OK) else f"{self.home} cannot be written to"

    def stage(self, files: Mapping[str, bytes], *, sources: Path | None = None, is_shared: bool = False) -> Staging:
        """A staging directory.

        Args:
            sources:   the folder that holds the files already.
            is_shared: builds of the same files may read them from one folder. New files are dear on some file systems, and
                       the variants of a kernel are hundreds of builds of the same few.
        Raises: StoreError when it cannot be made in either place.
        """
        if not is_shared or sources is not None:
            return self._made(lambda parent: Staging(parent, files, sources=sources))
        return self._made(lambda parent: self._shared(parent, files))

    def _shared(self, parent: Path, files: Mapping[str, bytes]) -> Staging:
        place = (parent, sha256(b"".join(sha256(part).digest() for pair in files.items() for part in _parts(pair))).hexdigest())
        tree = self._trees.get(place)
        try:
            if tree is None or not tree.is_whole:
                tree = self._trees[place] = _Tree(parent, files)
        except OSError as error:
            raise StoreError(f"a build cannot be staged in {parent}: {error}") from None
        self._trees[place] = self._trees.pop(place)  # the last one used is the last to go
        tree.n_users += 1
        try:
            return Staging(parent, files, sources=tree.folder, leave=lambda: self._left(tree))
        except StoreError:
            self._left(tree)
            raise

    def _left(self, tree: _Tree) -> None:
        """A build has ended. Of the trees that nobody uses the last few stay, for the next build."""
        tree.n_users -= 1
        if tree.n_users == 0 and tree not in self._trees.values():  # another one has taken its place
            tree.remove()
        idle = [place for place, one in self._trees.items() if one.n_users == 0]
        for place in idle[: max(0, len(self._trees) - _MOST_TREES)]:
            self._trees.pop(place).remove()

    def directory(self, name: str) -> Path:
        """A private directory of that name. Raises: StoreError, ForeignPeer."""
        return self._made(lambda parent: private_directory(parent / name))

    def sweep(self) -> None:
        """Remove what a killed daemon left unfinished. The caller holds the store's lock, so nobody is at work in there."""
        places = [self.home]
        with contextlib.suppress(StoreError):
            places.append(self._spare())
        for place in places:
            with contextlib.suppress(OSError, ForeignPeer):  # nothing there, or not ours: it may be a link to anything
                refuse_foreign(place, place.lstat(), uids=identities())
                for entry in list(os.scandir(place)):
                    _remove(entry)
        self.leave()

    def leave(self) -> None:
        """Remove the folders that no build uses, and the directory elsewhere, where there is one and nothing is left in it."""
        for place in [place for place, tree in self._trees.items() if tree.n_users == 0]:
            self._trees.pop(place).remove()
        with contextlib.suppress(OSError, StoreError):
            self._spare().rmdir()

    def _made(self, make: Callable[[Path], _Made]) -> _Made:
        reason = self.refused
        if not reason:
            try:
                return make(self.home)
            except StoreError as error:
                reason = error.message
        try:
            made = make(private_directory(self._spare()))
        except StoreError as error:
            raise StoreError(error.message, facts={"store": reason}, hint="free space, or set TMPDIR to another disk") from None
        logger.warning("elsewhere place=%s error=%s", self._spare(), reason)
        return made

    def _spare(self) -> Path:
        """One place for each store, so that the next daemon can sweep it; it is used only when it is ours alone.

        Raises: StoreError when there is no place for temporary files.
        """
        name = f"kserve-{os.getuid()}-{sha256(os.fsencode(self.home)).hexdigest()[:12]}"
        try:
            return Path(tempfile.gettempdir()) / name
        except FileNotFoundError as error:
            raise StoreError(f"nothing can be staged: {error.strerror}") from None


def _parts(pair: tuple[str, bytes]) -> tuple[bytes, bytes]:
    name, content = pair
    return os.fsencode(name), content


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raises: OSError."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _remove(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)  # noqa: PTH108 - an entry of scandir
