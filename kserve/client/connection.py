"""HTTP over the daemon's unix socket.

Nothing is sent before both sides know each other: the socket's directory belongs to this user alone, and the process behind
the socket runs under a trusted uid.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any

import kserve
from kserve import protocol
from kserve.client.start import log_path, start_daemon
from kserve.config import Settings
from kserve.errors import DaemonEnding, DaemonUnreachable, ForeignPeer, ProtocolMismatch, ServiceError, from_wire
from kserve.ownership import identities, refuse_foreign

# A living daemon answers in under 10 ms, also beside four compilers. One that does not within this is hung if it is not even
# trying: on a starved machine it would be running, or waiting for the disk.
_QUIET_S = 0.15
_HEALTH_TIMEOUT_S = 5.0
_SLACK_S = 30.0
# An answer that needs no wait for a build may wait for a compiler to be looked at, or for another writer.
_SLOWEST_S = 2.0
_LOOKS = 3
# After a daemon was found hung, this process does not wait for it again for so long.
_SHUNNED_S = 5.0
# A client without autostart builds in a child that serves until it was idle for this long.
_EMBEDDED_IDLE_S = 2.0
_PEER_FORMAT = "3i"  # struct ucred: pid, uid, gid
_shunned: dict[Path, float] = {}


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
        self.pid, uid, _ = struct.unpack(_PEER_FORMAT, self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid not in self._trusted:
            self.close()
            raise ForeignPeer(
                f"socket {self._path} is served by uid {uid} (pid {self.pid}), which this process does not trust",
                hint="name it in KSERVE_TRUSTED_UIDS if it should be",
            )

    def await_answer(self, quiet_s: float, most_s: float) -> None:
        """Wait until the daemon has something to say.

        Args:
            quiet_s: after this long it is asked whether it is trying at all.
        Raises: TimeoutError when it is not, or after `most_s`.
        """
        until = time.monotonic() + most_s
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        while not poller.poll(quiet_s * 1000):
            if time.monotonic() > until or not _is_trying(self.pid):
                raise TimeoutError
            quiet_s = _QUIET_S


def _is_trying(pid: int) -> bool:
    """Whether a thread of the process runs, wants to, or waits for the disk; true when it lives in another pid namespace."""
    for look in range(_LOOKS):
        if look:
            time.sleep(0.01)
        try:
            stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:  # it ends this instant: the connection will say so
            return True
        if any(stat.rpartition(")")[2].split()[0] in "RD" for stat in stats):
            return True
    return False


class Connection:
    """One kept-alive connection to the daemon of the settings' store.

    Not shared between threads or processes: the caller holds a lock and makes a new one after a fork.

    Args:
        any_protocol: talk to a daemon of any release: what ends it is the same in all of them.
    """

    def __init__(self, settings: Settings, *, any_protocol: bool = False) -> None:
        self._settings = settings
        self._any_protocol = any_protocol
        self._trusted = identities(settings.trusted_uids)
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
            if connection.sock is None:  # its last answer said that it was the last one
                self.close()
                if not last:
                    continue
                raise DaemonEnding(f"the kserve daemon closed the connection before {method} {path}")
            try:
                connection.sock.settimeout(wait_s + _SLACK_S)
                connection.request(method, path, body=payload, headers={"Content-Type": "application/json"})
                connection.await_answer(wait_s + _SLOWEST_S, wait_s + _SLACK_S)
                answer = connection.getresponse()
                content = answer.read()
            except TimeoutError:
                self.close()
                raise self._hung(f"hangs: no answer to {method} {path}") from None
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
        if self._http is None:
            self._http = self._open_if_there()
        if self._http is None and start:
            idle_s = self._settings.idle_s if self._settings.autostart else _EMBEDDED_IDLE_S
            start_daemon(self._settings, idle_s=idle_s)
            self._http = self._open_if_there()
            if self._http is None:
                raise DaemonEnding("the kserve daemon ended as soon as it was started", hint="call again")
        if self._http is None:
            raise self._unreachable("is not running")
        return self._http

    def _open_if_there(self) -> _UnixConnection | None:
        if time.monotonic() < _shunned.get(self._settings.socket, 0.0):
            raise self._unreachable("hung a moment ago")
        try:
            return self._open()
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def _open(self) -> _UnixConnection:
        """Connect, check who is there, and that it lives and speaks our protocol."""
        path = self._settings.socket
        try:
            refuse_foreign(path.parent, path.parent.lstat(), uids=self._trusted)
        except FileNotFoundError:
            pass  # connecting says the same
        except PermissionError:
            raise ForeignPeer(f"directory {path.parent} is refused: this user (uid {os.getuid()}) cannot enter it") from None
        connection = _UnixConnection(path, self._trusted)
        try:
            connection.connect()
            connection.request("GET", protocol.HEALTH)
            connection.await_answer(_QUIET_S, _HEALTH_TIMEOUT_S)
            health = json.loads(connection.getresponse().read())
        except TimeoutError:
            connection.close()
            raise self._hung("hangs: it does not answer, and it does nothing") from None
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            connection.close()
            raise DaemonEnding(f"the kserve daemon broke off: {error}") from None
        try:
            if not self._any_protocol:
                protocol.check_protocol(health.get("protocol"), version=str(health.get("version")), ours=kserve.__version__)
        except ProtocolMismatch:
            connection.close()
            raise
        return connection

    def _hung(self, what: str) -> DaemonUnreachable:
        _shunned[self._settings.socket] = time.monotonic() + _SHUNNED_S
        return self._unreachable(what)

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


def forgive() -> None:
    """Ask a daemon that hung again at once."""
    _shunned.clear()


def _error_of(status: int, content: bytes) -> Exception:
    try:
        return from_wire(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ServiceError(f"the daemon answered with HTTP status {status} and no error text")
