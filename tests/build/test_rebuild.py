"""Building again and comparing: what is equal, what differs, what cannot be built, and what plays no part."""

from __future__ import annotations

import json
import shutil
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, get_kernels
from kserve.artifact import Manifest
from kserve.build.plan import job_of
from kserve.config import WORKER_CONSTANTS, load_settings
from kserve.errors import STATUS
from kserve.key import build_key, canonical_json, digest_of
from kserve.store.files import FileStore
from kserve.toolchain.base import JobArgument
from tests.support import slow_kernel
from tests.support.daemon import daemon
from tests.support.definitions import CUDA_SOURCE, TRITON_SOURCE, TRITON_TOML, write_cuda, write_triton
from tests.support.processes import kserve, python, wait_for, workers

pytestmark = pytest.mark.toolchain
SITE = Path(sysconfig.get_path("purelib"))
DIFFERS, FAILED = STATUS["corrupt-artifact"][1], STATUS["build-failed"][1]


def verified(*arguments: str, status: int = 0) -> Any:
    """What `kserve cache verify --rebuild --json` prints."""
    done = kserve("cache", "verify", "--rebuild", *arguments, "--json")
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def the_store() -> FileStore:
    return FileStore(load_settings().store, writable=True)


def replace(manifest: Manifest, **changes: Any) -> Manifest:
    """Put another manifest in that one's place: sound, under a key of its own if its components changed."""
    other = manifest._replace(**changes)
    other = other._replace(key=build_key(other.components))
    store = the_store()
    store.delete(f"manifest/{manifest.key}")
    store.put(f"manifest/{other.key}", other.to_bytes())
    return other


def row(manifest: Manifest) -> dict[str, str]:
    return {field: getattr(manifest, field) for field in ("key", "name", "target", "variant")}


def files_of(store: Path) -> dict[Path, int]:
    kinds = ("payload", "manifest", "source", "quarantine")
    return {path: path.stat().st_mtime_ns for kind in kinds for path in (store / kind).rglob("*")}


def test_equal_bytes_and_nothing_kept(kernels: Path):
    write_cuda(kernels / "scale")
    write_triton(kernels / "tscale")
    for name in ("scale", "tscale"):
        get_kernel(name, target="sm_90")
    store = load_settings().store
    before = files_of(store)
    found = verified()
    assert {field: found[field] for field in ("n_rebuilt", "differing", "failed", "skipped", "damaged")} == {
        "n_rebuilt": 4,
        "differing": [],
        "failed": [],
        "skipped": [],
        "damaged": [],
    }
    sampled = kserve("cache", "verify", "--rebuild", "--sample", "1").stdout
    assert "built again: 1 equal, 0 differing, 0 failed, 0 skipped" in sampled
    assert "n_rebuilt" not in json.loads(kserve("cache", "verify", "--json").stdout)
    assert files_of(store) == before
    assert [path.name for path in (store / "tmp").glob("rebuild-*")] == []


def test_other_bytes_under_right_digests_are_found(kernels: Path):
    """Every digest is right; only a build shows that they are not the bytes of this key."""
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale", target="sm_90")
    write_cuda(kernels / "scale", source=CUDA_SOURCE.replace("factor * x[i]", "factor + x[i]"))
    client.forget()
    other = get_kernel("scale", target="sm_90")
    right = kernel.manifest
    planted = replace(right, digest=other.digest, size_bytes=other.manifest.size_bytes)
    assert planted.key == kernel.key
    client.forget()

    assert kserve("cache", "verify").returncode == 0
    found = verified(status=DIFFERS)
    assert found["differing"] == [{**row(right), "digest": other.digest, "rebuilt": right.digest}]
    assert (found["n_rebuilt"], found["failed"], found["skipped"]) == (4, [], [])
    text = kserve("cache", "verify", "--rebuild")
    assert text.returncode == DIFFERS
    named = (right.key, "scale", "cuda:sm_90", other.digest[:12], right.digest[:12])
    assert [word for word in named if word not in text.stdout.split("differs", 1)[1]] == []
    assert the_store().get(f"manifest/{right.key}") == planted.to_bytes(), "what was built again is not published"


STAMPED = """
import triton
import triton.language as tl

os = triton.knobs.os
STAMP = tl.constexpr({stamp})


@triton.jit
def tscale(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, factor * tl.load(x + at, mask=at < n) + STAMP, mask=at < n)
"""


STAMPS = {"process": "os.getpid()", "worker": "os.getppid()", "directory": "hash(os.getcwd()) % 2**20"}


def test_what_a_build_takes_from_its_surroundings_is_found(kernels: Path):
    """So the process, its worker and the directory are others than those of the first build."""
    for name, stamp in STAMPS.items():
        toml = TRITON_TOML.replace('name = "tscale"', f'name = "{name}"')
        write_triton(kernels / name, toml=toml, source=STAMPED.format(stamp=stamp))
    get_kernels([(name, {}) for name in STAMPS], target="sm_90")
    found = verified(status=DIFFERS)
    assert sorted(entry["name"] for entry in found["differing"]) == sorted([*STAMPS, *STAMPS]), "both variants of each"
    assert all(entry["digest"] != entry["rebuilt"] for entry in found["differing"])
    assert (found["n_rebuilt"], found["failed"]) == (6, [])


def test_a_build_that_fails_the_second_time(kernels: Path):
    flag = kernels.parent / "flag"
    check = f"import triton\nassert not triton.knobs.os.path.exists({str(flag)!r}), 'it is there now'\n"
    write_triton(kernels / "tscale", source=check + TRITON_SOURCE)
    kernel = get_kernel("tscale", target="sm_90")
    flag.touch()
    found = verified(status=FAILED)
    assert {entry["key"] for entry in found["failed"]} == {kernel.key, kernel.generic.key}
    assert all("it is there now" in entry["reason"] for entry in found["failed"])
    assert (found["n_rebuilt"], found["differing"], found["skipped"]) == (0, [], [])


def test_an_entry_that_is_another_keys(kernels: Path):
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale", target="sm_90")
    lie = kernel.manifest._replace(components=kernel.generic.components)
    the_store().put(f"manifest/{kernel.key}", lie.to_bytes())
    found = verified(status=FAILED)
    assert [entry["key"] for entry in found["failed"]] == [kernel.key]
    assert found["n_rebuilt"] == 1


def test_an_entry_of_another_compiler_is_skipped_and_says_why(kernels: Path):
    write_cuda(kernels / "scale")
    manifest = get_kernel("scale", target="sm_90").manifest
    older = {"toolchain.version": "11.0", "toolchain.files": "5" * 64}
    other = replace(manifest, components={**manifest.components, **older})
    found = verified()
    assert [row(other)] == [{field: entry[field] for field in row(other)} for entry in found["skipped"]]
    (reason,) = (entry["reason"] for entry in found["skipped"])
    assert "nvrtc 11.0, files 555555555555" in reason
    assert manifest.components["toolchain.version"] in reason, "and what is here"
    assert (found["n_rebuilt"], found["differing"]) == (1, [])
    assert f"skipped  {other.key}" in kserve("cache", "verify", "--rebuild").stdout


def test_an_entry_whose_source_is_gone_is_skipped(kernels: Path):
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale", target="sm_90")
    the_store().delete(f"source/{kernel.manifest.components['source.kernel.cu']}")
    found = verified()
    assert {entry["reason"] for entry in found["skipped"]} == {"its source kernel.cu is not in the store any more"}
    assert (found["n_rebuilt"], len(found["skipped"])) == (0, 2)


@pytest.mark.slow
def test_an_environment_that_was_used_before_is_used_again(kernels: Path):
    """A Triton of the caller's own, which the daemon's interpreter does not find."""
    packages = kernels.parent / "packages"
    shutil.copytree(SITE / "triton", packages / "triton", copy_function=lambda real, link: Path(link).symlink_to(real))
    changed = packages / "triton" / "language" / "math.py"
    text = changed.read_text()
    changed.unlink()
    changed.write_text(text + "# another file than the one installed\n")
    write_triton(kernels / "tscale")
    ask = "from kserve import get_kernel; print(get_kernel('tscale', target='sm_90').key)"
    there = python(ask, PYTHONPATH=str(packages)).stdout.strip()
    found = verified()
    assert (found["n_rebuilt"], found["differing"], found["skipped"]) == (2, [], [])
    shutil.rmtree(packages)
    found = verified()
    assert (found["n_rebuilt"], len(found["skipped"])) == (0, 2)
    assert there in {entry["key"] for entry in found["skipped"]}


def plant_slow(manifest: Manifest) -> None:
    """An entry whose build takes far longer than any test."""
    arguments = [JobArgument("out", "pointer", "float32", align=4), JobArgument("x", "f32", "float32")]
    kept = {label: text for label, text in manifest.components.items() if not label.startswith("argument.")}
    spoken = {f"argument.{i:03}": canonical_json(argument._asdict()) for i, argument in enumerate(arguments)}
    source = slow_kernel.SOURCE.encode()
    the_store().put(f"source/{digest_of(source)}", source)
    replace(manifest, components={**kept, **spoken, "function": "slow<0>", "source.kernel.cu": digest_of(source)})


def rebuilding(root: Path) -> list[str]:
    """Jobs that run in the directory of a rebuild."""
    places = [str(Path(f"/proc/{pid}/cwd").readlink()) for pid in workers(root)]
    return [place for place in places if "/rebuild-" in place and "/job-" in place]


def test_the_daemon_can_end_meanwhile(kernels: Path):
    root = kernels.parent
    write_cuda(kernels / "scale")
    with daemon(root) as running:
        plant_slow(get_kernel("scale", target="sm_90").manifest)
        ended: list[Any] = []
        asking = threading.Thread(target=lambda: ended.append(kserve("cache", "verify", "--rebuild")))
        asking.start()
        wait_for(lambda: rebuilding(root), what="the build")
        running.process.terminate()
        assert running.process.wait(timeout=5) == 0
        asking.join(timeout=10)
    assert ended[0].returncode == STATUS["daemon-ending"][1], ended[0].stdout + ended[0].stderr
    wait_for(lambda: not workers(root), deadline_s=2, what="its compilers to end")
    assert list((root / "store" / "tmp").glob("rebuild-*")) == []


# What a worker does for a job, without a worker around it: the vendor's cache is where the environment says.
COMPILE = """
import json, os, sys
from kserve.key import digest_of
from kserve.toolchain.base import job_from_json, load_toolchain
os.chdir(sys.argv[1])
print(digest_of(load_toolchain("triton").build(job_from_json(json.loads(sys.argv[2])))[1]))
"""


def compiled(folder: Path, source: str, manifest: Manifest, **environment: str) -> str:
    """The digest of a build in this environment, caches and all."""
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src" / "kernel.py").write_text(source)
    job = json.dumps(job_of(manifest.components)[0].to_json())
    return python(COMPILE, str(folder / "src"), job, **WORKER_CONSTANTS, **environment).stdout.split()[-1]


@pytest.mark.slow
def test_warm_caches_of_the_caller_play_no_part(kernels: Path):
    """They hold other bytes for this very kernel: a build or a comparison that looked into them would take those."""
    root = kernels.parent
    write_cuda(kernels / "scale")
    write_triton(kernels / "tscale")
    home = root / "home"
    places = {
        "HOME": str(home),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "CUDA_CACHE_PATH": str(home / ".nv" / "ComputeCache"),
    }
    other = {**places, "TRITON_CACHE_DIR": str(root / "other")}
    (home / ".nv" / "ComputeCache").mkdir(parents=True)
    with daemon(root):
        kernel = get_kernel("tscale", target="sm_90")
    folder, source = root / "plain", TRITON_SOURCE
    assert compiled(folder, source, kernel.manifest, **places) == kernel.digest
    poison = compiled(folder, source.replace("factor *", "2.0 * factor *"), kernel.manifest, **other)
    for path in (home / "triton").rglob("*.cubin"):
        shutil.copy(next((root / "other").rglob("*.cubin")), path)
    assert compiled(folder, source, kernel.manifest, **places) == poison != kernel.digest, "the cache is warm"

    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    with daemon(root, **places):
        assert verified()["n_rebuilt"] == 2
        the_store().delete(f"manifest/{kernel.key}")
        client.forget()
        again = get_kernel("tscale", target="sm_90")
        assert (again.origin, again.digest) == ("built", kernel.digest)
        get_kernel("scale", target="sm_90")
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
