"""Read-only stores below the writable one: baked into an image, mounted from elsewhere, filled by somebody else."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kserve.errors import ForeignPeer, StoreError
from kserve.ownership import refuse_foreign
from kserve.store.base import CONTENT_ADDRESSED, KINDS
from kserve.store.files import FileStore

logger = logging.getLogger("kserve")
_ROOT_UID = 0


class Layers:
    """Stores that are read, the first one that has a record wins. Nothing in them is ever changed.

    Args:
        roots: their directories, in order.
        uids:  who may own them; root may too. Nobody else may be able to write to one, or to a directory in it.
    Attributes:
        refused: directory -> why it is not read.
    """

    def __init__(self, roots: tuple[Path, ...], *, uids: frozenset[int]) -> None:
        self.refused: dict[Path, str] = {}
        self._uids = uids | {_ROOT_UID}
        self.stores = [FileStore(root, writable=False) for root in roots if self._accepts(root)]

    def _accepts(self, root: Path) -> bool:
        try:
            for directory in (root, *(path for kind in KINDS for path in _directories(root / kind))):
                refuse_foreign(directory, directory.stat(), uids=self._uids)
                if not os.access(directory, os.R_OK | os.X_OK):
                    raise PermissionError(None, "Permission denied", str(directory))
        except ForeignPeer as error:
            self.refused[root] = error.message
        except OSError as error:
            self.refused[root] = f"directory {error.filename or root} cannot be read: {error.strerror}"
        if root in self.refused:
            logger.warning("layer refused error=%s", self.refused[root])
        return root not in self.refused

    def get(self, name: str) -> bytes | None:
        """The record from the first store that has it whole."""
        return next(self.versions(name), None)

    def versions(self, name: str) -> Iterator[bytes]:
        """The record from every store that has it; one that cannot be read now, or that others can write to, is passed over."""
        for store in self.stores:
            try:
                content = store.get(name) if self._trusts(store, name) else None
            except StoreError as error:
                logger.warning("layer passed over error=%s", error.message)
                continue
            if content is not None:
                yield content

    def _trusts(self, store: FileStore, name: str) -> bool:
        """Whether only trusted users can have written it; content is known by its digest, whoever wrote it."""
        if name.startswith(CONTENT_ADDRESSED):
            return True
        try:
            found = store.path(name).stat()
        except OSError:
            return False
        return found.st_uid in self._uids and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def stamp(self, name: str) -> tuple[int, ...]:
        """The stamp of the first store that has a file for it; empty for none."""
        return next(filter(None, (store.stamp(name) for store in self.stores)), ())

    def keys(self, kind: str, prefix: str = "") -> set[str]:
        """The keys of all of them."""
        return {key for store in self.stores for key in store.keys(kind, prefix)}


def _directories(kind: Path) -> Iterator[Path]:
    """The directories that hold records of one kind, where there are any."""
    if kind.is_dir():
        yield kind
        yield from (Path(entry.path) for entry in os.scandir(kind) if entry.is_dir(follow_symlinks=False))
