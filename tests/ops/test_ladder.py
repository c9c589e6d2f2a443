"""The ladder: each reason in its order, overrides, the latch, proven modules, agreement, the report. The device is made up."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kserve.client.report import report
from kserve.errors import BuildError, NotBuilt, UnsupportedTarget
from kserve.ops import backend as ops_backend
from kserve.ops import ladder as ladders
from kserve.ops import served, set_backend
from kserve.ops.backend import forget
from kserve.ops.ladder import REASONS, Call, Device, Ladder, identify, report_once
from tests.support.processes import python

X = torch.ones(3)
HERE, ELSEWHERE = Device("sm_90", 132), Device("sm_80", 108)
NAMES = (f"made-up-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    forget()
    known = dict(ladders.LADDERS)
    yield
    forget()
    ladders.LADDERS.clear()
    ladders.LADDERS.update(known)


def ladder(device: Device | None = HERE, **options: Any) -> Ladder:
    """One whose kernels run on the CPU."""
    return Ladder(next(NAMES), device_type="cpu", identify=lambda _: device, tuned=frozenset({HERE}), **options)


def call(
    module: torch.nn.Module | None = None,
    *,
    x: torch.Tensor = X,
    kernel: Callable[..., Any] = lambda x: x * 7,
    unsupported: Callable[[], str | None] = lambda: None,
) -> Call:
    return Call((x,), kernel, lambda x: x + 1, unsupported, module)


def failing(error: Exception) -> Callable[..., Any]:
    def kernel(_: torch.Tensor) -> None:
        raise error

    return kernel


class Odd(torch.Tensor):
    """A subclass nobody knows."""


def is_kernel(result: torch.Tensor) -> bool:
    return bool((result == 7).all())


def test_kernels_serve_what_they_are_made_for():
    made, module = ladder(), torch.nn.Identity()
    assert is_kernel(made.call(call(module)))
    assert made.has_served(module) and made.last_decline(module) is None and made.declines() == {}
    assert served()[made.op] == {"cuda": 1}


def test_reasons_come_in_their_order(monkeypatch):
    """Everything that can be wrong is; each is put right in turn."""
    monkeypatch.setenv("KSERVE_NATIVE", "0")
    monkeypatch.setenv("KSERVE_TUNED_ONLY", "1")
    made, module = ladder(ELSEWHERE), torch.nn.Identity()
    wrong = {"kernel": failing(NotBuilt("no compiler")), "unsupported": lambda: "too odd"}
    odd = torch.empty(3, device="meta").as_subclass(Odd)
    found = []

    def note(x: torch.Tensor = odd, **options: Any) -> None:
        found.append(made.decline(call(module, x=x, **options)))

    note(**wrong)
    monkeypatch.delenv("KSERVE_NATIVE")
    made.forget()
    made.override(native=True)
    with pytest.warns(RuntimeWarning):
        made.call(call(kernel=wrong["kernel"]))  # latches
    made.override(native=None)
    note(**wrong)
    made.override(native=True)
    made.override(native=None)
    torch.func.vmap(lambda _: note(**wrong) or _)(X)
    note(**wrong)
    note(X.as_subclass(Odd), **wrong)
    with pytest.warns(RuntimeWarning, match="is left to torch on sm_80 with 108 SMs"):
        note(X, **wrong)
    made.override(native=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        note(X, **wrong)
        note(X, unsupported=lambda: None)
    assert [declined and declined.reason for declined in found] == [*REASONS, None]


@pytest.mark.parametrize(("text", "native"), [("0", False), ("off", False), ("1", True), ("Yes", True)])
def test_environment_opts_out(monkeypatch, text, native):
    monkeypatch.setenv("KSERVE_NATIVE", text)
    assert is_kernel(ladder().call(call())) == native


def test_override_goes_before_the_environment_and_says_what_it_replaces(monkeypatch):
    monkeypatch.setenv("KSERVE_NATIVE", "0")
    made = ladder()
    assert made.override(native=True) is None
    assert is_kernel(made.call(call()))
    assert made.override(native=False) is True
    assert not is_kernel(made.call(call()))
    assert made.override(native=None) is False
    assert made.decline(call()).detail == "KSERVE_NATIVE is 0"


def test_a_tracer_may_ask_whether_kernels_serve_at_all():
    made = ladder()
    assert ops_backend() == "cuda"  # the settings were forgotten: read before the trace, as when an op is imported
    traced = torch.compile(lambda x: x + 1 if made.is_closed() else x * 7, fullgraph=True, backend="aot_eager")
    assert is_kernel(traced(X))
    made.override(native=False)
    assert not is_kernel(traced(X))
    made.override(native=None)
    made.withhold("another rank")
    assert not is_kernel(traced(X))


def test_another_backend_is_an_opt_out():
    made = ladder()
    set_backend("pytorch")
    assert made.decline(call()).reason == "opted_out"
    assert ops_backend() == "pytorch" and not is_kernel(made.call(call()))


@pytest.mark.parametrize("found", [ELSEWHERE, None])
def test_an_untuned_device_is_served_with_one_warning(found):
    made = ladder(found)
    with pytest.warns(RuntimeWarning, match="default launch table") as warned:
        assert is_kernel(made.call(call())) and is_kernel(made.call(call()))
    assert len(warned) == 1


def test_tuned_only_leaves_an_untuned_device_to_torch_until_overridden(monkeypatch):
    monkeypatch.setenv("KSERVE_TUNED_ONLY", "1")
    made = ladder(None)
    with pytest.warns(RuntimeWarning, match="KSERVE_TUNED_ONLY=0") as warned:
        assert not is_kernel(made.call(call())) and not is_kernel(made.call(call()))
    assert len(warned) == 1
    made.override(native=True)
    with pytest.warns(RuntimeWarning, match="default launch table"):
        assert is_kernel(made.call(call()))


def test_override_serves_no_input_the_kernels_are_not_made_for():
    made = ladder()
    made.override(native=True)
    assert made.decline(call(unsupported=lambda: "too odd")) == ("unsupported", "too odd")


def test_a_check_that_raises_counts_as_no_and_does_not_latch():
    made = ladder()
    with pytest.warns(RuntimeWarning, match="cannot tell"):
        assert not is_kernel(made.call(call(unsupported=failing(KeyError("shape")).__get__(X))))
    assert is_kernel(made.call(call()))


def test_a_failure_latches_with_one_warning_and_is_forgotten_by_an_override():
    made, module = ladder(), torch.nn.Identity()
    with pytest.warns(RuntimeWarning, match="served by its reference from now on: no compiler") as warned:
        assert not is_kernel(made.call(call(module, kernel=failing(NotBuilt("no compiler")))))
    assert len(warned) == 1
    assert not is_kernel(made.call(call(module)))
    assert made.last_decline(module) == ("latched", "no compiler")
    assert made.declines() == {"Identity": {"latched": 1}}
    made.override(native=None)
    assert not is_kernel(made.call(call()))
    made.override(native=True)
    assert is_kernel(made.call(call()))


def test_a_module_that_was_served_keeps_its_kernels():
    made, proven = ladder(), torch.nn.Identity()
    made.call(call(proven))
    with pytest.warns(RuntimeWarning):
        made.call(call(torch.nn.Identity(), kernel=failing(NotBuilt("no compiler"))))
    assert is_kernel(made.call(call(proven)))
    assert not is_kernel(made.call(call(torch.nn.Identity())))


def test_a_served_module_that_fails_while_gradients_are_computed_raises():
    """As when a checkpoint computes again what a forward by the kernels has kept otherwise."""
    made, proven = ladder(), torch.nn.Identity()
    x = X.clone().requires_grad_()

    def step(kernel: Callable[..., Any]) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: made.call(call(proven, x=x, kernel=kernel)), x, use_reentrant=False)

    runs = iter([lambda x: (x * 7).sin(), failing(NotBuilt("gone"))])
    out = step(lambda x: next(runs)(x))  # noqa: PLW0108 - another at each call
    with pytest.raises(NotBuilt, match="gone"):
        out.sum().backward()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_what_is_no_failure_of_the_kernels_is_raised_and_does_not_latch(error):
    made = ladder()
    with pytest.raises(type(error)):
        made.call(call(kernel=failing(error)))
    assert is_kernel(made.call(call()))


def test_a_device_the_kernels_are_not_made_for_is_the_inputs_matter():
    made, module = ladder(), torch.nn.Identity()
    assert not is_kernel(made.call(call(module, kernel=failing(UnsupportedTarget("sm_75 is too old")))))
    assert made.last_decline(module).reason == "unsupported"
    assert is_kernel(made.call(call()))


def test_strict_raises_a_failure_but_routes_inputs(monkeypatch):
    monkeypatch.setenv("KSERVE_STRICT", "1")
    made = ladder()
    assert not is_kernel(made.call(call(unsupported=lambda: "too odd")))
    with pytest.raises(BuildError, match="no compiler"):
        made.call(call(kernel=failing(NotBuilt("no compiler"))))


def test_a_device_that_cannot_be_asked_has_no_identity():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert identify(torch.device("cuda", 0)) is None


class Normed(torch.nn.Module):
    """A module with a ladder."""

    ladder_label = "Normed"

    def __init__(self, ladder: Ladder) -> None:
        super().__init__()
        self.ladder = ladder


def test_report_says_who_served_and_is_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(ladders, "_printed", set())
    made = ladder()
    modules = torch.nn.Sequential(*(Normed(made) for _ in range(3)), torch.nn.Linear(1, 1))
    for module in modules[:2]:
        made.call(call(module))
    assert report_once(modules) == report_once(modules) == ["Normed  kernels 2/3, torch 1/3"]
    made.call(call(modules[2]))
    assert report_once(modules, rank=1) == ["Normed  kernels 3/3"]
    assert capsys.readouterr().err == "Normed  kernels 2/3, torch 1/3\n"


def test_what_ops_were_served_by_is_in_the_report_of_the_process():
    made, modules = ladder(), [torch.nn.Identity() for _ in range(2)]
    made.call(call(modules[0]))
    for module in modules:
        made.call(call(module, unsupported=lambda: "too odd"))
    made.call(call(unsupported=lambda: "odder still"))
    found = report().to_json()["ops"][made.op]
    assert found["served"] == {"cuda": 1, "pytorch": 3} and found["latch"] == ""
    assert found["declines"] == {"Identity": {"unsupported": 2}}
    assert {label: last["detail"] for label, last in found["last_declines"].items()} == {
        "Identity": "too odd",
        f"{made.op}()": "odder still",
    }
    text = str(report())
    assert (
        f"{made.op}: 1 cuda, 3 pytorch" in text and "Identity left to torch (2 unsupported), last unsupported: too odd" in text
    )


def test_what_latched_is_in_the_report_too():
    made = ladder()
    with pytest.warns(RuntimeWarning):
        made.call(call(Normed(made), kernel=failing(NotBuilt("no compiler"))))
    found = report().to_json()["ops"][made.op]
    assert found["latch"] == "no compiler" and found["last_declines"]["Normed"]["reason"] == "latched"
    assert "latched: no compiler" in str(report())


RANKS = """
import sys, torch
from torch import distributed, multiprocessing
from kserve.ops import ladder
from kserve.ops.ladder import Call, Device, Ladder, agree

def rank(index, path):
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=index, world_size=2)
    here = Device("sm_90", 132)
    both = Ladder("both", device_type="cpu", identify=lambda _: here)
    one = Ladder("one", device_type="cpu", identify=lambda _: here)
    one.override(native=None if index else False)
    agree()
    found = [made.decline(Call((torch.ones(1),), None, None, lambda: None)) for made in (both, one)]
    assert found[0] is None and found[1].reason == "opted_out", found
    assert ("another rank" in found[1].detail) == (index == 1), found
    one.override(native=None)
    agree()
    assert one.decline(Call((torch.ones(1),), None, None, lambda: None)) is None
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.start_processes(rank, (sys.argv[1],), 2, start_method="fork")
    print("agreed")
"""


def test_ranks_agree(tmp_path):
    assert python(RANKS, str(tmp_path / "meeting"), WORLD_SIZE="2").stdout == "agreed\n"
