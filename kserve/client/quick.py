"""Writes the launch function of one kernel: the text of what `launch.py` runs for torch tensors and plain numbers."""

from __future__ import annotations

from kserve.artifact import Contract, Param
from kserve.expression import parsed

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads of a block along one axis, blocks of a
# grid along x, y and z.
MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_SHARED = 2**31 - 1
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
    guards = [guard for param in params for guard in _guards(param, first=pointers[0] if pointers else "")]
    sizes = _sizes(contract)
    # A size that is fixed stands in the call; the others are computed, and bounded before ctypes would cut them to 32 bits.
    computed = {name: text for name, (text, _, _) in sizes.items() if not text.isdecimal()}
    within = [f"{sizes[name][1]} <= {name} <= {sizes[name][2]}" for name in computed]
    x, y, z, bx, by, bz, shared = (name if name in computed else text for name, (text, _, _) in sizes.items())
    lines = [
        "def launch(*args, stream=None, grid=None):",
        "    if stream is not None or grid is not None: return _slow(args, stream, grid)",
        "    try:",
        f"        ({''.join(name + ', ' for name in names)}) = args",
        f"        _device = {pointers[0]}.get_device()" if pointers else "        _device = _current_device()",
        f"        _fits = {' and '.join(guards) or 'True'}",
        "        if not _fits or _device != _current_device(): return _slow(args, stream, grid)",
        *(f"        _p_{name} = {name}.data_ptr()" for name in pointers),
        f"        _table = _functions if {_fact_condition(params)} else _generic",
        "        _function = _table[_device]",
        *(f"        {name} = {text}" for name, text in {**_constants(contract), **computed}.items()),
        f"        if not ({' and '.join(within) or 'True'}): return _slow(args, stream, grid)",
        f"    except {_NOT_QUICK}: return _slow(args, stream, grid)",
        "    try: _slot = _take()",
        "    except IndexError: _slot = _new()",
        f"    try: _pack(_slot.buffer, 0, {', '.join(packed)})",
        "    except _unfit: return _slow(args, stream, grid)",
        "    _stream = _current_stream(_device)",
        f"    _status = _launch(_function, {x}, {y}, {z}, {bx}, {by}, {bz}, {shared}, _stream, _slot.params, None)",
        "    _give(_slot)",
        "    if _status == _no_context: return _slow(args, stream, grid)",
        f"    if _status: _failed(_status, grid=({x}, {y}, {z}), block=({bx}, {by}, {bz}), shared={shared})",
    ]
    return "\n".join(lines) + "\n"


def _sizes(contract: Contract) -> dict[str, tuple[str, int, int]]:
    """The seven numbers of a launch by name: printed expression, least, most. An empty grid is the slow road's business."""
    texts = [*[*contract.grid, "1", "1"][:3], *[*contract.block, "1", "1"][:3], contract.shared_bytes]
    names = ("_x", "_y", "_z", "_bx", "_by", "_bz", "_shared")
    bounds = [*((1, most) for most in MOST_BLOCKS), *[(1, MOST_THREADS)] * 3, (0, MOST_SHARED)]
    return {name: (_printed(text, contract), *bound) for name, text, bound in zip(names, texts, bounds, strict=True)}


def _printed(text: str, contract: Contract) -> str:
    if text.isdecimal():
        return text
    expression = parsed(text)
    fixed = expression.names <= set(contract.constants)
    return str(expression.evaluate(contract.constants)) if fixed else expression.python


def _constants(contract: Contract) -> dict[str, str]:
    """The constants that the expressions read."""
    texts = (*contract.grid, *contract.block, contract.shared_bytes)
    used = set().union(*(parsed(text).names for text in texts if not text.isdecimal()))
    return {name: repr(value) for name, value in sorted(contract.constants.items()) if name in used}


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
