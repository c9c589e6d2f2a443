"""The disk that builds work on: `tmp/` of the store, or a directory elsewhere while that takes nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from kserve.build.shared import Directories, SharedStaging, Tree, Trees
from kserve.build.staging import Staging
from kserve.errors import ForeignPeer, StoreError
from kserve.ownership import identities, private_directory, refuse_foreign

logger = logging.getLogger("kserve")
# What a build may write: with less room than this its disk is as good as full.
_ROOM_BYTES = 32 << 20
_ROOM_FILES = 100
_Made = TypeVar("_Made")


class Scratch:
    """The place for staging and workers' files: `tmp/` of the store, or while its disk refuses a directory under TMPDIR.

    Args:
        home: `tmp/` of the store.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._trees = Trees()
        self._directories = Directories()

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
            is_shared: builds of the same files may read them from one folder, and builds have a directory one after the
                       other: the variants of a kernel are hundreds of builds of the same few files.
        Raises: StoreError when it cannot be made in either place.
        """
        if not is_shared or sources is not None:
            return self._made(lambda parent: Staging(parent, files, sources=sources))
        tree = self._made(lambda parent: self._trees.use(parent, files))
        return SharedStaging(
            tree.folder,
            take=lambda: self._made(self._directories.take),
            leave=lambda staging: self._left(tree, staging),
        )

    def _left(self, tree: Tree, staging: SharedStaging) -> None:
        """A build has ended. Outside of the store no directory is kept."""
        self._trees.leave(tree)
        if not staging.is_entered:
            return
        if staging.is_reusable and staging.root.parent == self.home:
            self._directories.give_back(staging.root)
        else:
            shutil.rmtree(staging.root, ignore_errors=True)

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
        """Remove what no build uses, and the directory elsewhere, where there is one and nothing is left in it."""
        self._trees.clear()
        self._directories.clear()
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
