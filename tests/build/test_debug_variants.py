"""Debug variants: other keys, sources that lie where the binary says, and never in the place of the kernel itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import cli, client, get_kernel
from kserve.artifact import DEBUGS
from kserve.client import Kernel
from kserve.errors import CompileFailed, InvalidSpec, LockMismatch, ToolchainMissing
from kserve.key import digest_of
from kserve.lockfile import Lock, Locked, LockedArtifact, read_lock
from kserve.store.debug_sources import DebugSources
from kserve.store.files import FileStore
from kserve.toolchain.disassembler import find_disassembler
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda, write_triton
from tests.support.processes import kserve

pytestmark = pytest.mark.toolchain
HEADER = "__device__ inline float times(float a, float b) {\n  return a * b;\n}\n"
SOURCE = '#include "times.cuh"\n' + CUDA_SOURCE.replace("factor * x[i]", "times(factor, x[i])")
TOML = CUDA_TOML.replace("headers = []", 'headers = ["*.cuh"]')


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with place() as root:
        write_cuda(root / "kernels" / "scale", toml=TOML, source=SOURCE, times__cuh=HEADER)
        write_triton(root / "kernels" / "tscale")
        with daemon(root) as found:
            yield found


@pytest.fixture
def served(running: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One daemon and one pair of warm workers for this file."""
    for name, value in variables(running.root).items():
        monkeypatch.setenv(name, value)
    client.forget()
    return running


def asked(name: str = "scale", **wanted: Any) -> Kernel:
    client.forget()
    return get_kernel(name, target="sm_90", **wanted)


def payload(running: Daemon, kernel: Kernel) -> Path:
    return running.root / "store" / "payload" / kernel.digest[:2] / kernel.digest


def line_table(running: Daemon, kernel: Kernel) -> dict[str, set[int]]:
    """File -> lines, as the disassembler reads them from the binary."""
    try:
        tool = find_disassembler()
    except ToolchainMissing:
        pytest.skip("there is no disassembler here")
    command = [str(tool), "--print-code", "--print-line-info", str(payload(running, kernel))]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    for file, line in re.findall(r'//## File "([^"]+)", line (\d+)', text):
        found.setdefault(file, set()).add(int(line))
    return found


def folder(running: Daemon, kernel: Kernel) -> Path:
    return running.root / "store" / "debug" / kernel.key


@pytest.mark.parametrize("name", ["scale", "tscale"])
@pytest.mark.parametrize("debug", DEBUGS)
def test_the_lines_of_a_debug_variant_lead_to_its_sources(served: Daemon, name: str, debug: str):
    plain, kernel = asked(name), asked(name, debug=debug)
    assert (plain.manifest.debug, kernel.manifest.debug) == ("", debug)
    assert kernel.key != plain.key
    assert kernel.manifest.closed_world == plain.manifest.closed_world
    table = line_table(served, kernel)
    main = folder(served, kernel) / ("kernel.cu" if name == "scale" else "kernel.py")
    assert str(main) in table
    for file, lines in table.items():
        if file.startswith(str(served.root)):  # the compiler's own are its wheel's
            assert max(lines) <= len(Path(file).read_text().splitlines())
    written = (served.root / "kernels" / name / main.name).read_text()
    assert main.read_text() == written


def test_a_header_is_found_where_the_binary_says(served: Daemon):
    kernel = asked(debug="device")
    assert 2 in line_table(served, kernel)[str(folder(served, kernel) / "times.cuh")]


@pytest.mark.parametrize("name", ["scale", "tscale"])
def test_what_is_built_for_everyday_names_no_file(served: Daemon, name: str):
    kernel = asked(name)
    assert line_table(served, kernel) == {}
    assert str(served.root).encode() not in payload(served, kernel).read_bytes()
    assert not folder(served, kernel).exists()
    assert "debug" not in kernel.manifest.components


def test_variants_are_never_served_for_each_other(served: Daemon):
    """Whatever was asked for first, and on whichever road: memo, files, daemon."""
    kernels = {debug: asked(debug=debug) for debug in (*DEBUGS, None)}
    assert len({kernel.key for kernel in kernels.values()}) == 4
    for debug in (None, *DEBUGS, None):
        assert asked(debug=debug).key == kernels[debug].key
    client.forget()
    for debug in ("device", None, "device", "lineinfo", None):  # one process, its memo
        assert get_kernel("scale", target="sm_90", debug=debug).key == kernels[debug].key
    assert asked().origin == "disk"


def test_device_code_is_not_optimised_and_the_sanitizers_asserts(served: Daemon):
    source = CUDA_SOURCE.replace("if (i < n)", "assert(n < 1000); if (i < n)")
    toml = CUDA_TOML.replace('name = "scale"', 'name = "asserting"').replace(
        "[[entry]]", '[options]\nflags = ["-DNDEBUG"]\n[[entry]]'
    )
    write_cuda(served.root / "kernels" / "asserting", toml=toml, source=prefixed(source))
    found = {debug: asked("asserting", debug=debug).manifest for debug in (None, *DEBUGS)}
    assert found["device"].size_bytes > found["lineinfo"].size_bytes > found[None].size_bytes  # type: ignore[index]
    asserts = {debug: b"__assertfail" in payload(served, asked("asserting", debug=debug)).read_bytes() for debug in found}
    assert asserts == {None: False, "lineinfo": False, "device": False, "sanitize": True}


def prefixed(source: str) -> str:
    """NVRTC has assert built in, but for a macro."""
    return (
        "#ifdef NDEBUG\n#define CHECK(x)\n#else\n"
        'extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);\n'
        '#define CHECK(x) ((x) ? (void)0 : __assertfail(#x, "kernel.cu", __LINE__, "scale", 1))\n#endif\n'
    ) + source.replace("assert(", "CHECK(")


def test_a_failed_build_leaves_no_sources(served: Daemon):
    write_cuda(
        served.root / "kernels" / "broken", toml=CUDA_TOML.replace('name = "scale"', 'name = "broken"'), source="no such thing;"
    )
    before = {path.name for path in (served.root / "store" / "debug").glob("*")}
    with pytest.raises(CompileFailed, match=r"kernel\.cu"):
        asked("broken", debug="lineinfo")
    assert {path.name for path in (served.root / "store" / "debug").glob("*")} == before


def test_sources_that_were_changed_or_removed_are_written_again(served: Daemon):
    kernel = asked(debug="lineinfo")
    place = folder(served, kernel)
    for damage in (lambda: shutil.rmtree(place), (place / "kernel.cu").unlink):
        damage()
        again = asked(debug="lineinfo")
        assert (again.key, again.digest, again.origin) == (kernel.key, kernel.digest, "built")
        assert again.manifest.reason == "its sources were removed"
        assert (place / "kernel.cu").read_text() == SOURCE
        assert (place / "kernel.cu").stat().st_mtime == 0, "a line table holds it"
    assert asked(debug="lineinfo").origin == "disk"


def test_sources_go_with_their_artifact(served: Daemon, capsys: pytest.CaptureFixture[str]):
    kernel = asked("tscale", debug="sanitize")
    assert folder(served, kernel).is_dir()
    assert cli.main(["cache", "prune", kernel.key]) == 0
    assert not folder(served, kernel).exists()


def test_a_debug_variant_that_does_not_exist_is_refused(served: Daemon):
    with pytest.raises(InvalidSpec) as caught:
        get_kernel("scale", target="sm_90", debug="fast")
    assert all(debug in caught.value.facts["allowed"] for debug in DEBUGS)


def test_the_command_builds_lists_and_shows_them(served: Daemon, capsys: pytest.CaptureFixture[str]):
    def ran(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    built = json.loads(ran("build", "scale", "--target", "sm_90", "--debug", "lineinfo", "--json"))
    assert (built["debug"], built["key"]) == ("lineinfo", asked(debug="lineinfo").key)
    listed = {row["key"]: row["debug"] for row in json.loads(ran("cache", "ls", "--json"))["artifacts"]}
    assert listed[built["key"]] == "lineinfo"
    assert listed[asked().key] == ""
    assert "declared lineinfo" in ran("cache", "ls")
    assert "lineinfo" in ran("cache", "show", built["key"]).splitlines()[0]
    sass = ran("cache", "show", built["key"], "--sass")
    assert str(folder(served, asked(debug="lineinfo")) / "kernel.cu") in sass


def test_a_lock_has_none(served: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel, plain = asked(debug="lineinfo"), asked()
    for broken in ("broken", "asserting"):
        shutil.rmtree(served.root / "kernels" / broken, ignore_errors=True)
    kserve("cache", "prune", "--name", "asserting")
    lock = tmp_path / "kserve.lock"
    assert kserve("lock", "--all", "--file", str(lock)).returncode == 0
    assert plain.key in read_lock(lock).keys
    assert kernel.key not in read_lock(lock).keys
    monkeypatch.setenv("KSERVE_LOCK", str(lock))
    with pytest.raises(LockMismatch, match="debug"):
        asked(debug="lineinfo")
    assert asked().key == plain.key
    forged = Locked("scale", "sm_90", "cuda:sm_90", {"size": 8}, {}, (LockedArtifact("declared", kernel.key, kernel.digest),))
    Lock(lock, (forged,)).write()
    with pytest.raises(LockMismatch, match="debug"):
        asked(size=8)


def test_a_rebuild_passes_them_over_and_says_why(served: Daemon):
    key = asked(debug="lineinfo").key
    found = served.call("POST", "/v1/verify?rebuild=1", wait_s=120)
    assert found["damaged"] == found["differing"] == found["failed"] == []
    (skipped,) = [row for row in found["skipped"] if row["key"] == key]
    assert "debug" in skipped["reason"]


def test_another_store_has_other_keys_and_the_same_one_the_same_bytes(monkeypatch: pytest.MonkeyPatch):
    """The bytes name a place, so it is in the key."""
    found = []
    for _ in range(2):
        with place() as root, daemon(root):
            for name, value in variables(root).items():
                monkeypatch.setenv(name, value)
            write_cuda(root / "kernels" / "scale", toml=TOML, source=SOURCE, times__cuh=HEADER)
            kernel = asked(debug="device")
            assert str(root).encode() in (root / "store/payload" / kernel.digest[:2] / kernel.digest).read_bytes()
            cli.main(["cache", "prune", "--all"])
            again = asked(debug="device")
            assert (again.origin, again.key, again.digest) == ("built", kernel.key, kernel.digest)
            found.append(kernel.key)
    assert found[0] != found[1]


def test_a_start_sweeps_sources_without_an_artifact(own_place: Path):
    files = FileStore(own_place / "store", writable=True)
    sources = DebugSources(files)
    kept, gone = digest_of(b"kept"), digest_of(b"gone")
    for key in (kept, gone):
        sources.write(key, {"a/kernel.cu": b"text"})
    (sources.root / "stray").mkdir()
    files.put(f"manifest/{kept}", b"{}")
    sources.sweep()
    assert [path.name for path in sources.root.iterdir()] == [kept]
    assert sources.holds(kept, {"a/kernel.cu": digest_of(b"text")})
    assert not sources.holds(kept, {"a/kernel.cu": digest_of(b"other")})
    assert not sources.holds(gone, {"a/kernel.cu": digest_of(b"text")})
