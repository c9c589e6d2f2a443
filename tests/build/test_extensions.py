"""Torch extensions from kernel folders, through a real daemon and real compilers: units, keys, contracts, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import get_extension, get_kernel
from kserve.artifact import Manifest
from kserve.client import forget
from kserve.client.direct import Wanted, resolve
from kserve.errors import CompileFailed, InvalidDefinition, LoadError, UnsupportedTarget
from kserve.target import host
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.extensions import CUDA_SOURCE, CUDA_TOML, HEADER, TOML, module, write_cuda_extension, write_parts

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]
needs_nvcc = pytest.mark.skipif(not Path("/usr/local/cuda/bin/nvcc").is_file(), reason="there is no nvcc in /usr/local/cuda")


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with place() as root, daemon(root) as found:
        yield found


@pytest.fixture
def folder(running: Daemon, own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One daemon for this file; each case has a kernel folder of its own."""
    for name, value in variables(running.root, KSERVE_PATH=str(own_place / "kernels")).items():
        monkeypatch.setenv(name, value)
    return own_place / "kernels" / "case"


def built(name: str, target: str = "cpu:x86_64") -> Any:
    """The extension, built and not loaded: what `kserve build` does."""
    forget()
    return resolve([Wanted(name, target, {})], load=False)[0]


def units_built(running: Daemon, since: int) -> list[str]:
    """The units that were compiled after so many builds."""
    builds = running.call("GET", "/v1/builds?limit=2000")["builds"]
    return sorted(one["variant"] for one in builds[: len(builds) - since] if one["variant"].startswith("unit:"))


def n_builds(running: Daemon) -> int:
    return len(running.call("GET", "/v1/builds?limit=2000")["builds"])


def test_an_edit_of_one_unit_compiles_one_an_edited_header_all_and_a_revert_none(running: Daemon, folder: Path):
    write_parts(folder, one=1, two=2, three=3)
    first, before = built("numbered"), n_builds(running)
    assert get_extension("numbered").answer() == 36

    (folder / "two.cpp").write_text((folder / "two.cpp").read_text().replace("+ 2", "+ 5"))
    edited = built("numbered")
    assert units_built(running, before) == ["unit:two.cpp"]
    assert "source two.cpp changed" in edited.manifest.reason
    assert get_extension("numbered").answer() == 39

    before = n_builds(running)
    (folder / "parts.h").write_text(HEADER.replace("10", "20"))
    assert "header parts.h changed" in built("numbered").manifest.reason
    assert units_built(running, before) == ["unit:main.cpp", "unit:one.cpp", "unit:three.cpp", "unit:two.cpp"]
    assert get_extension("numbered").answer() == 69

    before = n_builds(running)
    write_parts(folder, one=1, two=2, three=3)
    assert (built("numbered").key, n_builds(running)) == (first.key, before)
    assert get_extension("numbered").answer() == 36


def test_the_contract_says_what_the_library_needs(folder: Path):
    write_parts(folder)
    found = built("numbered")
    needs = found.manifest.contract.needs
    assert found.manifest.target == str(host())
    assert (found.manifest.contract.format, found.manifest.contract.symbol) == ("so", "numbered")
    assert needs["torch"] == torch.__version__
    assert needs["python"].startswith("cpython-3")
    assert needs["codes"] == ""
    assert found.manifest.closed_world


# What a process may lack: (need, what the contract says).
WRONG = {
    "another torch": ("torch", "2.1.0+cu121"),
    "a later stable ABI": ("torch", "stable 9.9"),
    "another Python": ("python", "cpython-39"),
    "the older strings": ("cxx", "0"),
    "a later C library": ("glibc", "9.99"),
}


@pytest.mark.parametrize(("need", "value"), WRONG.values(), ids=WRONG.keys())
def test_a_library_that_does_not_fit_the_process_is_refused_before_it_is_opened(folder: Path, need: str, value: str):
    from kserve.client.extension import check

    write_parts(folder)
    manifest: Manifest = built("numbered").manifest
    check(manifest)
    contract = manifest.contract._replace(needs={**manifest.contract.needs, need: value})
    with pytest.raises(LoadError, match=f"{need} {value.replace('+', '.')}, this process has"):
        check(manifest._replace(contract=contract))


def test_a_unit_is_no_library_and_an_extension_no_kernel(running: Daemon, folder: Path):
    write_parts(folder)
    built("numbered")
    with pytest.raises(LoadError, match="get_extension"):
        get_kernel("numbered", target=str(host()))


def test_what_is_not_declared_cannot_be_included(folder: Path):
    write_parts(folder)
    outside = folder.parent.parent / "outside.h"
    outside.write_text("#define OUTSIDE 1\n")
    (folder / "one.cpp").write_text(f'#include "{outside}"\nint one() {{ return OUTSIDE; }}\n')
    with pytest.raises(CompileFailed, match=r"one\.cpp:1:.*outside\.h: Permission denied") as caught:
        built("numbered")
    assert "kernel.toml" in str(caught.value.hint)
    (folder / "one.cpp").write_text('#include "two.cpp"\nint one() { return 1; }\n')
    with pytest.raises(CompileFailed, match=r"two\.cpp: No such file"):
        built("numbered")


def test_the_time_of_the_compile_is_refused(folder: Path):
    write_parts(folder)
    (folder / "one.cpp").write_text("int one() { return __TIME__[0]; }\n")
    with pytest.raises(CompileFailed, match=r"one\.cpp:1.*__TIME__"):
        built("numbered")


def test_a_compile_error_names_file_and_line_and_the_mended_source_builds_at_once(folder: Path):
    write_parts(folder)
    (folder / "one.cpp").write_text("int one() {\n  return nothing;\n}\n")
    with pytest.raises(RuntimeError, match=r"one\.cpp:2:10: error: .nothing. was not declared"):
        built("numbered")
    write_parts(folder, one=4)
    built("numbered")
    assert get_extension("numbered").answer() == 34


def test_an_undefined_symbol_is_an_error_when_it_is_loaded(folder: Path):
    write_parts(folder)
    (folder / "kernel.toml").write_text(TOML.replace('"*.cpp"', '"one.cpp", "two.cpp"').replace("numbered", "halved"))
    (folder / "three.cpp").unlink()
    built("halved")
    with pytest.raises(LoadError, match="three"):
        get_extension("halved")


def test_a_stable_build_reads_stable_headers_only(folder: Path):
    write_parts(folder)
    stable = TOML.replace("[[entry]]", '[options]\nstable_abi = "2.11"\nbinding = "operators"\n[[entry]]')
    (folder / "kernel.toml").write_text(stable)
    needs = built("numbered").manifest.contract.needs
    assert needs["torch"] == "stable 2.11"
    assert "python" not in needs
    assert "libtorch_python.so" not in needs["libraries"]
    unstable = "torch/csrc/utils/pythoncapi_compat.h"
    (folder / "one.cpp").write_text(f"#include <{unstable}>\nint one() {{ return 1; }}\n")
    # Later releases of torch refuse it themselves.
    with pytest.raises(
        CompileFailed, match=rf"one\.cpp reads {unstable}, which is not of torch's stable ABI|not be included when"
    ):
        built("numbered")


def test_a_spec_reaches_every_unit_as_macros(folder: Path):
    write_parts(folder)
    axes = '[spec]\nwide = { type = "int", min = 1, max = 9, default = 2 }\n[derived]\ntwice = "2 * wide"\n[[entry]]'
    (folder / "kernel.toml").write_text(TOML.replace("[[entry]]", axes))
    (folder / "main.cpp").write_text(module("KSERVE_WIDE * 100 + KSERVE_TWICE"))
    assert get_extension("numbered").answer() == 204
    assert get_extension("numbered", wide=3).answer() == 306


def test_a_source_for_a_device_needs_a_target(folder: Path):
    write_cuda_extension(folder, toml=CUDA_TOML.replace('[target]\ncuda = "sm_80"\n', ""))
    with pytest.raises(InvalidDefinition, match=r"scale\.cu and no `cuda` in \[target\]"):
        built("scaling")


@needs_nvcc
def test_device_code_is_made_for_the_target_or_for_every_arch_that_is_named(folder: Path):
    write_cuda_extension(folder)
    found = [built("scaling", target) for target in ("sm_80", "sm_90a")]
    assert [one.manifest.contract.needs["codes"] for one in found] == ["sm_80", "sm_90a"]
    assert found[0].key != found[1].key
    needs = found[0].manifest.contract.needs
    assert any(name.startswith("libcudart.so.") for name in needs["libraries"].split())
    assert needs["glibc"].startswith("2.")
    named = CUDA_TOML.replace("[options]", '[options]\narches = ["sm_80", "sm_90", "compute_90"]')
    write_cuda_extension(folder, toml=named)
    several = built("scaling", "sm_90")
    assert several.manifest.contract.needs["codes"] == "sm_80 sm_90 compute_90"


@needs_nvcc
def test_an_arch_the_compiler_lacks_is_an_error_with_those_it_has(folder: Path):
    write_cuda_extension(folder)
    with pytest.raises(UnsupportedTarget, match=r"sm_81|compute_81") as caught:
        built("scaling", "sm_81")
    assert "sm_90" in caught.value.facts["allowed"]


@needs_nvcc
def test_an_error_in_device_code_names_file_and_line(folder: Path):
    write_cuda_extension(folder, source=CUDA_SOURCE.replace("x[i] *= factor", "x[i] *= nothing"))
    with pytest.raises(CompileFailed, match=r'scale\.cu\(7\): error: identifier "nothing" is undefined'):
        built("scaling", "sm_80")


@needs_nvcc
def test_built_again_elsewhere_every_unit_and_library_has_the_same_bytes(running: Daemon, folder: Path):
    write_parts(folder)
    write_cuda_extension(folder.parent / "cuda")
    built("numbered")
    payload = built("scaling", "sm_80").artifact.payload
    assert str(running.root).encode() not in payload
    assert b"scale.cu" in payload
    found = running.call("POST", "/v1/verify?rebuild=1", wait_s=200)
    assert (found["differing"], found["failed"], found["skipped"]) == ([], [], [])
    assert found["n_rebuilt"] >= 7
