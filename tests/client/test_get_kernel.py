"""get_kernel without a GPU: named targets, real builds, real processes, real damage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, get_kernels, protocol
from kserve.build.planner import KernelRequest, MissingSources
from kserve.build.worker_handle import Environment
from kserve.client.connection import Connection
from kserve.client.loader import Driver
from kserve.client.local import local
from kserve.config import load_settings
from kserve.errors import (
    BuildTimeout,
    CompileFailed,
    InvalidDefinition,
    InvalidSpec,
    KserveError,
    LoadError,
    NotBuilt,
    UnknownKernel,
    UnsupportedTarget,
)
from kserve.service import KernelService
from kserve.store.files import FileStore
from tests.support.daemon import assert_sound, place, variables
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda, write_triton
from tests.support.processes import REPOSITORY, daemon_pid, python, wait_for
from tests.support.slow_kernel import write_slow

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"

GET = """
import json, sys
from kserve import get_kernel
from kserve.errors import KserveError
name, target, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    k = get_kernel(name, target=target, **spec)
    print(json.dumps({"origin": k.origin, "key": k.key, "digest": k.digest, "generic": k.generic and k.generic.key}))
except KserveError as error:
    print(json.dumps({"code": error.code, "text": str(error)}))
"""


def fresh(name: str = "scale", target: str = TARGET, *, cwd: Path = REPOSITORY, spec: Any = None, **environment: str) -> Any:
    """get_kernel in a process of its own."""
    return json.loads(start(name, target, cwd=cwd, spec=spec, **environment).communicate(timeout=120)[0])


def start(
    name: str = "scale", target: str = TARGET, *, cwd: Path = REPOSITORY, spec: Any = None, **environment: str
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]) if cwd != REPOSITORY else ""
    more = {**({"PYTHONPATH": path} if path else {}), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", GET, name, target, json.dumps(spec or {})],
        cwd=cwd,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def again(name: str = "scale", **wanted: Any) -> Any:
    """get_kernel as if this process had never asked."""
    client.forget()
    return get_kernel(name, target=TARGET, **wanted)


def builds() -> list[dict[str, Any]]:
    with contextlib.closing(Connection(load_settings())) as connection:
        found: list[dict[str, Any]] = connection.call("GET", protocol.BUILDS + "?limit=2000")["builds"]
        return found


def has_driver() -> bool:
    try:
        Driver()
    except LoadError:
        return False
    return True


without_gpu = pytest.mark.skipif(has_driver(), reason="there is a CUDA device")


def test_origins(kernels: Path):
    write_cuda(kernels / "scale")
    first = get_kernel("scale", target=TARGET)
    assert first.origin == "built"
    assert first.seconds > 0
    second = get_kernel("scale", target=TARGET)
    assert (second.origin, second.seconds, second.key) == ("memo", 0.0, first.key)
    assert fresh() == {"origin": "disk", "key": first.key, "digest": first.digest, "generic": first.generic.key}
    assert again().origin == "disk"


def test_the_same_kernel_asked_for_in_other_words_is_a_hit(kernels: Path):
    """Same process, same key, no build: the origin says so."""
    write_cuda(kernels / "scale")
    first = get_kernel("scale", target="sm_90")
    other = get_kernel("scale", target="cuda:sm_90", size=8)
    assert (other.key, other.origin) == (first.key, "disk")


def test_the_memo_survives_the_daemon(kernels: Path):
    write_cuda(kernels / "scale")
    get_kernel("scale", target=TARGET)
    os.kill(daemon_pid(kernels.parent), signal.SIGKILL)
    assert get_kernel("scale", target=TARGET).origin == "memo"


def test_same_key_wherever_the_folder_lies_and_whoever_asks(kernels: Path):
    """Two checkouts, another HOME, another directory, another time stamp."""
    root = kernels.parent
    write_cuda(kernels / "scale")
    elsewhere = write_cuda(root / "deep" / "down" / "another").parent
    home = root / "home"
    home.mkdir()
    first = fresh()
    assert first["origin"] == "built"
    for other in (
        fresh(KSERVE_PATH=str(elsewhere)),
        fresh(HOME=str(home), USER="somebody", LANG="C"),
        fresh(cwd=home),
        fresh(PYTHONHASHSEED="7"),
    ):
        assert other == {**first, "origin": "disk"}
    for path in (kernels / "scale").iterdir():
        os.utime(path, (1, 1))
    assert fresh() == {**first, "origin": "disk"}
    # A second daemon over a store of its own makes the same key and bytes.
    with place() as other:
        assert fresh(**variables(other, KSERVE_PATH=str(kernels))) == first


def test_an_edited_header_is_another_key_and_reverting_hits(kernels: Path):
    """Three deep: the source includes a, which includes b, which includes c."""
    folder = write_cuda(
        kernels / "scale",
        toml=CUDA_TOML.replace("headers = []", 'headers = ["*.cuh"]'),
        source='#include "a.cuh"\n' + CUDA_SOURCE.replace("factor * x[i]", "FACTOR * x[i]"),
        a__cuh='#include "b.cuh"\n',
        b__cuh='#include "c.cuh"\n',
        c__cuh="#define FACTOR 2.0f\n",
    )
    first = again()
    (folder / "c.cuh").write_text("#define FACTOR 3.0f\n")
    changed = again()
    assert changed.origin == "built"
    assert changed.key != first.key
    assert changed.digest != first.digest
    (folder / "c.cuh").write_text("#define FACTOR 2.0f\n")
    reverted = again()
    assert (reverted.origin, reverted.key, reverted.digest) == ("disk", first.key, first.digest)
    # Undeclared, it is not there.
    (folder / "kernel.toml").write_text(CUDA_TOML)
    with pytest.raises(CompileFailed, match=r"kernel\.cu\(1\)"):
        again()


@pytest.mark.parametrize(("language", "n"), [("cuda", 16), ("triton", 8)])
def test_processes_that_start_cold_together_make_one_build_a_key(kernels: Path, language: str, n: int):
    name = {"cuda": "scale", "triton": "tscale"}[language]
    {"cuda": write_cuda, "triton": write_triton}[language](kernels / name)
    started = [start(name) for _ in range(n)]
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    origins = [answer["origin"] for answer in answers]
    assert set(origins) <= {"built", "joined", "disk"}
    assert origins.count("built") == 1
    assert len({answer["digest"] for answer in answers}) == 1
    made = builds()
    assert sorted(build["key"] for build in made) == sorted({answers[0]["key"], answers[0]["generic"]})
    assert {build["state"] for build in made} == {"done"}
    assert assert_sound(kernels.parent / "store") == 2


def test_all_who_wait_get_the_compilers_text(kernels: Path):
    broken = CUDA_SOURCE.replace("out[i]", "nowhere[i]")
    folder = write_cuda(kernels / "scale", source=broken)
    started = [start() for _ in range(6)]
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert {answer["code"] for answer in answers} == {"compile-failed"}
    line = broken[: broken.index("nowhere")].count("\n") + 1
    assert all(f"kernel.cu({line})" in answer["text"] and "nowhere" in answer["text"] for answer in answers)
    assert len(builds()) == 2, "remembered: one attempt a variant"
    (folder / "kernel.cu").write_text(CUDA_SOURCE)
    assert again().origin == "built", "fixed, it builds at once"
    (folder / "kernel.cu").write_text(broken)
    with pytest.raises(CompileFailed):
        again()
    assert len([build for build in builds() if build["state"] == "failed"]) == 2


def test_a_failure_is_remembered_for_a_short_time_only(kernels: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KSERVE_FAILURE_MEMORY_S", "0.01")
    write_cuda(kernels / "scale", source="nonsense")

    def n_attempts() -> int:
        with pytest.raises(CompileFailed):
            again()
        return len(builds())

    assert n_attempts() == 2
    wait_for(lambda: n_attempts() == 4, what="another attempt")


def test_a_deadline_ends_the_wait_not_the_build(kernels: Path, capfd: pytest.CaptureFixture[str]):
    write_slow(kernels / "slow")
    write_cuda(kernels / "scale")
    get_kernel("scale", target=TARGET)
    began = time.monotonic()
    with pytest.raises(BuildTimeout) as caught:
        get_kernel("slow", target=TARGET, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - began < 2
    (running,) = [build for build in builds() if build["name"] == "slow"]
    assert running["state"] == "running"
    assert caught.value.facts["build"] == running["id"]
    with pytest.raises(BuildTimeout) as second:
        get_kernel("slow", target=TARGET, timeout_s=0.1)
    assert second.value.facts["build"] == running["id"], "the retry joins"
    other = start("slow")
    wait_for(lambda: [b["n_joined"] for b in builds() if b["name"] == "slow"] == [1], what="another process to join")
    other.kill()
    other.communicate()


def test_a_deadline_holds_while_the_toolchain_loads(kernels: Path):
    write_triton(kernels / "tscale")
    write_cuda(kernels / "scale")
    get_kernel("scale", target=TARGET)  # the daemon is up, Triton is not loaded
    began = time.monotonic()
    with pytest.raises(BuildTimeout):
        get_kernel("tscale", target=TARGET, timeout_s=0.2)
    assert time.monotonic() - began < 0.8
    assert get_kernel("tscale", target=TARGET).origin in ("built", "joined")


def test_a_deadline_of_nothing_waits_for_nothing(kernels: Path):
    write_slow(kernels / "slow")
    write_cuda(kernels / "scale")
    get_kernel("scale", target=TARGET)
    finished = python(
        "from kserve import get_kernel\nimport sys\n"
        "try:\n    get_kernel('slow', target='sm_90', timeout_s=0)\n"
        "except Exception as error:\n    print(type(error).__name__)",
        KSERVE_CLIENT_TIMEOUT_S="4",
    )
    assert finished.stdout == "BuildTimeout\n"
    assert "building slow" not in finished.stderr, "it waited for the default deadline"


def test_a_long_wait_is_told(kernels: Path, capfd: pytest.CaptureFixture[str]):
    write_slow(kernels / "slow")
    with pytest.raises(BuildTimeout):
        get_kernel("slow", target=TARGET, timeout_s=4)
    assert "slow" in capfd.readouterr().err


def payload_of(kernel: Any, store: Path) -> Path:
    return store / "payload" / kernel.digest[:2] / kernel.digest


def manifest_of(kernel: Any, store: Path) -> Path:
    return store / "manifest" / kernel.key[:2] / f"{kernel.key}.json"


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def garble(path: Path, other: Path) -> None:
    path.write_bytes(b"[1, 2]")


DAMAGE = [truncate, empty, flip, remove, swap, garble]


def test_a_damaged_record_is_built_again(kernels: Path):
    """Every kind of damage to either record, under a running daemon: the client sees a kernel, the same one."""
    store = kernels.parent / "store"
    write_cuda(kernels / "scale")
    first, other = again(), again(size=9)
    whole = payload_of(first, store).read_bytes()
    for where in (payload_of, manifest_of):
        for damage in DAMAGE:
            path = where(first, store)
            path.chmod(0o600)
            damage(path, where(other, store))
            shutil.rmtree(store / "alias", ignore_errors=True)  # the daemon is to be asked
            repaired = again()
            case = f"{damage.__name__} of the {where.__name__}"
            assert (repaired.origin, repaired.key, repaired.digest) == ("built", first.key, first.digest), case
            assert payload_of(first, store).read_bytes() == whole, case
            assert again().origin == "disk", case
    assert assert_sound(store) == 4
    assert len(list((store / "quarantine").iterdir())) == 10, "all but the removed ones are kept for a look"


def test_a_payload_that_became_a_directory_is_served_all_the_same(kernels: Path):
    write_cuda(kernels / "scale")
    first = again()
    path = payload_of(first, kernels.parent / "store")
    path.unlink()
    path.mkdir()
    assert again().digest == first.digest


def test_a_store_that_was_removed_is_made_again(kernels: Path):
    write_cuda(kernels / "scale")
    first = again()
    for folder in ("payload", "manifest", "source"):
        shutil.rmtree(kernels.parent / "store" / folder)
    assert again().digest == first.digest


def test_a_source_that_vanishes_before_its_build_is_never_compiled_as_an_empty_file(own_place: Path):
    """Otherwise the key of the real header would hold the code of an empty one."""
    text = CUDA_TOML.replace("headers = []", 'headers = ["a.cuh"]')
    source = '#include "a.cuh"\n#ifndef FACTOR\n#define FACTOR 1.0f\n#endif\n' + CUDA_SOURCE.replace("factor *", "FACTOR *")
    files = {"kernel.toml": text.encode(), "kernel.cu": source.encode(), "a.cuh": b"#define FACTOR 2.0f\n"}

    async def body() -> None:
        service = KernelService(load_settings(), FileStore(load_settings().store, writable=True))
        try:
            digests = {name: service.artifacts.add_source(content) for name, content in files.items()}
            request = KernelRequest("scale", digests, {}, TARGET, Environment(sys.executable, ()))
            asked = asyncio.create_task(service.resolve(request, client="a", wait_s=60))
            while not service.pool.to_json():  # the sources were found there, the toolchain is being loaded
                await asyncio.sleep(0.005)
            service.artifacts.files.delete(f"source/{digests['a.cuh']}")
            with contextlib.suppress(KserveError):
                assert isinstance(await asked, MissingSources)
            assert list(service.artifacts.manifests()) == []
        finally:
            await service.close()

    asyncio.run(body())


def test_a_source_that_vanishes_after_it_was_looked_at_is_built_all_the_same(own_place: Path):
    """Between the look and the build it may be damaged, or evicted: the bytes of the look are built."""
    files = {"kernel.toml": CUDA_TOML.encode(), "kernel.cu": CUDA_SOURCE.encode()}

    async def body() -> None:
        service = KernelService(load_settings(), FileStore(load_settings().store, writable=True))
        get, seen = service.artifacts.get, []

        def once(name: str) -> bytes | None:
            seen.append(name)
            return get(name) if seen.count(name) == 1 or not name.startswith("source/") else None

        try:
            digests = {name: service.artifacts.add_source(content) for name, content in files.items()}
            request = KernelRequest("scale", digests, {}, TARGET, Environment(sys.executable, ()))
            service.planner.definition(request)
            seen.clear()
            service.artifacts.get = once
            answer = await service.resolve(request, client="a", wait_s=60)
            assert [variant.origin for variant in answer] == ["built", "built"]
        finally:
            await service.close()

    asyncio.run(body())


def test_no_build_is_an_error_for_a_miss_and_nothing_for_a_hit(kernels: Path):
    write_cuda(kernels / "scale")
    missed = fresh(KSERVE_NO_BUILD="1")
    assert missed["code"] == NotBuilt.code
    os.kill(daemon_pid(kernels.parent), signal.SIGKILL)
    assert fresh()["origin"] == "built"
    assert fresh(KSERVE_NO_BUILD="1")["origin"] == "disk"


def test_no_build_is_the_callers_wish_not_the_daemons(kernels: Path):
    """A daemon that somebody else started builds for others; whoever forbids it is not built for, and the reverse."""
    write_cuda(kernels / "scale")
    assert fresh(spec={"size": 1})["origin"] == "built"
    assert fresh(spec={"size": 2}, KSERVE_NO_BUILD="1").get("code") == NotBuilt.code
    os.kill(daemon_pid(kernels.parent), signal.SIGKILL)
    assert fresh(spec={"size": 3}, KSERVE_NO_BUILD="1").get("code") == NotBuilt.code
    assert fresh(spec={"size": 3}).get("origin") == "built"


@without_gpu
def test_without_a_target_and_a_gpu_the_error_says_how_to_name_one(kernels: Path):
    write_cuda(kernels / "scale")
    for ask in (lambda: get_kernel("scale"), lambda: get_kernels([("scale", {})])):
        with pytest.raises(UnsupportedTarget) as caught:
            ask()
        assert "target=" in caught.value.hint
    assert daemon_pid(kernels.parent) is None, "nothing was started for it"


@without_gpu
def test_a_kernel_for_another_machine_cannot_be_called(kernels: Path):
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale", target=TARGET)
    for call in (kernel, kernel[(1,)]):
        with pytest.raises(LoadError):
            call(None, None, 1, 1.0)


def test_nothing_asked_for_is_nothing_given():
    assert get_kernels([]) == []
    assert get_kernels([], target=TARGET) == []


def test_get_kernels_is_one_round_trip(kernels: Path):
    write_cuda(kernels / "scale")
    write_triton(kernels / "tscale")
    wanted = [("scale", {"size": 3}), ("tscale", {}), ("scale", {"size": 4}), ("scale", {"size": 3})]
    found = get_kernels(wanted, target=TARGET)
    assert [kernel.name for kernel in found] == [name for name, _ in wanted]
    assert [kernel.manifest.spec.get("size") for kernel in found] == [3, None, 4, 3]
    assert found[0].key == found[3].key
    assert all(get_kernel(name, target=TARGET, **spec).origin == "memo" for name, spec in wanted)
    assert {kernel.origin for kernel in get_kernels(wanted, target=TARGET)} == {"memo"}
    with contextlib.closing(Connection(load_settings())) as connection:
        before = connection.call("GET", protocol.STATUS)["counters"]["requests"]
        client.forget()
        assert {kernel.origin for kernel in get_kernels(wanted, target=TARGET)} == {"disk"}
        assert connection.call("GET", protocol.STATUS)["counters"]["requests"] - before == len(wanted)
    with pytest.raises(InvalidSpec):
        get_kernels([("scale", {"size": 4}), ("scale", {"size": 3.0})], target=TARGET)  # 3.0 and 3 are one key of a dictionary


def test_get_kernels_raises_the_first_error_and_builds_the_rest(kernels: Path):
    write_cuda(kernels / "scale")
    write_cuda(kernels / "bad", toml=CUDA_TOML.replace('"scale"', '"bad"').replace("scale<", "bad<"), source="nonsense")
    with pytest.raises(CompileFailed):
        get_kernels([("scale", {}), ("bad", {})], target=TARGET)
    assert again().origin == "disk"


@pytest.mark.parametrize(
    ("name", "target", "spec", "error", "named"),
    [
        ("scael", TARGET, {}, UnknownKernel, "scale"),
        ("scale", TARGET, {"size": 0}, InvalidSpec, "1 to 4096"),
        ("scale", TARGET, {"sise": 8}, InvalidSpec, "size"),
        ("scale", "sm_75", {}, UnsupportedTarget, "sm_80"),
        ("scale", "gfx942", {}, UnsupportedTarget, "CUDA"),
        ("scale", "volta", {}, UnsupportedTarget, "cuda:sm_NN"),
    ],
)
def test_a_wrong_wish_is_refused_before_a_daemon_is_asked(
    kernels: Path, name: str, target: str, spec: dict[str, Any], error: type[KserveError], named: str
):
    write_cuda(kernels / "scale")
    with pytest.raises(error, match=named):
        get_kernel(name, target=target, **spec)
    assert daemon_pid(kernels.parent) is None


def test_a_definition_that_cannot_be_read_names_file_and_field(kernels: Path):
    write_cuda(kernels / "scale", toml=CUDA_TOML.replace('language = "cuda"', 'language = "opencl"'))
    with pytest.raises(InvalidDefinition, match=r"kernel\.toml.*language.*opencl"):
        get_kernel("scale", target=TARGET)


def test_a_daemon_that_was_killed_between_two_calls(kernels: Path):
    write_cuda(kernels / "scale")
    root = kernels.parent
    get_kernel("scale", target=TARGET)
    before = daemon_pid(root)
    os.kill(before, signal.SIGKILL)
    assert get_kernel("scale", target=TARGET, size=9).origin == "built"
    assert daemon_pid(root) != before


FORK = """
import os, sys, threading, time
from kserve import get_kernel
first = get_kernel("scale", target="sm_90")
if sys.argv[1] == "busy":
    threading.Thread(target=lambda: get_kernel("slow", target="sm_90"), daemon=True).start()
    time.sleep(0.5)
pid = os.fork()
if pid == 0:
    memo, other = get_kernel("scale", target="sm_90"), get_kernel("scale", target="sm_90", size=9)
    print(memo.origin, other.origin, flush=True)
    os._exit(0)
ended, until = 0, time.monotonic() + 15
while not ended and time.monotonic() < until:
    ended, status = os.waitpid(pid, os.WNOHANG)
    time.sleep(0.01)
if not ended:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    print("hung", flush=True)
elif sys.argv[1] == "idle":
    print(get_kernel("scale", target="sm_90", size=10).origin, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_a_forked_child_has_a_connection_of_its_own(kernels: Path, parent: str):
    """`busy`: another thread of the parent waits for a build while it forks."""
    write_cuda(kernels / "scale")
    write_slow(kernels / "slow")
    expected = ["memo", "built"] + (["built"] if parent == "idle" else [])
    assert python(FORK, parent).stdout.split() == expected


THREADS = """
from concurrent.futures import ThreadPoolExecutor
from kserve import get_kernel
with ThreadPoolExecutor(16) as pool:
    found = list(pool.map(lambda i: get_kernel("scale", target="sm_90", size=1 + i % 4), range(64)))
print(len({kernel.key for kernel in found}))
"""


def test_threads(kernels: Path):
    write_cuda(kernels / "scale")
    assert python(THREADS).stdout == "4\n"
    assert len(builds()) == 8


def test_a_store_the_client_cannot_read_is_served_by_the_daemon(kernels: Path, monkeypatch: pytest.MonkeyPatch):
    write_cuda(kernels / "scale")
    first = again()
    client.forget()
    local().places = ()
    assert get_kernel("scale", target=TARGET).digest == first.digest
