"""Users without a home, a passwd entry or a GPU: it works where anything is writable, and else says what to set."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import ASK
from tests.support.definitions import write_cuda
from tests.support.processes import kserve, python
from tests.support.users import SOMEBODY, copy_package, run_as

pytestmark = pytest.mark.toolchain


class Place:
    """An installed package, a kernel, and directories of a user without a passwd entry."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = self.made("scratch", 0o700)
        self.home = self.made("home", 0o700)
        self.sealed = self.made("sealed", 0o500)

    def made(self, name: str, mode: int) -> Path:
        path = self.root / name
        path.mkdir(mode=mode)
        path.chmod(mode)
        os.chown(path, SOMEBODY, SOMEBODY)
        return path

    def ask(self, **environment: str) -> dict[str, Any]:
        """get_kernel as that user, with no setting that says where the store is."""
        known = {
            "TMPDIR": str(self.scratch),
            "PYTHONPATH": str(self.root / "site"),
            "KSERVE_PATH": str(self.root / "kernels"),
            "KSERVE_RUNTIME_DIR": str(self.scratch / "run"),
            "KSERVE_AUTOSTART": "0",
        }
        done = run_as(SOMEBODY, ASK, "scale", "cuda:sm_90", "{}", cwd=Path("/"), **{**known, **environment})
        assert done.stdout.count("\n") == 2, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kt-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield copy_package(Path(folder))


@pytest.fixture
def here(own_place: Path, installed: Path, other_users: None) -> Place:
    own_place.chmod(0o755)
    (own_place / "site").symlink_to(installed)
    write_cuda(own_place / "kernels" / "scale")
    return Place(own_place)


def stores_below(root: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("KSERVE_STORE"))


WITHOUT_HOME = {
    "no HOME": {},
    "a HOME that does not exist": {"HOME": "/nonexistent"},
    "a HOME that cannot be written to": {"HOME": "{sealed}"},
    "a HOME of somebody else": {"HOME": "/root"},
    "a cache directory that cannot be written to": {"HOME": "{home}", "XDG_CACHE_HOME": "{sealed}/cache"},
}


@pytest.mark.parametrize("variables", WITHOUT_HOME.values(), ids=WITHOUT_HOME.keys())
def test_without_a_usable_home_the_store_is_in_the_scratch_directory(here: Place, variables: dict[str, str]):
    filled = {name: text.format(**vars(here)) for name, text in variables.items()}
    found = here.ask(**filled)
    assert found.get("origin") == "built", found
    assert stores_below(here.root) == [f"scratch/kserve-{SOMEBODY}"]
    again = here.ask(**filled)
    assert (again["origin"], again["digest"]) == ("disk", found["digest"])


def test_with_a_usable_home_the_store_is_in_it(here: Place):
    assert here.ask(HOME=str(here.home)).get("origin") == "built"
    assert stores_below(here.root) == ["home/.cache/kserve"]


def test_the_batch_systems_scratch_directory_comes_first(here: Place):
    local = here.made("local", 0o700)
    assert here.ask(SLURM_TMPDIR=str(local), TMPDIR=str(here.sealed)).get("origin") == "built"
    assert stores_below(here.root) == [f"local/kserve-{SOMEBODY}"]


def test_where_nothing_is_writable_the_error_says_what_to_set(here: Place):
    found = here.ask(HOME=str(here.sealed), TMPDIR=str(here.sealed))
    assert found.get("code") == "store-unusable", found
    assert "KSERVE_STORE" in found["text"]
    assert str(here.sealed) in found["text"]


def test_folders_that_may_not_be_entered_hold_nothing(here: Place):
    """On the search paths for kernels and for packages, as `sudo -E` leaves them."""
    hidden = here.root / "hidden"
    (hidden / "inner").mkdir(parents=True)
    hidden.chmod(0o700)
    kernels, packages = here.root / "kernels", here.root / "site"
    known = {"KSERVE_PATH": f"{hidden}/inner:{kernels}", "PYTHONPATH": f"{hidden}/inner:{packages}"}
    assert here.ask(**known).get("origin") == "built"


NO_DEVICE = """
from kserve import get_kernel, get_kernels
from kserve.errors import UnsupportedTarget
for ask in (lambda: get_kernel("scale"), lambda: get_kernels([("scale", {})])):
    try:
        ask()
    except UnsupportedTarget as error:
        print(error.hint)
print(get_kernel("scale", target="sm_90").origin)
"""


def test_without_a_gpu_targets_can_be_named_and_the_error_says_how(own_place: Path):
    """Also on a machine whose driver is there and shows no device."""
    write_cuda(own_place / "kernels" / "scale")
    environment = {"KSERVE_PATH": str(own_place / "kernels"), "CUDA_VISIBLE_DEVICES": ""}
    *hints, origin = python(NO_DEVICE, **environment).stdout.splitlines()
    assert len(hints) == 2
    assert all("target='cuda:sm_90'" in hint for hint in hints)
    assert origin == "built"
    assert kserve("build", "scale", "--target", "sm_80", **environment).returncode == 0
