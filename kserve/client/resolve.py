"""From wished-for kernels to loaded ones: definition and sources, one request, payloads, driver."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import kserve
from kserve import catalog, protocol
from kserve.artifact import Artifact
from kserve.client.connection import Connection
from kserve.client.launch import Kernel, Roads
from kserve.client.loader import driver
from kserve.config import Settings, environment_of_process, load_settings
from kserve.errors import (
    BuildTimeout,
    CorruptArtifact,
    DaemonEnding,
    KserveError,
    LoadError,
    RequestError,
    ServiceError,
    StoreError,
)
from kserve.key import digest_of
from kserve.ownership import listens
from kserve.protocol import Pending, Resolved
from kserve.store.files import FileStore
from kserve.target import parse_target

# After this long a wait is worth a line, and the daemon is asked again.
_PATIENCE_S = 2.0
_ATTEMPTS = 10
_ENDING_S = 1.0


class Wanted(NamedTuple):
    """One wish: an entry's name, a target, a value for each axis."""

    name: str
    target: str
    spec: dict[str, Any]


class _Session:
    """What a process keeps between calls: its settings, its idle connections, its name to the daemon."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.settings: Settings = load_settings()
        self.client = os.urandom(8).hex()
        self.store = FileStore(self.settings.store, writable=False)
        self._idle: list[Connection] = []

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection for one thread's use; threads that wait for builds do not wait for each other."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(self.settings)
        try:
            yield connection
        except BaseException:  # whatever state it is in, nobody else gets it
            connection.close()
            raise
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


_session: _Session | None = None


def session() -> _Session:
    """This process's session; a forked child gets its own."""
    global _session  # noqa: PLW0603 - one session a process
    if _session is None or _session.pid != os.getpid():
        _session = _Session()
    return _session


def disconnect() -> None:
    """End the session: the next one reads the settings again."""
    global _session  # noqa: PLW0603 - one session a process
    if _session is not None:
        _session.close()
    _session = None


def resolve(wanted: list[Wanted], *, timeout_s: float | None = None, load: bool = True) -> list[Kernel]:
    """Resolve and load kernels in one round trip.

    Args:
        timeout_s: None for the settings' own.
        load:      False leaves the driver alone, for builds ahead of time.
    Raises: the first error of any of them, and BuildTimeout when builds outlast the deadline (they go on).
    """
    if not wanted:
        return []
    began = time.monotonic()
    here = session()
    deadline = began + (here.settings.client_timeout_s if timeout_s is None else timeout_s)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with here.connection() as connection:
                answers = _ask(here, connection, wanted, deadline)
                loaded = [[_artifact(here, connection, variant) for variant in variants] for variants in answers]
            break
        except CorruptArtifact:  # damaged since the daemon looked: it is put aside and built again
            if attempt == _ATTEMPTS:
                raise
        except DaemonEnding:  # the next daemon serves what this one was asked for
            if attempt == _ATTEMPTS or time.monotonic() > deadline:
                raise
            _wait_for_the_end(here.settings)
    kernels = []
    for variants, artifacts in zip(answers, loaded, strict=True):
        origin = min((variant.origin for variant in variants), key=protocol.ORIGINS.index)
        device = _device_for(artifacts[0]) if load else None
        roads = Roads(artifacts, device=device)
        kernels.append(Kernel(roads, origin=origin, seconds=time.monotonic() - began))
    return kernels


def _wait_for_the_end(settings: Settings) -> None:
    """Until the daemon that is going down listens no more, or was replaced."""
    until = time.monotonic() + _ENDING_S
    while listens(settings.socket) and time.monotonic() < until:
        time.sleep(0.02)


def _ask(here: _Session, connection: Connection, wanted: list[Wanted], deadline: float) -> list[list[Resolved]]:
    """One request, repeated while sources are missing or builds are running."""
    found = [catalog.find(wish.name, here.settings) for wish in wanted]
    if not connection.is_open and not listens(here.settings.socket):  # no daemon is started for a wish it would refuse
        _check(wanted, found)
    requests = _requests(here, wanted, found)
    sent: set[str] = set()
    began = time.monotonic()
    while True:
        wait_s = max(0.0, min(_PATIENCE_S, deadline - time.monotonic()))
        body = protocol.resolve_request(requests, client=here.client, version=kserve.__version__, wait_s=wait_s)
        plain = connection.call("POST", protocol.RESOLVE, body, wait_s=wait_s, start=True)["results"]
        missing = {digest for result in plain for digest in result.get("missing", ())}
        if missing:
            _upload(connection, found, missing, sent)
            continue
        results = [protocol.read_result(result) for result in plain]
        _raise_first(wanted, found, results)
        pending = [(wish, result) for wish, result in zip(wanted, results, strict=True) if isinstance(result, Pending)]
        if not pending:
            return [result for result in results if isinstance(result, list)]
        _wait_on(pending, began=began, deadline=deadline)


def _upload(connection: Connection, found: list[catalog.Found], missing: set[str], sent: set[str]) -> None:
    """Send the files the daemon lacks, each once. Raises: ServiceError when it does not keep what it was sent."""
    if missing <= sent:
        raise ServiceError("the daemon lacks sources that it was just sent", hint="kserve status shows the state of its store")
    contents = {digest_of(content): content for item in found for content in item.files.values()}
    for digest in missing:
        connection.call("POST", protocol.SOURCES, contents[digest])
    sent |= missing


def _check(wanted: list[Wanted], found: list[catalog.Found]) -> None:
    for wish, item in zip(wanted, found, strict=True):
        item.check(wish.spec, wish.target)


def _requests(here: _Session, wanted: list[Wanted], found: list[catalog.Found]) -> list[dict[str, Any]]:
    environment, build = environment_of_process(), not here.settings.no_build
    return [
        protocol.kernel_request(
            wish.name, files=item.digests, spec=wish.spec, target=wish.target, environment=environment, build=build
        )
        for wish, item in zip(wanted, found, strict=True)
    ]


def _raise_first(
    wanted: list[Wanted], found: list[catalog.Found], results: list[list[Resolved] | Pending | KserveError]
) -> None:
    """Raise the first error among the results; one about the wish with this machine's paths, where it can be seen here."""
    for wish, item, result in zip(wanted, found, results, strict=True):
        if isinstance(result, RequestError):
            item.check(wish.spec, wish.target)
        if isinstance(result, KserveError):
            raise result


def _wait_on(pending: list[tuple[Wanted, Pending]], *, began: float, deadline: float) -> None:
    wish, state = pending[0]
    more = f" and {len(pending) - 1} more" if len(pending) > 1 else ""
    if time.monotonic() > deadline:
        raise BuildTimeout(
            f"{wish.name} for {wish.target}{more} is still being built after {time.monotonic() - began:.0f} s",
            facts={"build": state.build},
            hint="the build goes on: call again, or raise timeout_s",
        )
    ahead = f", {state.n_ahead} ahead" if state.n_ahead else ""
    print(  # noqa: T201 - a person is waiting
        f"kserve: building {wish.name} for {wish.target}{more}, {state.seconds:.0f} s{ahead}", file=sys.stderr, flush=True
    )


def _artifact(here: _Session, connection: Connection, variant: Resolved) -> Artifact:
    """The variant's bytes: from the store's files where this process can read them, else from the daemon. Verified."""
    manifest = variant.manifest
    try:
        content = here.store.get(f"payload/{manifest.digest}")
    except StoreError:
        content = None
    if content is None:
        content = connection.call_raw("GET", f"{protocol.ARTIFACTS}/{manifest.key}/payload")
    if digest_of(content) != manifest.digest:
        raise CorruptArtifact(f"payload of {manifest.name} arrived with another digest", facts={"key": manifest.key})
    return Artifact(manifest, content)


def _device_for(artifact: Artifact) -> int | None:
    """The current device when it runs this binary; None when there is no device, or it does not."""
    try:
        found = driver()
        device = found.current_device()
        fits = parse_target(artifact.manifest.target).runs_on(found.target_of(device).capability)
    except LoadError:
        return None
    return device if fits else None
