"""The sources of debug variants, at the place that their bytes name: tools such as ncu open them there.

debug/<key>/<relative name>, for as long as the key's manifest is in the store. They are no records: nothing is built from them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kserve.errors import StoreError
from kserve.key import digest_of
from kserve.store.base import is_key
from kserve.store.files import FileStore

# A line table holds its sources' times of change: equal keys would give other bytes. 0 stands for none in DWARF.
_TIME = 0


class DebugSources:
    """The folders of one store's debug variants."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self.root = Path(files.debug_root)

    def write(self, key: str, files: Mapping[str, bytes]) -> Path:
        """Put the files of that key where its bytes will name them; their folder. Raises: StoreError."""
        folder = self.root / key
        try:
            for name, content in files.items():
                path = folder / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
                temporary.write_bytes(content)
                os.utime(temporary, (_TIME, _TIME))
                temporary.chmod(0o400)  # an editor that was opened on it says so
                temporary.rename(path)
        except OSError as error:
            raise StoreError(f"the sources of a debug variant cannot be kept in {folder}: {error.strerror}") from None
        return folder

    def holds(self, key: str, digests: Mapping[str, str]) -> bool:
        """Whether all of these files, name -> digest, lie there as they were written."""
        try:
            return all(digest_of((self.root / key / name).read_bytes()) == digest for name, digest in digests.items())
        except OSError:
            return False

    def remove(self, key: str) -> None:
        """Forget that key's."""
        shutil.rmtree(self.root / key, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed daemon left: sources without an artifact. Nothing is being built yet."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.root):  # noqa: PTH208 - names alone
                if not (is_key(name) and self._files.stamp(f"manifest/{name}")):
                    self.remove(name)
