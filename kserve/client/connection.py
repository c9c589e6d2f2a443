"""HTTP over the daemon's unix socket, and the start of a daemon where there is none.

Nothing is sent before both sides know each other: the socket's directory belongs to this user alone, and the process behind
the socket runs under a trusted uid.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kserve
from kserve import protocol
from kserve.config import Settings, daemon_environment, listens, private_directory, python_command, refuse_foreign
from kserve.errors import DaemonEnding, DaemonUnreachable, ForeignPeer, ProtocolMismatch, ServiceError, from_wire

# A living daemon answers in under 10 ms, also beside four compilers; one that does not within this is hung.
_HEALTH_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 30.0
_SLACK_S = 30.0
# A client without autostart builds in a child that serves until it was idle for this long.
_EMBEDDED_IDLE_S = 2.0
_PEER_FORMAT = "3i"  # struct ucred: pid, uid, gid


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, trusted_uids: frozenset[int]) -> None:
        super().__init__("kserve", timeout=_HEALTH_TIMEOUT_S)
        self._path = path
        self._trusted = trusted_uids

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
        size = struct.calcsize(_PEER_FORMAT)
        pid, uid, _ = struct.unpack(_PEER_FORMAT, self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid not in self._trusted:
            self.close()
            raise ForeignPeer(
                f"socket {self._path} is served by uid {uid} (pid {pid}), which this process does not trust",
                hint="name it in KSERVE_TRUSTED_UIDS if it should be",
            )


class Connection:
    """One kept-alive connection to the daemon of the settings' store.

    Not shared between threads or processes: the caller holds a lock and makes a new one after a fork.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._http: _UnixConnection | None = None

    @property
    def is_open(self) -> bool:
        return self._http is not None

    def call(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0, start: bool = False) -> Any:
        """One request; the decoded JSON answer.

        Args:
            body:   an object, sent as JSON, or bytes, sent as they are.
            wait_s: how long the daemon was allowed to hold the answer back.
            start:  start a daemon when there is none.
        Raises:
            DaemonUnreachable, ForeignPeer, ProtocolMismatch; DaemonEnding when it went away during the request, which may
            then be asked again; and every error the daemon answers.
        """
        content = self.call_raw(method, path, body, wait_s=wait_s, start=start)
        return json.loads(content)

    def call_raw(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0, start: bool = False) -> bytes:
        """Like `call`, with the answer's bytes."""
        payload = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        for last in (False, True):
            fresh = self._http is None
            connection = self._connected(start=start)
            try:
                assert connection.sock is not None
                connection.sock.settimeout(wait_s + _SLACK_S)
                connection.request(method, path, body=payload, headers={"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            except TimeoutError:
                self.close()
                raise self._unreachable(f"did not answer {method} {path} in {wait_s + _SLACK_S:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A kept connection to a daemon that has ended since is no news: every request may be repeated.
                if last or fresh:
                    raise DaemonEnding(f"the kserve daemon broke off during {method} {path}: {error}") from None
                continue
            if answer.status >= 400:
                raise _error_of(answer.status, content)
            return content
        raise AssertionError("unreachable")

    def _connected(self, *, start: bool) -> _UnixConnection:
        if self._http is not None:
            return self._http
        try:
            self._http = self._open()
        except (FileNotFoundError, ConnectionRefusedError):
            if not start:
                raise self._unreachable("is not running") from None
            self._start()
            self._http = self._open()
        return self._http

    def _open(self) -> _UnixConnection:
        """Connect, check who is there, and that it lives and speaks our protocol."""
        path = self._settings.socket
        try:
            refuse_foreign(path.parent, path.parent.lstat(), uid=os.getuid())
        except FileNotFoundError:
            pass  # connecting says the same
        except PermissionError:
            raise ForeignPeer(f"directory {path.parent} is refused: this user (uid {os.getuid()}) cannot enter it") from None
        connection = _UnixConnection(path, frozenset({os.getuid(), *self._settings.trusted_uids}))
        try:
            connection.connect()
            connection.request("GET", protocol.HEALTH)
            health = json.loads(connection.getresponse().read())
        except TimeoutError:
            connection.close()
            raise self._unreachable(f"hangs: no answer in {_HEALTH_TIMEOUT_S:.1f} s") from None
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            connection.close()
            raise DaemonEnding(f"the kserve daemon broke off: {error}") from None
        try:
            protocol.check_protocol(health.get("protocol"), version=str(health.get("version")), ours=kserve.__version__)
        except ProtocolMismatch:
            connection.close()
            raise
        return connection

    def _start(self) -> None:
        """Start a daemon and wait for its socket. One client at a time; the others find it when it is up."""
        settings = self._settings
        folder = settings.socket.parent
        for directory in (folder.parent.parent, folder.parent, folder):
            private_directory(directory)
        with _held(folder / "start.lock"):
            if listens(settings.socket):
                return
            idle_s = settings.idle_s if settings.autostart else _EMBEDDED_IDLE_S
            wait_until_up(settings, start_daemon(settings, idle_s=idle_s))

    def _unreachable(self, what: str) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"the kserve daemon of store {self._settings.store} {what}",
            facts={"socket": str(self._settings.socket), "log": str(log_path(self._settings))},
            hint="kserve up starts it, kserve status shows it",
        )

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


def log_path(settings: Settings) -> Path:
    """Where a daemon that was started in the background writes its log."""
    return settings.socket.parent / "daemon.log"


def start_daemon(settings: Settings, *, idle_s: float) -> subprocess.Popen[bytes]:
    """Start a daemon in the background: its own session, a clean environment, no descriptor of ours."""
    command = python_command(sys.executable, "kserve.cli", "up", "--idle", str(idle_s))
    environment = daemon_environment()
    environment.update(KSERVE_STORE=str(settings.store), KSERVE_RUNTIME_DIR=str(settings.runtime_dir))
    descriptor = os.open(log_path(settings), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    return child


def wait_until_up(settings: Settings, child: subprocess.Popen[bytes]) -> None:
    """Wait until the child serves its socket.

    Raises: DaemonUnreachable with the end of its log when it ends first, or takes too long.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not listens(settings.socket):
        ended = child.poll() is not None
        if ended or time.monotonic() > deadline:
            text = log_path(settings).read_text(errors="replace").strip()[-2000:]
            raise DaemonUnreachable(
                f"a kserve daemon for store {settings.store} could not be started",
                facts={"why": text.replace("\n", "\n             ") or f"no answer in {_START_TIMEOUT_S:.0f} s"},
            )
        time.sleep(0.005)
    child.returncode = 0  # it is on its own from here: nobody waits for it, and that is no mistake to warn of


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _error_of(status: int, content: bytes) -> Exception:
    try:
        return from_wire(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ServiceError(f"the daemon answered with HTTP status {status} and no error text")
