"""Integer expressions of kernel.toml: `cdiv(n, 4) * (hidden > 64)`.

Read once into a checked tree, then evaluated with values or printed as Python for the launch code. Only names, integer and
string constants, `+ - * // %`, comparisons (1 or 0), min, max, cdiv and next_pow2 exist: evaluating an expression calls
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kserve.errors import InvalidDefinition

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from types import CodeType

_LONGEST = 300
_OPERATORS = {"Add": "+", "Sub": "-", "Mult": "*", "FloorDiv": "//", "Mod": "%"}
_COMPARISONS = {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">="}


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_pow2(a: int) -> int:
    """The smallest power of two that is at least a; 1 for a <= 1."""
    return 1 << max(a - 1, 0).bit_length()


_ARITY = {"min": (2, 8), "max": (2, 8), "cdiv": (2, 2), "next_pow2": (1, 1)}
FUNCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max, "cdiv": cdiv, "next_pow2": next_pow2}


class Expression:
    """One checked expression.

    Args:
        text: the expression as written; an int stands for itself.
    Raises:
        InvalidDefinition: the text does not parse, or uses something that is not allowed.
    """

    __slots__ = ("_code", "names", "python", "text")

    def __init__(self, text: str | int) -> None:
        import ast

        self.text = str(text)
        if len(self.text) > _LONGEST:
            raise InvalidDefinition(f"expression of {len(self.text)} characters: at most {_LONGEST} are allowed")
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise InvalidDefinition(f"expression {self.text!r} cannot be parsed: {error}") from None
        names: set[str] = set()
        self.python = _python(tree.body, self.text, names)
        self.names = frozenset(names)
        self._code: CodeType = compile(self.python, "<expression>", "eval")

    def evaluate(self, values: Mapping[str, object]) -> int:
        """The value with `values` for the names.

        Raises: InvalidDefinition for a missing name, a division by zero or a result that is no integer.
        """
        try:
            result = eval(self._code, {"__builtins__": {}, **FUNCTIONS}, dict(values))  # noqa: S307 - whitelisted tree
        except (NameError, ZeroDivisionError, TypeError) as error:
            raise InvalidDefinition(f"expression {self.text!r} has no value: {error}") from None
        if not isinstance(result, int):
            raise InvalidDefinition(f"expression {self.text!r} gives {result!r}: an integer is needed")
        return int(result)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def _python(node: ast.AST, text: str, names: set[str]) -> str:
    """The node as Python source, fully bracketed; collects the names it reads."""
    kind = type(node).__name__
    printer = _PRINTERS.get(kind)
    if printer is None:
        raise _refused(kind, text)
    return printer(node, text, names)


def _binary(node: ast.BinOp, text: str, names: set[str]) -> str:
    operator = _OPERATORS.get(type(node.op).__name__)
    if operator is None:
        raise _refused(type(node.op).__name__, text)
    return f"({_python(node.left, text, names)} {operator} {_python(node.right, text, names)})"


def _compare(node: ast.Compare, text: str, names: set[str]) -> str:
    operator = _COMPARISONS.get(type(node.ops[0]).__name__)
    if operator is None or len(node.ops) != 1:
        raise _refused("chained or unusual comparison", text)
    return f"({_python(node.left, text, names)} {operator} {_python(node.comparators[0], text, names)})"


def _unary(node: ast.UnaryOp, text: str, names: set[str]) -> str:
    if type(node.op).__name__ != "USub":
        raise _refused(type(node.op).__name__, text)
    return f"(-{_python(node.operand, text, names)})"


def _call(node: ast.Call, text: str, names: set[str]) -> str:
    function = getattr(node.func, "id", None)
    if function not in FUNCTIONS or node.keywords:
        raise _refused(f"call of {function}", text)
    arguments = [_python(argument, text, names) for argument in node.args]
    least, most = _ARITY[function]
    if not least <= len(arguments) <= most:
        raise _refused(f"{function} with {len(arguments)} arguments", text)
    if function == "cdiv":  # spelled out: the launch code pays for every call
        return f"(-(-{arguments[0]} // {arguments[1]}))"
    return f"{function}({', '.join(arguments)})"


def _name(node: ast.Name, text: str, names: set[str]) -> str:  # noqa: ARG001 - one shape for all printers
    names.add(node.id)
    return node.id


def _constant(node: ast.Constant, text: str, names: set[str]) -> str:  # noqa: ARG001 - one shape for all printers
    if not isinstance(node.value, int | str):
        raise _refused(f"constant {node.value!r}", text)
    return repr(node.value)


def _refused(what: str, text: str) -> InvalidDefinition:
    return InvalidDefinition(
        f"expression {text!r} uses {what}, which is not allowed",
        facts={"allowed": "names, integers, strings, + - * // %, == != < <= > >=, " + ", ".join(FUNCTIONS)},
    )


_PRINTERS: dict[str, Callable[[Any, str, set[str]], str]] = {
    "BinOp": _binary,
    "Compare": _compare,
    "UnaryOp": _unary,
    "Call": _call,
    "Name": _name,
    "Constant": _constant,
}
