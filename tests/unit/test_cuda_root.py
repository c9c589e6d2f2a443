"""Which CUDA toolkit is taken, and why another one is not: over directories that look like toolkits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kserve.errors import ToolchainMissing
from kserve.toolchain.cuda_root import Candidate, Toolkit, candidates, chosen, link_libraries

PROGRAMS = ("bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc")
WHEELS = {
    "nvidia_cuda_nvcc": "13.0.88",
    "nvidia_nvvm": "13.0.88",
    "nvidia_cuda_crt": "13.0.88",
    "nvidia_cuda_cccl": "13.0.85",
    "nvidia_cuda_runtime": "13.0.96",
}


def written(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def toolkit(home: Path, release: str = "13.0", *, headers: str | None = None, libraries: str = "lib64") -> Path:
    """A directory with the files of a toolkit, whose nvcc can say its release."""
    nvcc = written(home / "bin" / "nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    for program in PROGRAMS:
        written(home / program)
    header_files(home, headers or release)
    written(home / libraries / "libcudart.so.13")
    return home


def header_files(home: Path, release: str) -> Path:
    major, minor = map(int, release.split("."))
    written(home / "include" / "cuda_runtime.h")
    written(home / "include" / "cuda.h", f"#define CUDA_VERSION {major * 1000 + minor * 10}\n")
    written(home / "include" / "crt" / "host_config.h")
    return home


def site(root: Path, **versions: str) -> Path:
    """A site-packages with the compiler's wheels, or with other versions of them; an empty one is not installed."""
    toolkit(root / "nvidia" / "cu13", libraries="lib")
    for name, version in {**WHEELS, **versions}.items():
        if version:
            (root / f"{name}-{version}.dist-info").mkdir()
    return root


def looked_at(root: Path, **places: object) -> list[Candidate]:
    wanted = {"named": [], "sites": [], "cuda": "13.0", "system": root / "usr", **places}
    return candidates(wanted.pop("named"), wanted.pop("sites"), **wanted)


def test_the_order_is_named_then_wheels_then_system(tmp_path: Path):
    mine, theirs, system = (toolkit(tmp_path / name) for name in ("mine", "theirs", "usr"))
    everything = {"sites": [site(tmp_path / "site")], "system": system}
    found = looked_at(tmp_path, named=[("configured", mine), ("CUDA_HOME", theirs)], **everything)
    assert [one.origin for one in found] == ["configured", "CUDA_HOME", "wheels", "system"]
    assert all(one.toolkit and not one.rejected for one in found)
    assert chosen(found).home == mine
    assert chosen(looked_at(tmp_path, **everything)).home == tmp_path / "site" / "nvidia" / "cu13"
    assert chosen(looked_at(tmp_path, system=system)).home == system


def test_a_named_toolkit_that_does_not_serve_is_an_error_and_no_other_one_is_taken(tmp_path: Path):
    found = looked_at(tmp_path, named=[("CUDA_HOME", tmp_path / "nowhere")], system=toolkit(tmp_path / "usr"))
    with pytest.raises(ToolchainMissing, match="nowhere cannot be used: there is no such directory"):
        chosen(found)


def test_nothing_found_names_every_place_and_its_reason(tmp_path: Path):
    with pytest.raises(ToolchainMissing) as caught:
        chosen(looked_at(tmp_path, sites=[tmp_path / "site"]))
    assert caught.value.facts.keys() == {"wheels", "system"}
    assert "nvidia-cuda-nvcc" in caught.value.facts["wheels"]
    assert "no such directory" in caught.value.facts["system"]


@pytest.mark.parametrize("name", WHEELS)
def test_wheels_of_two_releases_are_not_mixed(tmp_path: Path, name: str):
    found = looked_at(tmp_path, sites=[site(tmp_path / "site", **{name: "13.5.12"})])[0]
    assert found.toolkit is None
    assert f"{name.replace('_', '-')} 13.5.12" in found.rejected
    assert "not mixed" in found.rejected


@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_that_is_not_installed_is_named(tmp_path: Path, name: str):
    found = looked_at(tmp_path, sites=[site(tmp_path / "site", **{name: ""})])[0]
    assert found.rejected == f"not installed: {name.replace('_', '-')}"


@pytest.mark.parametrize("lacking", ["bin/nvcc", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt/host_config.h"])
def test_a_toolkit_that_lacks_a_part_says_which(tmp_path: Path, lacking: str):
    home = toolkit(tmp_path / "usr")
    (home / lacking).unlink()
    assert lacking in looked_at(tmp_path)[-1].rejected


def test_headers_of_another_release_than_the_compiler_are_refused(tmp_path: Path):
    toolkit(tmp_path / "usr", "13.0", headers="13.5")
    assert looked_at(tmp_path)[-1].rejected == "its nvcc is of release 13.0, its headers are of 13.5"


@pytest.mark.parametrize(("cuda", "serves"), [("13.0", True), ("13.2", True), ("", True), ("12.8", False)])
def test_a_toolkit_serves_a_torch_of_its_own_major_release(tmp_path: Path, cuda: str, serves: bool):
    toolkit(tmp_path / "usr", "13.0")
    found = looked_at(tmp_path, cuda=cuda)[-1]
    assert (found.toolkit is not None) == serves
    assert serves or "torch was built with CUDA 12.8" in found.rejected


def trimmed(root: Path, release: str) -> Toolkit:
    """A toolkit without cuBLAS or a plain libcudart.so, beside wheels of that release that have them."""
    toolkit(root / "usr", "13.0")
    wheels = header_files(root / "site" / "nvidia" / "cu13", release)
    written(wheels / "include" / "cublas_v2.h")
    written(wheels / "lib" / "libcublas.so.13")
    return chosen(looked_at(root, sites=[root / "site"]))


def test_what_a_toolkit_lacks_comes_from_the_wheels_after_its_own(tmp_path: Path):
    found = trimmed(tmp_path, "13.0")
    wheels = tmp_path / "site" / "nvidia" / "cu13"
    assert found.where("cuda_runtime.h") == tmp_path / "usr" / "include" / "cuda_runtime.h"
    assert found.where("cublas_v2.h") == wheels / "include" / "cublas_v2.h"
    assert found.where("libcublas.so") == wheels / "lib" / "libcublas.so.13"
    links = link_libraries(found, tmp_path / "links")
    assert (links / "libcublas.so").resolve() == wheels / "lib" / "libcublas.so.13"
    assert (links / "libcudart.so").resolve() == tmp_path / "usr" / "lib64" / "libcudart.so.13"


def test_wheels_of_another_release_fill_nothing(tmp_path: Path):
    found = trimmed(tmp_path, "13.1")
    assert found.where("cublas_v2.h") is None
    assert found.where("libcublas.so") is None


def test_compiler_and_headers_of_one_release_in_two_sites_are_one_toolkit(tmp_path: Path):
    """As where a second site-packages holds the compiler's wheels and the first one torch's."""
    site(tmp_path / "compiler", nvidia_cuda_runtime="")
    (tmp_path / "torch" / "nvidia_cuda_runtime-13.0.96.dist-info").mkdir(parents=True)
    for name in ("cuda_runtime.h", "cuda.h"):
        (tmp_path / "compiler" / "nvidia" / "cu13" / "include" / name).unlink()
    header_files(tmp_path / "torch" / "nvidia" / "cu13", "13.0")
    found = chosen(looked_at(tmp_path, sites=[tmp_path / "compiler", tmp_path / "torch"]))
    assert found.home == tmp_path / "compiler" / "nvidia" / "cu13"
    assert found.includes == (found.home / "include", tmp_path / "torch" / "nvidia" / "cu13" / "include")
