"""The daemon as a process: how it starts, whom it lets in, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kserve import protocol
from kserve.build.reaper import members
from kserve.client.connection import Connection
from kserve.errors import DaemonEnding, ForeignPeer, KserveError, StoreError
from kserve.key import canonical_json, digest_of
from kserve.store.files import FileStore
from tests.support.daemon import Daemon, answers, ask, assert_sound, daemon, settings_of, variables
from tests.support.definitions import write_cuda
from tests.support.processes import REPOSITORY, compilers_of, daemon_pid, kserve, python, wait_for, workers
from tests.support.slow_kernel import write_slow

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def root(own_place: Path) -> Path:
    """A place whose kernel folder has a quick and a slow kernel."""
    write_cuda(own_place / "kernels" / "scale")
    write_slow(own_place / "kernels" / "slow")
    return own_place


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs: one that ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def begin_slow(found: Daemon, connection: Connection, tag: int = 0) -> dict[str, Any]:
    """Ask for the slow build; its record, once it has one: the toolchain is loaded first."""

    def build() -> Any:
        ask(connection, found.settings, "slow", tag=tag, wait_s=0.0)
        return [build for build in connection.call("GET", protocol.BUILDS)["builds"] if build["name"] == "slow"]

    found_: list[dict[str, Any]] = wait_for(build, what="the build to be known")  # type: ignore[assignment]
    return found_[0]


def start_slow(found: Daemon, tag: int = 0) -> str:
    """Begin the slow build and wait until the compiler runs; the build's id."""
    with contextlib.closing(found.connection()) as connection:
        build: str = begin_slow(found, connection, tag)["id"]
        wait_for(lambda: connection.call("GET", f"{protocol.BUILDS}/{build}")["state"] == "running", what="the build")
        wait_for(lambda: compilers_of(found.root), what="the compiler")
    return build


def test_socket_and_directories_are_the_users_alone(root: Path):
    with daemon(root) as found:
        path = found.settings.socket
        assert stat.S_ISSOCK(path.lstat().st_mode)
        assert mode(path) == 0o600
        assert [mode(folder) for folder in (path.parent, path.parent.parent, root / "run", root / "store")] == [0o700] * 4
    assert not path.exists(), "the socket goes with its daemon"


def test_a_second_daemon_on_one_store_is_refused(root: Path):
    with daemon(root) as found:
        elsewhere = variables(root, KSERVE_RUNTIME_DIR=str(root / "run2"))
        for environment in (variables(root), elsewhere):
            second = kserve("up", **environment)
            assert second.returncode == 6
            assert str(found.process.pid) in second.stderr
            assert "kserve down" in second.stderr
        assert answers(found.settings), "the first serves on"


def test_a_socket_that_a_dead_daemon_left_is_replaced(root: Path):
    with daemon(root) as found:
        found.process.kill()
        found.process.wait(10)
        assert found.settings.socket.exists()
        with daemon(root) as second:
            assert second.call("GET", protocol.STATUS)["pid"] == second.process.pid


def test_a_file_in_the_sockets_place_is_replaced(root: Path):
    path = settings_of(root).socket
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text("")
    with daemon(root) as found:
        assert answers(found.settings)


def test_it_ends_when_idle_but_not_while_it_works(root: Path):
    with daemon(root, KSERVE_IDLE_S="0.4") as found:
        start_slow(found)
        began = time.monotonic()
        wait_for(lambda: time.monotonic() - began > 1.2 or found.process.poll() is not None)
        assert found.process.poll() is None, "a build is work"
        for pid in compilers_of(root):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: found.process.poll() is not None, deadline_s=5, what="the idle end")
        assert found.process.returncode == 0


@pytest.mark.toolchain
def test_it_does_not_end_while_a_toolchain_loads(root: Path):
    """Triton takes a second to load, on a cold disk ten: a request that waits for it is work too."""
    with daemon(root, KSERVE_IDLE_S="0.3") as found, contextlib.closing(found.connection()) as connection:
        answer = ask(connection, found.settings, "realspace_fwd")
        assert "variants" in answer, answer


@pytest.mark.toolchain
@pytest.mark.parametrize(("prewarm", "loaded"), [("1", ["cuda"]), ("0", [])])
def test_a_daemon_over_an_empty_store_loads_nvrtc_before_it_is_asked(root: Path, prewarm: str, loaded: list[str]):
    with daemon(root, KSERVE_PREWARM=prewarm) as found:
        wait_for(lambda: [worker["language"] for worker in found.call("GET", protocol.STATUS)["workers"]] == loaded)
        pid = {worker["pid"] for worker in found.call("GET", protocol.STATUS)["workers"]}
        with contextlib.closing(found.connection()) as connection:
            ask(connection, found.settings, "scale")
        (after,) = found.call("GET", protocol.STATUS)["workers"]
        assert not pid or pid == {after["pid"]}, "the first build takes that worker"


@pytest.mark.toolchain
def test_a_daemon_that_is_started_for_another_compiler_loads_only_that(root: Path):
    with daemon(root) as found, contextlib.closing(found.connection()) as connection:
        ask(connection, found.settings, "realspace_fwd")
        assert [worker["language"] for worker in found.call("GET", protocol.STATUS)["workers"]] == ["triton"]


def test_up_detach_returns_with_the_callers_pipes_closed(root: Path):
    began = time.monotonic()
    first = kserve("up", "--detach", "--idle", "30")  # captures its output: a pipe left open would hold it
    assert (first.returncode, time.monotonic() - began < 15) == (0, True)
    pid = daemon_pid(root)
    assert pid is not None
    assert str(pid) in first.stdout
    assert os.getsid(pid) == pid, "a session of its own"
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    again = kserve("up", "--detach")
    assert (again.returncode, daemon_pid(root)) == (0, pid)


def test_down_and_status(root: Path):
    assert kserve("status").returncode == 6
    assert kserve("down").returncode == 0, "nothing to end is no error"
    assert kserve("up", "--detach").returncode == 0
    pid = daemon_pid(root)
    assert str(pid) in kserve("status").stdout
    ended = kserve("down")
    assert ended.returncode == 0
    assert str(pid) in ended.stdout
    wait_for(lambda: daemon_pid(root) is None, deadline_s=1, what="the process to be gone")
    assert kserve("status").returncode == 6


def test_many_detached_starts_at_once_are_one_daemon(root: Path):
    environment = {**os.environ, **variables(root)}
    command = [sys.executable, "-m", "kserve", "up", "--detach"]
    started = [
        subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(5)
    ]
    outputs = [process.communicate(timeout=60)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0] * 5, outputs
    pid = daemon_pid(root)
    assert all(str(pid) in output for output in outputs)


def test_a_start_that_fails_says_why(root: Path):
    (root / "store").mkdir(mode=0o777)
    (root / "store").chmod(0o777)
    failed = kserve("up", "--detach")
    assert failed.returncode == 6
    assert "others can write to it" in failed.stderr


@pytest.mark.toolchain
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_its_builds(root: Path, number: signal.Signals):
    with daemon(root) as found:
        start_slow(found, 1)
        start_slow(found, 2)
        children = children_of(found.process.pid)
        wait_for(lambda: len(compilers_of(root)) == 2, what="both compilers")
        began = time.monotonic()
        found.process.send_signal(number)
        assert found.process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert workers(root) == []
        assert [pid for pid in children if alive(pid)] == []
        assert list((root / "store" / "tmp").glob("job-*")) == []
        assert assert_sound(root / "store") == 0


@pytest.mark.toolchain
def test_who_waits_for_a_build_is_told_of_the_end(root: Path):
    """An answer with a code that says so, and at once: the client turns to the next daemon."""
    with daemon(root) as found, ThreadPoolExecutor(1) as pool:
        build = start_slow(found)

        def wait() -> str:
            with contextlib.closing(found.connection()) as connection:
                try:
                    return str(ask(connection, found.settings, "slow", client="waiting", wait_s=60.0)["error"]["code"])
                except KserveError as error:
                    return error.code

        waiting = pool.submit(wait)
        wait_for(lambda: found.call("GET", f"{protocol.BUILDS}/{build}")["n_joined"] == 1, what="somebody to wait")
        found.process.terminate()
        assert waiting.result(5) == DaemonEnding.code


LOOP = """
import collections, sys, time
from kserve import client, get_kernel
from kserve.client.local import local
from kserve.errors import KserveError
seen = collections.Counter()
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    client.forget()
    local().places = ()  # no file is read: the daemon is to be asked
    try:
        seen[get_kernel("scale", target="sm_90").origin] += 1
    except KserveError as error:
        seen[f"{type(error).__name__}: {error.message}"] += 1
print(sorted(seen))
"""


@pytest.mark.toolchain
@pytest.mark.slow
def test_clients_do_not_see_a_daemon_end(root: Path):
    """Whoever asks while one daemon goes down is served by the next one."""
    looping = subprocess.Popen(
        [sys.executable, "-c", LOOP, "8"],
        cwd=REPOSITORY,
        env={**os.environ, **variables(root, KSERVE_AUTOSTART="1")},
        stdout=subprocess.PIPE,
    )
    wait_for(lambda: len(list((root / "store" / "manifest").glob("??/*"))) == 2, what="the first build, both variants")
    ended: set[int] = set()
    while looping.poll() is None:
        pid = daemon_pid(root)
        if pid is not None and pid not in ended and answers(settings_of(root)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            ended.add(pid)
    assert len(ended) >= 3
    # Who was not answered before the first one ended finds what it built: "built" may be missing, an error may not appear.
    assert looping.communicate()[0].decode().strip() in ("['built', 'disk']", "['disk']")


@pytest.mark.toolchain
@pytest.mark.slow
def test_a_killed_daemon_leaves_nothing(root: Path):
    """At ten moments inside a compile: no compiler is left after 2 s, the store is sound, the next start works."""
    moments = random.Random("daemon")
    left: set[Path] = set()
    for round_ in range(10):
        with daemon(root) as found, contextlib.closing(found.connection()) as connection:
            origins = [v["origin"] for v in ask(connection, found.settings, "scale", size=round_ + 1)["variants"]]
            assert origins == ["built", "built"]
            assert left.isdisjoint((root / "store" / "tmp").iterdir()), "what the last one left is swept"
            build, moment = begin_slow(found, connection, round_)["id"], moments.uniform(0.0, 1.0)
            wait_for(lambda: connection.call("GET", f"{protocol.BUILDS}/{build}")["seconds"] >= moment)  # noqa: B023
            os.kill(found.process.pid, signal.SIGKILL)
            wait_for(lambda: not workers(root), deadline_s=2, what=f"compilers to end, killed after {moment:.2f} s")
            left = {path for path in (root / "store" / "tmp").iterdir() if not path.name.startswith("worker-")}
            assert len(left) > 1, "its sources and its directory"
            assert assert_sound(root / "store") == 2 * (round_ + 1)


@pytest.mark.toolchain
@pytest.mark.slow
def test_a_killed_worker_leaves_nothing(root: Path):
    """At ten moments inside a compile: its compilers end with it, the daemon serves on with a fresh one."""
    moments = random.Random("worker")
    with daemon(root, KSERVE_JOBS="4") as found, contextlib.closing(found.connection()) as connection:
        for round_ in range(10):
            build, moment = begin_slow(found, connection, round_)["id"], moments.uniform(0.0, 1.0)
            wait_for(lambda: connection.call("GET", f"{protocol.BUILDS}/{build}")["seconds"] >= moment)  # noqa: B023
            (worker,) = connection.call("GET", protocol.STATUS)["workers"]
            os.kill(worker["pid"], signal.SIGKILL)
            wait_for(lambda: not members(worker["pid"]), deadline_s=2, what=f"its session to end, {moment:.2f} s")  # noqa: B023
            origins = [v["origin"] for v in ask(connection, found.settings, "scale", size=round_ + 1)["variants"]]
            assert origins == ["built", "built"]
            end_builds(root, connection)
            kept = [*(root / "store" / "tmp").glob("job-*")]
            assert len(kept) <= 2, "two builds at once have ended by themselves"
            assert {path.stat().st_size for folder in kept for path in folder.rglob("*") if path.is_file()} <= {0}
            assert assert_sound(root / "store") == 2 * (round_ + 1)


def end_builds(root: Path, connection: Connection) -> None:
    """Whether the lost build was given up or is tried again, kill it."""

    def ended() -> bool:
        for pid in compilers_of(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        states = {build["state"] for build in connection.call("GET", protocol.BUILDS)["builds"]}
        return states <= {"done", "failed"}

    wait_for(ended, what="the builds to end")


def as_user(uid: int, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code as another user, with the interpreter and the package already loaded: both may lie where he cannot read."""
    prefix = f"import os, json, socket, sys, kserve.client.resolve, kserve.cli, http.client, tomllib\nos.setuid({uid})\n"
    return python(prefix + code, *arguments, check=False, **environment)


KNOCK = """
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.settimeout(5)
peer.connect(sys.argv[1])
try:
    peer.sendall(b"GET /v1/health HTTP/1.1\\r\\nHost: kserve\\r\\n\\r\\n")
    print(repr(peer.recv(1000)))
except ConnectionError:
    print(repr(b""))
"""


KNOCK_HERE = "import socket, sys" + KNOCK


@contextlib.contextmanager
def opened(found: Daemon) -> Iterator[None]:
    """The socket reachable for everybody, as a careless administrator would leave it."""
    path = found.settings.socket
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent, found.root):
        folder.chmod(0o711)
    path.chmod(0o666)
    yield


@needs_root
def test_a_peer_of_another_user_is_refused(root: Path):
    with daemon(root) as found, opened(found):
        assert as_user(NOBODY, KNOCK, str(found.settings.socket)).stdout.strip() == "b''"
        assert b"200" in eval(python(KNOCK_HERE, str(found.settings.socket)).stdout)
        assert answers(found.settings), "it serves on"
        assert f"refused uid={NOBODY}" in found.log


@needs_root
def test_a_trusted_user_is_let_in(root: Path):
    with daemon(root, KSERVE_TRUSTED_UIDS=f"1,{NOBODY}") as found, opened(found):
        assert b"200" in eval(as_user(NOBODY, KNOCK, str(found.settings.socket)).stdout)


ASK = """
from kserve.client.connection import Connection
from kserve.config import load_settings
from kserve.errors import KserveError
try:
    print(json.dumps(Connection(load_settings()).call("GET", "/v1/status", start=bool(sys.argv[1:]))["pid"]))
except KserveError as error:
    print(json.dumps(error.code))
"""


@needs_root
def test_a_client_refuses_another_users_daemon(root: Path):
    """Before it sends a byte: the directory is not his."""
    with daemon(root) as found, opened(found):
        asked = as_user(NOBODY, ASK, HOME="/")
        assert asked.stdout.strip() == '"foreign-peer"', asked.stderr


@needs_root
def test_a_place_a_client_cannot_enter_is_an_error_with_a_code(root: Path):
    with daemon(root):
        asked = as_user(NOBODY, ASK, HOME="/")
        assert asked.stdout.strip() in ('"foreign-peer"', '"daemon-unreachable"', '"store-unusable"'), asked.stderr


@needs_root
def test_a_socket_that_another_user_serves_is_refused(root: Path):
    """In a directory of ours, somehow: the peer's uid is what counts."""
    path = settings_of(root).socket
    path.parent.mkdir(parents=True, mode=0o700)
    serve = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\nos.setuid(65534)\ns.listen()\nprint('up', flush=True)\n"
        "peer = s.accept()[0]\nprint(repr(peer.recv(100)), flush=True)"
    )
    foreign = subprocess.Popen([sys.executable, "-c", serve, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert foreign.stdout.readline() == "up\n"
        with contextlib.closing(Connection(settings_of(root))) as connection, pytest.raises(ForeignPeer) as caught:
            connection.call("GET", protocol.STATUS)
        assert str(NOBODY) in caught.value.message
        assert foreign.communicate(timeout=5)[0] == "b''\n", "something was sent to a stranger"
    finally:
        foreign.kill()
        foreign.communicate()


@needs_root
def test_a_trusted_user_is_served(root: Path):
    with daemon(root, KSERVE_TRUSTED_UIDS=str(NOBODY)) as found, opened(found):
        asked = as_user(NOBODY, ASK, HOME="/", KSERVE_TRUSTED_UIDS="0")
        assert asked.stdout.strip() == str(found.process.pid), asked.stderr


def test_a_directory_that_is_no_store_is_left_alone(root: Path):
    mine = root / "store"
    (mine / "tmp" / "work").mkdir(parents=True)
    mine.chmod(0o700)
    (mine / "tmp" / "thesis.txt").write_text("years of it")
    (mine / "lock").write_text("mine")
    refused = kserve("up")
    assert refused.returncode == 5
    assert "KSERVE_STORE" in refused.stderr
    assert (mine / "tmp" / "thesis.txt").read_text() == "years of it"
    assert (mine / "lock").read_text() == "mine"


def test_a_daemon_whose_store_was_removed_ends_and_the_next_one_makes_a_new_store(root: Path):
    with daemon(root) as found:
        shutil.rmtree(root / "store")
        wait_for(lambda: found.process.poll() is not None, deadline_s=8, what="the daemon to end")
    with daemon(root) as found:
        assert found.call("GET", protocol.STATUS)["store"]["n_artifacts"] == 0


@pytest.mark.toolchain
def test_a_change_beside_the_compiler_disturbs_nobody(root: Path):
    """Every request sees the change at once: the toolchain is loaded again once, no running job is killed."""
    with daemon(root) as found, contextlib.closing(found.connection()) as connection:
        assert "variants" in ask(connection, found.settings, "scale")
        known = root / "store" / "toolchains.json"
        toolchains = json.loads(known.read_text())["toolchains"]
        for toolchain in toolchains.values():
            toolchain["stamps"]["/"] = [1, 1, 1, 1]
        digest = digest_of(canonical_json(toolchains).encode())
        known.write_text(json.dumps({"digest": digest, "toolchains": toolchains}))
    with daemon(root) as found:
        with ThreadPoolExecutor(6) as pool:
            answers_ = list(pool.map(lambda size: _ask_alone(found, size), [8, 8, 8, 9, 10, 11]))
        assert [answer for answer in answers_ if "variants" not in answer] == []
        assert len(found.call("GET", protocol.STATUS)["workers"]) == 1


def _ask_alone(found: Daemon, size: int) -> Any:
    with contextlib.closing(found.connection()) as connection:
        return ask(connection, found.settings, "scale", size=size)


def _foreign(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


SPOILT: dict[str, tuple[Any, str]] = {
    "of another user": (_foreign, f"uid {NOBODY}"),
    "open to everybody": (lambda path: path.chmod(0o777), "0777"),
    "open to the group": (lambda path: path.chmod(0o770), "0770"),
}


@pytest.mark.parametrize("which", ["run", "run/kserve", "socket", "store", "store/manifest", "store/tmp"])
@pytest.mark.parametrize("how", SPOILT)
def test_a_directory_that_is_not_ours_alone_is_refused(root: Path, which: str, how: str):
    spoil, named = SPOILT[how]
    if spoil is _foreign and os.getuid() != 0:
        pytest.skip("only root can act as another user")
    path = settings_of(root).socket.parent if which == "socket" else root / which
    FileStore(root / "store", writable=True)
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    spoil(path)
    refused = kserve("up")
    assert refused.returncode == 6
    assert str(path) in refused.stderr
    assert named in refused.stderr


def test_a_link_in_place_of_the_runtime_directory_is_refused(root: Path):
    path = settings_of(root).socket.parent
    (root / "elsewhere").mkdir(mode=0o700)
    path.parent.mkdir(parents=True, mode=0o700)
    path.symlink_to(root / "elsewhere")
    refused = kserve("up")
    assert refused.returncode == 6
    assert str(path) in refused.stderr


def test_a_socket_path_that_is_too_long_names_the_limit(root: Path):
    with pytest.raises(StoreError, match="107"):
        settings_of(root, KSERVE_RUNTIME_DIR=str(root / ("d" * 90)))
        _ = settings_of(root, KSERVE_RUNTIME_DIR=str(root / ("d" * 90))).socket


START = "import sys; from kserve.client.connection import Connection; from kserve.config import load_settings\n"
START += "print(Connection(load_settings()).call('GET', '/v1/health', start=True)['pid'])"


def test_many_first_clients_start_one_daemon(root: Path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", START], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(12)
    ]
    outputs = [process.communicate(timeout=60) for process in started]
    assert {output for output, _ in outputs} == {f"{daemon_pid(root)}\n"}, outputs


def test_an_autostarted_daemon_holds_nothing_of_its_starter(root: Path):
    read, write = os.pipe()
    os.set_inheritable(write, True)
    secret = {**os.environ, "A_TOKEN": "secret"}
    subprocess.run(
        [sys.executable, "-c", START], cwd=REPOSITORY, env=secret, close_fds=False, check=True, stdout=subprocess.DEVNULL
    )
    os.close(write)
    os.set_blocking(read, True)
    assert os.read(read, 1) == b"", "an inherited descriptor is still open"
    os.close(read)
    pid = daemon_pid(root)
    assert b"A_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert stat.S_IMODE((settings_of(root).socket.parent / "daemon.log").stat().st_mode) == 0o600


CAPTURED = """
import os, time
from kserve import get_kernel
get_kernel("scale", target="sm_90")
print(os.readlink("/proc/self/fd/1"), os.readlink("/proc/self/fd/2"), time.monotonic(), flush=True)
"""


@pytest.mark.toolchain
def test_a_first_client_whose_output_is_captured_returns_at_once(root: Path):
    """`subprocess.run(capture_output=True)` reads until nobody holds the pipe: the daemon it started does not."""
    done = python(CAPTURED, **variables(root, KSERVE_AUTOSTART="1"))
    ended = time.monotonic()
    *pipes, last = done.stdout.split()
    assert ended - float(last) < 2, "the interpreter's own end, and no more"
    pid = daemon_pid(root)
    held = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert len(pipes) == 2
    assert not held & set(pipes)


@pytest.mark.toolchain
def test_without_autostart_a_short_lived_daemon_builds(root: Path):
    environment = variables(root, KSERVE_AUTOSTART="0", KSERVE_IDLE_S="600")
    made = python("from kserve import get_kernel; print(get_kernel('scale', target='sm_90').origin)", **environment)
    assert made.stdout == "built\n"
    assert daemon_pid(root) is not None
    second = python("from kserve import get_kernel; print(get_kernel('scale', target='sm_90').origin)", **environment)
    assert second.stdout == "disk\n"
    wait_for(lambda: daemon_pid(root) is None, deadline_s=6, what="the short-lived daemon to end")
    assert workers(root) == []


def test_nothing_but_http_costs_only_that_connection(root: Path):
    with daemon(root) as found:
        for content in (b"", b"\r\n\r\n", b"\x16\x03\x01" * 100, b"GET / HTTP/9.9\r\n\r\n", b"G" * 100_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(5)
                peer.connect(str(found.settings.socket))
                with contextlib.suppress(ConnectionError):
                    peer.sendall(content)
                    peer.shutdown(socket.SHUT_WR)
                    assert b" 200 " not in peer.recv(1000)
        assert answers(found.settings)
