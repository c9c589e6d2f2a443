"""Fixtures only."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

import hatch_build
from kserve import client
from tests.support import users
from tests.support.place import set_up_place, tear_down_place

# The same inputs in every run, so that a red test is the change's fault; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, print_blob=False)
settings.register_profile("search", derandomize=False, database=None, deadline=None, max_examples=5000)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch):
    """Every test has a store, a runtime directory and a daemon of its own."""
    # Not pytest's tmp_path: a socket path holds 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    set_up_place(monkeypatch, root)
    yield root
    tear_down_place(root)


@pytest.fixture
def kernels(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder of users' kernels, on the search path."""
    folder = own_place / "kernels"
    folder.mkdir(exist_ok=True)
    client.forget()
    monkeypatch.setenv("KSERVE_PATH", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    client.forget()


@pytest.fixture
def other_users():
    """Skips where no other user can run a Python with these packages."""
    if users.interpreter() is None:
        pytest.skip("no other user can run a Python with these packages here")


@pytest.fixture
def gpu():
    """Skips where there is no CUDA device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def launcher_file(tmp_path_factory):
    """The compiled launcher, from today's source; skips where there is nothing to compile with."""
    target = tmp_path_factory.mktemp("launcher") / hatch_build.TARGET.name
    reason = hatch_build.build_launcher(target, "-Werror")
    if reason and "failed" in reason:
        pytest.fail(reason)
    return target if not reason else pytest.skip(reason)


@pytest.fixture(scope="session")
def launcher_module(launcher_file):
    spec = importlib.util.spec_from_file_location("kserve.client._launcher", launcher_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compiled(launcher_module, monkeypatch):
    """`kserve.client._launcher` is importable, and is today's."""
    monkeypatch.setitem(sys.modules, "kserve.client._launcher", launcher_module)
    return launcher_module
