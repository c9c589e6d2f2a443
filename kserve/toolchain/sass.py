"""Reads SASS, the machine code of NVIDIA's GPUs as nvdisasm prints it: which instructions a kernel has, by class.

Names are those of the CUDA Binary Utilities manual, "Instruction Set Reference", Turing to Blackwell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_]*)((?:\.[\w]+)*)", re.MULTILINE
)
_WIDTH = re.compile(r"\.(?:[US]?(8|16|64|128|256)|ENL2\.256)(?![\w])")
# Class -> the whole opcodes in it. The first that fits counts; what fits none is arithmetic, addressing and control.
_CLASSES = {
    "matrix": r"[A-Z]?MMA|[A-Z]GMMA|UTC[A-Z]*MMA",
    "bulk_copies": r"UBLKCP|UBLKPF|UBLKRED|UTMA(?:LDG|STG|PF|REDG)|UTCCP",
    "async_copies": r"LDGSTS",
    "global_loads": r"LDG|LD",
    "global_stores": r"STG|ST",
    "shared_loads": r"LDS|LDSM",
    "shared_stores": r"STS|STSM|STAS",
    "local_loads": r"LDL",
    "local_stores": r"STL",
    "tensor_memory": r"LDTM|STTM|LDT|STT",
    "atomics": r"ATOM|ATOMG|ATOMS|RED|REDG|REDAS|SUATOM|SURED",
    "barriers": r"BAR|SYNCS|WARPSYNC|WARPGROUP|UCGABAR_ARV|UCGABAR_WAIT|ACQBULK",
    "special_functions": r"MUFU",
    "branches": r"BRA|BRX|BRXU|JMP|JMX|JMXU|CALL|RET",
}
_CLASS = re.compile("|".join(f"(?P<{name}>(?:{pattern})$)" for name, pattern in _CLASSES.items()))
# Those whose width says whether the memory is used well.
_BY_WIDTH = ("async_copies", "global_loads", "global_stores")


def instruction_mix(sass: str) -> dict[str, int]:
    """How many instructions of each class the code has, and in all; padding does not count.

    Every class is there, with 0 where it has none. Global loads and stores, and copies from global to shared memory,
    are also counted by the bits of one access: `global_loads_128`.
    """
    counted: Counter[str] = Counter()
    for opcode, modifiers in _instructions(sass):
        counted["total"] += 1
        match = _CLASS.match(opcode)
        if match is not None and match.lastgroup is not None:
            counted[match.lastgroup] += 1
            if match.lastgroup in _BY_WIDTH:
                counted[f"{match.lastgroup}_{_width(modifiers)}"] += 1
    widths = sorted((name for name in counted if name.startswith(tuple(f"{kind}_" for kind in _BY_WIDTH))), key=_by_number)
    return {name: counted[name] for name in ("total", *_CLASSES, *widths)}


def _instructions(sass: str) -> Iterator[tuple[str, str]]:
    return ((opcode, modifiers) for opcode, modifiers in _INSTRUCTION.findall(sass) if opcode != "NOP")


def _width(modifiers: str) -> int:
    """Bits of one access; 32 where none are named."""
    match = _WIDTH.search(modifiers)
    return 32 if match is None else int(match[1] or 256)


def _by_number(name: str) -> tuple[str, int]:
    kind, _, bits = name.rpartition("_")
    return kind, int(bits)
