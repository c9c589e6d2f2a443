"""What is the same has the same key wherever it lies and whoever asks; what differs has another, and the miss says why."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from kserve.client.connection import Connection
from kserve.config import load_settings
from tests.support.clients import ASK, ask_alone
from tests.support.daemon import daemon, place, variables
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import REPOSITORY, daemon_pid
from tests.support.users import SOMEBODY, copy_package, give, make_environment, run_as, site_packages

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"
BUILT_IN = ("fused_norm_residual", {"dtype": "float32", "hidden": 128, "training": False})


def again(name: str = "scale", **spec: Any) -> Any:
    """get_kernel as if this process had never asked."""
    client.forget()
    return get_kernel(name, target=TARGET, **spec)


def same(answer: dict[str, Any]) -> tuple[str, str]:
    return answer["key"], answer["digest"]


# Header `a` includes `b`, which includes `c`: how each one names the next.
QUOTED, ANGLE, MACRO = '#include "{}"\n', "#include <{}>\n", '#define NEXT "{}"\n#include NEXT\n#undef NEXT\n'


@pytest.mark.parametrize("form", [QUOTED, ANGLE, MACRO], ids=["quoted", "angle", "macro"])
def test_a_header_three_includes_deep(kernels: Path, form: str):
    """Edited, it is a miss that names it; reverted, a hit with the bytes of before."""
    shared = form == ANGLE
    folder = kernels / "include" / "deep" if shared else kernels / "scale"
    names = [f"deep/{letter}.cuh" if shared else f"{letter}.cuh" for letter in "abc"]
    declared = 'headers = []\nshared_headers = ["deep/*.cuh"]' if shared else 'headers = ["*.cuh"]'
    source = form.format(names[0]) + CUDA_SOURCE.replace("factor * x[i]", "FACTOR * x[i]")
    write_cuda(kernels / "scale", toml=CUDA_TOML.replace("headers = []", declared), source=source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.cuh").write_text(form.format(names[1]))
    (folder / "b.cuh").write_text(form.format(names[2]))
    (folder / "c.cuh").write_text("#define FACTOR 2.0f\n")
    first = again()
    (folder / "c.cuh").write_text("#define FACTOR 3.0f\n")
    changed = again()
    assert changed.origin == "built"
    assert changed.digest != first.digest
    assert changed.manifest.reason == f"header {'include/' if shared else ''}{names[2]} changed"
    (folder / "c.cuh").write_text("#define FACTOR 2.0f\n")
    reverted = again()
    assert (reverted.origin, reverted.key, reverted.digest) == ("disk", first.key, first.digest)


ARCHES = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_90a", "cuda:sm_100a", "cuda:sm_120a")


def test_one_daemon_keeps_five_targets_of_one_source_apart(kernels: Path):
    write_cuda(kernels / "scale")
    made = {arch: get_kernel("scale", target=arch) for arch in ARCHES}
    assert [kernel.origin for kernel in made.values()] == ["built"] * 5
    assert [str(kernel.target) for kernel in made.values()] == [*ARCHES]
    assert len({kernel.key for kernel in made.values()}) == len({kernel.digest for kernel in made.values()}) == 5
    for arch, kernel in made.items():
        found = ask_alone("scale", target=arch)
        assert (found["origin"], *same(found)) == ("disk", kernel.key, kernel.digest), arch


def test_a_kernel_folder_that_was_moved_is_a_hit(kernels: Path, monkeypatch: pytest.MonkeyPatch):
    write_cuda(kernels / "scale")
    first = again()
    moved = kernels.parent / "deep" / "down"
    moved.mkdir(parents=True)
    shutil.move(kernels / "scale", moved / "renamed")
    monkeypatch.setenv("KSERVE_PATH", str(moved))
    found = again()
    assert (found.origin, found.key, found.digest) == ("disk", first.key, first.digest)


def test_a_second_checkout_is_a_hit(kernels: Path):
    """The package and its kernels at another path, asking the daemon of the first one."""
    name, spec = BUILT_IN
    first = ask_alone(name, spec=spec)
    assert first["origin"] == "built"
    checkout = kernels.parent / "checkout"
    for folder in ("kserve", "cuda_src", "triton_src"):
        shutil.copytree(REPOSITORY / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", checkout)
    where = "import kserve; print(kserve.__file__)"
    used = subprocess.run([sys.executable, "-c", where], cwd=checkout, capture_output=True, text=True, check=True).stdout
    assert str(checkout) in used
    found = ask_alone(name, spec=spec, cwd=checkout)
    assert (found["origin"], *same(found)) == ("disk", *same(first))


@pytest.mark.usefixtures("other_users")
def test_another_user_with_a_store_of_its_own_makes_the_same_bytes(kernels: Path):
    write_cuda(kernels / "scale")
    first = ask_alone("scale")
    with place() as root:
        root.chmod(0o755)
        kernels.parent.chmod(0o755)
        theirs = give(root / "theirs", SOMEBODY)
        environment = variables(theirs, KSERVE_PATH=str(kernels), KSERVE_AUTOSTART="1", HOME=str(theirs))
        done = run_as(SOMEBODY, ASK, "scale", TARGET, "{}", **environment)
        try:
            assert f'"key": "{first["key"]}", "digest": "{first["digest"]}"' in done.stdout, done.stderr
            assert '"origin": "built"' in done.stdout
        finally:
            os.kill(daemon_pid(theirs), signal.SIGKILL)


@pytest.mark.parametrize("function", ["kern<{kind}, {size}>", "kern<{kind},{size}>"])
def test_a_name_expression_with_a_comma_is_found_without_a_compiler(kernels: Path, function: str):
    """By a second process and a second daemon: no worker is started, no build allowed."""
    toml = CUDA_TOML.replace("scale<{size}>", function).replace("[spec]", '[spec]\nkind = { type = "dtype" }')
    source = CUDA_SOURCE.replace("template <int SIZE>", "template <typename T, int SIZE>").replace("void scale(", "void kern(")
    write_cuda(kernels / "scale", toml=toml, source=source)
    spec = {"kind": "float32", "size": 2}
    first = ask_alone("scale", spec=spec)
    assert first["origin"] == "built", first
    os.kill(daemon_pid(kernels.parent), signal.SIGKILL)
    shutil.rmtree(kernels.parent / "store" / "alias", ignore_errors=True)  # the daemon is to be asked
    second = ask_alone("scale", spec=spec, KSERVE_NO_BUILD="1", KSERVE_PREWARM="0")
    assert (second["origin"], *same(second)) == ("disk", *same(first))
    with contextlib.closing(Connection(load_settings())) as connection:
        status = connection.call("GET", protocol.STATUS)
    assert (status["workers"], status["counters"].get("built", 0)) == ([], 0)


def test_touched_sources_and_a_reinstalled_package_are_hits(kernels: Path):
    """The same files with new times, at new inodes: the sources, the package, its built-in kernels."""
    name, spec = BUILT_IN
    site = copy_package(kernels.parent / "site")
    write_cuda(kernels / "scale")
    environment = {"PYTHONPATH": str(site), "cwd": kernels.parent}
    first = [ask_alone("scale", **environment), ask_alone(name, spec=spec, **environment)]
    assert [answer["origin"] for answer in first] == ["built", "built"]
    os.kill(daemon_pid(kernels.parent), signal.SIGKILL)
    shutil.rmtree(site)
    copy_package(site)
    for path in kernels.rglob("*"):
        os.utime(path, (1, 1))
    found = [ask_alone("scale", **environment), ask_alone(name, spec=spec, **environment)]
    assert [answer["origin"] for answer in found] == ["disk", "disk"]
    assert [same(answer) for answer in found] == [same(answer) for answer in first]


def install(folder: Path) -> str:
    """A virtual environment with a copy of NVRTC and its bindings, the other packages through a link file; its interpreter."""
    own = folder / "packages"
    for package in ("cuda/bindings", "cuda/pathfinder"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.pxd")
        shutil.copytree(site_packages() / package, own / package, ignore=unwanted, copy_function=shutil.copy)
    for library in site_packages().glob("nvidia/*/lib/libnvrtc*.so*"):
        target = own / library.relative_to(site_packages())
        target.parent.mkdir(parents=True, exist_ok=True)
        if ".alt." not in library.name:
            shutil.copy(library, target)
    (own / "others.pth").write_text(f"{site_packages()}\n")
    return make_environment(folder, python=os.path.realpath(sys.executable), packages=own)


def test_a_reinstalled_compiler_is_a_hit(kernels: Path):
    """The same compiler at new inodes and times, under a daemon that knew the old ones, and from another place."""
    root = kernels.parent
    write_cuda(kernels / "scale")
    python = install(root / "environment")
    with daemon(root):
        first = ask_alone("scale", python=python)
        assert first["origin"] == "built", first
        known = (root / "store" / "toolchains.json").read_text()
        assert str(root / "environment") in known, "the copy is what compiled"
    shutil.rmtree(root / "environment")
    install(root / "environment")
    with daemon(root):
        second = ask_alone("scale", python=python)
        assert (second["origin"], *same(second)) == ("disk", *same(first))
        assert (root / "store" / "toolchains.json").read_text() != known, "it was looked at again"
        third = ask_alone("scale")
        assert (third["origin"], *same(third)) == ("disk", *same(first)), "the compiler that was copied"
