"""The door of `torch.utils.cpp_extension`: what torch's own tests of its loader ask for, and what its users met."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import client
from kserve.client import extension
from kserve.client.report import report
from kserve.doors.cpp_extension import load, load_inline
from kserve.errors import BuildError, CompileFailed, RequestError
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.extensions import CUDA_SOURCE, module
from tests.support.processes import compilers_of, wait_for

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
def sources(running: Daemon, own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One daemon for this file; each case has a folder of its own."""
    for name, value in variables(running.root).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    client.forget()
    folder = own_place / "sources"
    folder.mkdir()
    return folder


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def last() -> Any:
    """The line of this process's report about the last load: its origin, why the files did not do, why it was built."""
    return report().calls[-1].kernels[0]


def again(call: Callable[[], Any]) -> Any:
    """The call as a new process would make it."""
    client.forget()
    return call()


def settle() -> None:
    """Until files written now have stamps that are certain."""
    until = time.time_ns() + 60_000_000
    wait_for(lambda: time.time_ns() > until)


def test_one_file_is_built_once_and_read_from_the_store_afterwards(sources: Path):
    source = written(sources / "one.cpp", module("41 + 1"))
    found = load("one", source)
    assert (found.answer(), found.answer.__doc__, found.__name__) == (42, "what it is", "one")
    assert last().origin == "built"
    assert again(lambda: load("one", [str(source)])) is found
    assert last().origin == "disk"


def test_an_edit_gives_a_module_of_a_new_name_beside_the_old_one_and_a_revert_the_old_one(sources: Path):
    source = written(sources / "edited.cpp", module("1"))
    first = load("edited", source)
    written(source, module("2"))
    second = load("edited", source)
    assert (first.answer(), second.answer()) == (1, 2)
    assert (first.__name__, second.__name__) == ("edited", "edited_v1")
    assert "source edited.cpp changed" in last().reason
    written(source, module("1"))
    assert load("edited", source) is first


INCLUDES = {
    "by its name in quotes": ('#include "a/first.h"\n', "a/first.h"),
    "by its name in brackets": ("#include <b/first.h>\n", "b/first.h"),
    "through a macro": ('#define WHICH "a/first.h"\n#include WHICH\n', "a/first.h"),
}


@pytest.mark.parametrize(("directive", "where"), INCLUDES.values(), ids=INCLUDES.keys())
def test_a_header_three_includes_deep_is_noticed_named_and_its_revert_hits(sources: Path, directive: str, where: str):
    source = written(sources / "src" / "deep.cpp", directive + module("DEEP"))
    base = sources / ("src" if where.startswith("a/") else "inc")
    written(base / where, '#include "second.h"\n')
    written(base / Path(where).parent / "second.h", '#include "third.h"\n')
    third = written(base / Path(where).parent / "third.h", "#define DEEP 3\n")

    def call() -> Any:
        return again(lambda: load("deep", source, extra_include_paths=[str(sources / "inc")]))

    first = call()
    settle()
    written(third, "#define DEEP 33\n")
    assert call().answer() == 33
    assert str(third) in last().why
    assert last().reason.endswith("third.h changed")
    assert ";" not in last().reason
    written(third, "#define DEEP 3\n")
    assert call() is first
    assert last().origin == "disk"


def test_a_header_that_is_gone_is_the_compilers_error(sources: Path):
    source = written(sources / "gone.cpp", '#include "gone.h"\n' + module("GONE"))
    header = written(sources / "gone.h", "#define GONE 1\n")
    assert load("gone", source).answer() == 1
    header.unlink()
    with pytest.raises(RuntimeError, match=r"gone\.cpp:1:.*gone\.h: No such file"):
        load("gone", source)


def test_a_header_that_appears_in_front_of_another_is_taken(sources: Path):
    source = written(sources / "front.cpp", "#include <which.h>\n" + module("WHICH"))
    written(sources / "late" / "which.h", "#define WHICH 2\n")
    (sources / "early").mkdir()
    paths = [str(sources / name) for name in ("early", "late")]

    def call() -> Any:
        return again(lambda: load("front", source, extra_include_paths=paths))

    assert call().answer() == 2
    settle()
    written(sources / "early" / "which.h", "#define WHICH 1\n")
    assert call().answer() == 1
    (sources / "early" / "which.h").unlink()
    assert call().answer() == 2


def test_what_lies_beside_a_source_of_a_project_is_found_by_going_up(sources: Path):
    (sources / "pyproject.toml").touch()
    written(sources / "common" / "up.h", "#define UP 7\n")
    source = written(sources / "csrc" / "inner" / "up.cpp", '#include "../../common/up.h"\n' + module("UP"))
    assert load("up", source).answer() == 7


def test_two_checkouts_and_a_moved_file_are_one_build(sources: Path):
    """The key knows neither where a checkout lies nor who works in it."""
    found = []
    for name in ("here", "there/deeper"):
        source = written(sources / name / "moved.cpp", '#include "moved.h"\n' + module("MOVED + sizeof(__FILE__)"))
        written(sources / name / "moved.h", "#define MOVED 100\n")
        found.append(load("moved", source))
    assert found[0] is found[1]
    assert last().origin == "disk"


def test_two_sources_of_one_name_at_once_are_both_right(sources: Path):
    files = [written(sources / str(number) / "same.cpp", module(str(number))) for number in range(4)]
    found = at_once(len(files), lambda number: load("same", files[number]))
    assert [one.answer() for one in found] == [0, 1, 2, 3]


def test_many_loads_of_one_source_at_once_are_one_build(running: Daemon, sources: Path):
    source = written(sources / "crowd.cpp", module("8"))
    found = at_once(8, lambda _: load("crowd", source))
    assert [one.answer() for one in found] == [8] * 8
    built = [one for one in running.call("GET", "/v1/builds")["builds"] if one["name"] == "crowd"]
    assert sorted(one["variant"] for one in built) == ["declared", "unit:crowd.cpp"]


def at_once(n: int, call: Callable[[int], Any]) -> list[Any]:
    """What the call gives in each of so many threads that begin together."""
    found: list[Any] = [None] * n
    together = threading.Barrier(n)

    def work(number: int) -> None:
        together.wait()
        found[number] = call(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return found


def test_several_sources_and_their_options(sources: Path):
    written(sources / "a" / "part.cpp", "int part() { return PART; }\n")
    main = written(sources / "main.cpp", "int part();\n" + module("part() + MAIN"))
    found = load("several", [main, sources / "a" / "part.cpp"], extra_cflags=["-DPART=5 -DMAIN=6", "-O2"])
    assert found.answer() == 11


def test_an_edit_of_one_source_of_several_compiles_one(running: Daemon, sources: Path):
    parts = [written(sources / f"part{n}.cpp", f"int part{n}() {{ return {n}; }}\n") for n in range(3)]
    declared = "".join(f"int part{n}();\n" for n in range(3))
    main = written(sources / "main.cpp", declared + module("part0() + part1() + part2()"))
    assert load("unitwise", [main, *parts]).answer() == 3
    written(parts[1], "int part1() { return 11; }\n")
    assert load("unitwise", [main, *parts]).answer() == 13
    units = [one["variant"] for one in running.call("GET", "/v1/builds")["builds"] if one["name"] == "unitwise"]
    assert units.count("unit:part1.cpp") == 2
    assert len(units) == 2 + 5


def test_a_library_of_the_users_is_linked_and_watched(sources: Path):
    written(sources / "lib" / "far.cpp", "int far() { return 9; }\n")

    def make(value: int) -> None:
        written(sources / "lib" / "far.cpp", f"int far() {{ return {value}; }}\n")
        assert os.system(f"cd {sources}/lib && c++ -fPIC -c far.cpp && ar rcs libfar.a far.o") == 0

    source = written(sources / "near.cpp", "int far();\n" + module("far()"))
    make(9)
    settle()

    def call(*flags: str) -> Any:
        return again(lambda: load("near", source, extra_ldflags=list(flags)))

    assert call(f"-L{sources / 'lib'}", "-lfar").answer() == 9
    assert call(str(sources / "lib" / "libfar.a")).answer() == 9
    make(10)
    settle()
    assert call(f"-L{sources / 'lib'}", "-lfar").answer() == 10
    assert call(str(sources / "lib" / "libfar.a")).answer() == 10


def test_the_log_is_printed_when_it_is_asked_for_and_changes_nothing(sources: Path, capfd: pytest.CaptureFixture[str]):
    source = written(sources / "loud.cpp", "#warning heard\n" + module("1"))
    quiet = load("loud", source)
    assert "heard" not in capfd.readouterr().err
    assert again(lambda: load("loud", source, verbose=True)) is quiet
    assert "#warning heard" in capfd.readouterr().err


def test_a_given_build_directory_gets_the_library(sources: Path):
    source = written(sources / "kept.cpp", module("6"))
    found = load("kept", source, build_directory=str(sources / "out"))
    assert found.answer() == 6
    assert found.__file__ == str(sources / "out" / "kept.so")
    assert [path.name for path in (sources / "out").iterdir()] == ["kept.so"]
    assert again(lambda: load("kept", source)) is found


def test_a_library_that_is_no_module_is_loaded_and_its_path_returned(sources: Path):
    source = written(sources / "plain.cpp", 'extern "C" int plain() { return 5; }\n')
    path = load("plain-library", source, is_python_module=False)
    assert ctypes.CDLL(path).plain() == 5


def test_the_bytes_that_run_are_those_that_were_verified(sources: Path):
    """Nobody can write to them, on no mount is it forbidden to run them, and the store may lose them."""
    path = load("sealed", written(sources / "sealed.cpp", 'extern "C" int sealed() { return 5; }\n'), is_python_module=False)
    with pytest.raises(PermissionError), Path(path).open("r+b") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"with_sycl": True},
        {"extra_sycl_cflags": ["-O2"]},
        {"is_standalone": True, "is_python_module": False},
        {"extra_cflags": ["-o", "/tmp/x"]},
        {"extra_cflags": ["-include", "x.h"]},
        {"extra_cflags": ["-fplugin=x.so"]},
        {"extra_cuda_cflags": ["--keep"]},
        {"extra_ldflags": ["@file"]},
        {"name": "not a name"},
        {"sources": "one.py"},
        {"sources": []},
        {"sources": "missing.cpp"},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_and_named(sources: Path, wrong: dict[str, Any]):
    call = {"name": "refused", "sources": str(written(sources / "refused.cpp", module("1"))), **wrong}
    with pytest.raises(RequestError) as caught:
        load(**call)
    assert str(next(iter(wrong.values()))).strip("[]'").split("'")[0] in str(caught.value) or next(iter(wrong)) in str(
        caught.value
    )


def test_precompiled_headers_are_refused(sources: Path):
    with pytest.raises(RequestError, match="use_pch=True is not supported"):
        load_inline("pch", module("1"), use_pch=True, no_implicit_headers=True)


def test_a_file_that_no_list_shows_is_refused(sources: Path):
    written(sources / "data.bin", "data")
    source = written(sources / "hidden.cpp", f'asm(".incbin \\"{sources}/data.bin\\"");\n' + module("1"))
    with pytest.raises(CompileFailed, match=r"hidden\.cpp: \.incbin reads a file"):
        load("hidden", source)


BINDINGS = """
#include <pybind11/pybind11.h>
int twice(int x) { return 2 * x; }
int thrice(int x) { return 3 * x; }
"""


def test_functions_of_a_text_are_bound_with_their_docstrings(sources: Path):
    functions = {"twice": 'It says "two"\nand means it.', "thrice": "three"}
    options = {"no_implicit_headers": True, "with_pytorch_error_handling": False}
    found = load_inline("bound", BINDINGS, functions=functions, **options)
    assert (found.twice(4), found.thrice(4)) == (8, 12)
    assert 'It says "two"\nand means it.' in found.twice.__doc__
    assert load_inline("bound", [BINDINGS], functions=functions, **options) is found


@pytest.mark.slow
def test_the_common_case_a_text_over_tensors_with_torchs_own_headers(sources: Path):
    """A minute of torch's headers, once."""
    text = (
        'torch::Tensor sin_add(torch::Tensor x, torch::Tensor y) { TORCH_CHECK(x.dim() > 0, "a scalar"); return x.sin() + y; }'
    )
    found = load_inline("tensors", text, functions={"sin_add": "sin(x) + y"})
    x, y = torch.rand(3), torch.rand(3)
    assert torch.equal(found.sin_add(x, y), x.sin() + y)
    assert "sin(x) + y" in found.sin_add.__doc__
    with pytest.raises(RuntimeError, match="a scalar"):
        found.sin_add(torch.tensor(1.0), y)
    assert again(lambda: load_inline("tensors", [text], functions={"sin_add": "sin(x) + y"})) is found
    assert last().origin == "disk"


def test_a_text_edited_again_and_again_is_right_each_time(sources: Path):
    found = [load_inline("reloaded", module(str(number)), no_implicit_headers=True) for number in (1, 2, 3)]
    assert [one.answer() for one in found] == [1, 2, 3]
    assert [one.__name__ for one in found] == ["reloaded", "reloaded_v1", "reloaded_v2"]


def test_an_error_in_a_text_is_the_compilers(sources: Path):
    with pytest.raises(RuntimeError, match=r"main\.cpp:1:.*error"):
        load_inline("broken", "int f() { return nothing; }", no_implicit_headers=True)


@needs_nvcc
def test_device_code_needs_a_list_of_arches_where_there_is_no_device(sources: Path, monkeypatch: pytest.MonkeyPatch):
    source = written(sources / "scale.cu", CUDA_SOURCE)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    path = load("scale_listed", source, is_python_module=False)
    assert ctypes.CDLL(path).scale_on_device is not None
    (manifest,) = [found for found in loaded_manifests() if found["name"] == "scale_listed"]
    assert manifest["target"] == "cuda:sm_80"
    # What is loaded as a module must have code for the device, where there is one.
    own = [".".join(map(str, torch.cuda.get_device_capability()))] if torch.cuda.is_available() else []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", ";".join({"8.0", *own}))
    mixed = [source, written(sources / "mixed.cpp", 'extern "C" int scale_on_device(float*, int, float);\n' + module("1"))]
    assert load("mixed", mixed, extra_cuda_cflags=["-O2", "-lineinfo"]).answer() == 1
    assert load("mixed", mixed, extra_cuda_cflags=["-gencode=arch=compute_90,code=sm_90"]).__name__ == "mixed_v1"


def loaded_manifests() -> list[dict[str, Any]]:
    from kserve.client.connection import Connection
    from kserve.config import load_settings

    with contextlib.closing(Connection(load_settings())) as connection:
        found = connection.call("GET", "/v1/artifacts")["artifacts"]
    return [one for one in found if not one["variant"].startswith("unit:")]


def test_a_package_is_known_by_its_version_and_the_users_files_by_their_bytes(sources: Path):
    site = sources / "site-packages"
    header = written(site / "bigpack" / "include" / "pack.h", "#define PACK 1\n")
    record = written(site / "bigpack-1.0.dist-info" / "RECORD", "bigpack/include/pack.h,sha256=x,1\n")
    source = written(sources / "packed.cpp", "#include <pack.h>\n" + module("PACK"))

    def call() -> Any:
        return again(lambda: load("packed", source, extra_include_paths=[str(header.parent)]))

    first = call()
    settle()
    assert call() is first
    header.write_text("#define PACK 2\n")
    record.parent.rename(site / "bigpack-2.0.dist-info")
    assert call().answer() == 2
    assert "bigpack-1.0" in last().reason
    assert "bigpack-2.0" in last().reason


N_HEADERS = 5000


def test_a_tree_of_thousands_of_headers_is_watched_file_by_file(sources: Path):
    for number in range(N_HEADERS):
        written(sources / "tree" / f"d{number % 50}" / f"h{number}.h", f"#define H{number} {number}\n")
    lines = "".join(f'#include "d{number % 50}/h{number}.h"\n' for number in range(N_HEADERS))
    source = written(sources / "treed.cpp", lines + module(f"H{N_HEADERS - 1}"))

    def call() -> Any:
        return again(lambda: load("treed", source, extra_include_paths=[str(sources / "tree")]))

    first = call()
    call()
    began = time.perf_counter()
    assert call() is first
    seconds = time.perf_counter() - began
    assert last().why == ""
    assert seconds < 1.0  # 0.05 s on a quiet machine: benchmarks/extensions.py has the figure
    settle()
    written(sources / "tree" / f"d{(N_HEADERS - 1) % 50}" / f"h{N_HEADERS - 1}.h", f"#define H{N_HEADERS - 1} 1\n")
    assert call().answer() == 1


SLOW = """
constexpr long slow(long n) {
  long sum = 0;
  for (long i = 0; i < n; ++i) sum += i % 7;
  return sum;
}
#include "pace.h"
static_assert(slow(PACE) >= 0);
"""
ENDLESS = ["-fconstexpr-loop-limit=2147483647", "-fconstexpr-ops-limit=9223372036854775807"]


def test_a_killed_compiler_and_a_killed_daemon_leave_nothing_to_delete(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    """Where a lock file was left behind, the next load hung."""
    source = written(own_place / "slow.cpp", SLOW + module("1"))
    pace = written(own_place / "pace.h", "#define PACE 1000000000000\n")
    outcomes: list[Any] = []

    def begin() -> threading.Thread:
        def work() -> None:
            try:
                outcomes.append(load("slow", source, extra_cflags=ENDLESS).answer())
            except BuildError as error:
                outcomes.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    waiting = begin()
    wait_for(lambda: compilers_of(own_place), what="the compiler to run")
    for pid in compilers_of(own_place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    waiting.join(timeout=60)
    assert isinstance(outcomes.pop(), BuildError)

    waiting = begin()
    wait_for(lambda: compilers_of(own_place), what="the compiler to run again")
    written(pace, "#define PACE 1\n")
    os.kill(int((own_place / "store" / "lock").read_text()), signal.SIGKILL)
    waiting.join(timeout=60)
    assert outcomes == [1]


def test_a_daemon_that_cannot_be_reached_leaves_the_build_to_torch(sources: Path, monkeypatch: pytest.MonkeyPatch):
    if shutil.which("ninja") is None:
        pytest.skip("torch's own loader needs ninja")
    monkeypatch.setenv("KSERVE_RUNTIME_DIR", "/proc/kserve")
    monkeypatch.setenv("KSERVE_STORE", str(sources / "store"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(sources / "torch"))
    source = written(sources / "native.cpp", module("3"))
    with pytest.warns(RuntimeWarning, match="kserve cannot serve native, torch builds it"):
        assert again(lambda: load("native", source)).answer() == 3
    client.forget()


def test_the_kill_switch_leaves_everything_to_torch(sources: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KSERVE_DISABLE", "1")
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda **given: (given["name"], given["sources"]))
    source = str(written(sources / "native.cpp", module("3")))
    assert again(lambda: load("switched", source)) == ("switched", [source])
    client.forget()


def test_a_hung_daemon_is_left_within_a_moment(sources: Path, running: Daemon, monkeypatch: pytest.MonkeyPatch):
    """From the call to the beginning of torch's own build."""
    began: list[float] = []

    def native(*_: Any, **given: Any) -> Any:
        began.append(time.perf_counter())
        return given["name"]

    monkeypatch.setattr("torch.utils.cpp_extension.load", native)
    source = written(sources / "hung.cpp", module("3"))
    os.kill(running.process.pid, signal.SIGSTOP)
    try:
        with pytest.warns(RuntimeWarning, match="hangs"):
            called = time.perf_counter()
            assert again(lambda: load("hung", source)) == "hung"
    finally:
        os.kill(running.process.pid, signal.SIGCONT)
        client.forget()
    assert began[0] - called < 0.8  # 0.16 s on a quiet machine


def test_what_is_loaded_stays_whatever_becomes_of_the_store(sources: Path, running: Daemon):
    found = load("lasting", written(sources / "lasting.cpp", module("4")))
    running.call("POST", "/v1/prune", {"name": "lasting"})
    assert found.answer() == 4
    assert extension.path_of  # the library is a file of this process alone


def test_whether_sources_lie_in_a_project_is_in_no_key(sources: Path):
    found = []
    for name in ("exported", "cloned"):
        source = written(sources / name / "src" / "same.cpp", '#include "../same.h"\n' + module("SAME"))
        written(sources / name / "same.h", "#define SAME 6\n")
        (sources / name / "setup.py").touch()
        found.append(load("projected", source, extra_include_paths=[str(sources / name)] if name == "exported" else None))
    assert found[0].answer() == found[1].answer() == 6
    plain = written(sources / "bare" / "alone.cpp", module("1"))
    first = load("alone", plain)
    (sources / "bare" / "pyproject.toml").touch()
    assert again(lambda: load("alone", plain)) is first
