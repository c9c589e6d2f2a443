"""The daemon process: the store's lock, the socket, uvicorn, and the ways it ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kserve.build.limits import no_process
from kserve.build.scratch import Scratch
from kserve.config import Settings
from kserve.errors import ServiceError, StoreError
from kserve.ownership import identities, listens, private_runtime
from kserve.server.hot import Activity, HotRoad
from kserve.service import KernelService
from kserve.store.files import FileStore

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger("kserve")
_BACKLOG = 1024
_GRACE_S = 2
_N_THREADS = 4
_ENDING_S = 6.0  # longer than a daemon takes to go down
_PEER_FORMAT = "3i"  # struct ucred: pid, uid, gid


class PeerCheckedProtocol(HttpToolsProtocol):
    """HTTP for trusted users only: a connection of any other uid is closed before a byte of it is read."""

    trusted_uids: frozenset[int] = frozenset()

    def connection_made(self, transport: Any) -> None:
        peer = transport.get_extra_info("socket")
        size = struct.calcsize(_PEER_FORMAT)
        _, uid, _ = struct.unpack(_PEER_FORMAT, peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid not in self.trusted_uids:
            logger.warning("refused uid=%d", uid)
            transport.abort()
            return
        super().connection_made(transport)
        self.client = ("uid", uid)  # in place of an address, which a unix socket has not

    def connection_lost(self, exc: Exception | None) -> None:
        if getattr(self, "transport", None) is not None:
            super().connection_lost(exc)


def run(settings: Settings) -> NoReturn:
    """Run a daemon until it is told to end or has been idle for `settings.idle_s`; ends the process.

    Raises: ServiceError when the store already has a daemon; StoreError, ForeignPeer when a directory cannot be used.
    """
    _set_up_log(settings.log)
    store = FileStore(settings.store, writable=True)
    with _store_lock(settings.store, settings.socket) as held:
        Scratch(store.root / "tmp").sweep()
        _raise_descriptor_limit()
        listener = _listen(settings)
        ours = settings.socket.stat()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, store, listener, held))
        finally:
            if _is_still(settings.socket, ours):  # not the socket of a daemon that came after us
                with contextlib.suppress(OSError):  # the next one replaces it
                    settings.socket.unlink()
            logger.info("ended pid=%d", os.getpid())
    logging.shutdown()
    os._exit(0)  # everything is in order; the interpreter's own end would wait for a thread that is busy


def _raise_descriptor_limit() -> None:
    """As many clients as the system allows: the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 65536) if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_still(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), known)
    except OSError:
        return False


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which raises the signal again and so skips our own end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Threads(ThreadPoolExecutor):
    """Threads whose end nobody waits for: a look through a large store takes minutes."""

    def shutdown(self, *_: Any, **__: Any) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _start_threads() -> ThreadPoolExecutor:
    """Threads for slow look-ups, all of them started now: later the limit on processes may be reached. Raises: BuildError."""
    threads, together = _Threads(_N_THREADS, thread_name_prefix="kserve"), threading.Barrier(_N_THREADS)
    try:
        started = [threads.submit(together.wait) for _ in range(_N_THREADS)]  # none is idle before all of them run
    except RuntimeError as error:
        together.abort()
        raise no_process("a thread of the daemon", error) from None
    for thread in started:
        thread.result()
    return threads


async def _serve(settings: Settings, store: FileStore, listener: socket.socket, held: int) -> None:
    asyncio.get_running_loop().set_default_executor(_start_threads())
    service = KernelService(settings, store)
    ending: list[asyncio.Task[None]] = []

    def stop() -> None:
        server.should_exit = True
        ending.append(asyncio.create_task(service.close()))  # requests that wait for a build are answered at once

    def full() -> ASGIApp:
        from kserve.server.app import create_app

        return create_app(service, activity, stop=stop)

    activity = Activity()
    app = HotRoad(service, activity, full, stop=stop)
    server = _server(app, identities(settings.trusted_uids))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    logger.info("listening socket=%s store=%s pid=%d", settings.socket, settings.store, os.getpid())
    service.upkeep.mend()
    warming = asyncio.create_task(service.prewarm())
    watch = asyncio.create_task(_watch(app, service, held, stop))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        warming.cancel()
        await service.close()


def _server(app: HotRoad, trusted: frozenset[int]) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            http=type("Protocol", (PeerCheckedProtocol,), {"trusted_uids": trusted}),
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
        )
    )


async def _watch(app: HotRoad, service: KernelService, held: int, stop: Callable[[], None]) -> None:
    """End the server when it has been idle for long enough, or its store was removed: the next one makes a new store."""
    idle_s = service.settings.idle_s
    while True:
        await asyncio.sleep(min(1.0, idle_s / 4))
        if not _is_still(service.artifacts.files.root, os.fstat(held)):
            logger.error("gone store=%s", service.artifacts.files.root)
            stop()
            return
        busy = service.leases.running or app.activity.n_open
        if not busy and time.monotonic() - app.activity.last_request > idle_s:
            logger.info("idle seconds=%.0f", idle_s)
            stop()
            return
        await service.tend()
        if not busy:  # the import would hold up a build or an answer
            await app.prepare()


def _listen(settings: Settings) -> socket.socket:
    """Bind the socket at 0600 in directories that are ours alone. We hold the store's lock: an old socket is dead.

    Trusted users, where any are named, may pass and connect; who they are is checked at each connection.
    """
    path = settings.socket
    private_runtime(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        hint = "set KSERVE_RUNTIME_DIR to a directory this user can write to"
        raise StoreError(f"socket {path} cannot be made: {error.strerror}", hint=hint) from None
    finally:
        os.umask(previous)
    if settings.trusted_uids:
        path.chmod(0o666)
        for directory in (path.parent, path.parent.parent, path.parent.parent.parent):
            directory.chmod(0o711)
    listener.listen(_BACKLOG)
    listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    return listener


@contextlib.contextmanager
def _store_lock(root: Path, path: Path) -> Iterator[int]:
    """Hold the store, by a lock on its directory: a disk that takes no more files has that too. The kernel frees it.

    Yields: the directory's descriptor.
    Raises: ServiceError when another daemon holds it and serves the socket at `path`, or does not end.
    """
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + _ENDING_S
        while not _locked(held):
            if listens(path) or time.monotonic() > until:
                raise ServiceError(
                    f"store {root} already has a daemon (pid {_holder(root)})",
                    hint="kserve status shows it, kserve down ends it",
                )
            time.sleep(0.01)  # its holder answers nobody: it is on its way out
        with contextlib.suppress(OSError):  # only to tell people who it is
            (root / "lock").write_text(str(os.getpid()))
        yield held
    finally:
        os.close(held)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(root: Path) -> str:
    with contextlib.suppress(OSError):
        return (root / "lock").read_text(errors="replace").strip() or "unknown"
    return "unknown"


def _set_up_log(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z"
    )
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
