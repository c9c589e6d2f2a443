"""Which implementation serves: chosen, fallen back to, counted. Kernels that cannot be had are made by refusing builds."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from kserve.config import load_settings
from kserve.errors import BuildError, InvalidSpec, LaunchError, NotBuilt, RequestError, UnsupportedTarget
from kserve.ops import backend as current
from kserve.ops import edge_features, given_up, served, set_backend
from kserve.ops.backend import Usual, forget, serve, summary
from tests.support.processes import python

X = torch.ones(3)


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def missing(*_: object) -> None:
    raise NotBuilt("no compiler here")


def call(kernel, *, reason: str | None = None, op: str = "op"):
    return serve(op, (X,), kernel=kernel, reference=lambda x: x + 1, reason=reason)


def test_the_kernel_serves_what_it_is_made_for():
    assert torch.equal(call(lambda x: x * 7), X * 7)
    assert torch.equal(call(lambda x: x * 7, reason="on the CPU"), X + 1)
    assert served() == {"op": {"cuda": 1, "pytorch": 1}}


def test_a_backend_can_be_chosen_in_any_case_and_says_what_it_replaces():
    assert current() == "cuda"
    assert set_backend("PyTorch") == "cuda"
    assert torch.equal(call(missing), X + 1)
    assert set_backend("compiled") == "pytorch"
    assert torch.equal(call(missing), X + 1)
    assert served() == {"op": {"compiled": 1, "pytorch": 1}}


@pytest.fixture
def usual(monkeypatch):
    """Recognises tensors of any device, as the compiled form does not."""
    monkeypatch.setenv("KSERVE_LAUNCHER", "python")
    return Usual("op", "n")


def test_a_usual_call_gets_what_the_first_of_its_kind_has_settled(usual):
    assert usual.find(X) is None and served() == {}
    usual.settle((X,), "kernel")
    kernel, (_, size) = usual.find(X)
    assert (kernel, size) == ("kernel", 3)
    assert usual.find(torch.nn.Parameter(torch.ones(5), requires_grad=False))[0] == "kernel"
    assert served() == {"op": {"cuda": 2}}
    assert usual.find(X, asked="another") is None
    usual.settle((X,), "other kernel", asked="another")
    assert (usual.find(X)[0], usual.find(X, asked="another")[0]) == ("kernel", "other kernel")
    assert usual.find(X.double()) is None


def test_tensors_that_are_never_recognised_settle_nothing(usual):
    usual.settle((torch.ones(4, 2),), "kernel")
    assert usual.find(torch.ones(4, 2)) is None


def test_what_is_unusual_takes_the_long_road(usual):
    usual.settle((X,), "kernel")
    needs_gradient = X.clone().requires_grad_()
    for tensor in (needs_gradient, torch.ones(4)[::2], "text"):
        assert usual.find(tensor) is None
    with torch.no_grad():
        assert usual.find(needs_gradient)[0] == "kernel"
    with FakeTensorMode():
        assert usual.find(X) is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert usual.find(X) is None, "its region would be missing"
    assert served() == {"op": {"cuda": 1}}


def test_a_call_that_settles_after_another_backend_was_chosen_changes_nothing(usual):
    """As one that was under way in another thread."""
    set_backend("pytorch")
    usual.settle((X,), "kernel")
    assert usual.find(X) is None and served() == {}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # make_dual's own, from torch 2.14
def test_a_transform_gets_the_reference_which_torch_can_differentiate_and_batch(usual):
    usual.settle((X,), "kernel")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, 2 * X)
        assert usual.find(dual) is None
        found = serve("op", (dual,), kernel=torch.zeros_like, reference=lambda x: 3 * x, reason=None)
        assert torch.equal(forward_ad.unpack_dual(found).tangent, 6 * X)
    seen = []
    torch.func.vmap(lambda x: seen.append(usual.find(x)) or x)(torch.ones(2, 3))
    assert seen == [None]
    assert served() == {"op": {"pytorch": 1}}
    assert usual.find(X)[0] == "kernel"


def give_up() -> None:
    with pytest.warns(RuntimeWarning):
        call(missing)


@pytest.mark.parametrize("end", [lambda: set_backend("cuda"), forget, give_up])
def test_what_was_settled_is_forgotten_when_it_may_no_longer_hold(usual, end):
    usual.settle((X,), "kernel")
    end()
    assert usual.find(X) is None


@pytest.mark.parametrize("name", ["triton", "", None])
def test_another_backend_is_refused_with_the_allowed_ones(name):
    with pytest.raises(InvalidSpec) as refused:
        set_backend(name)
    assert "pytorch" in refused.value.facts["allowed"]
    assert isinstance(refused.value, ValueError)


def test_a_kernel_that_cannot_be_had_costs_one_warning():
    with pytest.warns(RuntimeWarning, match="op is served by its reference from now on: no compiler here"):
        assert torch.equal(call(missing), X + 1)
    with warnings.catch_warnings(record=True) as later:
        assert torch.equal(call(lambda x: x * 7), X + 1)
    assert later == []
    assert given_up() == {"op": "no compiler here"}
    assert torch.equal(call(lambda x: x * 7, op="another"), X * 7)
    set_backend("cuda")
    assert torch.equal(call(lambda x: x * 7), X * 7), "chosen again, tried again"


@pytest.mark.parametrize("variables", [{"KSERVE_STRICT": "1"}, {"WORLD_SIZE": "2"}])
def test_strict_raises_what_the_kernel_raised(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BuildError, match="no compiler here"):
        call(missing)
    assert torch.equal(call(missing, reason="on the CPU"), X + 1), "the input's matter stays"


def test_one_rank_among_many_may_be_told_to_fall_back(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("KSERVE_STRICT", "0")
    with pytest.warns(RuntimeWarning):
        call(missing)


def test_another_target_is_the_inputs_matter(monkeypatch):
    monkeypatch.setenv("KSERVE_STRICT", "1")

    def elsewhere(*_: object) -> None:
        raise UnsupportedTarget("not made for sm_75")

    assert torch.equal(call(elsewhere), X + 1)
    assert given_up() == {}


def test_an_error_of_the_call_is_never_swallowed():
    def wrong(*_: object) -> None:
        raise LaunchError("x lies elsewhere")

    with pytest.raises(LaunchError):
        call(wrong)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "cuda"),
        ({"KSERVE_BACKEND": "PyTorch"}, "pytorch"),
        ({"QECDEC_BACKEND": "compiled"}, "compiled"),
        ({"KSERVE_BACKEND": "cuda", "QECDEC_BACKEND": "pytorch"}, "cuda"),
        ({"KSERVE_DISABLE": "1"}, "pytorch"),
        ({"KSERVE_DISABLE": "1", "KSERVE_BACKEND": "cuda"}, "pytorch"),
    ],
)
def test_the_environment_chooses(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert current() == expected


def test_an_unusable_value_names_its_variable():
    with pytest.raises(RequestError, match="QECDEC_BACKEND"):
        load_settings(environ={"QECDEC_BACKEND": "fast"})


def test_what_an_op_served_is_counted():
    edge_features(torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.ones(3, 4))
    assert served() == {"edge_features": {"pytorch": 1}}


def test_who_looks_at_what_was_served_reads_no_settings(monkeypatch):
    """The thread that does would read them before the call they are meant for."""
    monkeypatch.setenv("KSERVE_BACKEND", "compiled")
    forget()
    assert summary().get("op") is None
    monkeypatch.setenv("KSERVE_BACKEND", "pytorch")
    assert current() == "pytorch"


def test_the_name_of_the_function_and_of_its_module_do_not_fight():
    code = "import kserve.ops.backend; import kserve.ops; print(kserve.ops.backend(), kserve.ops.served())"
    assert python(code).stdout.strip() == "cuda {}"


TRACED_FIRST = """
import torch
from kserve.ops import group_norm, realspace

def step(x):
    return realspace(*group_norm(x, 2)[0, :2])[0]

print(*torch.compile(step, fullgraph=True, backend="aot_eager")(torch.randn(1, 4, 2, 3, 3)).shape)
"""


def test_an_op_may_be_traced_before_it_is_ever_called():
    assert python(TRACED_FIRST).stdout.split() == ["2", "3", "3"]
