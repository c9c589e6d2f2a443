"""Same key, same bytes: the built-in kernels, from two checkouts and two virtual environments in two places."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from kserve.build.sandbox import landlock_version
from kserve.catalog import every_entry
from kserve.config import Settings
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.extensions import CUDA_TOML, write_cuda_extension
from tests.support.processes import REPOSITORY

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]
SITE = Path(sysconfig.get_path("purelib"))
TARGETS = ["cuda:sm_80", "cuda:sm_90"]
WISHES: list[tuple[str, dict[str, Any]]] = [
    ("fused_norm_residual", {}),
    ("fused_norm_residual", {"hidden": 129}),
    ("fused_norm_residual", {"hidden": 1000}),
    ("fused_norm_residual_dropout", {"dtype": "bfloat16"}),
    ("philox_advance", {}),
    ("fused_edge_features", {}),
    ("fused_edge_features", {"dtype": "float16", "hidden": 7}),
    ("graph_norm_bce_chunks", {}),
    ("graph_norm_bce_mean", {}),
    ("graph_norm_bce_few", {}),
    ("graph_norm_bce_atomic", {}),
    ("graph_norm_bce_atomic_mean", {}),
    ("group_norm_stats", {}),
    ("group_norm_apply", {}),
    ("group_norm_bwd_sums", {}),
    ("group_norm_bwd_apply", {}),
    ("realspace_cuda_fwd", {}),
    ("realspace_cuda_bwd", {"n_ang": 4, "dtype": "bfloat16"}),
    ("realspace_fwd", {}),
    ("realspace_fwd", {"n_ang": 5}),
    ("realspace_bwd", {}),
    ("realspace_bwd", {"n_ang": 2, "n_grid": 9}),
]
EXTENSION = "kserve_operators"
# Prints which package asked, and key and digest of each variant.
ASK = """
import json, sys, kserve
targets, wishes = json.loads(sys.argv[1])
found = [kernel for target in targets for kernel in kserve.get_kernels(wishes, target=target)]
manifests = [m for kernel in found for m in (kernel.manifest, kernel.generic) if m]
print(json.dumps([kserve.__file__, [[m.key, m.digest] for m in manifests]]))
"""


def test_every_built_in_kernel_is_wished_for():
    assert {entry.name for _, _, entry in every_entry(Settings())} == {EXTENSION, *(name for name, _ in WISHES)}


def linked(source: str, target: str) -> None:
    """The same file at another path; copied where that is on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def second_environment(root: Path) -> str:
    """A virtual environment with compilers of its own, no links to the first; its interpreter."""
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    )
    libraries = [library.relative_to(SITE) for library in SITE.glob("nvidia/*/lib/libnvrtc*")]
    # Triton finds its back ends through its metadata. No bytecode: it would name the first place.
    for folder in ["triton", "cuda", *(path.name for path in SITE.glob("triton-*.dist-info"))]:
        shutil.copytree(SITE / folder, site / folder, copy_function=linked, ignore=shutil.ignore_patterns("__pycache__"))
    for library in libraries:
        (site / library).parent.mkdir(parents=True, exist_ok=True)
        linked(str(SITE / library), str(site / library))
    return str(python)


def second_checkout(root: Path) -> Path:
    for name in ("kserve", "cuda_src", "triton_src"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


def asked(python: str, checkout: Path, root: Path, **environment: str) -> Any:
    """What `ASK` prints, from that interpreter and that checkout."""
    done = subprocess.run(
        [python, "-c", ASK, json.dumps([TARGETS, WISHES])],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], **variables(root, KSERVE_AUTOSTART="0", **environment)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    package, manifests = json.loads(done.stdout)
    assert Path(package).is_relative_to(checkout)
    return manifests


def test_another_checkout_and_environment_give_the_same_keys_and_bytes():
    with place() as root:
        python, checkout = second_environment(root / "venv"), second_checkout(root / "checkout")
        with daemon(root, checkout=checkout, KSERVE_PREWARM="0") as there:  # no compiler but the callers'
            built = asked(python, checkout, root)
            assert there.call("GET", "/v1/status")["counters"]["built"] == len(built)
            assert_compilers_lie_in(root, there)
        assert_no_path_of(root)
        shutil.rmtree(root / "venv")
        shutil.rmtree(checkout)
        with daemon(root) as here:
            assert asked(sys.executable, REPOSITORY, root, KSERVE_NO_BUILD="1") == built
            found = here.call("POST", "/v1/verify?rebuild=1", wait_s=200)
    assert (found["differing"], found["failed"], found["skipped"]) == ([], [], [])
    assert found["n_rebuilt"] == len(built) > len(TARGETS) * len(WISHES), "most have a variant for no facts"


STABLE = """
#include <torch/csrc/stable/tensor.h>
extern "C" bool is_row(void* tensor) {
  const torch::stable::Tensor found(static_cast<AtenTensorHandle>(tensor));
  STD_TORCH_CHECK(found.dim() == 1, "a message with the name of this file");
  return found.is_contiguous();
}
"""


@pytest.mark.skipif(not Path("/usr/local/cuda/bin/nvcc").is_file(), reason="there is no nvcc in /usr/local/cuda")
def test_an_extension_has_the_same_bytes_beside_another_torch_and_toolkit():
    """Kernel, torch, toolkit and Python's headers are reached by other paths, as in another checkout and environment."""
    toml = CUDA_TOML.replace('["scale.cu"]', '["scale.cu", "stable.cpp"]').replace(
        "[options]", '[options]\nstable_abi = "2.11"'
    )
    with place() as root:
        for folder in (root / "kernels" / "case", root / "elsewhere" / "deep" / "case"):
            (write_cuda_extension(folder, toml=toml) / "stable.cpp").write_text(STABLE)
        python, checkout = second_environment(root / "venv"), second_checkout(root / "checkout")
        site = next((root / "venv").glob("lib/python3*/site-packages"))
        (site / "torch").symlink_to(SITE / "torch")
        for headers in SITE.glob("nvidia/cu[0-9][0-9]/include"):  # what a trimmed toolkit lacks
            (site / headers.relative_to(SITE)).symlink_to(headers)
        (root / "cuda").symlink_to("/usr/local/cuda")
        with daemon(root, checkout=checkout) as there:
            built = extension(python, checkout, root, CUDA_HOME=str(root / "cuda"))
            artifacts = there.call("GET", "/v1/artifacts")["artifacts"]
            logs = [there.call("GET", f"/v1/artifacts/{one['key']}")["attachments"]["log"] for one in artifacts]
        assert len(artifacts) == 3
        assert all(f"{site}/torch/" in log for log in logs)
        for one in artifacts:
            payload = (root / "store" / "payload" / one["digest"][:2] / one["digest"]).read_bytes()
            assert str(root).encode() not in payload
            assert str(SITE).encode() not in payload
        with daemon(root) as here:
            other = {"KSERVE_NO_BUILD": "1", "CUDA_HOME": "/usr/local/cuda", "KSERVE_PATH": str(root / "elsewhere" / "deep")}
            assert extension(sys.executable, REPOSITORY, root, **other) == built
            shutil.rmtree(root / "venv")
            found = here.call("POST", "/v1/verify?rebuild=1", wait_s=200)
    assert (found["differing"], found["failed"], found["skipped"]) == ([], [], [])
    assert found["n_rebuilt"] == 3


def extension(python: str, checkout: Path, root: Path, **environment: str) -> tuple[str, str]:
    """Key and digest of the extension, from that interpreter and that checkout."""
    done = subprocess.run(
        [python, "-m", "kserve", "build", "scaling", "--target", "sm_90", "--json"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], **variables(root, KSERVE_AUTOSTART="0", **environment)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    return found["key"], found["digest"]


def assert_compilers_lie_in(root: Path, found: Daemon) -> None:
    """Both workers, and every file of their compilers; and they worked in a closed world."""
    workers = found.call("GET", "/v1/status")["workers"]
    assert {worker["language"] for worker in workers} == {"cuda", "triton"}
    assert all(worker["python"].startswith(str(root)) for worker in workers)
    known = json.loads((root / "store" / "toolchains.json").read_text())["toolchains"]
    files = [path for toolchain in known.values() for path, stamp in toolchain["stamps"].items() if stamp]
    assert files
    assert [path for path in files if not path.startswith(str(root))] == []
    entries = found.call("GET", "/v1/artifacts")["artifacts"]
    assert {entry["closed_world"] for entry in entries} == {landlock_version() >= 2}


def assert_no_path_of(root: Path) -> None:
    for path in (root / "store" / "payload").rglob("*"):
        assert path.is_dir() or str(root).encode() not in path.read_bytes()
