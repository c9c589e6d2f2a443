"""Where builds work: the private directory of one build, and the disk it lies on.

src/      the declared files, under their relative names, and nothing else: the compiler's current directory. For a debug
          variant a link to where they stay
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

from kserve.errors import ForeignPeer, StoreError
from kserve.ownership import identities, private_directory, refuse_foreign

logger = logging.getLogger("kserve")
LOG_NAME = "log.txt"
_LONGEST_LOG = 256 << 10
# What a build may write: with less room than this its disk is as good as full.
_ROOM_BYTES = 32 << 20
_ROOM_FILES = 100
_Made = TypeVar("_Made")


class Staging:
    """A staging directory, 0700 and with a name nobody can guess.

    Args:
        sources: the folder that holds the files already, where they stay after the build.
    Raises: StoreError when it cannot be made or filled.
    """

    def __init__(self, parent: Path, files: Mapping[str, bytes], *, sources: Path | None = None) -> None:
        self.root = parent
        try:
            self.root = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
            for folder in ("out", "scratch"):
                (self.root / folder).mkdir(mode=0o700)
            if sources is not None:
                (self.root / "src").symlink_to(sources)
                return
            (self.root / "src").mkdir(mode=0o700)
            for name, content in files.items():
                path = self.root / "src" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
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


class Scratch:
    """The place for staging and workers' files: `tmp/` of the store, or while its disk refuses a directory under TMPDIR.

    Args:
        home: `tmp/` of the store.
    """

    def __init__(self, home: Path) -> None:
        self.home = home

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

    def stage(self, files: Mapping[str, bytes], *, sources: Path | None = None) -> Staging:
        """A staging directory. Raises: StoreError when it cannot be made in either place."""
        return self._made(lambda parent: Staging(parent, files, sources=sources))

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
        """Remove the directory elsewhere, where there is one and nothing is left in it."""
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


def _remove(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)  # noqa: PTH108 - an entry of scandir
