"""Reads a shared library: which libraries it needs, and which versions of the C and C++ libraries."""

from __future__ import annotations

import re
import struct

from kserve.errors import CompileFailed
from kserve.toolchain.cubin import sections

_DT_NEEDED = 1
_VERSION = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)(?=\0)")


def needs_of(library: bytes) -> dict[str, str]:
    """`libraries` (names, in order) and the newest of `glibc`, `glibcxx` and `cxxabi` whose symbols it uses.

    Raises: CompileFailed when the bytes are no ELF64 file.
    """
    table = {section.name: section.content for section in sections(library)}
    names, entries = table.get(".dynstr", b""), table.get(".dynamic", b"")
    found = {"libraries": " ".join(_needed(entries, names))}
    for kind in (b"GLIBC", b"GLIBCXX", b"CXXABI"):
        versions = [tuple(map(int, version.split(b"."))) for name, version in _VERSION.findall(names) if name == kind]
        if versions:
            found[kind.decode().lower()] = ".".join(map(str, max(versions)))
    return found


def _needed(entries: bytes, names: bytes) -> list[str]:
    try:
        tags = [tag for tag in struct.iter_unpack("<qQ", entries) if tag[0] == _DT_NEEDED]
        return [names[at : names.index(b"\0", at)].decode() for _, at in tags]
    except (struct.error, ValueError) as error:
        raise CompileFailed(f"the linker's output is a damaged ELF file: {error}") from None
