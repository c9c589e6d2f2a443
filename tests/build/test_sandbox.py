"""The closed world: what a build cannot read, what it still can, and what happens where the kernel does not enforce it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import get_kernel
from kserve.build.sandbox import landlock_version
from kserve.build.worker_handle import Environment
from kserve.errors import CompileFailed
from kserve.toolchain.base import Job, JobArgument
from tests.support.daemon import Daemon, ask, daemon, place, variables
from tests.support.definitions import CUDA_SOURCE, TRITON_SOURCE, TRITON_TOML, write_cuda, write_triton
from tests.support.jobs import pool, staging
from tests.support.processes import REPOSITORY, kserve, python

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock"),
]
SITE = Path(sysconfig.get_path("purelib"))
BUILT_IN = ["fused_norm_residual", "realspace_fwd", "realspace_bwd"]


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with place() as root, daemon(root) as found:
        yield found


@pytest.fixture
def served(running: Daemon, own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One daemon for this file; each case has a kernel folder of its own."""
    for name, value in variables(running.root, KSERVE_PATH=str(own_place / "kernels")).items():
        monkeypatch.setenv(name, value)
    return running


def cuda(own_place: Path, before: str = "", *, body: str = "", **more: str) -> Any:
    source = before + CUDA_SOURCE.replace("int i =", body + "int i =")
    write_cuda(own_place / "kernels" / "case", source=source, **more)
    return get_kernel("scale", target="sm_90")


def triton(own_place: Path, before: str = "", *, source: str = TRITON_SOURCE, target: str = "sm_90", **more: str) -> Any:
    write_triton(own_place / "kernels" / "case", source="import triton\nos = triton.knobs.os\n" + before + source, **more)
    return get_kernel("tscale", target=target)


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#define OUTSIDE 1\n")
    return path


# Files this user can read and no build may.
OUTSIDE: dict[str, Callable[[Path], Path]] = {
    "a temporary file": lambda root: written(root / "outside.cuh"),
    "a file of its own folder": lambda root: written(root / "kernels" / "case" / "undeclared.cuh"),
    "a file of another kernel": lambda root: written(root / "kernels" / "other" / "other.cuh"),
    "the checkout": lambda _: REPOSITORY / "cuda_src" / "include" / "kserve" / "access.cuh",
    "kserve itself": lambda _: REPOSITORY / "kserve" / "__init__.py",
    "another package": lambda _: SITE / "numpy" / "__init__.py",
    "the machine": lambda _: Path("/etc/passwd"),
    "a way around": lambda root: Path(f"/proc/self/root{written(root / 'outside.cuh')}"),
}


@pytest.mark.parametrize("where", OUTSIDE.values(), ids=OUTSIDE.keys())
@pytest.mark.parametrize("form", ['"{}"', "<{}>"])
def test_an_include_from_outside_is_refused_and_named(served: Daemon, own_place: Path, where: Any, form: str):
    path = where(own_place)
    path.read_bytes()
    with pytest.raises(CompileFailed) as caught:
        cuda(own_place, f"#include {form.format(path)}\n")
    assert f'kernel.cu(1): catastrophic error: cannot open source file "{path}"' in caught.value.message
    assert "kernel.toml" in str(caught.value.hint)


def test_a_folder_above_is_outside(served: Daemon, own_place: Path):
    """`../..` of the sources is the store's own folder of unfinished writes."""
    written(served.root / "store" / "tmp" / "above.cuh")
    with pytest.raises(CompileFailed, match=r'"\.\./\.\./above\.cuh"'):
        cuda(own_place, '#include "../../above.cuh"\n')


def test_a_source_cannot_ask_whether_a_file_is_there(served: Daemon, own_place: Path):
    """Its answer would be an input that no key has."""
    path = written(own_place / "outside.cuh")
    cuda(own_place, f'#if __has_include("{path}")\n#error seen\n#endif\n')


@pytest.mark.parametrize("directive", [".incbin", ".include"])
def test_the_assembler_reads_nothing_either(served: Daemon, own_place: Path, directive: str):
    path = written(own_place / "outside.cuh")
    with pytest.raises(CompileFailed, match=rf"\{directive}"):
        cuda(own_place, body=f'asm volatile("{directive} \\"{path}\\";");')


READS = {
    "a file": ("open('{path}').read()", "{path}"),
    "a file that is written": ("open('{path}', 'w')", "{path}"),
    "a new file": ("open('{path}.new', 'w')", "{path}.new"),
    "a folder": ("os.listdir('{home}')", "{home}"),
    "a file of the machine": ("open('/etc/passwd').read()", "/etc/passwd"),
    "the process table": ("os.listdir('/proc')", "/proc"),
    "a link": ("os.symlink('{path}', 'link')", "{path}"),
    "a program": ("triton.backends.nvidia.compiler.subprocess.run(['/bin/true'])", "/bin/true"),
}


@pytest.mark.parametrize(("statement", "named"), READS.values(), ids=READS.keys())
def test_what_a_triton_file_opens_is_refused_and_named(served: Daemon, own_place: Path, statement: str, named: str):
    path = written(own_place / "outside.cuh")
    with pytest.raises(CompileFailed) as caught:
        triton(own_place, statement.format(path=path, home=Path.home()) + "\n")
    assert "kernel.py cannot be imported: PermissionError" in caught.value.message
    assert f"'{named.format(path=path, home=Path.home())}'" in caught.value.message
    assert "kernel.toml" in str(caught.value.hint)
    assert path.read_text() == "#define OUTSIDE 1\n"


def test_an_outside_file_has_no_other_name_inside(served: Daemon, own_place: Path):
    with pytest.raises(CompileFailed, match=r"OSError|PermissionError"):
        triton(own_place, f"os.link('{written(own_place / 'outside.cuh')}', 'inside')\n")


def test_what_is_opened_while_triton_compiles_is_refused_too(served: Daemon, own_place: Path):
    path = written(own_place / "outside.cuh")
    look = f"\n\n@triton.constexpr_function\ndef look():\n    return len(open('{path}').read())\n"
    source = TRITON_SOURCE.replace("    at =", "    tl.static_assert(look() > 0)\n    at =") + look
    with pytest.raises(CompileFailed, match=f"'{path}'") as caught:
        triton(own_place, source=source)
    assert "kernel.toml" in str(caught.value.hint)


def test_home_is_a_folder_of_the_build(served: Daemon, own_place: Path):
    """What a library keeps under HOME is fresh for each build."""
    check = "home = os.path.expanduser('~')\nassert os.listdir(home) == [], home\nopen(home + '/kept', 'w').close()\n"
    for comment in ("# once\n", "# again\n"):
        triton(own_place, check + comment)


def test_a_declared_file_can_be_read(served: Daemon, own_place: Path):
    toml = TRITON_TOML.replace('["kernel.py"]', '["kernel.py", "table.txt"]')
    triton(own_place, "assert open('table.txt').read() == '1 2 3'\n", toml=toml, table__txt="1 2 3")


def test_a_build_has_no_network_and_no_one_to_signal(served: Daemon, own_place: Path):
    if landlock_version() < 6:
        pytest.skip(f"this kernel has Landlock {landlock_version()}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"__import__('socket').create_connection({server.getsockname()})\n"
        for statement in (connect, "os.kill(os.getppid(), 0)\n"):
            with pytest.raises(CompileFailed, match="PermissionError"):
                triton(own_place, statement)


def test_the_entry_says_that_its_world_was_closed(served: Daemon, own_place: Path):
    kernels = [cuda(own_place), triton(own_place), triton(own_place, target="gfx942")]
    assert [kernel.manifest.closed_world for kernel in kernels] == [True] * 3
    assert kernels[0].generic.closed_world
    for kernel in kernels:
        shown = kserve("cache", "show", kernel.key)
        assert "closed" in shown.stdout.split("world", 1)[1].split("\n")[0]


# Sixteen layers are the most: the kernel refuses a job its own. Each must allow moving files, which a layer refuses unasked.
FULL = """
import os, struct, sys
from kserve.build import sandbox
for _ in range(16):
    moving = sandbox._REFER
    ruleset = sandbox._call(sandbox._CREATE_RULESET, struct.pack("=Q", moving), 8)
    sandbox._call(sandbox._ADD_RULE, ruleset, sandbox._PATH_BENEATH, struct.pack("=Qi", moving, os.open("/", os.O_PATH)))
    sandbox._libc.prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    sandbox._call(sandbox._RESTRICT_SELF, ruleset, 0)
from kserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_where_the_kernel_refuses_the_build_is_open_says_so_and_has_the_same_bytes(running: Daemon):
    with place() as root, daemon(root, program=("-c", FULL)) as other:
        for name in BUILT_IN:
            closed, opened = (variants(found, name) for found in (running, other))
            assert [v["closed_world"] for v in closed] == [True] * len(closed)
            assert [v["closed_world"] for v in opened] == [False] * len(opened)
            assert [(v["key"], v["digest"]) for v in opened] == [(v["key"], v["digest"]) for v in closed]
        log = other.call("GET", f"/v1/artifacts/{opened[0]['key']}")["attachments"]["log"]
        assert "this build's world is open: Landlock: Argument list too long" in log


def variants(found: Daemon, name: str) -> list[dict[str, Any]]:
    with contextlib.closing(found.connection()) as connection:
        return [variant["manifest"] for variant in ask(connection, found.settings, name)["variants"]]


# In a child of its own: a restriction is for life.
LOOK = """
import json, os, socket, sys, time
from pathlib import Path
from kserve.build.sandbox import World
version, root, port = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
own = root / "own"
world = World([], version=version)
began = time.perf_counter()
entered = world.enter(own, root / "sources")
seconds = time.perf_counter() - began
def can(act):
    try:
        act()
    except OSError as error:
        return False
    return True
found = {
    "entered": entered,
    "read": can((root / "file").read_bytes),
    "list": can(lambda: os.listdir(root)),
    "cut": can(lambda: os.truncate(root / "cut", 0)),
    "write": can((root / "new").touch),
    "read a source": can((root / "sources" / "kernel.cu").read_bytes),
    "write to a source": can(lambda: (root / "sources" / "kernel.cu").write_text("x")),
    "add a source": can((root / "sources" / "new").touch),
    "connect": can(lambda: socket.create_connection(("127.0.0.1", port))),
    "signal": can(lambda: os.kill(os.getppid(), 0)),
    "own": can(lambda: ((own / "b").mkdir(), (own / "a").write_text("1"), (own / "a").rename(own / "b" / "a"))),
    "null": can(lambda: Path(os.devnull).write_text("x")),
    "import": can(lambda: __import__("wsgiref.handlers")),
}
print("\\n" + json.dumps([found, seconds]))
"""


def look(own_place: Path, version: int) -> tuple[dict[str, bool], float]:
    """What a process can do after it entered a world with that interface, and how long entering took."""
    for folder in ("own", "sources"):
        (own_place / folder).mkdir()
    for name in ("file", "cut", "sources/kernel.cu"):
        (own_place / name).write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        found, seconds = json.loads(
            python(LOOK, str(version), str(own_place), str(server.getsockname()[1])).stdout.split("\n")[-2]
        )
    return found, seconds


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 5, 6, 7])
def test_each_version_of_the_kernel_refuses_what_it_knows(own_place: Path, version: int):
    if version > landlock_version():
        pytest.skip(f"this kernel has Landlock {landlock_version()}")
    found, _ = look(own_place, version)
    closed = version >= 2
    assert found == {
        "entered": closed,
        "read": not closed,
        "list": not closed,
        "cut": version < 3,
        "write": not closed,
        "read a source": True,
        "write to a source": not closed,
        "add a source": not closed,
        "connect": version < 4,
        "signal": version < 6,
        "own": True,
        "null": True,
        "import": True,
    }


def test_entering_costs_little(own_place: Path):
    """A millisecond or two; the bound is what a busy machine may add."""
    _, seconds = look(own_place, landlock_version())
    assert seconds < 0.1


def farm(source: Path, target: Path) -> Path:
    """The folder again, made of links to each of its files, as some installers do it."""
    shutil.copytree(source, target, copy_function=lambda real, link: Path(link).symlink_to(real))
    return target


def test_a_compiler_made_of_links_in_a_folder_of_the_users(own_place: Path):
    """`python_path` leads to another Triton, and its files to a third place."""
    farm(SITE / "triton", own_place / "packages" / "triton")
    arguments = tuple(JobArgument(name, "pointer", "float32") for name in ("x", "out"))
    arguments += (JobArgument("n", "i32", "int32", 4), JobArgument("factor", "f32", "float32", 4))
    job = Job("triton", "cuda:sm_90a", "kernel.py", "tscale", (*arguments, JobArgument("BLOCK", "constexpr", value=128)), {})
    where = "import triton\nprint(triton.__file__)\n"

    async def body() -> None:
        async with pool(own_place) as held:
            environment = Environment(sys.executable, (str(own_place / "packages"),))
            found = staging(own_place, {"kernel.py": (where + TRITON_SOURCE).encode()})
            built = await held.run(job, environment, found, on_start=lambda: None)
            assert built["closed_world"]
            assert str(own_place / "packages" / "triton" / "__init__.py") in found.log()

    asyncio.run(body())


def test_a_world_that_cannot_be_prepared_is_open(own_place: Path):
    """Out of descriptors: builds go on, and say so."""
    code = """
import resource, sys
from pathlib import Path
from kserve.build.sandbox import World
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
world = World([])
Path(sys.executable).open().close()  # what it had opened is closed again
print(world.enter(Path(sys.argv[1]), Path(sys.argv[1])))
"""
    assert python(code, str(own_place)).stdout.splitlines() == [
        "this build's world is open: Landlock: Too many open files",
        "False",
    ]
