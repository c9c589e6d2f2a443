"""The ops' cases share one store and one daemon: they are about results, not about where a kernel came from."""

from __future__ import annotations

import pytest

from tests.support.place import shared_place


@pytest.fixture(scope="session", autouse=True)
def own_place():
    with shared_place() as root:
        yield root
