"""Several users and user namespaces around one socket: nobody poses as another, and what is planted is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients import ask_alone
from tests.support.daemon import Daemon, answers, daemon, settings_of, variables
from tests.support.definitions import write_cuda
from tests.support.processes import REPOSITORY, daemon_pid, wait_for
from tests.support.users import OVERFLOW, SOMEBODY, SOMEBODY_ELSE, STRANGER, give, interpreter, needs_root

pytestmark = needs_root

KNOCK = """
import socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.settimeout(5)
peer.connect(sys.argv[1])
try:
    peer.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: kserve\\r\\n\\r\\n")
    print(len(peer.recv(1000)))
except ConnectionError:
    print(0)
"""
MAPPED, UNMAPPED = ("unshare", "-U", "-r"), ("unshare", "-U")


@pytest.fixture
def root(own_place: Path) -> Path:
    """A place that everybody can look into."""
    own_place.chmod(0o755)
    write_cuda(own_place / "kernels" / "scale")
    return own_place


def knock(found: Daemon, uid: int, *namespace: str) -> bool:
    """Whether that user, in a user namespace of its own where one is named, gets a byte out of the daemon."""
    done = subprocess.run(
        [*namespace, interpreter() or sys.executable, "-c", KNOCK, str(found.settings.socket)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        user=uid,
        group=uid,
        extra_groups=[],
        timeout=60,
    )
    if namespace and "unshare failed" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr
    return int(done.stdout) > 0


def open_to_all(found: Daemon) -> None:
    """The socket reachable for everybody, as a careless administrator would leave it."""
    path = found.settings.socket
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        folder.chmod(0o711)
    path.chmod(0o666)


@pytest.mark.usefixtures("other_users")
def test_four_users_and_two_namespaces_are_who_they_are(root: Path):
    """What counts is the user the kernel names: not what a process is called inside a namespace of its own."""
    with daemon(root, KSERVE_TRUSTED_UIDS=str(SOMEBODY)) as found:
        open_to_all(found)
        assert knock(found, 0)
        assert knock(found, SOMEBODY)
        assert not knock(found, SOMEBODY_ELSE)
        assert not knock(found, OVERFLOW)
        assert not knock(found, STRANGER, *MAPPED), "root in its own namespace"
        assert not knock(found, STRANGER, *UNMAPPED), "nobody in its own namespace"
        assert knock(found, SOMEBODY, *MAPPED), "still the trusted user"
        refused = [line.rpartition("uid=")[2] for line in found.log.splitlines() if "refused uid=" in line]
        assert refused == [str(uid) for uid in (SOMEBODY_ELSE, OVERFLOW, STRANGER, STRANGER)]
        assert answers(found.settings), "it serves on"


@pytest.mark.usefixtures("other_users")
def test_a_daemon_in_a_namespace_serves_its_own_user_and_no_overflow(root: Path):
    """It sees everybody from outside as one user, who is nobody in particular."""
    give(root, SOMEBODY)
    there = {"wrapper": MAPPED, "uid": SOMEBODY, "python": interpreter(), "awaited": False}
    with daemon(root, **there) as found:
        wait_for(lambda: "listening" in found.log or found.process.poll() is not None, what="the daemon")
        open_to_all(found)
        assert knock(found, SOMEBODY)
        for stranger in (0, STRANGER):
            assert not knock(found, stranger)
        assert f"refused uid={OVERFLOW}" in found.log


@pytest.mark.usefixtures("other_users")
@pytest.mark.parametrize("namespace", [MAPPED, UNMAPPED], ids=["mapped", "unmapped"])
def test_a_daemon_that_would_trust_the_overflow_user_does_not_start(root: Path, namespace: tuple[str, ...]):
    """Named as trusted, or because it has no user of its own: either way everybody would be trusted."""
    give(root, SOMEBODY)
    trusted = {"KSERVE_TRUSTED_UIDS": str(OVERFLOW)} if namespace == MAPPED else {}
    with daemon(root, wrapper=namespace, uid=SOMEBODY, python=interpreter() or "", awaited=False, **trusted) as found:
        assert found.process.wait(20) == 6, found.log
        assert str(OVERFLOW) in found.log
        assert "Traceback" not in found.log


OVER = """
import json, sys
from kserve import get_kernel
from kserve.errors import KserveError
try:
    print(get_kernel("scale", target="sm_90").origin)
except KserveError as error:
    print(error.code)
"""


def test_a_client_without_a_user_of_its_own_trusts_nobody(root: Path):
    """In a namespace that maps nobody, whoever planted the directory and its socket looks like oneself."""
    planted = settings_of(root).socket
    planted.parent.mkdir(parents=True, mode=0o700)
    with listening(planted, STRANGER) as stranger:
        give(root / "run", STRANGER)
        done = subprocess.run(
            [*UNMAPPED, sys.executable, "-c", OVER],
            cwd=REPOSITORY,
            env={**os.environ, **variables(root)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if "unshare failed" in done.stderr:
            pytest.skip("no user namespaces here")
        assert done.stdout == "foreign-peer\n", done.stderr
        assert stranger.communicate(b"\n", timeout=10)[0].splitlines()[1:] == [], "something was sent to a stranger"


SERVE = """
import os, select, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
os.setuid(int(sys.argv[2]))
listener.listen()
print("up", flush=True)
while True:
    ready, _, _ = select.select([listener, 0], [], [])
    if listener in ready:
        received = listener.accept()[0].recv(100)
        if received:
            print(received, flush=True)
    if 0 in ready:
        break
"""


class listening:  # noqa: N801 - reads as a statement
    """A process of that user that listens on a socket and prints what it is sent, until it gets a line itself."""

    def __init__(self, path: Path, uid: int) -> None:
        self._command = [sys.executable, "-c", SERVE, str(path), str(uid)]

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize("planted", ["run", "run/kserve", "socket"])
def test_a_runtime_directory_that_somebody_made_before_is_refused(root: Path, planted: str, monkeypatch: pytest.MonkeyPatch):
    """With a socket that answers in it: the client sends nothing to it and starts nothing beside it."""
    path = settings_of(root).socket
    path.parent.mkdir(parents=True, mode=0o700)
    for name, value in variables(root, KSERVE_AUTOSTART="1").items():
        monkeypatch.setenv(name, value)
    with listening(path, STRANGER) as stranger:
        os.chown(path.parent if planted == "socket" else root / planted, STRANGER, STRANGER)
        asked = ask_alone("scale")
        assert asked["code"] == "foreign-peer", asked
        assert stranger.communicate(b"\n", timeout=10)[0] == b"", "something was sent to a stranger"
    path.unlink()
    asked = ask_alone("scale")
    assert asked["code"] == "foreign-peer", "and none is started there"
    assert daemon_pid(root) is None
    assert not (root / "store" / "manifest").exists()
