"""Calls that are like each other, told by their tensors alone: compiled and in plain Python, with the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kserve.client.compiled import compiled_match
from kserve.ops.signature import matcher

CPU = 1  # as DLPack counts: the tensors of this file lie where a test can have them


@pytest.fixture(params=["python", pytest.param("compiled", marks=pytest.mark.toolchain)])
def match_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[..., Any]]:
    if request.param == "python":
        monkeypatch.setenv("KSERVE_LAUNCHER", "python")
        return matcher
    request.getfixturevalue("compiled")
    return lambda pattern: compiled_match(pattern, torch, device_type=CPU)


def test_sizes_come_in_the_order_of_their_letters(match_of):
    match = match_of("n H, 2 e, e H")
    assert match(torch.ones(5, 3), torch.ones(2, 7), torch.ones(7, 3))[1:] == (5, 3, 7)
    assert match_of("a, B, a B")(torch.ones(5), torch.ones(3), torch.ones(5, 3))[1:] == (5, 3)
    assert match_of("")(torch.ones(())) is not None


def test_the_key_tells_dtypes_and_upper_case_sizes_apart(match_of):
    match = match_of("n H, n H")
    key = match(torch.ones(5, 3), torch.ones(5, 3))[0]
    assert match(torch.ones(6, 3), torch.ones(6, 3))[0] == key
    assert match(torch.nn.Parameter(torch.ones(5, 3)), torch.ones(5, 3))[0] == key
    others = [match(torch.ones(5, 4), torch.ones(5, 4))[0]]
    others += [match(torch.ones(5, 3).to(dtype), torch.ones(5, 3))[0] for dtype in (torch.int32, torch.float64, torch.bfloat16)]
    others += [match(torch.ones(5, 3), torch.ones(5, 3).half())[0]]
    assert len({key, *others}) == 6


class Subclass(torch.Tensor):
    pass


def unfit() -> Iterator[tuple[Any, ...]]:
    """Arguments for `n H, 2 n` that do not fit it."""
    good = torch.ones(5, 3), torch.ones(2, 5)
    for wrong in (
        torch.ones(3, 5).t(),
        torch.ones(5),
        torch.ones(5, 3, 1),
        torch.ones(0, 3),
        torch.ones(5, 0),
        torch.ones(4, 3),
    ):
        yield wrong, good[1]
    for wrong in (torch.ones(3, 5), torch.ones(2, 4), torch.ones(2), torch.ones(5, 2).t(), torch.ones(1, 2, 5)):
        yield good[0], wrong
    for wrong in (None, "text", 5, [1.0], torch.ones(5, 3).numpy(), torch.ones(5, 3).as_subclass(Subclass)):
        yield wrong, good[1]
    yield torch.ones(5, 3).to_sparse(), good[1]


@pytest.mark.parametrize("tensors", [*unfit()], ids=[str(i) for i, _ in enumerate(unfit())])
def test_what_does_not_fit_is_no_error(match_of, tensors):
    assert match_of("n H, 2 n")(*tensors) is None


@pytest.mark.toolchain
@pytest.mark.usefixtures("compiled")
def test_both_agree_on_random_shapes(monkeypatch):
    monkeypatch.setenv("KSERVE_LAUNCHER", "python")
    draw = random.Random(0)
    n_fits = 0
    for _ in range(2000):
        dims = [[draw.choice("abCD12") for _ in range(draw.randint(0, 3))] for _ in range(draw.randint(1, 3))]
        pattern = ", ".join(" ".join(tensor) for tensor in dims)
        sizes = {letter: draw.randint(0, 3) for letter in "abCD"} | {"1": 1, "2": 2}
        shapes = [[sizes[dim] if draw.random() < 0.95 else draw.randint(0, 3) for dim in tensor] for tensor in dims]
        tensors = [torch.ones(shape) for shape in shapes]
        ours, theirs = (match(*tensors) for match in (matcher(pattern), compiled_match(pattern, torch, device_type=CPU)))
        assert (ours and ours[1:]) == (theirs and theirs[1:]), (pattern, shapes)
        n_fits += ours is not None
    assert 200 < n_fits < 1800


@pytest.mark.toolchain
@pytest.mark.parametrize(
    "pattern", ["n-h", "0", "n, " * 8 + "n", "a b c d e f g h i", "a b c d, e f g h, i", "é", "n\th", "a" * 9], ids=repr
)
def test_another_pattern_is_refused(compiled, pattern):
    with pytest.raises(ValueError, match="pattern"):
        compiled_match(pattern, torch, device_type=CPU)


@pytest.mark.toolchain
def test_a_wrong_number_of_tensors_does_not_fit(compiled):
    match = compiled_match("n, n", torch, device_type=CPU)
    assert match(torch.ones(3)) is None
    assert match(*[torch.ones(3)] * 3) is None
    assert match() is None


@pytest.mark.toolchain
def test_memory_elsewhere_does_not_fit(compiled):
    match = compiled_match("n", torch, device_type=CPU)
    assert match(torch.ones(3, device="meta")) is None
    assert compiled_match("n", torch)(torch.ones(3)) is None, "the CPU is no GPU"
