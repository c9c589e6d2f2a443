"""Alias: which keys a request had, and the file stamps that say whether it still has them.

The daemon writes one for each request it answers; a client that finds it in the store, with every stamp as it was, needs no
daemon. A stamp is size, modification time, change time (both in ns) and inode. Names are relative to the kernel roots.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kserve.artifact import COMPACT_FORM
from kserve.key import canonical_json, digest_of, sealed, unsealed

ALIAS_SCHEMA = 4
# More files than this around one kernel: stamping them costs more than asking.
_MOST_STAMPS = 2000
# File systems count time in ticks of up to 10 ms: a file younger than this may change again under the same stamp.
_TICK_NS = 50_000_000
_BYTECODE = "__pycache__"

Stamps = dict[str, list[int]]


class Signpost(NamedTuple):
    """What decides about the values of a kernel's knobs, so that a client can tell which of several answers is its own.

    Fields:
        base:      of its tunings (`tuning.candidates`).
        variables: knob -> environment variables that override it, the strongest first.
        sizes:     the names that `sizes` may have.
    """

    base: str
    variables: dict[str, list[str]]
    sizes: list[str]


class Alias(NamedTuple):
    """What a request gave. A kernel with knobs has one alias that is a signpost, with the answer for the values that knobs have
    by default, and one more for each choice of other values.

    Fields:
        variants:  their manifests in short (`artifact.compact`), the declared facts first; none at a signpost whose defaults
                   nobody has asked for.
        language:  of the kernel; `version` of the compiler that a process which imported another one must not use.
        toolchain: digest of the record with the stamps of the compiler's own files.
        stamps:    of everything the answer was read from, as canonical JSON: a program that loads many kernels has seen the
                   same text before, and need not read it.
        behind:    the signpost that leads here; empty for none.
    """

    variants: list[list[Any]]
    language: str
    version: str
    toolchain: str
    stamps: str
    signpost: Signpost | None = None
    behind: str = ""


def request_digest(
    name: str, spec: Mapping[str, object], target: str, *, roots: list[str], environment: Mapping[str, Any]
) -> str:
    """The name of a request's alias: everything but the content of files that decides its keys."""
    plain = {axis: value if isinstance(value, bool | int | str) else _plain(value) for axis, value in spec.items()}
    place = [environment["python"], environment["python_path"], environment.get("cuda_home", "")]
    return digest_of(canonical_json([ALIAS_SCHEMA, COMPACT_FORM, name, plain, target, roots, place]).encode())


def answer_digest(request: str, values: Mapping[str, int]) -> str:
    """The name of the alias behind a signpost for these values of knobs."""
    return digest_of(canonical_json([request, dict(values)]).encode())


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
        alias = Alias(**plain)
        return alias._replace(signpost=alias.signpost and Signpost(*alias.signpost))
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
            if entry.is_dir() and entry.name != _BYTECODE:
                yield entry.path
                yield f"{entry.path}/kernel.toml"
    for tree in (folder, f"{os.path.dirname(folder)}/include"):  # noqa: PTH120 - texts, as they are stored
        for place, folders, files in os.walk(tree):
            folders[:] = [name for name in folders if name != _BYTECODE]
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
    """Size, modification and change time in ns, inode; of a directory a hash of its names, not the size. Empty for none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - many of them a look: half the time without a Path
    except OSError:
        return []
    first = _names(path) if stat.S_ISDIR(found.st_mode) else found.st_size
    return [first, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def is_as_it_was(path: str, stated: list[int]) -> bool:
    """Whether the file or directory still has that stamp.

    A directory is looked into only when its times differ: bytecode that appears beside a source changes them and no more.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - as above
    except OSError:
        return not stated
    if len(stated) != 4 or found.st_ino != stated[3]:
        return False
    same_times = [found.st_mtime_ns, found.st_ctime_ns] == stated[1:3]
    if stat.S_ISDIR(found.st_mode):
        return same_times or _names(path) == stated[0]
    return same_times and found.st_size == stated[0]


def _names(path: str) -> int:
    try:
        names = sorted(name for name in os.listdir(path) if name != _BYTECODE)  # noqa: PTH208 - names alone
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).digest()[:7])


def changed_since(text: str, roots: list[str], seen: dict[tuple[str, int], bool]) -> str:
    """The first file that is not as it was; empty when all are.

    Args:
        text: the stamps of an alias.
        seen: what was found a moment ago, by path and stated change time; what is found now is added.
    """
    stamps: Stamps = json.loads(text)
    for name, stated in stamps.items():
        position, _, rest = name.partition("/")
        if not position.isdecimal() or int(position) >= len(roots):
            return name
        path = f"{roots[int(position)]}/{rest}" if rest else roots[int(position)]
        place = (path, stated[2] if len(stated) > 2 else 0)
        if place not in seen:
            seen[place] = is_as_it_was(path, stated)
        if not seen[place]:
            return path
    return ""
