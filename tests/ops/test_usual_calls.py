"""Calls whose like has been served before take a shorter way: the same bits, the same refusals. Most of it on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.config

from kserve.errors import InvalidSpec, LaunchError
from kserve.ops import edge_features, graph_norm_bce, norm_residual, realspace, served, set_backend
from kserve.ops.backend import Usual, forget
from kserve.ops.realspace import reference


class Case(NamedTuple):
    """A call, and changes to its arguments that the op must refuse, by position."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    wrong: dict[int, Any]


def cases(device: torch.device) -> list[Case]:
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device)

    index = torch.randint(9, (2, 40), generator=random, device=device)
    graphs = torch.arange(40, device=device) * 3 // 40
    many = torch.arange(20_000, device=device) * 3 // 20_000
    return [
        Case(
            edge_features, (normal(9, 16), index, normal(40, 16)), {0: normal(9, 8), 1: index.int(), 2: normal(40, 16).half()}
        ),
        Case(norm_residual, (normal(9, 16), normal(9, 16), normal(16), normal(16)), {1: normal(8, 16), 2: normal(15)}),
        Case(graph_norm_bce, (normal(40), normal(40).sigmoid(), graphs, 3), {1: normal(39), 2: graphs.int(), 3: 0}),
        Case(graph_norm_bce, (normal(20_000), normal(20_000).sigmoid(), many, 3), {2: many.float(), 3: 2.0}),
        Case(realspace, (normal(5, 8, 3), normal(5, 8, 3)), {0: normal(5, 8, 2), 1: normal(5, 8, 3).cpu()}),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("position", range(5))
def test_the_second_call_gives_the_bits_of_the_first_and_refuses_what_it_would(gpu, position):
    forget()
    op, arguments, wrong = cases(torch.device("cuda"))[position]
    name = op.__name__
    first = op(*arguments)
    again = op(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(_all(first), _all(again), strict=True))
    assert served()[name] == {"cuda": 2}
    for place, value in wrong.items():
        with pytest.raises((LaunchError, InvalidSpec)):
            op(*arguments[:place], value, *arguments[place + 1 :])
    before = set_backend("pytorch")
    op(*arguments)
    assert served()[name]["pytorch"] == 1
    set_backend(before)


@pytest.mark.gpu
def test_sizes_may_change_and_odd_layouts_are_served_as_ever(gpu):
    forget()
    x, residual, gamma, beta = cases(torch.device("cuda"))[1].arguments
    whole = norm_residual(x, residual, gamma, beta)
    assert torch.equal(norm_residual(x[:4], residual[:4], gamma, beta), whole[:4])
    strided = x.t().contiguous().t()
    torch.testing.assert_close(norm_residual(strided, residual, gamma, beta), whole)
    shifted = torch.empty(x.numel() + 1, device=x.device)[1:].view_as(x).copy_(x)  # not aligned to 16 bytes
    torch.testing.assert_close(norm_residual(shifted, residual, gamma, beta), whole)
    assert norm_residual(x[:0], residual[:0], gamma, beta).shape == (0, 16)


@pytest.mark.gpu
def test_what_the_kernel_is_not_made_for_is_served_by_the_reference_all_the_same(gpu):
    forget()
    a, b = cases(torch.device("cuda"))[4].arguments
    realspace(a, b)
    for mixed in ((a, b.bfloat16()), (a.double(), b)):
        assert torch.equal(realspace(*mixed)[0], reference(*mixed)[0])
    assert served()["realspace"] == {"cuda": 1, "pytorch": 2}


@pytest.mark.gpu
def test_a_gradient_is_asked_for_after_calls_without(gpu):
    forget()
    a, b = cases(torch.device("cuda"))[4].arguments
    plain = realspace(a, b)
    recorded = realspace(a.clone().requires_grad_(), b)
    assert recorded[0].requires_grad and torch.equal(recorded[0], plain[0])
    with pytest.raises(LaunchError, match="has no gradient"):
        x, residual, gamma, beta = cases(torch.device("cuda"))[1].arguments
        norm_residual(x, residual, gamma, beta)
        norm_residual(x.requires_grad_(), residual, gamma, beta)


def test_two_dtypes_are_no_usual_pair(monkeypatch):
    forget()
    monkeypatch.setenv("KSERVE_LAUNCHER", "python")  # the compiled form knows tensors of a GPU alone
    usual = Usual("realspace", "n f M, n f M")
    monkeypatch.setattr(import_module("kserve.ops.realspace"), "_usual", usual)
    a = torch.randn(5, 8, 3)

    def kernel(*_: object) -> None:
        raise LaunchError("a_sin has another dtype")

    usual.settle((a, a), kernel)
    with pytest.raises(LaunchError):
        realspace(a, a)
    mixed = a, a.bfloat16()
    assert torch.equal(realspace(*mixed)[0], reference(*mixed)[0])
    forget()


def of_nonzero_edges(mask: torch.Tensor, x: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    edges = mask.nonzero().t().contiguous()
    return edge_features(x, edges, edge_h[: edges.shape[1]])


def of_nonzero_rows(mask: torch.Tensor, x: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    rows = mask.nonzero()[:, 0]
    return norm_residual(edge_h[rows], edge_h[rows], x[0], x[1])


def of_nonzero_losses(mask: torch.Tensor, x: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    graphs = mask.nonzero()[:, 0].contiguous()
    return graph_norm_bce(edge_h[graphs, 0], edge_h[graphs, 1].sigmoid(), graphs, 5)


@pytest.mark.parametrize("step", [of_nonzero_edges, of_nonzero_rows, of_nonzero_losses])
def test_no_size_is_asked_for_while_an_op_is_traced(step):
    """A number of edges that the device alone knows would end the trace."""
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 5, generator=random) > 0.5
    x, edge_h = torch.randn(5, 4, generator=random), torch.randn(25, 4, generator=random)
    expected = step(mask, x, edge_h)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        traced = torch.compile(step, fullgraph=True, backend="eager")(mask, x, edge_h)
    torch.testing.assert_close(traced, expected)


def _all(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
