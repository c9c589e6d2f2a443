"""What lets the daemon down, a disk, a limit, a clock: clients get their kernels, status says so, it heals by itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from kserve.errors import BuildError, BuildTimeout, CompileFailed, KserveError, ToolchainMissing
from tests.support.clients import ASK
from tests.support.daemon import Daemon, assert_sound, daemon, variables
from tests.support.definitions import write_cuda, write_triton
from tests.support.disks import FAULTS, Disk, small_disk
from tests.support.processes import REPOSITORY, daemon_pid, kserve, wait_for
from tests.support.users import SOMEBODY, give, interpreter, run_as

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]
TARGET = "cuda:sm_90"


def again(name: str = "scale", **spec: Any) -> Any:
    """get_kernel as if this process had never asked."""
    client.forget()
    return get_kernel(name, target=TARGET, **spec)


@pytest.fixture
def root(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a kernel of each language and a directory for temporary files; no daemon starts by itself."""
    write_cuda(own_place / "kernels" / "scale")
    write_triton(own_place / "kernels" / "tscale")
    (own_place / "temporary").mkdir()
    return own_place


@pytest.fixture
def disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with small_disk(root / "disk") as found:
        for name, value in variables(root, KSERVE_STORE=str(found.store)).items():
            monkeypatch.setenv(name, value)
        client.forget()
        yield found


def on(disk: Disk) -> dict[str, str]:
    """What a daemon over that disk is started with."""
    return {"KSERVE_STORE": str(disk.store), "TMPDIR": str(disk.path.parent / "temporary")}


def degraded(found: Daemon) -> str:
    state: str = found.call("GET", protocol.STATUS)["store"]["degraded"]
    return state


def assert_serves_without_the_disk(found: Daemon, *, first: int) -> None:
    """New kernels of both languages are built and found again; who asks for the state is told."""
    built = again(size=first)
    assert built.origin == "built"
    assert (again(size=first).origin, again(size=first).digest) == ("disk", built.digest)
    assert again("tscale", block=16 * first).origin == "built"
    assert degraded(found)
    state = next(line for line in kserve("status").stdout.splitlines() if line.startswith("state "))
    assert str(found.settings.store) in state, "it names the place that refuses"


def assert_healed(found: Daemon, *, size: int) -> None:
    assert again(size=size).origin == "built"
    wait_for(lambda: degraded(found) == "", what="the disk to be used again")
    assert "sound" in kserve("status").stdout
    assert found.process.poll() is None
    assert_sound(found.settings.store)
    assert list((found.root / "temporary").rglob("job-*")) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_lets_a_running_daemon_down(root: Path, disk: Disk, fault: str):
    with daemon(root, **on(disk)) as found:
        warm = again(size=1)
        FAULTS[fault](disk)
        assert (again(size=1).origin, again(size=1).digest) == ("disk", warm.digest)
        assert_serves_without_the_disk(found, first=2)
        disk.mend()
        assert_healed(found, size=3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_lets_a_daemon_down_before_it_starts(root: Path, disk: Disk, fault: str):
    with daemon(root, **on(disk)):
        warm = again(size=1)
    FAULTS[fault](disk)
    with daemon(root, **on(disk)) as found:
        assert (again(size=1).origin, again(size=1).digest) == ("disk", warm.digest)
        assert_serves_without_the_disk(found, first=2)
        second = kserve("up", **on(disk))
        assert (second.returncode, str(found.process.pid) in second.stderr or fault == "read-only") == (6, True)
        disk.mend()
        assert_healed(found, size=3)
    with daemon(root, **on(disk)):
        assert (again(size=1).origin, again(size=3).origin) == ("disk", "disk")


@pytest.mark.parametrize("fault", ["full", "out of inodes"])
def test_a_new_store_on_a_full_disk(root: Path, disk: Disk, fault: str):
    """It becomes a store when there is room."""
    disk.store.mkdir(mode=0o700)
    FAULTS[fault](disk)
    with daemon(root, **on(disk)) as found:
        assert_serves_without_the_disk(found, first=2)
        disk.mend()
        assert_healed(found, size=3)
    with daemon(root, **on(disk)):
        assert again(size=3).origin == "disk"


def test_a_new_store_on_a_read_only_disk_is_refused_with_what_to_set(root: Path, disk: Disk):
    disk.store.mkdir(mode=0o700)
    disk.make_read_only()
    refused = kserve("up", **on(disk))
    assert refused.returncode == 5
    assert "KSERVE_STORE" in refused.stderr
    assert "Read-only" in refused.stderr


def test_a_store_that_is_removed_costs_no_client_its_kernel(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The daemon serves on until it notices; the next one makes a new store."""
    for name, value in variables(root).items():
        monkeypatch.setenv(name, value)
    with daemon(root) as found:
        again(size=1)
        shutil.rmtree(root / "store")
        sizes = itertools.count(2)
        wait_for(lambda: again(size=next(sizes)) and found.process.poll() is not None, what="the daemon to end")
    assert again(size=1).origin == "built"
    assert daemon_pid(root) not in (None, found.process.pid)
    assert_sound(root / "store")


@pytest.fixture
def theirs(root: Path, other_users: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon of a user for whom permissions and limits hold, asked by this process."""
    give(root, SOMEBODY)
    monkeypatch.setattr(sys, "executable", interpreter())  # whose compilers are asked for
    # Without a compiler loaded ahead: what a first build meets is what is tested.
    trusted = {"KSERVE_TRUSTED_UIDS": f"0,{SOMEBODY}", "TMPDIR": str(root / "temporary"), "KSERVE_PREWARM": "0"}
    for name, value in variables(root, **trusted).items():
        monkeypatch.setenv(name, value)
    with daemon(root, uid=SOMEBODY, python=interpreter() or "", **trusted) as found:
        yield found


def test_permissions_that_are_lost(theirs: Daemon):
    """A store its own user may not write to any more: everything but the records themselves can be read."""
    store = theirs.settings.store
    warm = again(size=1)
    folders = [store, *(path for path in store.rglob("*") if path.is_dir() and "tmp" not in path.parts)]
    modes = {folder: folder.stat().st_mode for folder in [*folders, store / "tmp"]}
    for folder in modes:
        folder.chmod(0o500)
    assert (again(size=1).origin, again(size=1).digest) == ("disk", warm.digest)
    assert_serves_without_the_disk(theirs, first=2)
    for folder, mode in modes.items():
        folder.chmod(mode)
    assert_healed(theirs, size=3)


def worker_of(found: Daemon, language: str = "cuda") -> int:
    workers = found.call("GET", protocol.STATUS)["workers"]
    (pid,) = [worker["pid"] for worker in workers if worker["language"] == language]
    return int(pid)


@pytest.mark.parametrize("kind", ["payload", "source", "manifest"])
def test_a_folder_of_the_store_that_cannot_be_read_any_more(theirs: Daemon, kind: str):
    again(size=1)
    folders = list((theirs.settings.store / kind).glob("??"))
    for folder in folders:
        folder.chmod(0)
    assert theirs.call("GET", protocol.STATUS)["pid"] == theirs.process.pid
    assert kserve("status").returncode == 0
    assert kserve("cache", "ls").returncode == 0
    assert again(size=2).origin == "built"
    for folder in folders:
        folder.chmod(0o700)
    assert again(size=3).origin == "built"
    wait_for(lambda: degraded(theirs) == "", what="the disk to be used again")


LIMIT = """
import resource, sys
pid, most = int(sys.argv[1]), int(sys.argv[2])
_, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
resource.prlimit(pid, resource.RLIMIT_NPROC, (most, hard))
"""


def limit_processes(pid: int, most: int) -> None:
    """As its own user: root may lack the right."""
    done = run_as(SOMEBODY, LIMIT, str(pid), str(most))
    assert done.returncode == 0, done.stderr


def n_tasks(uid: int) -> int:
    """Threads of all processes of that user: what RLIMIT_NPROC counts."""
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                found += len(list((entry / "task").iterdir()))
    return found


def assert_names_the_limit(found: Daemon, name: str, limit: str, **spec: Any) -> None:
    """The build fails with that limit in the error; whatever is warm is served."""
    with pytest.raises(BuildError) as caught:
        again(name, **spec)
    assert not isinstance(caught.value, CompileFailed | ToolchainMissing), "it says nothing about source or compiler"
    assert limit in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert found.call("GET", protocol.STATUS)["pid"] == found.process.pid


def test_no_process_for_a_compile(theirs: Daemon):
    again(size=1)
    worker = worker_of(theirs)
    limit_processes(worker, 1)
    assert_names_the_limit(theirs, "scale", "RLIMIT_NPROC 1", size=2)
    assert again(size=1).origin == "disk"
    limit_processes(worker, 1000)
    assert again(size=2).origin == "built", "the failure is not remembered"
    assert worker_of(theirs) == worker


def test_no_process_for_the_assembler_of_a_compile(theirs: Daemon):
    again("tscale")
    worker = worker_of(theirs, "triton")
    limit_processes(worker, n_tasks(SOMEBODY) + 1)
    assert_names_the_limit(theirs, "tscale", "RLIMIT_NPROC", block=256)
    limit_processes(worker, 1000)
    assert again("tscale", block=256).origin == "built"
    assert worker_of(theirs, "triton") == worker


def test_no_process_for_a_worker(theirs: Daemon):
    limit_processes(theirs.process.pid, 1)
    for _ in range(2):
        assert_names_the_limit(theirs, "scale", "RLIMIT_NPROC 1", size=1)
    assert kserve("status").returncode == 0
    limit_processes(theirs.process.pid, 1000)
    assert again(size=1).origin == "built"


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group for processes; skips where none can be made."""
    for parent in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        group = parent / f"kt-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / "pids.max").exists():
                yield group
                for pid in (group / "cgroup.procs").read_text().split():
                    (parent / "cgroup.procs").write_text(pid)
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no control group for processes can be made here")


def test_the_control_groups_limit_is_reached(theirs: Daemon, control_group: Path):
    """The limit of a container: threads and processes of the daemon and all its compilers."""
    again(size=1)
    for pid in (theirs.process.pid, worker_of(theirs)):
        (control_group / "cgroup.procs").write_text(str(pid))
    (control_group / "pids.max").write_text((control_group / "pids.current").read_text())
    limit = (control_group / "pids.max").read_text().strip()
    assert_names_the_limit(theirs, "scale", f"pids.max {limit}", size=2)
    assert_names_the_limit(theirs, "tscale", f"pids.max {limit}")
    assert again(size=1).origin == "disk"
    assert kserve("status").returncode == 0
    (control_group / "pids.max").write_text("max")
    assert again(size=2).origin == "built"
    assert again("tscale").origin == "built"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_refuses_the_runtime_directory(root: Path, disk: Disk, fault: str, monkeypatch: pytest.MonkeyPatch):
    """Without room for a log the daemon runs; where no socket can be made none can, and the error says what to set."""
    for name, value in variables(root, KSERVE_RUNTIME_DIR=str(disk.path / "run")).items():
        monkeypatch.setenv(name, value)
    again(size=1)
    os.kill(daemon_pid(root) or 0, signal.SIGKILL)
    wait_for(lambda: daemon_pid(root) is None, what="its end")
    FAULTS[fault](disk)
    if fault != "read-only":
        assert again(size=2).origin == "built"
    else:
        with pytest.raises(KserveError) as caught:
            again(size=2)
        assert "KSERVE_RUNTIME_DIR" in str(caught.value)
        assert str(disk.path) in str(caught.value)
        refused = kserve("up")
        assert (refused.returncode, "Traceback" in refused.stderr) == (5, False)
        assert "KSERVE_RUNTIME_DIR" in refused.stderr
    disk.mend()
    assert again(size=3).origin == "built"


FEW_PROCESSES = "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n" + ASK


@pytest.mark.usefixtures("other_users")
def test_a_client_that_may_start_no_process_says_so(root: Path):
    give(root, SOMEBODY)
    environment = variables(root, KSERVE_AUTOSTART="1")
    asked = run_as(SOMEBODY, FEW_PROCESSES, "scale", TARGET, "{}", **environment)
    assert asked.stdout.count("\n") == 2, asked.stderr
    answer = json.loads(asked.stdout.splitlines()[-1])
    assert answer["code"] == "daemon-unreachable"
    assert "could not be started" in answer["text"]


# A daemon in which removing what lies beside the flag fails with that error while the flag is there.
CLEAN_UP_FAILS = """
import errno, os, sys
number, flag = getattr(errno, sys.argv.pop(1)), sys.argv.pop(1)

def failing(real):
    def call(path, *arguments, **options):
        here = "dir_fd" in options or str(path).startswith(os.path.dirname(flag))
        if here and os.path.exists(flag):
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **options)
    return call

os.unlink, os.rmdir = failing(os.unlink), failing(os.rmdir)
os.supports_dir_fd = {*os.supports_dir_fd, os.unlink, os.rmdir}
from kserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("error", ["EBUSY", "ENOENT", "ESTALE"])
def test_clean_up_that_fails_is_nobodys_error(root: Path, error: str, monkeypatch: pytest.MonkeyPatch):
    """Staging directories, unfinished writes, dropped entries, the daemon's own socket."""
    for name, value in variables(root).items():
        monkeypatch.setenv(name, value)
    flag = root / "failing"
    with daemon(root, program=("-c", CLEAN_UP_FAILS, error, str(flag))) as found:
        first, store = again(size=1), root / "store"
        flag.touch()
        assert again(size=2).origin == "built"
        (store / "payload" / first.digest[:2] / first.digest).unlink()
        assert (again(size=1).origin, again(size=1).digest) == ("built", first.digest)
        with pytest.raises(CompileFailed):
            write_cuda(root / "kernels" / "scale", source="nonsense")
            again(size=3)
        assert found.call("POST", protocol.VERIFY)["damaged"] == []
        assert kserve("status").returncode == 0
        found.process.terminate()
        assert found.process.wait(10) == 0
        assert "Traceback" not in found.log, found.log[found.log.index("Traceback") :]
    write_cuda(root / "kernels" / "scale")
    found.settings.socket.unlink()
    with daemon(root, program=("-c", CLEAN_UP_FAILS, error, str(flag))) as found:
        assert again(size=1).origin == "disk"
        assert again(size=4).origin == "built"
        assert "Traceback" not in found.log, found.log[found.log.index("Traceback") :]
        flag.unlink()


# A daemon whose wall clock goes back by thirty years while the flag is there.
CLOCK_GOES_BACK = """
import os, sys, time
flag, now = sys.argv.pop(1), time.time
time.time = lambda: now() - (1e9 if os.path.exists(flag) else 0)
from kserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_clock_that_is_set_back(root: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in variables(root).items():
        monkeypatch.setenv(name, value)
    flag = root / "back"
    with daemon(root, program=("-c", CLOCK_GOES_BACK, str(flag)), KSERVE_IDLE_S="30") as found:
        again(size=1)
        flag.touch()
        assert (again(size=1).origin, again(size=2).origin, again(size=2).origin) == ("disk", "built", "disk")
        with pytest.raises(BuildTimeout):
            get_kernel("tscale", target=TARGET, timeout_s=0.1)
        assert again("tscale").origin in ("built", "joined")
        status = found.call("GET", protocol.STATUS)
        assert 0 <= status["uptime_s"] < 60
        builds = found.call("GET", protocol.BUILDS)["builds"]
        assert all(0 <= build["seconds"] < 60 for build in builds)
        flag.unlink()
        assert (again(size=2).origin, again(size=3).origin) == ("disk", "built")


@pytest.mark.parametrize("when", [1.0, 4e9], ids=["1970", "2096"])
def test_files_of_another_time(root: Path, when: float, monkeypatch: pytest.MonkeyPatch):
    """Of the store and of the kernels: what a clock that was wrong, a copy or an image leaves."""
    for name, value in variables(root).items():
        monkeypatch.setenv(name, value)
    with daemon(root):
        first = again(size=1)
    for path in (*(root / "store").rglob("*"), *(root / "kernels").rglob("*")):
        os.utime(path, (when, when))
    with daemon(root):
        assert (again(size=1).origin, again(size=1).digest) == ("disk", first.digest)
        assert again(size=2).origin == "built"


@pytest.mark.skipif(os.getuid() == 0, reason="root has mounted already")
def test_disks_again_in_a_namespace_where_this_user_may_mount():
    """The tests above that were skipped for want of the right."""
    command = ["unshare", "-U", "-r", "-m", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run([*command, "-k", "disk and not again"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
