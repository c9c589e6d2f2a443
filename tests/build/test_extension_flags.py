"""The flags of an extension are torch's: held to the ninja file that the installed torch writes for the same sources."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from kserve.errors import ToolchainMissing
from kserve.toolchain.base import Job
from kserve.toolchain.cuda_root import Toolkit, candidates, chosen
from kserve.toolchain.extension import ExtensionToolchain
from kserve.toolchain.host import find_host
from kserve.toolchain.torch_facts import Torch, find_torch

native = pytest.importorskip("torch.utils.cpp_extension")
pytestmark = pytest.mark.toolchain
# What is added, docs/decisions/0006: nothing that a program could notice but its paths.
OURS = re.compile(r"-ffile-prefix-map=.*|-frandom-seed=.*|-Werror=date-time|-objtemp|--orig_src_path_name .*|-I\.|-Iinclude")


@pytest.fixture(scope="module")
def torch_here() -> Torch:
    found = find_torch(sys.path)
    assert found is not None
    return found


@pytest.fixture
def toolkit(torch_here: Torch) -> Toolkit:
    try:
        return chosen(candidates([], [Path(entry) for entry in sys.path if entry], cuda=torch_here.cuda))
    except ToolchainMissing as error:
        pytest.skip(error.message)


def ours(torch_here: Torch, toolkit: Toolkit, **options: object) -> tuple[list[str], list[str], list[str]]:
    """The command lines of a C++ unit, a CUDA unit and the library."""
    toolchain = ExtensionToolchain(torch_here, find_host(), toolkit)
    job = Job(
        "torch-extension",
        "cuda:sm_80",
        "",
        "named",
        (),
        {"units": ["a.cpp", "b.cu"], "with_cuda": True, "macros": {}, "roots": [["include", ""]], **options},
        ("/some/include",),
    )
    return (
        toolchain._cxx_line(job, "a.cpp"),
        toolchain._nvcc_line(job, "b.cu"),
        toolchain._link_line(job, [Path("a.o"), Path("b.cuda.o")]),
    )


def theirs(own_place: Path, toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The variables of torch's ninja file, as words."""
    monkeypatch.setattr(native, "CUDA_HOME", str(toolkit.home))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    native._write_ninja_file_to_build_library(
        path=str(own_place / "build.ninja"),
        name="named",
        sources=["a.cpp", "b.cu"],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O2"],
        extra_sycl_cflags=[],
        extra_ldflags=native._prepare_ldflags(["-lm"], True, False, False, False),
        extra_include_paths=["/some/include"],
        with_cuda=True,
        with_sycl=False,
        is_standalone=False,
    )
    lines = re.findall(r"^(\w+) = (.*)$", (own_place / "build.ninja").read_text(), re.MULTILINE)
    return {name: shlex.split(text) for name, text in lines}


def told(words: list[str]) -> list[str]:
    """One word for each option: spelled in one way, without what stands for nothing."""
    text = " ".join(word.replace(" ", "\0") for word in words)
    for option in ("-isystem", "-Xcompiler", "-Xcudafe"):
        text = text.replace(f"{option} ", f"{option}=")
    text = text.replace("--compiler-options ", "-Xcompiler=")
    return [word.replace("\0", " ") for word in text.split()]


def bare(words: list[str]) -> list[str]:
    """Without what is added, and without the values given to the host's compiler that are."""
    return [word for word in told(words) if not OURS.fullmatch(word.removeprefix("-Xcompiler=").removeprefix("-Xcudafe="))]


def test_every_flag_of_torchs_is_given_and_no_other(
    torch_here: Torch, toolkit: Toolkit, own_place: Path, monkeypatch: pytest.MonkeyPatch
):
    (own_place / "a.cpp").touch()
    (own_place / "b.cu").touch()
    monkeypatch.chdir(own_place)
    flags = theirs(own_place, toolkit, monkeypatch)
    cxx, nvcc, link = ours(torch_here, toolkit, cflags=["-O3"], cuda_cflags=["-O2"], ldflags=["-lm"])
    # Beside torch's own include directories those of the wheels, for what the toolkit lacks.
    known = {*told(flags["cflags"]), *told(flags["cuda_cflags"]), *told(flags["ldflags"])}

    def is_filling(word: str) -> bool:
        return word not in known and "nvidia/cu" in word

    assert sorted(word for word in bare(cxx[1:]) if not is_filling(word)) == sorted(told(flags["cflags"]))
    own_cuda = [word for word in bare(nvcc[3:]) if not is_filling(word)]
    assert sorted(own_cuda) == sorted(told(flags["cuda_cflags"]))
    linked = [word for word in told(link[3:]) if not is_filling(word) and not word.startswith(("-Wl,--dependency", "-L"))]
    assert sorted(linked) == sorted(word for word in told(flags["ldflags"]) if not word.startswith("-L"))
    order = [word for word in linked if word.startswith("-l")]
    assert order == [word for word in told(flags["ldflags"]) if word.startswith("-l")]
