"""What a compile has read, from the list that the compiler wrote, by names that hold on any machine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kserve.errors import BuildError, CompileFailed

# A file outside of every root, such as the C library's headers: named by its path.
SYSTEM = "system"
_ESCAPED = re.compile(r"\\([ #\\:])|\$(\$)")
_WORD = re.compile(r"(?:\\.|[^\s\\])+")
_UNLISTED = re.compile(rb"\.incbin\b")


def listed(depfile: Path) -> list[str]:
    """The files of a dependency list in make's form, as absolute paths, each once."""
    rules = depfile.read_text(errors="surrogateescape").replace("\\\n", " ")
    words = [word for rule in rules.splitlines() for word in _WORD.findall(rule.partition(": ")[2])]
    plain = (_ESCAPED.sub(lambda match: match[1] or match[2], word) for word in words)
    return list(dict.fromkeys(os.path.abspath(path) for path in plain))  # noqa: PTH100 - texts, many of them


class Roots(NamedTuple):
    """The places outside that a job may read, in the order a compiler searches them.

    Fields:
        identified: what a package there is called, for each; empty for a root whose files are looked at one by one.
        searched:   numbers of those in which an include is looked for.
    """

    paths: Sequence[str]
    identified: Sequence[str]
    searched: Sequence[int]


def read_from_roots(paths: Sequence[str], roots: Roots, *, known: Sequence[str], since_ns: int) -> dict[str, str]:
    """Digests by name of what was read outside of `known` places; nothing for a place where a file would have been taken first.

    A name begins with the number of the root that the file lies in.

    Args:
        known:    the job's own directory, and whatever the compiler's fingerprint covers.
        since_ns: when the compile began.
    Raises: BuildError for a file that was changed since; CompileFailed for one that reads files no list shows.
    """
    found = {}
    for path in paths:
        if any(path.startswith(f"{place}/") for place in known):
            continue
        number = _root_of(path, roots.paths)
        if number is None or not roots.identified[number]:
            found[_name(path, number, roots.paths)] = _digest(path, since_ns, is_users=number is not None)
        for name in _in_front(path, roots):
            found.setdefault(name, "")
    return found


def inside(paths: Sequence[str], roots: Sequence[str]) -> list[str]:
    """Those of the files that lie in a root."""
    return [path for path in paths if _root_of(path, roots) is not None]


def refuse_unlisted(content: bytes, path: str) -> None:
    """Raises CompileFailed for a text that reads a file which no list of dependencies shows."""
    if _UNLISTED.search(content):
        raise CompileFailed(
            f"{path}: .incbin reads a file that no list of dependencies shows",
            hint="put the extension into a kernel folder, and list the file in `headers` of its kernel.toml",
        )


def _in_front(path: str, roots: Roots) -> Iterator[str]:
    """Names of what is not there, and would come first if it were: of a folder that is missing, the folder."""
    for place, number in enumerate(roots.searched):
        base = roots.paths[number].rstrip("/")
        if path.startswith(base + "/"):
            parts = path.removeprefix(base + "/").split("/")
            for earlier in roots.searched[:place]:
                missing = _missing(roots.paths[earlier], parts)
                if missing:
                    yield f"{earlier}/{missing}"


def _missing(base: str, parts: Sequence[str]) -> str:
    for end in range(1, len(parts) + 1):
        name = "/".join(parts[:end])
        if not os.path.lexists(f"{base}/{name}"):
            return name
    return ""


def _root_of(path: str, roots: Sequence[str]) -> int | None:
    """The innermost root that the file lies in; of equal ones the first."""
    around = [number for number, root in enumerate(roots) if path == root or path.startswith(root.rstrip("/") + "/")]
    return max(around, key=lambda number: (len(roots[number]), -number), default=None)


def _name(path: str, number: int | None, roots: Sequence[str]) -> str:
    if number is None:
        return f"{SYSTEM}{path}"
    return f"{number}/{os.path.relpath(path, roots[number])}"


def _digest(path: str, since_ns: int, *, is_users: bool) -> str:
    with open(path, "rb") as file:  # noqa: PTH123 - many of them
        content = file.read()
        stamp = os.fstat(file.fileno())
    if since_ns <= stamp.st_ctime_ns:
        raise BuildError(f"{path} was changed while it was compiled", hint="call again")
    if is_users:
        refuse_unlisted(content, path)
    return hashlib.sha256(content).hexdigest()
