"""A wish that brings its own files, and reads others outside of them: their bytes, their digests, their stamps."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from kserve.alias import Stamps, stamp
from kserve.errors import RequestError
from kserve.key import digest_of

# As in `alias.survey`: a younger file may change again under the same stamp.
_TICK_NS = 50_000_000
_SYSTEM = "system/"
_PACKAGES = ("site-packages", "dist-packages")


class Root(NamedTuple):
    """A directory, or a file, outside: where it is and what it is for; `build.extension_job.Root` says which uses there are."""

    path: str
    use: str


class Given:
    """The files of one wish.

    Args:
        identity: everything about the wish but the content of files: what the request is called.
        texts:    relative name -> bytes.
        paths:    relative name -> where it is read from.
    Attributes:
        name: of the entry.
    """

    def __init__(self, name: str, identity: str, *, texts: dict[str, bytes], paths: dict[str, Path], roots: list[Root]) -> None:
        self.name = name
        self.identity = identity
        self._texts = texts
        self._paths = paths
        self._roots = roots
        self._packages: list[tuple[str, str]] | None = None
        self._digests: dict[str, str] = {}
        self._stamps: dict[str, list[int]] = {}
        self._certain = True
        self.files: dict[str, bytes] = {}

    def read(self) -> Given:
        """Read the sources as they are now, and forget what was seen outside. Raises: RequestError."""
        self._digests, self._stamps, self._certain = {}, {}, True
        self.files = dict(self._texts)
        for name, path in self._paths.items():
            try:
                self.files[name] = self._content(str(path))
            except OSError as error:
                raise RequestError(f"source {path} of {self.name} cannot be read: {error.strerror}") from None
        return self

    def look(self, names: list[str]) -> None:
        """Take the digests of files outside; of one that is not there, nothing."""
        for name in names:
            self._digests[name] = ""
            with contextlib.suppress(OSError):
                self._digests[name] = self._digest(self._path(name))

    def unseen(self, names: list[str]) -> list[str]:
        """Those of the names that were not looked at."""
        return [name for name in names if name not in self._digests]

    def check(self, spec: object, target: str, overrides: object = None) -> None:
        """What there is to check is checked where the wish is made."""

    @property
    def variables(self) -> dict[str, list[str]]:
        """Those that override knobs: it has none."""
        return {}

    @property
    def digests(self) -> dict[str, str]:
        return {name: digest_of(content) for name, content in self.files.items()}

    @property
    def outside(self) -> dict[str, Any]:
        """Roots and digests as a request states them."""
        if self._packages is None:
            self._packages = [_package(root.path) for root in self._roots]
        roots = [
            {"path": root.path, "use": root.use, "identity": identity}
            for root, (identity, _) in zip(self._roots, self._packages, strict=True)
        ]
        return {"roots": roots, "digests": self._digests}

    @property
    def stamps(self) -> Stamps | None:
        """The stamps of everything the answer is made of; None while one of them is not certain."""
        found = {f"0{path}": stated for path, stated in self._stamps.items()}
        found |= {f"0{place}": stamp(place) for _, place in self._packages or () if place}
        young = time.time_ns() - _TICK_NS
        is_old = all(max(stated[1:3], default=0) <= young for stated in found.values())
        return found if self._certain and is_old else None

    def _digest(self, path: str) -> str:
        try:
            return digest_of(self._content(path))
        except IsADirectoryError:  # there was none
            return digest_of(b"")

    def _content(self, path: str) -> bytes:
        before = self._stamps[path] = stamp(path)
        with open(path, "rb") as file:  # noqa: PTH123 - many of them
            content = file.read()
        self._certain = self._certain and stamp(path) == before
        return content

    def _path(self, name: str) -> str:
        """Where the file of that name is. Raises: OSError for a name of no root."""
        if name.startswith(_SYSTEM):
            return name.removeprefix(_SYSTEM[:-1])
        number, _, rest = name.partition("/")
        if not number.isdecimal() or int(number) >= len(self._roots):
            raise FileNotFoundError(name)
        return os.path.normpath(f"{self._roots[int(number)].path}/{rest}")


def _package(path: str) -> tuple[str, str]:
    """Name and version of the installed package that the directory belongs to, and where that is written; empty for none."""
    for parent in Path(path).parents:
        if parent.name in _PACKAGES:
            inside = os.path.relpath(path, parent) + "/"
            for record in sorted(parent.glob("*.dist-info/RECORD")):
                with contextlib.suppress(OSError):
                    if any(line.startswith(inside) for line in record.read_text(errors="replace").splitlines()):
                        return record.parent.name.removesuffix(".dist-info"), str(record.parent)
    return "", ""
