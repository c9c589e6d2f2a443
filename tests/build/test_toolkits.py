"""An extension from each kind of toolkit there is: the system's nvcc, and the wheels of an interpreter alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kserve.client.direct import Wanted, resolve
from kserve.client.local import local
from kserve.toolchain.cuda_root import Candidate, candidates
from kserve.toolchain.torch_facts import find_torch
from tests.support.daemon import daemon, place, variables
from tests.support.extensions import CUDA_SOURCE, CUDA_TOML, write_cuda_extension

pytest.importorskip("torch")
pytestmark = pytest.mark.toolchain
# What a trimmed toolkit lacks, and the wheels beside torch have.
CUBLAS = (
    "#include <cublas_v2.h>\n" + CUDA_SOURCE + 'extern "C" int library() { int v; cublasGetVersion(nullptr, &v); return v; }\n'
)


def looked_at(origin: str) -> Candidate:
    torch = find_torch(sys.path)
    assert torch is not None
    found = candidates([], [Path(entry) for entry in sys.path if entry], cuda=torch.cuda)
    return next(one for one in found if one.origin == origin)


@pytest.mark.parametrize("origin", ["system", "wheels"])
def test_an_extension_is_built_with_it_alone(origin: str, monkeypatch: pytest.MonkeyPatch):
    found = looked_at(origin)
    if found.toolkit is None:
        pytest.skip(f"{origin}: {found.rejected}")
    named = str(found.toolkit.home) if origin == "system" else ""
    with place() as root, daemon(root) as running:
        for name, value in variables(root, KSERVE_CUDA_HOME=named).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.delenv("CUDA_PATH", raising=False)
        linked = CUDA_TOML.replace("[options]", '[options]\nldflags = ["-lcublas"]')
        write_cuda_extension(root / "kernels" / "scaling", toml=linked, source=CUBLAS)
        built = resolve([Wanted("scaling", "sm_80", {})], load=False)[0]
        needed = built.manifest.contract.needs["libraries"]
        log = (local().read(f"payload/{built.manifest.attachments['log']}") or b"").decode()
        assert [one["variant"] for one in running.call("GET", "/v1/artifacts")["artifacts"]] == ["declared", "unit:scale.cu"]
    assert "libcudart.so." in needed
    assert "libcublas.so." in needed
    assert f"{found.toolkit.nvcc} " in log or f"{found.toolkit.nvcc.resolve()} " in log
    assert origin == "system" or "/usr/local/cuda" not in log
