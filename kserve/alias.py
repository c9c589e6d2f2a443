"""Alias: which keys a request had, and the file stamps that say whether it still has them.

The daemon writes one for each request it answers; a client that finds it in the store, with every stamp as it was, needs no
daemon. A stamp is size, modification time, change time (both in ns) and inode. Names are relative to the kernel roots.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kserve.key import canonical_json, digest_of, sealed, unsealed

ALIAS_SCHEMA = 1
# More files than this around one kernel: stamping them costs more than asking.
_MOST_STAMPS = 2000
# File systems count time in ticks of up to 10 ms: a file younger than this may change again under the same stamp.
_TICK_NS = 50_000_000

Stamps = dict[str, list[int]]


class Alias(NamedTuple):
    """What a request gave.

    Fields:
        keys:      of its variants, the declared facts first.
        language:  of the kernel; `version` of the compiler that a process which imported another one must not use.
        toolchain: digest of the record with the stamps of the compiler's own files.
        stamps:    of everything the answer was read from.
    """

    keys: list[str]
    language: str
    version: str
    toolchain: str
    stamps: Stamps


def request_digest(
    name: str, spec: Mapping[str, object], target: str, *, roots: list[str], environment: Mapping[str, Any]
) -> str:
    """The name of a request's alias: everything but the content of files that decides its keys."""
    plain = {axis: value if isinstance(value, bool | int | str) else _plain(value) for axis, value in spec.items()}
    place = [environment["python"], environment["python_path"]]
    return digest_of(canonical_json([ALIAS_SCHEMA, name, plain, target, roots, place]).encode())


def _plain(value: object) -> int | str:
    """A torch dtype by its name, a NumPy integer as an int: one wish however it is spelled."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # anything else raises TypeError
    except TypeError:
        return str(value).removeprefix("torch.")


def alias_to_bytes(alias: Alias) -> bytes:
    """Canonical JSON with a hash over itself."""
    return sealed({**alias._asdict(), "schema": ALIAS_SCHEMA})


def alias_from_bytes(content: bytes) -> Alias | None:
    """The alias; None when it is damaged or of another schema."""
    plain = unsealed(content)
    if plain is None or plain.pop("schema", None) != ALIAS_SCHEMA:
        return None
    try:
        return Alias(**plain)
    except TypeError:
        return None


def survey(roots: list[str], folder: str) -> Stamps | None:
    """Stamps of every file and directory that a lookup of the kernel in `folder` depends on; None when there are too many.

    That is: the roots, each folder in them and its kernel.toml, which decide where a name is found; everything in the kernel's
    own folder and in `include` beside it.
    """
    stamps: Stamps = {}
    for path in _paths(roots, folder):
        name = _relative(path, roots)
        if name is None or len(stamps) > _MOST_STAMPS:
            return None
        stamps[name] = stamp(path)
    young = time.time_ns() - _TICK_NS
    return None if any(max(found[1:3], default=0) > young for found in stamps.values()) else stamps


def _paths(roots: list[str], folder: str) -> Iterator[str]:
    for root in roots:
        yield root
        yield f"{root}/kernel.toml"
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name) if os.path.isdir(root) else ():  # noqa: PTH112
            if entry.is_dir():
                yield entry.path
                yield f"{entry.path}/kernel.toml"
    for tree in (folder, f"{os.path.dirname(folder)}/include"):  # noqa: PTH120 - texts, as they are stored
        for place, _, files in os.walk(tree):
            yield place
            yield from (f"{place}/{file}" for file in sorted(files))


def _relative(path: str, roots: list[str]) -> str | None:
    for position, root in enumerate(roots):
        if path == root or path.startswith(root + "/"):
            return f"{position}{path[len(root) :]}"
        beside = os.path.dirname(root) + "/include"  # noqa: PTH120 - a root that is a kernel's folder itself
        if path == beside or path.startswith(beside + "/"):
            return f"{position}/..{path[len(os.path.dirname(root)) :]}"  # noqa: PTH120
    return None


def stamp(path: str) -> list[int]:
    """Size, modification and change time in ns, inode; empty where there is no such file."""
    try:
        found = os.stat(path)  # noqa: PTH116 - many of them a look: half the time without a Path
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def changed_since(stamps: Mapping[str, list[int]], roots: list[str], seen: dict[str, list[int]]) -> str:
    """The first file that is not as it was; empty when all are.

    Args:
        seen: stamps taken a moment ago, by path; those taken now are added.
    """
    for name, stated in stamps.items():
        position, _, rest = name.partition("/")
        if not position.isdecimal() or int(position) >= len(roots):
            return name
        path = f"{roots[int(position)]}/{rest}" if rest else roots[int(position)]
        found = seen.get(path)
        if found is None:
            found = seen[path] = stamp(path)
        if found != stated:
            return path
    return ""
