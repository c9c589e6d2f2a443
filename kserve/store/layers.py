"""Read-only stores below the writable one: baked into an image, mounted from elsewhere, filled by somebody else."""

from __future__ import annotations

import logging
from pathlib import Path

from kserve.errors import ForeignPeer, StoreError
from kserve.ownership import refuse_foreign
from kserve.store.files import FileStore

logger = logging.getLogger("kserve")
_ROOT_UID = 0


class Layers:
    """Stores that are read, the first one that has a record wins. Nothing in them is ever changed.

    Args:
        roots: their directories, in order.
        uids:  who may own them; root may too. Nobody else may be able to write to one.
    Attributes:
        refused: directory -> why it is not read.
    """

    def __init__(self, roots: tuple[Path, ...], *, uids: frozenset[int]) -> None:
        self.refused: dict[Path, str] = {}
        self.stores = [FileStore(root, writable=False) for root in roots if self._accepts(root, uids | {_ROOT_UID})]

    def _accepts(self, root: Path, uids: frozenset[int]) -> bool:
        try:
            refuse_foreign(root, root.stat(), uids=uids)
        except ForeignPeer as error:
            self.refused[root] = error.message
        except OSError as error:
            self.refused[root] = f"directory {root} cannot be read: {error.strerror}"
        return root not in self.refused

    def get(self, name: str) -> bytes | None:
        """The record from the first store that has it whole; one that cannot be read now is passed over."""
        for store in self.stores:
            try:
                content = store.get(name)
            except StoreError as error:
                logger.warning("layer passed over error=%s", error.message)
                continue
            if content is not None:
                return content
        return None

    def keys(self, kind: str, prefix: str = "") -> set[str]:
        """The keys of all of them."""
        return {key for store in self.stores for key in store.keys(kind, prefix)}
