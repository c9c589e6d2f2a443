"""The ops' cases share one store and one daemon: they are about results, not about where a kernel came from."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.place import set_up_place, tear_down_place


@pytest.fixture(scope="session", autouse=True)
def own_place():
    root = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        set_up_place(patch, root)
        yield root
    tear_down_place(root)
