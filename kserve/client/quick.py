"""Writes the launch function of one kernel: the text of what `launch.py` runs for torch tensors and plain numbers."""

from __future__ import annotations

from kserve.artifact import Contract, Param
from kserve.expression import Expression

# Blocks of a grid along x, y and z: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
# What a term of the generated condition raises on an argument of another kind.
_NOT_QUICK = "(AttributeError, ValueError, TypeError, KeyError, ZeroDivisionError)"


def quick_source(contract: Contract) -> str:
    """The launch function's text.

    Names of parameters are identifiers (checked where kernel.toml is read); expressions are printed from their checked trees.
    """
    params = [param for param in contract.params if param.kind != "scratch"]
    names = [param.name for param in params]
    pointers = [param.name for param in params if param.kind == "pointer"]
    packed = [f"_p_{param.name}" if param.kind == "pointer" else param.name for param in params]
    texts = (*contract.grid, *contract.block, contract.shared_bytes)
    used = set().union(*(Expression(text).names for text in texts))
    constants = "; ".join(f"{name} = {value!r}" for name, value in sorted(contract.constants.items()) if name in used)
    grid = [*(Expression(text).python for text in contract.grid), "1", "1"][:3]
    extents = [
        f"0 < {name} <= {most}" for name, most, text in zip(("_x", "_y", "_z"), MOST_BLOCKS, grid, strict=True) if text != "1"
    ]
    block = ", ".join([*(Expression(text).python for text in contract.block), "1", "1"][:3])
    guards = [guard for param in params for guard in _guards(param, first=pointers[0] if pointers else "")]
    lines = [
        f"def launch({', '.join(['*args', 'stream=None', 'grid=None'])}):",
        "    if stream is not None or grid is not None: return _slow(args, stream, grid)",
        "    try:",
        f"        ({''.join(name + ', ' for name in names)}) = args",
        f"        _device = {pointers[0]}.get_device()" if pointers else "        _device = _current_device()",
        f"        _fits = {' and '.join(guards) or 'True'}",
        "        if not _fits or _device != _current_device(): return _slow(args, stream, grid)",
        *(f"        _p_{name} = {name}.data_ptr()" for name in pointers),
        f"        _table = _functions if {_fact_condition(params)} else _generic",
        "        _function = _table[_device]",
        f"        {constants}" if constants else "        pass",
        f"        _x = {grid[0]}; _y = {grid[1]}; _z = {grid[2]}",
        f"        _shared = {Expression(contract.shared_bytes).python}",
        f"        if not ({' and '.join(extents) or 'True'}): return _slow(args, stream, grid)",
        f"    except {_NOT_QUICK}: return _slow(args, stream, grid)",
        "    try: _slot = _take()",
        "    except IndexError: _slot = _new()",
        f"    try: _pack(_slot.buffer, 0, {', '.join(packed)})",
        "    except _unfit: return _slow(args, stream, grid)",
        f"    _status = _launch(_function, _x, _y, _z, {block}, _shared, _current_stream(_device), _slot.params, None)",
        "    _give(_slot)",
        "    if _status == _no_context: return _slow(args, stream, grid)",
        f"    if _status: _failed(_status, grid=(_x, _y, _z), block=({block}), shared=_shared)",
    ]
    return "\n".join(lines) + "\n"


def _guards(param: Param, *, first: str) -> list[str]:
    name = param.name
    if param.kind == "pointer":
        found = [f"{name}.dtype is _dtype_{name}"]
        found += [f"{name}.is_contiguous()"] if param.contiguous else []
        return found + ([] if name == first else [f"{name}.get_device() == _device"])
    if param.kind in ("struct", "tensor_map"):
        return [f"{name}.__class__ is bytes and len({name}) == {param.size_bytes}"]
    kind = "float" if param.kind.startswith("f") else "bool" if param.kind == "bool" else "int"
    return [f"{name}.__class__ is {kind}"]


def _fact_condition(params: list[Param]) -> str:
    """One test a distinct alignment, over all its pointers at once; one a divisor."""
    by_alignment: dict[int, list[str]] = {}
    for param in params:
        if param.align:
            by_alignment.setdefault(param.align, []).append(f"_p_{param.name}")
    tests = [f"not ({' | '.join(names)}) & {align - 1}" for align, names in sorted(by_alignment.items())]
    tests += [f"not {param.name} % {param.divisible_by}" for param in params if param.divisible_by]
    return " and ".join(tests) or "True"
