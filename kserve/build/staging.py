"""The private directory of one build.

src/      the declared files, under their relative names, and nothing else: the compiler's current directory
out/      what the build gives: payload, result.json, one file an attachment
scratch/  HOME, TMPDIR and the compilers' own caches
log.txt   everything the compiler printed
"""

from __future__ import annotations

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

    Raises: StoreError when it cannot be made or filled.
    """

    def __init__(self, parent: Path, files: Mapping[str, bytes]) -> None:
        self.root = parent
        try:
            self.root = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
            for folder in ("src", "out", "scratch"):
                (self.root / folder).mkdir(mode=0o700)
            for name, content in files.items():
                path = self.root / "src" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        except OSError as error:
            if self.root != parent:
                self.remove()
            raise StoreError(f"a build cannot be staged in {parent}: {error}") from None

    def log(self) -> str:
        """What the compiler printed so far: the end of it when it is very long."""
        try:
            with (self.root / LOG_NAME).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST_LOG))
                return file.read(_LONGEST_LOG).decode(errors="replace")
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
