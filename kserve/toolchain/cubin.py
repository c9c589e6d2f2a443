"""Reads a cubin and the compiler's report: parameters, registers, shared memory, spills.

A cubin is an ELF64 file. The parameter table lies in section `.nv.info.<symbol>`, one record of attribute 0x17 a parameter;
registers are in attribute 0x2f of `.nv.info`. The layout is the one that cuobjdump prints with `-elf`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from kserve.errors import CompileFailed

_KPARAM_INFO = 0x17
_REGCOUNT = 0x2F
_FORMAT_WITH_PAYLOAD = 0x04
_SHT_NOBITS = 8

# The assembler's lines about one kernel: its properties, then what it uses.
_REPORT = re.compile(
    r"entry function '(?P<symbol>[^']*)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<used>[^\n]*)",
    re.DOTALL,
)
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*\(([^)]*)\)")
_PTX_TYPE = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")
_PTX_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")


class Section(NamedTuple):
    """One section of an ELF file; `link` is the header's sh_info: of a `.text` section, its symbol's index."""

    name: str
    link: int
    size_bytes: int
    content: bytes


def sections(cubin: bytes) -> Iterator[Section]:
    """The sections of an ELF64 little-endian file.

    Raises: CompileFailed when the bytes are not one.
    """
    try:
        if cubin[:6] != b"\x7fELF\x02\x01":
            raise CompileFailed("the compiler's output is not an ELF64 file")
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        entry_size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]
        names = headers[names_at][4]
        for name_at, kind, _, _, offset, size, _, link, *_ in headers:
            start = names + name_at
            name = cubin[start : cubin.index(b"\0", start)].decode()
            yield Section(name, link & 0xFFFFFF, size, b"" if kind == _SHT_NOBITS else cubin[offset : offset + size])
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise CompileFailed(f"the compiler's output is a damaged ELF file: {error}") from None


def attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of each record of an `.nv.info` section that carries one."""
    at = 0
    while at + 4 <= len(content):
        layout, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if layout == _FORMAT_WITH_PAYLOAD:
            yield attribute, content[at : at + size]
            at += size


def _records(section: Section, attribute: int, layout: str) -> Iterator[tuple[int, ...]]:
    """The payloads of one attribute. Raises: CompileFailed for one of another size."""
    for found, payload in attributes(section.content):
        if found == attribute:
            try:
                yield struct.unpack(layout, payload)
            except struct.error as error:
                raise CompileFailed(f"{section.name} of the compiler's output is damaged: {error}") from None


def parameters(cubin: bytes, symbol: str) -> list[tuple[int, int]]:
    """(offset, size_bytes) of each parameter of the kernel, in order."""
    found = {}
    for section in sections(cubin):
        if section.name == f".nv.info.{symbol}":
            for _, ordinal, offset, packed in _records(section, _KPARAM_INFO, "<IHHI"):
                found[ordinal] = (offset, packed >> 18)
    return [found[ordinal] for ordinal in sorted(found)]


def resources(cubin: bytes, symbol: str, report: str) -> dict[str, int]:
    """What one thread and one block of the kernel take.

    Args:
        report: the assembler's text (`ptxas -v`); it knows spills, and shared memory without what the system reserves.
    Returns:  registers (a thread), shared_bytes (static, a block), and, where the report has the kernel, spill_bytes and
              stack_bytes (a thread).
    """
    found = {"registers": 0, "shared_bytes": 0}
    table = {section.name: section for section in sections(cubin)}
    text, info, shared = (table.get(name) for name in (f".text.{symbol}", ".nv.info", f".nv.shared.{symbol}"))
    if text is not None and info is not None:
        counts = dict(pair for pair in _records(info, _REGCOUNT, "<II") if len(pair) == 2)
        found["registers"] = counts.get(text.link, 0)
    if shared is not None:
        found["shared_bytes"] = shared.size_bytes
    for match in _REPORT.finditer(report):
        if match["symbol"] == symbol:
            static = _STATIC_SHARED.search(match["used"])
            found["shared_bytes"] = int(static[1]) if static else 0
            found["stack_bytes"] = int(match["stack"])
            found["spill_bytes"] = int(match["stores"]) + int(match["loads"])
    return found


def ptx_kinds(ptx: str, symbol: str) -> list[str]:
    """`float` or `int` for each parameter of the kernel, `` where PTX names only bits."""
    for name, body in _PTX_ENTRY.findall(ptx):
        if name == symbol:
            return [_kind(type_name) for type_name in _PTX_TYPE.findall(body)]
    return []


def _kind(type_name: str) -> str:
    return {"f": "float", "s": "int", "u": "int"}.get(type_name[0], "")


def ptx_threads(ptx: str) -> int:
    """Threads a block needs, as the PTX states them; 0 where it does not."""
    match = _PTX_THREADS.search(ptx)
    return int(match[1]) if match else 0
