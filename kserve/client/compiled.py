"""Chooses a kernel's quick road: compiled where `_launcher.c` was built and can express the kernel, else generated."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kserve.artifact import Contract, Param
from kserve.client.loader import Library, driver
from kserve.client.quick import quick_road, sizes_of
from kserve.errors import InvalidDefinition, LoadError
from kserve.expression import FUNCTIONS, parsed
from kserve.spec import DTYPES

if TYPE_CHECKING:
    from kserve.client._launcher import Step

_CUDA = 2  # DLPack's kDLCUDA
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}  # DLPack's DLDataTypeCode
_KINDS = {"pointer": "p", "struct": "s", "tensor_map": "s", "scratch": "0"}
_NODES = "Add Sub Mult FloorDiv Mod Eq NotEq Lt LtE Gt GtE USub min max next_pow2"
_OPERATORS = dict(zip(_NODES.split(), "+-*/%=!<l>gnmM2", strict=True))


def best_road(
    contract: Contract,
    libraries: list[Library],
    torch: Any,
    *,
    launcher: str,
    slow: Callable[..., None],
    failed: Callable[..., None],
) -> Callable[..., None]:
    """The launch function of a kernel for torch tensors; its other arguments are `quick_road`'s.

    Args:
        launcher: auto, python or compiled: the setting.
    Raises: LoadError when it is compiled and there is no such launcher.
    """
    road = None
    if launcher != "python":
        try:
            road = compiled_road(contract, libraries, torch, slow=slow, failed=failed)
        except ImportError as error:
            if launcher == "compiled":
                hint = "`make launcher` builds it in a checkout; KSERVE_LAUNCHER=auto does without"
                raise LoadError(f"there is no compiled launcher: {error}", hint=hint) from None
    return road or quick_road(contract, libraries, torch, slow=slow, failed=failed)


def compiled_road(
    contract: Contract,
    libraries: list[Library],
    torch: Any,
    *,
    slow: Callable[..., None],
    failed: Callable[..., None],
    device_type: int = _CUDA,
) -> Callable[..., None] | None:
    """The compiled launch function; None for a kernel that it cannot express, or a torch too old to be read by it.

    Args:
        device_type: where the tensors lie, as DLPack counts.
    Raises: ImportError when it was not built, or not for this Python.
    """
    from kserve.client._launcher import Launcher

    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    try:
        sizes = tuple((_steps_of(size.text, contract), size.least, size.most) for size in sizes_of(contract).values())
        params = tuple(_described(param) for param in contract.params)
        if exchange is None:
            return None
        return Launcher(
            params=params,
            sizes=sizes,
            tensor=torch.Tensor,
            parameter=torch.nn.Parameter,
            exchange=exchange,
            device_type=device_type,
            declared=libraries[0].functions,
            generic=libraries[-1].functions,
            slow=slow,
            failed=failed,
            launch_kernel=_address(driver().slow.cuLaunchKernel),
            current_device=_address(driver().quick.cuCtxGetDevice),
        ).launch
    except (InvalidDefinition, KeyError, OverflowError, ValueError):
        return None


def compiled_match(pattern: str, torch: Any, *, device_type: int = _CUDA) -> Callable[..., tuple[Any, ...] | None] | None:
    """`Signature(pattern).match`; None where it was not built, or torch is too old to be read by it."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    try:
        from kserve.client._launcher import Signature
    except ImportError:
        return None
    if exchange is None:
        return None
    plain = {"tensor": torch.Tensor, "parameter": torch.nn.Parameter}
    return Signature(pattern, **plain, exchange=exchange, device_type=device_type).match


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _described(param: Param) -> tuple[str, int, int, int, int, int, int, bool, bool]:
    kind, code, bits = _KINDS.get(param.kind, param.kind[0]), 0, 0
    if param.kind == "pointer":
        code, bits = _CODES[param.dtype.rstrip("0123456789")], DTYPES[param.dtype].size_bytes * 8
    facts = (param.align, param.divisible_by, param.contiguous, param.nullable)
    return (kind, code, bits, param.offset, param.size_bytes, *facts)


def _steps_of(text: str, contract: Contract) -> tuple[Step, ...]:
    places = {param.name: place for place, param in enumerate(contract.params)}
    return tuple(_steps(ast.parse(text, mode="eval").body, contract.constants, places))


def _steps(node: ast.expr, constants: dict[str, Any], places: dict[str, int]) -> list[Step]:
    """A printed expression in postfix order, what is constant in it evaluated: texts occur nowhere else."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - set(FUNCTIONS)
    if names <= set(constants):
        return [("k", parsed(ast.unparse(node)).evaluate(constants))]
    if isinstance(node, ast.Name):
        return [("v", places[node.id])]
    operator, operands = _parts(node)
    first, *others = (_steps(operand, constants, places) for operand in operands)
    if not others:
        return [*first, (operator, 0)]
    return first + [step for other in others for step in (*other, (operator, 0))]


def _parts(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """The operator of a printed expression, and what it is applied to from left to right."""
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op).__name__], [node.operand]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op).__name__], [node.left, node.right]
    if isinstance(node, ast.Compare):
        return _OPERATORS[type(node.ops[0]).__name__], [node.left, *node.comparators]
    assert isinstance(node, ast.Call), "expression.py prints nothing else"
    return _OPERATORS[ast.unparse(node.func)], node.args
