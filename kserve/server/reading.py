"""Reads the body of a resolve request: the checks that `models.py` describes to FastAPI, in plain Python.

The daemon answers its first request without importing FastAPI or pydantic (a third of a second); a test holds both to the same
bodies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kserve.artifact import DEBUGS
from kserve.build.extension_job import Outside, Root
from kserve.build.planner import AliasWish, KernelRequest
from kserve.build.tuned import NO_WISH, KnobWish
from kserve.build.worker_handle import Environment
from kserve.errors import ForeignPeer, RequestError
from kserve.tuning import Device

MOST_KERNELS = 1000
MOST_FILES = 1000
MOST_STAMPS = 20_000
MOST_ROOTS = 200
MOST_KNOBS = 100
USES = r"^(?:quote [A-Za-z0-9_./+-]+|include|system|library|read|project)$"
LONGEST_TEXT = 4096
LONGEST_WAIT_S = 600.0
LONGEST_NAME = 200
DIGEST = r"^[0-9a-f]{64}$"
# No parent folders, no absolute paths: the name becomes a path inside the staging directory.
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*$"
_DIGEST, _FILE_NAME, _USES = re.compile(DIGEST), re.compile(FILE_NAME), re.compile(USES)


class ResolveRequest(NamedTuple):
    """A whole request: who asks, how long the answer may take, and the kernels."""

    protocol: int
    version: str
    client: str
    wait_s: float
    kernels: list[KernelRequest]


def read_resolve(content: bytes, *, may_alias: bool) -> ResolveRequest:
    """The request in a body.

    Args:
        may_alias: whether an alias is taken from this client: only from one that runs as the daemon's own user.
    Raises: RequestError naming the field that does not have the documented form.
    """
    fields = _Fields("body", _json(content), ("protocol", "version", "client", "wait_s", "kernels"))
    kernels = fields.list("kernels", MOST_KERNELS)
    return ResolveRequest(
        protocol=fields.integer("protocol"),
        version=fields.text("version"),
        client=fields.text("client"),
        wait_s=fields.seconds("wait_s"),
        kernels=[_kernel(f"kernels.{position}", one, may_alias=may_alias) for position, one in enumerate(kernels)],
    )


def check_object(content: bytes) -> None:
    """Raises: RequestError for a body that is neither empty nor an object of JSON."""
    if content and not isinstance(_json(content), dict | None):
        raise _refused("body", "an object")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise _refused("body", "JSON") from None


def _kernel(place: str, plain: object, *, may_alias: bool) -> KernelRequest:
    optional = ("spec", "build", "alias", "knobs", "generic", "debug", "outside")
    fields = _Fields(place, plain, ("name", "files", "target", "environment"), optional)
    files = fields.table("files", MOST_FILES)
    for name, digest in files.items():
        if len(name) > LONGEST_NAME or not _FILE_NAME.search(name) or "\n" in name:
            raise _refused(f"{place}.files", f"relative names of letters, digits and ._+-, not {name[:80]!r}")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise _refused(f"{place}.files.{name}", "64 hex digits")
    spec = fields.table("spec", 100, default={})
    for axis, value in spec.items():
        if not isinstance(value, bool | int | str) or len(str(value)) > LONGEST_TEXT:
            raise _refused(f"{place}.spec.{axis[:80]}", "a boolean, an integer or a text")
    alias = _alias(f"{place}.alias", fields.get("alias"))
    debug = fields.get("debug", "")
    if debug not in ("", *DEBUGS):
        raise _refused(f"{place}.debug", f"nothing, or one of {', '.join(DEBUGS)}")
    return KernelRequest(
        name=fields.text("name"),
        files=files,
        spec=spec,
        target=fields.text("target"),
        environment=_environment(f"{place}.environment", fields.get("environment")),
        build=fields.flag("build", default=True),
        alias=alias if may_alias else None,
        knobs=_knobs(f"{place}.knobs", fields.get("knobs")),
        generic=fields.flag("generic", default=True),
        outside=_outside(f"{place}.outside", fields.get("outside"), may_read=may_alias),
        debug=debug,
    )


def _outside(place: str, plain: object, *, may_read: bool) -> Outside | None:
    """What an extension may read besides: named by the daemon's own user only, as whom it is compiled."""
    if plain is None:
        return None
    if not may_read:
        raise ForeignPeer(
            "directories outside of a kernel's folder are taken from the daemon's own user, over its socket, only"
        )
    fields = _Fields(place, plain, ("roots", "digests"))
    roots = [_Fields(f"{place}.roots", root, ("path", "use", "identity")) for root in fields.list("roots", MOST_ROOTS)]
    read = tuple(Root(root.text("path"), root.text("use"), root.text("identity")) for root in roots)
    for root in read:
        if not root.path.startswith("/") or not _USES.fullmatch(root.use):
            raise _refused(f"{place}.roots", "absolute paths, each with a use")
    digests = fields.table("digests", MOST_STAMPS)
    if not all(isinstance(digest, str) and (not digest or _DIGEST.fullmatch(digest)) for digest in digests.values()):
        raise _refused(f"{place}.digests", "64 hex digits, or nothing where there is no such file")
    return Outside(read, digests)


def _environment(place: str, plain: object) -> Environment:
    fields = _Fields(place, plain, ("python",), ("python_path", "loaded", "cuda_home"))
    path = [_text(f"{place}.python_path", part) for part in fields.list("python_path", 100, default=[])]
    loaded = {name: _text(f"{place}.loaded", version) for name, version in fields.table("loaded", 10, default={}).items()}
    cuda_home = _text(f"{place}.cuda_home", fields.get("cuda_home", ""))
    return Environment(fields.text("python"), tuple(path), tuple(sorted(loaded.items())), cuda_home)


def _alias(place: str, plain: object) -> AliasWish | None:
    if plain is None:
        return None
    fields = _Fields(place, plain, ("request", "stamps"), ("variables",))
    request = fields.text("request")
    if not _DIGEST.fullmatch(request):
        raise _refused(f"{place}.request", "64 hex digits")
    stamps = fields.table("stamps", MOST_STAMPS)
    for name, stamp in stamps.items():
        numbers = stamp if isinstance(stamp, list) and len(stamp) <= 4 else [None]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise _refused(f"{place}.stamps.{name[:80]}", "up to four integers")
    variables = fields.table("variables", MOST_KNOBS, default={})
    for knob, names in variables.items():
        if not isinstance(names, list) or len(names) > MOST_KNOBS:
            raise _refused(f"{place}.variables.{knob[:80]}", "a list of texts")
        for name in names:
            _text(f"{place}.variables.{knob[:80]}", name)
    return AliasWish(request, stamps, variables)


def _knobs(place: str, plain: object) -> KnobWish:
    if plain is None:
        return NO_WISH
    fields = _Fields(place, plain, (), ("values", "sizes", "device"))
    numbers = {field: fields.table(field, MOST_KNOBS, default={}) for field in ("values", "sizes")}
    for field, found in numbers.items():
        for name, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise _refused(f"{place}.{field}.{name[:80]}", "an integer")
    device = fields.get("device")
    return KnobWish(numbers["values"], numbers["sizes"], None if device is None else _device(f"{place}.device", device))


def _device(place: str, plain: object) -> Device:
    fields = _Fields(place, plain, Device._fields)
    return Device(fields.text("name"), fields.integer("sm_count"), fields.integer("l2_bytes"), fields.text("mig"))


class _Fields:
    """The fields of one JSON object. Every reader raises RequestError with the field's place."""

    def __init__(self, place: str, plain: object, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        if not isinstance(plain, dict):
            raise _refused(place, "an object")
        known = (*required, *optional)
        wrong = {name[:80]: f"one of {', '.join(known)}" for name in plain if name not in known}
        wrong |= {name: "a value: it is required" for name in required if name not in plain}
        if wrong:
            raise _refused_all({f"{place}.{name}": allowed for name, allowed in list(wrong.items())[:20]})
        self._place = place
        self._plain: Mapping[str, Any] = plain

    def get(self, field: str, default: object = None) -> Any:
        return self._plain.get(field, default)

    def text(self, field: str) -> str:
        return _text(f"{self._place}.{field}", self.get(field))

    def integer(self, field: str) -> int:
        found = self.get(field)
        if not isinstance(found, int) or isinstance(found, bool):
            raise _refused(f"{self._place}.{field}", "an integer")
        return found

    def seconds(self, field: str) -> float:
        found = self.get(field)
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= LONGEST_WAIT_S:
            raise _refused(f"{self._place}.{field}", f"seconds from 0 to {LONGEST_WAIT_S:.0f}")
        return float(found)

    def flag(self, field: str, *, default: bool) -> bool:
        found = self.get(field, default)
        if not isinstance(found, bool):
            raise _refused(f"{self._place}.{field}", "true or false")
        return found

    def list(self, field: str, most: int, default: object = None) -> list[Any]:
        found = self.get(field, default)
        if not isinstance(found, list) or len(found) > most:
            raise _refused(f"{self._place}.{field}", f"a list of at most {most}")
        return found

    def table(self, field: str, most: int, default: object = None) -> dict[str, Any]:
        found = self.get(field, default)
        if not isinstance(found, dict) or len(found) > most or any(len(name) > LONGEST_TEXT for name in found):
            raise _refused(f"{self._place}.{field}", f"an object of at most {most} fields")
        return found


def _text(place: str, found: object) -> str:
    if not isinstance(found, str) or len(found) > LONGEST_TEXT:
        raise _refused(place, f"a text of at most {LONGEST_TEXT} characters")
    return found


def _refused(place: str, allowed: str) -> RequestError:
    return _refused_all({place: allowed})


def _refused_all(wrong: Mapping[str, str]) -> RequestError:
    facts = {place: f"expected {allowed}" for place, allowed in wrong.items()}
    return RequestError("the request does not have the documented form", facts=facts)
