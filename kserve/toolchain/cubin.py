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

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*\(([^)]*)\)")
_PTX_TYPE = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")
_PTX_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")


class Section(NamedTuple):
    name: str
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
        for name_at, kind, _, _, offset, size, *_ in headers:
            start = names + name_at
            name = cubin[start : cubin.index(b"\0", start)].decode()
            yield Section(name, size, b"" if kind == _SHT_NOBITS else cubin[offset : offset + size])
    except (struct.error, ValueError, IndexError) as error:
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


def parameters(cubin: bytes, symbol: str) -> list[tuple[int, int]]:
    """(offset, size_bytes) of each parameter of the kernel, in order."""
    found = {}
    for section in sections(cubin):
        if section.name == f".nv.info.{symbol}":
            for attribute, payload in attributes(section.content):
                if attribute == _KPARAM_INFO:
                    _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
                    found[ordinal] = (offset, packed >> 18)
    return [found[ordinal] for ordinal in sorted(found)]


def resources(cubin: bytes, symbol: str, report: str) -> dict[str, int]:
    """What one thread and one block of the kernel take.

    Args:
        report: the assembler's text (`ptxas -v`), for what the cubin does not say.
    Returns:  registers (a thread), shared_bytes (static, a block), and, where the report has them, spill_bytes and
              stack_bytes (a thread).
    """
    found = {"registers": 0, "shared_bytes": 0}
    for section in sections(cubin):
        if section.name == f".nv.shared.{symbol}":
            found["shared_bytes"] = section.size_bytes
        elif section.name == ".nv.info":
            counts = [struct.unpack("<II", payload)[1] for a, payload in attributes(section.content) if a == _REGCOUNT]
            found["registers"] = max(counts, default=0)
    stack = _SPILLS.search(report, max(report.find(symbol), 0))
    if stack:
        found["stack_bytes"] = int(stack[1])
        found["spill_bytes"] = int(stack[2]) + int(stack[3])
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
