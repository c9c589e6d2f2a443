"""The road through the daemon: definition and sources, one request, builds that are waited for, payloads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import kserve
from kserve import catalog, protocol
from kserve.alias import Stamps, survey
from kserve.artifact import Artifact
from kserve.client.connection import Connection, forgive
from kserve.client.direct import Local, Wanted, local
from kserve.client.given import Given
from kserve.config import Settings, environment_of_process
from kserve.errors import (
    BuildTimeout,
    CorruptArtifact,
    DaemonEnding,
    KserveError,
    NotBuilt,
    RequestError,
    ServiceError,
)
from kserve.key import digest_of
from kserve.ownership import listens
from kserve.protocol import Pending, Resolved

# After this long a wait is worth a line, and the daemon is asked again.
_PATIENCE_S = 2.0
_ATTEMPTS = 10
_ENDING_S = 1.0


class _Session:
    """What a process keeps between calls: its idle connections, its name to the daemon."""

    def __init__(self, here: Local) -> None:
        self.local = here
        self.settings = here.settings
        self.client = os.urandom(8).hex()
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


_sessions: dict[Local, _Session] = {}


def session() -> _Session:
    """This process's session, one for all threads; a forked child gets its own, and so does one with other settings."""
    here = local()
    for other in [other for other in list(_sessions) if other is not here]:
        _sessions.pop(other, None)
    return _sessions.get(here) or _sessions.setdefault(here, _Session(here))


def disconnect() -> None:
    """Close the connections, and bear no daemon a grudge."""
    forgive()
    for found in list(_sessions.values()):
        found.close()
    _sessions.clear()


def ask(wanted: list[Wanted], *, deadline: float) -> list[tuple[str, list[Artifact]]]:
    """Resolve kernels in one round trip: the origin and the variants of each.

    Raises: the first error of any of them, and BuildTimeout when builds outlast the deadline (they go on).
    """
    here = session()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with here.connection() as connection:
                answers = _ask(here, connection, wanted, deadline)
                loaded = [[_artifact(here, connection, variant) for variant in variants] for variants in answers]
            break
        except CorruptArtifact:  # damaged or evicted since the daemon looked: it is built again
            if attempt == _ATTEMPTS:
                raise
        except DaemonEnding:  # the next daemon serves what this one was asked for
            if attempt == _ATTEMPTS or time.monotonic() > deadline:
                raise
            _wait_for_the_end(here.settings)
    origins = [min((variant.origin for variant in variants), key=protocol.ORIGINS.index) for variants in answers]
    return list(zip(origins, loaded, strict=True))


def _wait_for_the_end(settings: Settings) -> None:
    """Until the daemon that is going down listens no more, or was replaced."""
    until = time.monotonic() + _ENDING_S
    while listens(settings.socket) and time.monotonic() < until:
        time.sleep(0.02)


def _ask(here: _Session, connection: Connection, wanted: list[Wanted], deadline: float) -> list[list[Resolved]]:
    """One request, repeated while sources are missing or builds are running."""
    entries = {name: _find(here, name) for name in dict.fromkeys(wish.name for wish in wanted if wish.given is None)}
    found = [_Found(wish.given.read(), None) if wish.given else entries[wish.name] for wish in wanted]
    if not connection.is_open and not listens(here.settings.socket):  # no daemon is started for a wish it would refuse
        _check(wanted, found)
    sent: dict[str, int] = {}
    began = time.monotonic()
    while True:
        requests = _requests(here, wanted, found)
        wait_s = max(0.0, min(_PATIENCE_S, deadline - time.monotonic()))
        body = protocol.resolve_request(requests, client=here.client, version=kserve.__version__, wait_s=wait_s)
        plain = connection.call("POST", protocol.RESOLVE, body, wait_s=wait_s, start=True)["results"]
        missing = {digest for result in plain for digest in result.get("missing", ())}
        if missing:
            _upload(connection, found, missing, sent)
            continue
        if _look_outside(wanted, [result.get("includes", []) for result in plain]):
            continue
        results = [protocol.read_result(result) for result in plain]
        _raise_first(wanted, found, results)
        pending = [(wish, result) for wish, result in zip(wanted, results, strict=True) if isinstance(result, Pending)]
        if not pending:
            answers = [result for result in results if isinstance(result, list)]
            if _look_outside(
                wanted, [_includes_of(answer) for answer in answers]
            ):  # it was built now: tell what it was made of
                body = protocol.resolve_request(
                    _requests(here, wanted, found), client=here.client, version=kserve.__version__, wait_s=0.0
                )
                connection.call("POST", protocol.RESOLVE, body)
            return answers
        _wait_on(pending, began=began, deadline=deadline)


class _Found(NamedTuple):
    """An entry, and the stamps of what it was read from where they are certain."""

    entry: catalog.Found | Given
    stamps: Stamps | None


def _look_outside(wanted: list[Wanted], names: list[list[str]]) -> bool:
    """Look at the files outside that each wish names and has not looked at; whether there were any."""
    looked = False
    for wish, some in zip(wanted, names, strict=True):
        if wish.given is not None and (unseen := wish.given.unseen(some)):
            wish.given.look(unseen)
            looked = True
    return looked


def _includes_of(variants: list[Resolved]) -> list[str]:
    """What the build has read outside."""
    components = variants[0].manifest.components
    return [label.removeprefix("include.") for label in components if label.startswith("include.")]


def _find(here: _Session, name: str) -> _Found:
    """Read the entry twice, between three looks at its files: the stamps are those of the very bytes that are sent."""
    roots = here.local.roots
    first = catalog.find(name, here.settings)
    before = survey(roots, str(first.folder))
    entry = catalog.find(name, here.settings)
    after = survey(roots, str(entry.folder))
    return _Found(entry, after if entry == first and before == after else None)


def _upload(connection: Connection, found: list[_Found], missing: set[str], sent: dict[str, int]) -> None:
    """Send the files the daemon lacks. Raises: ServiceError when it does not keep what it was sent again and again."""
    if any(sent.get(digest, 0) >= _ATTEMPTS for digest in missing):
        raise ServiceError("the daemon lacks sources that it was just sent", hint="kserve status shows the state of its store")
    contents = {digest_of(content): content for item in found for content in item.entry.files.values()}
    for digest in missing:
        connection.call("POST", protocol.SOURCES, contents[digest])
        sent[digest] = sent.get(digest, 0) + 1


def _check(wanted: list[Wanted], found: list[_Found]) -> None:
    for wish, item in zip(wanted, found, strict=True):
        item.entry.check(wish.spec, wish.target)


def _requests(here: _Session, wanted: list[Wanted], found: list[_Found]) -> list[dict[str, Any]]:
    environment, build = environment_of_process(here.settings), not here.settings.no_build
    requests = [
        protocol.kernel_request(
            wish.name,
            files=item.entry.digests,
            spec=wish.spec,
            target=wish.target,
            environment=environment,
            build=build,
            alias=_alias(here, wish, item),
            debug=wish.debug,
        )
        for wish, item in zip(wanted, found, strict=True)
    ]
    return [
        protocol.with_outside(request, wish.given.outside) if wish.given else request
        for request, wish in zip(requests, wanted, strict=True)
    ]


def _alias(here: _Session, wish: Wanted, item: _Found) -> dict[str, Any] | None:
    """What lets the next such request do without the daemon; None for a debug variant, which only the daemon serves."""
    stamps = item.entry.stamps if isinstance(item.entry, Given) else item.stamps
    if stamps is None or wish.debug:
        return None
    return {"request": here.local.request_digest(wish), "stamps": stamps}


def _raise_first(wanted: list[Wanted], found: list[_Found], results: list[list[Resolved] | Pending | KserveError]) -> None:
    """Raise the first error among the results; one about the wish with this machine's paths, where it can be seen here."""
    for wish, item, result in zip(wanted, found, results, strict=True):
        if isinstance(result, RequestError):
            item.entry.check(wish.spec, wish.target)
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
    content = here.local.read(f"payload/{manifest.digest}")
    if content is None:
        try:
            content = connection.call_raw("GET", f"{protocol.ARTIFACTS}/{manifest.key}/payload", start=True)
        except NotBuilt:
            raise CorruptArtifact(f"{manifest.name} was evicted while it was fetched", facts={"key": manifest.key}) from None
    if digest_of(content) != manifest.digest:
        raise CorruptArtifact(f"payload of {manifest.name} arrived with another digest", facts={"key": manifest.key})
    return Artifact(manifest, content)
