"""Integer expressions: their values, and everything they cannot do."""

from __future__ import annotations

import pytest

from kserve.errors import InvalidDefinition
from kserve.expression import FUNCTIONS, Expression, cdiv, next_pow2

VALUES = {"n": 100, "hidden": 128, "zero": 0, "flag": True, "dtype": "float32"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (7, 7),
        ("7", 7),
        ("-7", -7),
        ("n", 100),
        ("n + 1", 101),
        ("n - hidden", -28),
        ("2 * n + 1", 201),
        ("2 * (n + 1)", 202),
        ("10 - 3 - 2", 5),
        ("n // 8", 12),
        ("-7 // 2", -4),
        ("-7 % 4", 1),
        ("n % 8", 4),
        ("min(n, hidden)", 100),
        ("max(n, hidden, 300)", 300),
        ("cdiv(n, 8)", 13),
        ("cdiv(96, 8)", 12),
        ("cdiv(0, 8)", 0),
        ("cdiv(n + 1, 2 * 4)", 13),
        ("next_pow2(n)", 128),
        ("n == 100", 1),
        ("n != 100", 0),
        ("n < hidden", 1),
        ("n <= 100", 1),
        ("n > hidden", 0),
        ("n >= 101", 0),
        ("1 + (hidden % 2 == 0)", 2),
        ("256 + 256 * (n <= 4)", 256),
        ("flag * 3", 3),
        ("flag", 1),
        ("dtype == 'float32'", 1),
        ("4 - 2 * (dtype == 'float16')", 4),
        ("  n  ", 100),
    ],
)
def test_the_value_of_an_expression(text, value):
    found = Expression(text).evaluate(VALUES)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize(
    "text", ["10 - (3 - 2)", "-(n + 1) % 7", "cdiv(n - 1, hidden // 3) * 2", "-cdiv(n, 3)", "(n < 3) * 2 + 1"]
)
def test_the_printed_expression_has_the_same_value(text):
    expression = Expression(text)
    assert eval(expression.python, {**FUNCTIONS}, dict(VALUES)) == expression.evaluate(VALUES)


def test_an_expression_knows_the_names_it_reads():
    assert Expression("cdiv(n, groups * rows) + max(n, 3)").names == {"n", "groups", "rows"}
    assert Expression("1 + 2").names == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n +",
        "n hidden",
        "n; hidden",
        "n = 1",
        "n := 1",
        "(m := 1)",
        "1.5",
        "1e3",
        "1j",
        "None",
        "...",
        "b'x'",
        "n ** 2",
        "n / 2",
        "n << 2",
        "n | 1",
        "n & 1",
        "~n",
        "+n",
        "not n",
        "n and 1",
        "n or 1",
        "1 if n else 2",
        "0 < n < 3",
        "n in (1, 2)",
        "n is 1",
        "(1, 2)",
        "[n]",
        "[x for x in n]",
        "{n}",
        "n[0]",
        "n.real",
        "lambda: 1",
        "f'{n}'",
        "abs(n)",
        "eval('1')",
        "__import__('os')",
        "open('/etc/passwd')",
        "(cdiv)(1)",
        "min(*n)",
        "min(1, key=2)",
        "min(1)",
        "min(1, 2, 3, 4, 5, 6, 7, 8, 9)",
        "cdiv(1)",
        "cdiv(1, 2, 3)",
        "next_pow2(1, 2)",
        "next_pow2()",
        "min(1, 2)(3)",
        "n.__class__.__mro__",
        "n\0",
        "1" * 301,
        "(" * 250 + "1" + ")" * 40,
        "-" * 250 + "1",
    ],
)
def test_anything_else_is_refused_where_it_is_read(text):
    with pytest.raises(InvalidDefinition):
        Expression(text)


@pytest.mark.parametrize(
    "text",
    ["missing", "n // zero", "n % zero", "cdiv(n, zero)", "dtype", "dtype + 1", "-dtype", "next_pow2(dtype)", "min(n, dtype)"],
)
def test_an_expression_without_an_integer_value_says_so(text):
    with pytest.raises(InvalidDefinition) as caught:
        Expression(text).evaluate(VALUES)
    assert text in caught.value.message


@pytest.mark.parametrize("text", ["n * n", "-n * n", "next_pow2(n) * 2", "0x" + "f" * 100])
def test_a_value_of_more_than_64_bits_is_none(text):
    """Derived axes that multiply each other would soon fill the memory."""
    with pytest.raises(InvalidDefinition):
        Expression(text).evaluate({"n": 2**62})


@pytest.mark.parametrize("text", ["'a' * 1000000000000000000", "dtype * 1000000000000000000", "'%1000000000000000000d' % 1"])
def test_text_is_only_compared(text):
    with pytest.raises(InvalidDefinition):
        Expression(text).evaluate(VALUES)


def test_builtins_are_out_of_reach_of_names():
    with pytest.raises(InvalidDefinition):
        Expression("len").evaluate({})


@pytest.mark.parametrize(
    ("a", "b", "value"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (-5, 4, -1), (10**20, 3, 33333333333333333334)]
)
def test_cdiv_rounds_up(a, b, value):
    assert cdiv(a, b) == value


@pytest.mark.parametrize(("a", "value"), [(-3, 1), (0, 1), (1, 1), (2, 2), (3, 4), (127, 128), (128, 128), (129, 256)])
def test_next_pow2_is_at_least_its_argument(a, value):
    assert next_pow2(a) == value
