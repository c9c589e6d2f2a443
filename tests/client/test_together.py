"""Many callers at once, behind a barrier: one build, one error, builds side by side."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, get_kernels, protocol
from kserve.errors import BuildTimeout, CompileFailed
from tests.support.clients import ask_alone, crowd
from tests.support.daemon import Daemon, ask, daemon, variables
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import wait_for
from tests.support.slow_kernel import SOURCE, TOML, write_slow, write_slow_triton

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"
# Compiles of a second or two: long enough for everybody to be there.
SLOW = {"cuda": ("slow", {"depth": 6}), "triton": ("tslow", {"rounds": 40})}
QUICK = {"cuda": ("slow", {"depth": 1}), "triton": ("tslow", {"rounds": 1})}


@pytest.fixture
def root(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place whose kernel folder has the slow kernels, where this process and its children look."""
    write_slow(own_place / "kernels" / "slow")
    write_slow_triton(own_place / "kernels" / "tslow")
    for name, value in variables(own_place).items():
        monkeypatch.setenv(name, value)
    client.forget()
    return own_place


def builds_of(found: Daemon, name: str) -> list[dict[str, Any]]:
    return [build for build in found.call("GET", protocol.BUILDS)["builds"] if build["name"] == name]


def load_toolchain(found: Daemon, language: str) -> None:
    name, spec = QUICK[language]
    with contextlib.closing(found.connection()) as connection:
        assert "variants" in ask(connection, found.settings, name, **spec)


@pytest.mark.parametrize("language", SLOW)
def test_sixteen_who_ask_at_once_share_one_build(root: Path, language: str):
    """None of them waits longer than that build and a second."""
    name, spec = SLOW[language]
    with daemon(root) as found:
        load_toolchain(found, language)
        with crowd(*[(name, spec)] * 16) as clients:
            clients.let_go()
            answers = clients.answers()
        assert len({answer["digest"] for answer in answers}) == 1
        assert sorted(answer["origin"] for answer in answers) == ["built", *["joined"] * 15]
        key = answers[0]["key"]
        (build,) = [build for build in builds_of(found, name) if build["key"] == key]
        assert build["n_joined"] == 15
        assert found.log.count(f"built key={key[:12]}") == 1
        assert max(answer["waited_s"] for answer in answers) <= build["seconds"] + 1.0


def write_eight(folder: Path) -> list[str]:
    """One folder with eight entries of one source, each some tenths of a second of work."""
    head, entry = TOML.split("[[entry]]")
    names = [f"part_{number}" for number in range(8)]
    entries = [entry.replace('"slow"', f'"{name}"').replace("{tag}", str(number)) for number, name in enumerate(names)]
    write_cuda(folder, toml="[[entry]]".join([head, *entries]), source=SOURCE)
    return names


def test_eight_kernels_of_one_folder_build_side_by_side_up_to_the_limit(root: Path):
    names = write_eight(root / "kernels" / "eight")
    with daemon(root, KSERVE_JOBS="4") as found:
        load_toolchain(found, "cuda")
        with crowd(*[(name, {"depth": 4}) for name in names]) as clients:
            clients.let_go()
            seen = []
            while any(process.poll() is None for process in clients.processes):
                status = found.call("GET", protocol.STATUS)
                seen.append((status["n_running"], status["n_queued"]))
            answers = clients.answers()
        assert [answer["origin"] for answer in answers] == ["built"] * 8
        assert len({answer["key"] for answer in answers}) == 8
        assert max(running for running, _ in seen) == 4
        assert (4, 4) in seen, "the other half waits for a place"


def test_a_caller_whose_deadline_is_short_finds_the_build_done_later(root: Path):
    name, spec = SLOW["cuda"]
    with daemon(root) as found:
        load_toolchain(found, "cuda")
        began = time.monotonic()
        with pytest.raises(BuildTimeout) as caught:
            get_kernel(name, target=TARGET, timeout_s=0.2, **spec)
        assert time.monotonic() - began < 1.0
        (running,) = [build for build in builds_of(found, name) if build["id"] == caught.value.facts["build"]]
        assert running["state"] in ("queued", "running")
        with pytest.raises(BuildTimeout) as again:
            get_kernel(name, target=TARGET, timeout_s=0.1, **spec)
        assert again.value.facts["build"] == running["id"], "a retry joins"
        wait_for(
            lambda: found.call("GET", f"{protocol.BUILDS}/{running['id']}")["state"] == "done",
            what="the build to end by itself",
        )
        assert ask_alone(name, spec=spec)["origin"] == "disk", "and later is a hit"
        assert get_kernel(name, target=TARGET, **spec).key == running["key"]
        assert len([build for build in builds_of(found, name) if build["key"] == running["key"]]) == 1


# 2^14 classes before the compiler comes to the error: time for everybody to join.
LATE_ERROR = """
template <int DEPTH, int TAG>
struct Count { static constexpr int value = Count<DEPTH - 1, 2 * TAG>::value + Count<DEPTH - 1, 2 * TAG + 1>::value; };
template <int TAG>
struct Count<0, TAG> { static constexpr int value = 1; };
template <int SIZE>
__global__ void scale(const float* x, float* out, int n, float factor) {
  static_assert(Count<14, 1>::value == 0, "the count is wrong");
}
"""


def test_eight_who_wait_for_a_failing_build_get_the_compilers_text(root: Path):
    write_cuda(root / "kernels" / "scale", toml=CUDA_TOML.replace(", align = 16", ""), source=LATE_ERROR)
    line = LATE_ERROR[: LATE_ERROR.index("static_assert")].count("\n") + 1
    with daemon(root) as found:
        load_toolchain(found, "cuda")
        with crowd(*[("scale", {})] * 8) as clients:
            clients.let_go()
            wait_for(lambda: any(build["n_joined"] == 7 for build in builds_of(found, "scale")), what="all eight to wait")
            answers = clients.answers()
        assert {answer["code"] for answer in answers} == {"compile-failed"}
        for answer in answers:
            assert f"kernel.cu({line})" in answer["text"]
            assert "the count is wrong" in answer["text"]
        assert len(builds_of(found, "scale")) == 1


def test_a_verbose_log_changes_neither_flags_nor_key(root: Path):
    write_cuda(root / "kernels" / "scale")
    with daemon(root, KSERVE_LOG="error"):
        quiet = get_kernel("scale", target=TARGET)
    client.forget()
    with daemon(root, KSERVE_LOG="debug"):
        verbose = ask_alone("scale", KSERVE_LOG="debug")
        other = get_kernel("scale", target=TARGET, size=9)
    assert (verbose["origin"], verbose["key"], verbose["digest"]) == ("disk", quiet.key, quiet.digest)
    for label in ("toolchain.options", "toolchain.files", "function", "target"):
        expected = quiet.manifest.components[label].replace("<8>", "<9>")
        assert other.manifest.components[label] == expected


# Size 9 of it does not compile.
NINE_FAILS = CUDA_SOURCE.replace("int i =", 'static_assert(SIZE != 9, "nine is refused");\n  int i =')


def test_a_failing_key_and_a_good_one_do_not_mask_each_other(root: Path):
    folder = write_cuda(root / "kernels" / "scale", source=NINE_FAILS)
    with daemon(root):
        good = get_kernel("scale", target=TARGET, size=8)
        for _ in range(2):  # the second time the failure is remembered and the good one is warm
            client.forget()
            with pytest.raises(CompileFailed, match="nine is refused"):
                get_kernel("scale", target=TARGET, size=9)
            again = get_kernel("scale", target=TARGET, size=8)
            assert (again.origin, again.digest) == ("disk", good.digest)
            for wanted in ([("scale", {"size": 8}), ("scale", {"size": 9})], [("scale", {"size": 9}), ("scale", {"size": 8})]):
                with pytest.raises(CompileFailed, match="nine is refused"):
                    get_kernels(wanted, target=TARGET)
        (folder / "kernel.cu").write_text(CUDA_SOURCE)
        client.forget()
        fixed = get_kernel("scale", target=TARGET, size=9)
        assert fixed.origin == "built", "at once, while the failure of the old source is still remembered"
