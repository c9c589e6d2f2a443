"""Writes the launch function of one kernel: what runs for torch tensors and plain numbers that pass every guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kserve.artifact import Contract, Param
from kserve.client.block import MOST_BLOCKS, MOST_SHARED, MOST_THREADS, Slot, layout
from kserve.client.loader import NO_CONTEXT, Library, driver
from kserve.expression import FUNCTIONS, parsed


def quick_road(
    contract: Contract, libraries: list[Library], torch: Any, *, slow: Callable[..., None], failed: Callable[..., None]
) -> Callable[..., None]:
    """The launch function of a kernel.

    Args:
        libraries: of the variant for the declared facts, first; of the one for none, last.
        slow:      takes (args, stream, grid) of what does not fit.
        failed:    raises for (status, sizes) of what the driver refused.
    """
    pool: list[Slot] = []
    namespace: dict[str, Any] = {
        **{f"_dtype_{param.name}": getattr(torch, param.dtype) for param in contract.params if param.kind == "pointer"},
        "_current_device": torch._C._cuda_getDevice,  # noqa: SLF001 - torch's public wrappers cost 8 µs
        "_current_stream": torch._C._cuda_getCurrentRawStream,  # noqa: SLF001
        "_declared": libraries[0].functions,
        "_generic": libraries[-1].functions,
        "_slow": slow,
        "_take": pool.pop,
        "_give": pool.append,
        "_new": lambda: Slot(contract),
        "_pack": layout(contract).pack_into,
        "_launch": driver().launch,
        "_no_context": NO_CONTEXT,
        "_failed": failed,
        **FUNCTIONS,
    }
    code = compile(quick_source(contract), f"<launch of {contract.symbol}>", "exec")
    exec(code, namespace)  # noqa: S102 - our own text, checked names
    launch: Callable[..., None] = namespace["launch"]
    return launch


class Size(NamedTuple):
    """One of the seven numbers of a launch: Python text, what it reads, its bounds. An empty grid is left to the slow road."""

    text: str
    names: frozenset[str]
    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        return self.text.isdecimal() and self.least <= int(self.text) <= self.most


def sizes_of(contract: Contract) -> dict[str, Size]:
    """Grid, block and dynamic shared memory, under the names they have in a launch function."""
    texts = [*[*contract.grid, "1", "1"][:3], *[*contract.block, "1", "1"][:3], contract.shared_bytes]
    names = ("_x", "_y", "_z", "_bx", "_by", "_bz", "_shared")
    bounds = [*((1, most) for most in MOST_BLOCKS), *[(1, MOST_THREADS)] * 3, (0, MOST_SHARED)]
    return {name: Size(*_printed(text, contract), *bound) for name, text, bound in zip(names, texts, bounds, strict=True)}


def _printed(text: str, contract: Contract) -> tuple[str, frozenset[str]]:
    """An expression as Python text and the names in it; what has a value already is printed as that."""
    if text.isdecimal():
        return text, frozenset()
    expression = parsed(text)
    if expression.names <= set(contract.constants):
        return str(expression.evaluate(contract.constants)), frozenset()
    return expression.python, expression.names


def quick_source(contract: Contract) -> str:
    """The launch function's text: every guard that the slow road has is a term of a condition.

    Names of parameters are identifiers (checked where kernel.toml is read); expressions are printed from their checked trees.
    """
    params = [param for param in contract.params if param.kind != "scratch"]
    pointers = [param.name for param in params if param.kind == "pointer"]
    addresses, none_is_null = _addresses(params, first=pointers[0] if pointers else "")
    packed = [f"_p_{param.name}" if param.kind == "pointer" else param.name for param in params]
    guards = [guard for param in params for guard in _guards(param, first=pointers[0] if pointers else "")]
    sizes = sizes_of(contract)
    # A size that is fixed stands in the call; the others are computed, and bounded before they are packed.
    computed = {name: size for name, size in sizes.items() if not size.is_fixed}
    within = [f"{size.least} <= {name} <= {size.most}" for name, size in computed.items()]
    passed = ", ".join(name if name in computed else size.text for name, size in sizes.items())
    read = {name for size in computed.values() for name in size.names}
    constants = {name: repr(value) for name, value in sorted(contract.constants.items()) if name in read}
    values = constants | {name: size.text for name, size in computed.items()}
    # Without a tensor there is no library whose stream it could be.
    stream = "_current_stream(_device)" if pointers else "0"
    lines = [
        "def launch(*args, stream=None, grid=None):",
        "    if stream is not None or grid is not None: return _slow(args, stream, grid)",
        "    try:",
        f"        ({''.join(param.name + ', ' for param in params)}) = args",
        f"        _device = {pointers[0]}.get_device()" if pointers else "        _device = _current_device()",
        f"        if not ({' and '.join([*guards, '_device == _current_device()'])}): return _slow(args, stream, grid)",
        *addresses,
        f"        if not ({none_is_null}): return _slow(args, stream, grid)",
        f"        _function = (_declared if {_fact_condition(params)} else _generic)[_device]",
        *(f"        {name} = {text}" for name, text in values.items()),
        f"        if not ({' and '.join(within) or 'True'}): return _slow(args, stream, grid)",
        "        try: _slot = _take()",
        "        except IndexError: _slot = _new()",
        f"        _pack(_slot.buffer, 0, {', '.join([passed, stream, *packed])})",
        # A foreign object may raise anything. Nothing is launched yet, and the slow road says what is wrong with it.
        "    except Exception: return _slow(args, stream, grid)",
        "    _status = _launch(_slot.config, _function, _slot.params, None)",
        "    _give(_slot)",
        "    if _status == 0: return",
        "    if _status == _no_context: return _slow(args, stream, grid)",
        f"    _failed(_status, ({passed}))",
    ]
    return "\n".join(lines) + "\n"


def _guards(param: Param, *, first: str) -> list[str]:
    name = param.name
    if param.kind == "pointer":
        found = [f"{name}.dtype is _dtype_{name}"]
        found += [f"{name}.is_contiguous()"] if param.contiguous else []
        found += [] if name == first else [f"{name}.get_device() == _device"]
        return [f"({name} is None or ({' and '.join(found)}))"] if _may_be_none(param, first=first) else found
    if param.kind in ("struct", "tensor_map"):
        return [f"{name}.__class__ is bytes and len({name}) == {param.size_bytes}"]
    kind = "float" if param.kind.startswith("f") else "bool" if param.kind == "bool" else "int"
    return [f"{name}.__class__ is {kind}"]


def _addresses(params: list[Param], *, first: str) -> tuple[list[str], str]:
    """Lines that read the pointers, and the test that none is null: without elements, or memory of its own, as a fake one."""
    lines, tests = [], []
    for param in params:
        if param.kind == "pointer":
            name, is_optional = param.name, _may_be_none(param, first=first)
            lines.append(f"        _p_{name} = {f'0 if {name} is None else ' if is_optional else ''}{name}.data_ptr()")
            tests.append(f"(_p_{name} or {name} is None)" if is_optional else f"_p_{name}")
    return lines, " and ".join(tests) or "True"


def _may_be_none(param: Param, *, first: str) -> bool:
    """The first pointer says which device the launch is for: without it the slow road looks for one."""
    return param.kind == "pointer" and param.nullable and param.name != first


def _fact_condition(params: list[Param]) -> str:
    """One test a distinct alignment, over all its pointers at once; one a divisor."""
    by_alignment: dict[int, list[str]] = {}
    for param in params:
        if param.align:
            by_alignment.setdefault(param.align, []).append(f"_p_{param.name}")
    tests = [f"not ({' | '.join(names)}) & {align - 1}" for align, names in sorted(by_alignment.items())]
    tests += [f"not {param.name} % {param.divisible_by}" for param in params if param.divisible_by]
    return " and ".join(tests) or "True"
