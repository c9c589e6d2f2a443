"""The road through the daemon: definition and sources, one request, builds that are waited for, payloads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import kserve
from kserve import catalog, protocol
from kserve.alias import Stamps, survey
from kserve.artifact import Artifact
from kserve.client.choice import device_for
from kserve.client.connection import Connection, forgive
from kserve.client.direct import Wanted
from kserve.client.given import Given
from kserve.client.local import Local, local
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
from kserve.knobs import Override, overrides_in
from kserve.ownership import listens
from kserve.protocol import Pending, Resolved

# After this long a wait is worth a line, and the daemon is asked again.
_PATIENCE_S = 2.0
_ATTEMPTS = 10
_ENDING_S = 1.0
_READ = "include."  # the labels of what a build has read outside


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


class Answer(NamedTuple):
    """One wish, resolved.

    Fields:
        chosen_by: who chose the values of its knobs; empty where they are the defaults.
        base:      what its tunings are filed under.
    """

    origin: str
    artifacts: list[Artifact]
    chosen_by: str
    base: str


def ask(wanted: list[Wanted], *, deadline: float) -> list[Answer]:
    """Resolve kernels in one round trip.

    Raises: the first error of any of them, and BuildTimeout when builds outlast the deadline (they go on).
    """
    answers = ask_each(wanted, deadline=deadline, is_one=True)
    return [answer for answer in answers if isinstance(answer, Answer)]


def ask_each(wanted: list[Wanted], *, deadline: float, is_one: bool = False) -> list[Answer | KserveError]:
    """Resolve kernels in one round trip; one that fails leaves its error in its place.

    Args:
        is_one: the first error is raised as soon as it is known, and both variants are asked for.
    Raises: what concerns all of them, BuildTimeout when builds outlast the deadline (they go on).
    """
    here = session()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with here.connection() as connection:
                results = _ask(here, connection, wanted, deadline, is_one=is_one)
                return [_answer(here, connection, wish, result) for wish, result in results]
        except CorruptArtifact:  # damaged or evicted since the daemon looked: it is built again
            if attempt == _ATTEMPTS:
                raise
        except DaemonEnding:  # the next daemon serves what this one was asked for
            if attempt == _ATTEMPTS or time.monotonic() > deadline:
                raise
            _wait_for_the_end(here.settings)
    raise AssertionError("the last attempt returns or raises")


def _answer(
    here: _Session, connection: Connection, chosen_by: str, result: list[Resolved] | KserveError
) -> Answer | KserveError:
    if isinstance(result, KserveError):
        return result
    origin = min((variant.origin for variant in result), key=protocol.ORIGINS.index)
    artifacts = [_artifact(here, connection, variant) for variant in result]
    return Answer(origin, artifacts, "tuned" if result[0].tuned else chosen_by, result[0].base)


def _wait_for_the_end(settings: Settings) -> None:
    """Until the daemon that is going down listens no more, or was replaced."""
    until = time.monotonic() + _ENDING_S
    while listens(settings.socket) and time.monotonic() < until:
        time.sleep(0.02)


def _ask(
    here: _Session, connection: Connection, wanted: list[Wanted], deadline: float, *, is_one: bool
) -> list[tuple[str, list[Resolved] | KserveError]]:
    """One request, repeated while sources are missing or builds are running: who chose each one's knobs, and the result."""
    asked = _all_asked(here, wanted)
    if not connection.is_open and not listens(here.settings.socket):  # no daemon is started for a wish it would refuse
        _check(asked)
    results: list[list[Resolved] | Pending | KserveError | None] = [None] * len(asked)
    sent: dict[str, int] = {}
    began = time.monotonic()
    while True:
        # A failure stands: asked for again, it would be built again once the daemon has forgotten it.
        left = [place for place, result in enumerate(results) if not isinstance(result, KserveError)]
        wait_s = max(0.0, min(_PATIENCE_S, deadline - time.monotonic()))
        requests = [_request(here, asked[place], is_one=is_one) for place in left]
        body = protocol.resolve_request(requests, client=here.client, version=kserve.__version__, wait_s=wait_s)
        plain = connection.call("POST", protocol.RESOLVE, body, wait_s=wait_s, start=True)["results"]
        missing = {digest for result in plain for digest in result.get("missing", ())}
        if missing:
            _upload(connection, asked, missing, sent)
            continue
        looked = [_looks_outside(asked[place], result.get("includes", [])) for place, result in zip(left, plain, strict=True)]
        if any(looked):
            continue
        for place, result in zip(left, plain, strict=True):
            results[place] = protocol.read_result(result)
        if is_one:
            _raise_first(asked, results)
        pending = [(one.wish, result) for one, result in zip(asked, results, strict=True) if isinstance(result, Pending)]
        if not pending:
            _tell_what_was_read(here, connection, asked, results)
            return [
                (one.chosen_by, found)
                for one, found in zip(asked, results, strict=True)
                if isinstance(found, list | KserveError)
            ]
        _wait_on(pending, began=began, deadline=deadline)


def _looks_outside(one: _Asked, names: list[str]) -> bool:
    """Look at the files outside that a wish has not looked at; whether there were any."""
    unseen = one.wish.given.unseen(names) if one.wish.given else []
    if one.wish.given and unseen:
        one.wish.given.look(unseen)
    return bool(unseen)


def _tell_what_was_read(here: _Session, connection: Connection, asked: list[_Asked], results: Sequence[object]) -> None:
    """An extension was built now: only now is it known what it is made of, and the next process needs an alias."""
    for one, result in zip(asked, results, strict=True):
        if one.wish.given and isinstance(result, list):
            labels = result[0].manifest.components
            if _looks_outside(one, [label.removeprefix(_READ) for label in labels if label.startswith(_READ)]):
                request = _request(here, one, is_one=True)
                body = protocol.resolve_request([request], client=here.client, version=kserve.__version__, wait_s=0.0)
                connection.call("POST", protocol.RESOLVE, body)


class _Asked(NamedTuple):
    """A wish, the entry it means, and the variables that set its knobs."""

    wish: Wanted
    entry: catalog.Found | Given
    known: Stamps | None
    overrides: dict[str, Override]

    @property
    def stamps(self) -> Stamps | None:
        return self.entry.stamps if isinstance(self.entry, Given) else self.known

    @property
    def chosen_by(self) -> str:
        by = ", ".join(dict.fromkeys(override.variable for override in self.overrides.values()))
        return "asked for" if self.wish.knobs else by

    def check(self) -> None:
        self.entry.check(self.wish.spec, self.wish.target, self.overrides)


def _all_asked(here: _Session, wanted: list[Wanted]) -> list[_Asked]:
    """The wishes with what they need. Raises: InvalidSpec for a variable that says no value of its knob."""
    entries = {name: _find(here, name) for name in dict.fromkeys(wish.name for wish in wanted if wish.given is None)}
    asked = []
    for wish in wanted:
        found = _Found(wish.given.read(), None) if wish.given else entries[wish.name]
        overrides = {} if wish.knobs else overrides_in(found.entry.variables, here.local.variables)
        asked.append(_Asked(wish, *found, overrides))
        if overrides:
            asked[-1].check()
    return asked


def _request(here: _Session, asked: _Asked, *, is_one: bool) -> dict[str, Any]:
    wish, entry = asked.wish, asked.entry
    values: Mapping[str, int | None] = wish.knobs or {knob: override.value for knob, override in asked.overrides.items()}
    device = device_for(wish.target) if entry.variables and not values else None
    alias = {"request": here.local.request_digest(wish), "stamps": asked.stamps, "variables": entry.variables}
    request = protocol.kernel_request(
        wish.name,
        files=entry.digests,
        spec=wish.spec,
        target=wish.target,
        environment=environment_of_process(here.settings),
        build=not here.settings.no_build,
        alias=alias
        if alias["stamps"] is not None and is_one and not wish.debug
        else None,  # a debug variant the daemon alone serves
        debug=wish.debug,
    )
    if wish.given:
        request = protocol.with_outside(request, wish.given.outside)
    knobs = {"values": dict(values), "sizes": dict(wish.sizes), "device": device and device._asdict()}
    return {**request, **({"knobs": knobs} if entry.variables else {}), **({} if is_one else {"generic": False})}


class _Found(NamedTuple):
    """An entry, and the stamps of what it was read from where they are certain."""

    entry: catalog.Found | Given
    stamps: Stamps | None


def _find(here: _Session, name: str) -> _Found:
    """Read the entry twice, between three looks at its files: the stamps are those of the very bytes that are sent."""
    roots = here.local.roots
    first = catalog.find(name, here.settings)
    before = survey(roots, str(first.folder))
    entry = catalog.find(name, here.settings)
    after = survey(roots, str(entry.folder))
    return _Found(entry, after if entry == first and before == after else None)


def _upload(connection: Connection, asked: list[_Asked], missing: set[str], sent: dict[str, int]) -> None:
    """Send the files the daemon lacks. Raises: ServiceError when it does not keep what it was sent again and again."""
    if any(sent.get(digest, 0) >= _ATTEMPTS for digest in missing):
        raise ServiceError("the daemon lacks sources that it was just sent", hint="kserve status shows the state of its store")
    contents = {digest_of(content): content for one in asked for content in one.entry.files.values()}
    for digest in missing:
        connection.call("POST", protocol.SOURCES, contents[digest])
        sent[digest] = sent.get(digest, 0) + 1


def _check(asked: list[_Asked]) -> None:
    for one in asked:
        one.check()


def _raise_first(asked: list[_Asked], results: Sequence[list[Resolved] | Pending | KserveError | None]) -> None:
    """Raise the first error among the results; one about the wish with this machine's paths, where it can be seen here."""
    for one, result in zip(asked, results, strict=True):
        if isinstance(result, RequestError):
            one.check()
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
