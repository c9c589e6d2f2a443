"""Where a build works: its private directory.

src/      the declared files, under their relative names, and nothing else: the compiler's current directory. Elsewhere when the
          files lie there already, for a debug variant or for builds of the same files
out/      what the build gives: payload, result.json, one file an attachment
scratch/  HOME, TMPDIR and the compilers' own caches
log.txt   everything the compiler printed
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kserve.errors import StoreError

LOG_NAME = "log.txt"
_LONGEST_LOG = 256 << 10


class Staging:
    """A staging directory, 0700 and with a name nobody can guess.

    Args:
        sources: the folder that holds the files already, where they stay after the build.
    Raises: StoreError when it cannot be made or filled.
    Attributes:
        sources:     the folder of the declared files.
        is_reusable: set when nothing of the directory is needed any more, nor can be written by what the build has started.
    """

    root: Path
    is_reusable = False

    def __init__(self, parent: Path, files: Mapping[str, bytes], *, sources: Path | None = None) -> None:
        self.root = new_directory(parent)
        self.sources = self.root / "src" if sources is None else sources
        try:
            if sources is None:
                write_files(self.sources, files)
        except OSError as error:
            self.remove()
            raise StoreError(f"a build cannot be staged in {parent}: {error}") from None

    def enter(self) -> None:
        """The build's turn has come: its directory is needed from now on. Raises: StoreError."""

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

    def forget_result(self) -> None:
        """The job is given to another worker. Raises: StoreError."""
        try:
            (self.root / "out" / "result.json").unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"a build cannot be staged in {self.root.parent}: {error}") from None

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


def new_directory(parent: Path) -> Path:
    """The directory of a build, without sources. Raises: StoreError."""
    root = parent
    try:
        root = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
        for folder in ("out", "scratch"):
            (root / folder).mkdir(mode=0o700)
    except OSError as error:
        if root != parent:
            shutil.rmtree(root, ignore_errors=True)
        raise StoreError(f"a build cannot be staged in {parent}: {error}") from None
    return root


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raises: OSError."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
