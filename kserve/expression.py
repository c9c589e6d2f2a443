"""Integer expressions of kernel.toml: `cdiv(n, 4) * (hidden > 64)`.

Read once into a checked tree, then evaluated with values or printed as Python for the launch code. Only names, integers,
`+ - * // %`, comparisons (1 or 0; the only place for a text), min, max, cdiv and next_pow2 exist: evaluating an expression
calls nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from kserve.errors import InvalidDefinition
from kserve.spec import INTEGER_BITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from types import CodeType

LONGEST = 300
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
_ALLOWED = {"allowed": "names, integers, + - * // %, == != < <= > >=, texts in a comparison, " + ", ".join(FUNCTIONS)}


@lru_cache(maxsize=1024)
def parsed(text: str) -> Expression:
    """The expression of that text, parsed once a process."""
    return Expression(text)


class Expression:
    """One checked expression.

    Args:
        text: the expression as written; an int stands for itself.
    Raises:
        InvalidDefinition: the text does not parse, or uses something that is not allowed.
    """

    __slots__ = ("_code", "_numbers", "names", "python", "text")

    def __init__(self, text: str | int) -> None:
        import ast

        self.text = str(text)
        if len(self.text) > LONGEST:
            raise InvalidDefinition(
                f"expression of {len(self.text)} characters", facts={"allowed": f"at most {LONGEST} characters"}
            )
        numbers: set[str] = set()
        texts: set[str] = set()
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
            self.python = _Printer(self.text, numbers, texts).print(tree.body)
            self._code: CodeType = compile(self.python, "<expression>", "eval")
        except InvalidDefinition:
            raise
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise InvalidDefinition(f"expression {self.text!r} cannot be parsed: {error}", facts=_ALLOWED) from None
        self.names = frozenset(numbers | texts)
        self._numbers = numbers

    def evaluate(self, values: Mapping[str, object]) -> int:
        """The value with `values` for the names.

        Raises: InvalidDefinition for a missing name, a division by zero or a result that is no integer.
        """
        for name in self._numbers:
            if not isinstance(values.get(name, 0), int):
                raise InvalidDefinition(f"expression {self.text!r} has no value: {name} is {values[name]!r}, no integer")
        try:
            result = eval(self._code, {"__builtins__": {}, **FUNCTIONS}, dict(values))  # noqa: S307 - whitelisted tree
        except (NameError, ZeroDivisionError, TypeError, MemoryError) as error:
            raise InvalidDefinition(f"expression {self.text!r} has no value: {error}") from None
        if not isinstance(result, int):
            raise InvalidDefinition(f"expression {self.text!r} gives {result!r}: an integer is needed")
        if result.bit_length() > INTEGER_BITS:
            raise InvalidDefinition(f"expression {self.text!r} gives a number of more than {INTEGER_BITS} bits")
        return int(result)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


class _Printer:
    """Prints a tree as Python source, fully bracketed, and refuses everything that is not on the list.

    Args:
        numbers: collects the names that are computed with.
        texts:   collects the names that are only compared: they may stand for a text.
    """

    def __init__(self, text: str, numbers: set[str], texts: set[str]) -> None:
        self._text = text
        self._numbers = numbers
        self._texts = texts

    def print(self, node: ast.AST) -> str:
        kind = type(node).__name__
        printer = getattr(self, f"_print_{kind}", None)
        if printer is None:
            raise self._refused(kind)
        return str(printer(node))

    def _print_BinOp(self, node: ast.BinOp) -> str:  # noqa: N802 - named after the node, as in ast.NodeVisitor
        operator = _OPERATORS.get(type(node.op).__name__)
        if operator is None:
            raise self._refused(type(node.op).__name__)
        return f"({self.print(node.left)} {operator} {self.print(node.right)})"

    def _print_Compare(self, node: ast.Compare) -> str:  # noqa: N802
        operator = _COMPARISONS.get(type(node.ops[0]).__name__)
        if operator is None or len(node.ops) != 1:
            raise self._refused("a chained or unusual comparison")
        return f"({self._operand(node.left)} {operator} {self._operand(node.comparators[0])})"

    def _operand(self, node: ast.AST) -> str:
        """One side of a comparison: the only place where a text may stand."""
        value, name = getattr(node, "value", None), getattr(node, "id", None)
        if isinstance(value, str):
            return repr(value)
        if name is None:
            return self.print(node)
        self._texts.add(name)
        return str(name)

    def _print_UnaryOp(self, node: ast.UnaryOp) -> str:  # noqa: N802
        if type(node.op).__name__ != "USub":
            raise self._refused(type(node.op).__name__)
        return f"(-{self.print(node.operand)})"

    def _print_Call(self, node: ast.Call) -> str:  # noqa: N802
        function = getattr(node.func, "id", None)
        if function not in FUNCTIONS or node.keywords:
            raise self._refused(f"a call of {function}")
        arguments = [self.print(argument) for argument in node.args]
        least, most = _ARITY[function]
        if not least <= len(arguments) <= most:
            raise self._refused(f"{function} with {len(arguments)} arguments")
        if function == "cdiv":  # spelled out: the launch code pays for every call
            return f"(-(-{arguments[0]} // {arguments[1]}))"
        return f"{function}({', '.join(arguments)})"

    def _print_Name(self, node: ast.Name) -> str:  # noqa: N802
        self._numbers.add(node.id)
        return node.id

    def _print_Constant(self, node: ast.Constant) -> str:  # noqa: N802
        if not isinstance(node.value, int):
            raise self._refused(f"constant {node.value!r}")
        return repr(node.value)

    def _refused(self, what: str) -> InvalidDefinition:
        return InvalidDefinition(f"expression {self._text!r} uses {what}, which is not allowed", facts=_ALLOWED)
