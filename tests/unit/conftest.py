"""Fixtures only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kserve.client import loader
from tests.support.roads import RoadMaker
from tests.support.stub_driver import StubDriver, build_stub


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory):
    return StubDriver(build_stub(tmp_path_factory.mktemp("stub")))


@pytest.fixture
def stub(stub_library, monkeypatch):
    """A driver that writes launches down, in place of libcuda."""
    stub_library.reset()
    monkeypatch.setattr(loader, "_driver", loader.Driver(str(stub_library.path)))
    return stub_library


@pytest.fixture(params=["generated", pytest.param("compiled", marks=pytest.mark.toolchain)])
def road(request, stub):
    """Makes the quick road of a contract, of either kind, for torch tensors on the CPU."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")
    return RoadMaker(request.param, stub, SimpleNamespace(**vars(pytest.importorskip("torch"))))
