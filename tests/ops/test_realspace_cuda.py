"""realspace's CUDA form: the kernels on the host against float64, what the compiler makes of them, and which form serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kserve.ops.circle import default_n_grid, reference, reference_gradient
from kserve.ops.realspace import _Options, _RealSpace, bases, form_for, realspace
from tests.support import compare
from tests.support.built_in import built_in_plan, device_code
from tests.support.host_cuda import host_kernel
from tests.support.inputs import circle_inputs

F64 = torch.float64
# 16-byte accesses of a thread for each operand: exchanged in a warp, or one that a thread has for itself.
EXCHANGED, OWN = {"n_ang": 3}, {"n_ang": 4}
CASES = [
    ({"n_ang": 1, "n_grid": 4}, 515),
    ({"n_ang": 2, "n_grid": 3, "dtype": "float16"}, 700),
    (EXCHANGED, 521),
    ({**EXCHANGED, "dtype": "bfloat16"}, 1100),
    (OWN, 300),
    ({"n_ang": 5, "n_grid": 16}, 513),
    ({"n_ang": 8, "n_grid": 15}, 140),
]


class Case:
    """The kernels of one spec on the host, and the operands g_cos, g_sin, a_cos, a_sin of some rows."""

    def __init__(self, spec: dict[str, Any], rows: int, *, facts: bool = True) -> None:
        self.dtype = getattr(torch, spec.get("dtype", "float32"))
        self.n_grid = spec.get("n_grid") or default_n_grid(spec["n_ang"])
        self.operands = [tensor[0] for tensor in circle_inputs((1, rows, spec["n_ang"]), count=4, dtype=self.dtype)]
        self.kernels = [host_kernel(f"realspace_cuda_{way}", facts=facts, **spec) for way in ("fwd", "bwd")]

    def run(self, *, by_order: tuple[int, ...] = (), seed: int = 0) -> list[torch.Tensor]:
        """out_cos, out_sin, da_cos, da_sin; the operands at these positions lie order by order."""
        rows = self.operands[0].shape[0]
        given = [tensor.T.contiguous() if i in by_order else tensor for i, tensor in enumerate(self.operands)]
        strides = [rows if i in by_order else 0 for i in range(4)]
        results = [Guarded(self.operands[0]) for _ in range(4)]
        forward, backward = self.kernels
        forward(*given[2:], results[0].inside, results[1].inside, rows, *strides[2:], seed=seed)
        backward(*given, results[2].inside, results[3].inside, rows, *strides, seed=seed)
        assert all(result.is_untouched_outside() for result in results)
        return [result.inside for result in results]

    def expected(self) -> tuple[torch.Tensor, ...]:
        wide = [tensor[None].to(F64) for tensor in self.operands]
        found = (*reference(*wide[2:], n_grid=self.n_grid), *reference_gradient(wide, n_grid=self.n_grid))
        return tuple(tensor[0] for tensor in found)

    def check(self, found: list[torch.Tensor]) -> None:
        for actual, expected in zip(found, self.expected(), strict=True):
            if self.dtype == torch.float32:
                compare.assert_within(actual, expected, compare.REALSPACE_F32)
            else:
                compare.assert_within_relative(actual, expected, compare.RELATIVE["realspace", self.dtype])
        assert (found[1][:, 0] == 0).all() and (found[3][:, 0] == 0).all()


class Guarded:
    """A poisoned result between further poisoned elements."""

    def __init__(self, like: torch.Tensor) -> None:
        self._buffer = torch.full((like.numel() + 64,), torch.nan, dtype=like.dtype)
        self.inside = self._buffer[32:-32].view(like.shape)

    def is_untouched_outside(self) -> bool:
        return bool(self._buffer[:32].isnan().all() and self._buffer[-32:].isnan().all())


@pytest.mark.toolchain
@pytest.mark.parametrize(("spec", "rows"), CASES)
def test_kernels_against_float64(spec, rows):
    case = Case(spec, rows)
    case.check(case.run())
    case.check(case.run(by_order=(0, 1, 2, 3), seed=1))


@pytest.mark.toolchain
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 512, 513])
def test_awkward_numbers_of_rows(rows):
    case = Case(EXCHANGED, rows)
    case.check(case.run(seed=rows))
    case.check(case.run(by_order=(1, 2)))


@pytest.mark.toolchain
def test_every_mixture_of_layouts_gives_the_same_bits():
    case = Case(EXCHANGED, 640)
    expected = case.run()
    for mixture in range(1, 16):
        found = case.run(by_order=tuple(i for i in range(4) if mixture >> i & 1), seed=mixture)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), mixture


@pytest.mark.toolchain
def test_unaligned_operands_give_the_same_bits():
    aligned, generic = Case(EXCHANGED, 521), Case(EXCHANGED, 521, facts=False)
    for by_order in ((), (0, 1, 2, 3)):
        pairs = zip(aligned.run(by_order=by_order), generic.run(by_order=by_order), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.toolchain
@pytest.mark.parametrize("spec", [EXCHANGED, OWN])
def test_nan_stays_in_its_row_and_the_dead_sine_has_no_influence(spec):
    case = Case(spec, 150)
    expected = case.run()
    case.operands[3][:, 0] = torch.nan
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))
    case.operands[2][70, 1] = torch.nan
    for found, before in zip(case.run(), expected, strict=True):
        kept = torch.arange(150) != 70
        assert torch.equal(found[kept], before[kept])
        assert found[70, 1:].isnan().all()


@pytest.mark.toolchain
def test_large_values_give_no_nan():
    case = Case(EXCHANGED, 6)
    large = torch.tensor([-3e38, -1e30, -90.0, 90.0, 1e30, 3e38])
    case.operands[2] = torch.stack([large, *[torch.zeros(6)] * 2], dim=1)
    case.operands[3] = torch.zeros(6, 3)
    found = case.run()
    assert torch.allclose(found[0][:, 0], torch.relu(large), rtol=1e-6)
    assert all(tensor.isfinite().all() for tensor in found)


# What the compiler makes of them

COMPILED = [
    *(({"n_ang": 3}, arch) for arch in ("sm_80", "sm_90", "sm_100", "sm_120")),
    ({"n_ang": 4}, "sm_90"),
    ({"n_ang": 7}, "sm_80"),
    ({"n_ang": 8}, "sm_90"),
    ({"n_ang": 3, "dtype": "bfloat16"}, "sm_90"),
]


@pytest.mark.toolchain
@pytest.mark.parametrize(("spec", "arch"), COMPILED)
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_compiles_without_spills_and_with_wide_accesses(way, spec, arch, tmp_path):
    name = f"realspace_cuda_{way}"
    code = device_code(name, tmp_path, arch=arch, **spec)
    assert code.resources["spill_bytes"] == code.resources["stack_bytes"] == 0
    assert code.mix["matrix"] == 0
    plan, _ = built_in_plan(name, **spec)
    row_bytes = spec["n_ang"] * (4 if "dtype" not in spec else 2)
    thread_bytes = plan.knobs["ROWS"] * row_bytes
    assert code.mix["global_stores_128"] == 2 * thread_bytes // 16
    # Once row by row and once order by order; what is left is for the last rows, element by element.
    assert code.mix["async_copies"] == code.mix["async_copies_128"] == {"fwd": 2, "bwd": 4}[way] * 2 * thread_bytes // 16


@pytest.mark.toolchain
def test_kernel_refuses_a_grid_that_cannot_tell_the_orders_apart(tmp_path):
    from kserve.errors import CompileFailed

    with pytest.raises(CompileFailed, match="tell the orders apart"):
        device_code("realspace_cuda_fwd", tmp_path, n_ang=3, n_grid=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n_ang", range(1, 9))
def test_a_thread_has_whole_accesses(n_ang, dtype):
    plan, _ = built_in_plan("realspace_cuda_bwd", dtype=dtype, n_ang=n_ang)
    size = 4 if dtype == "float32" else 2
    is_long = size == 2 and n_ang in (5, 7)
    assert plan.knobs["ROWS"] * n_ang * size % (8 if is_long else 16) == 0
    assert plan.knobs["ROWS"] * n_ang * size <= 112


# Which form serves, and how torch sees it


@pytest.mark.parametrize(
    ("dtype", "n_grid", "has_basis", "forward"),
    [
        (torch.float32, 9, False, "realspace_cuda_fwd"),
        (torch.bfloat16, 32, False, "realspace_cuda_fwd"),
        (torch.float32, 33, False, "realspace_fwd"),
        (torch.float32, 9, True, "realspace_fwd"),
        (torch.float16, 33, False, None),
        (torch.bfloat16, 9, True, None),
        (torch.float32, 257, False, None),
    ],
)
def test_form_is_chosen_by_a_fixed_table(dtype, n_grid, has_basis, forward):
    form = form_for(dtype, n_grid, has_basis=has_basis)
    assert (form and form.forward) == forward


@pytest.mark.parametrize("basis", [[], list(bases(3, 7))])
def test_ops_keep_their_promises_to_torch(basis):
    operands = circle_inputs((2, 4, 3), count=4)
    given, kinds = {"basis": basis, "n_grid": 7}, ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kserve.realspace.default, tuple(operands[2:]), given, test_utils=kinds)
    torch.library.opcheck(torch.ops.kserve.realspace_backward.default, tuple(operands), given, test_utils=kinds)


def test_traces_as_a_whole():
    def step(a_cos: torch.Tensor, a_sin: torch.Tensor) -> torch.Tensor:
        pair = torch.ops.kserve.realspace(a_cos, a_sin, basis=[], n_grid=9)
        return realspace(*pair)[0] * torch.ops.kserve.realspace_backward(*pair, *pair, basis=[], n_grid=9)[1]

    operands = circle_inputs((2, 4, 3))
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*operands), step(*operands))


def test_gradient_goes_through_a_trace():
    def served(*operands: torch.Tensor) -> torch.Tensor:  # as on a GPU
        return _RealSpace.apply(*operands, _Options(9))[0]

    operands = [tensor.requires_grad_() for tensor in circle_inputs((2, 4, 3))]
    expected = torch.autograd.grad(realspace(*operands)[0].sum(), operands)
    for function in (served, lambda *operands: realspace(*operands)[0]):
        traced = torch.compile(function, fullgraph=True, backend="aot_eager")
        for found, wanted in zip(torch.autograd.grad(traced(*operands).sum(), operands), expected, strict=True):
            compare.assert_within(found, wanted, compare.REALSPACE_F32)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_order_major_operands_are_read_in_place(dtype):
    operands = circle_inputs((40, 16, 3), count=4, dtype=dtype, device="cuda")
    by_order = [tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0) for tensor in operands]
    plain = realspace(*operands[2:])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    found = realspace(*by_order[2:])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_traced_with_its_gradient_and_captured_on_a_gpu():
    operands = [tensor.requires_grad_() for tensor in circle_inputs((40, 16, 3), device="cuda")]
    traced = torch.compile(realspace, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(realspace(*operands)[0].sum(), operands)
    found = torch.autograd.grad(traced(*operands)[0].sum(), operands)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = realspace(*operands)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[0], realspace(*operands)[0])
