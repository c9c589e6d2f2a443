"""A small disk of its own for a test: it can be filled, made read-only, and mended."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_SIZE, _INODES = "64m", 2000


class Disk(NamedTuple):
    """A mounted file system; the store is a directory in it, what fills the disk lies beside."""

    path: Path

    @property
    def store(self) -> Path:
        return self.path / "store"

    def fill(self) -> None:
        """Not a byte more."""
        with (self.path / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def use_up_inodes(self) -> None:
        """Not a file more."""
        (self.path / "files").mkdir()
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (self.path / "files" / str(number)).touch()

    def make_read_only(self) -> None:
        """A read-only view on top: unlike a remount it does not mind files that are open."""
        mount("--bind", str(self.path), str(self.path))
        mount("-o", "remount,bind,ro", str(self.path))

    def mend(self) -> None:
        """What was wrong is over."""
        if not os.access(self.path, os.W_OK):
            mount("-o", "remount,bind,rw", str(self.path))
        (self.path / "ballast").unlink(missing_ok=True)
        for file in (self.path / "files").glob("*"):
            file.unlink()
        with contextlib.suppress(FileNotFoundError):
            (self.path / "files").rmdir()


FAULTS: dict[str, Callable[[Disk], None]] = {
    "full": Disk.fill,
    "out of inodes": Disk.use_up_inodes,
    "read-only": Disk.make_read_only,
}


def mount(*arguments: str) -> None:
    """Skips the test where this user cannot mount."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    path.mkdir()
    mount("-t", "tmpfs", "-o", f"size={_SIZE},nr_inodes={_INODES},mode=0700", "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        while subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False).returncode == 0:
            pass
