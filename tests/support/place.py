"""The place a test works in: its own store, runtime directory and daemon."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kserve import client
from tests.support.processes import end_daemon


def set_up_place(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Point kserve at `root`; nothing of the machine's settings leaks in."""
    for name in [name for name in os.environ if name.startswith("KSERVE_")]:
        patch.delenv(name)
    patch.setenv("KSERVE_STORE", str(root / "store"))
    patch.setenv("KSERVE_RUNTIME_DIR", str(root / "run"))
    patch.setenv("KSERVE_AUTOSTART", "1")
    patch.setenv("KSERVE_IDLE_S", "60")
    client.forget()


@contextmanager
def shared_place() -> Iterator[Path]:
    """A place for many tests that share kernels, not state."""
    # Not pytest's tmp_path: a socket path holds 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        set_up_place(patch, root)
        yield root
    tear_down_place(root)


def tear_down_place(root: Path) -> None:
    client.forget()
    end_daemon(root)
    shutil.rmtree(root, ignore_errors=True)
