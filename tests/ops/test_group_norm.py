"""group_norm: the front door on the CPU, its launches with the kernels on the host, what the compiler makes of them, a GPU."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from kserve.errors import CompileFailed, InvalidSpec
from kserve.ops import group_norm, group_norm_kernels
from kserve.ops.group_norm import FastGroupNorm, is_supported, reason_for_reference, reference
from kserve.ops.group_norm_kernels import Norm, differentiable, partition
from tests.support import compare
from tests.support.built_in import device_code
from tests.support.host_cuda import host_kernel
from tests.support.processes import python

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    grad: torch.Tensor  # of the result

    def double(self) -> Inputs:
        return Inputs(*(None if tensor is None else tensor.double() for tensor in self))


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last_3d)


def inputs(
    shape: tuple[int, ...] = (1, 64, 5, 7, 9), *, dtype: torch.dtype = F32, out: torch.dtype | None = None, **o: Any
) -> Inputs:
    """Unit-normal volumes around `mean`, the affine near (1, 0) in `affine` or absent; the same on every device."""
    random = torch.Generator().manual_seed(o.get("seed", 0))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, dtype=F64)

    x, grad = normal(*shape) * o.get("std", 1.0) + o.get("mean", 0.0), normal(*shape)
    affine, device = o.get("affine", dtype), o.get("device", "cpu")
    weight, bias = 1.0 + 0.1 * normal(shape[1]), 0.1 * normal(shape[1])
    parameters = [None if affine is None else tensor.to(affine).to(device) for tensor in (weight, bias)]
    return Inputs(channels_last(x.to(dtype).to(device)), *parameters, channels_last(grad.to(out or dtype).to(device)))


def exact(given: Inputs, norm: Norm) -> tuple[torch.Tensor, ...]:
    """Result and gradients of what is there, in float64 by torch."""
    wide = given.double()
    leaves = [tensor.requires_grad_() for tensor in wide[:3] if tensor is not None]
    out = reference(*wide[:3], norm._replace(out_dtype=F64))
    return (out.detach(), *torch.autograd.grad(out, leaves, wide.grad))


def served(given: Inputs, norm: Norm, call: Any = differentiable) -> tuple[torch.Tensor, ...]:
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in given[:3]]
    out = call(*leaves, norm)
    return (out.detach(), *torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], given.grad))


def check(found: tuple[torch.Tensor, ...], given: Inputs, norm: Norm) -> None:
    """Every result within the bar of its own dtype, or of the input's where that is narrower."""
    for actual, expected in zip(found, exact(given, norm), strict=True):
        assert actual.isfinite().all()
        compare.assert_within_relative(actual, expected, compare.RELATIVE["group_norm", actual.dtype])


# The front door and the reference, on the CPU


GOLDEN_X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-1.0, 1.0], [0.0, 2.0]]).view(1, 4, 2, 1, 1)
GOLDEN = {
    "y": [[0, 0], [0, 1.683271], [0, 1.447212], [0, 0.670818]],
    "dx": [[0.357763, -0.178887], [-0.715537, 0.536661], [-0.000003, 0.447213], [-0.223607, -0.223603]],
    "dw": [0, 1.341635, 0.447212, 1.341635],
    "db": [0, 1, 1, 1],
}


def golden() -> Inputs:
    weight, bias = torch.tensor([1.0, 2.0, 1.0, 0.5]), torch.tensor([0.0, -1.0, 1.0, 0.0])
    return Inputs(channels_last(GOLDEN_X), weight, bias, torch.ones_like(GOLDEN_X))


def assert_golden(found: tuple[torch.Tensor, ...]) -> None:
    for actual, expected in zip(found, GOLDEN.values(), strict=True):
        compare.assert_within(actual, torch.tensor(expected, dtype=F32).view(actual.shape), 2e-6)


def test_golden_example():
    assert_golden(served(golden(), Norm(2, 1e-5, True, F32), call=reference))


@pytest.mark.parametrize("shape", [(2, 24, 3, 4, 5), (1, 6, 2, 1, 1), (3, 8), (2, 4, 5), (1, 4, 6, 6)])
def test_the_reference_serves_any_rank(shape):
    x, weight = torch.randn(shape), torch.randn(shape[1])
    expected = torch.relu(torch.nn.functional.group_norm(x, 2, weight))
    compare.assert_within(group_norm(x, 2, weight, activation="relu"), expected, 1e-6)


def test_module_is_torchs_with_the_same_state():
    ours, theirs = FastGroupNorm(4, 8, 1e-3, device="cpu"), torch.nn.GroupNorm(4, 8, 1e-3)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 3, 4, 5)
    compare.assert_within(ours(x), theirs(x), 1e-6)
    assert torch.equal(copy.deepcopy(ours)(x), ours(x))
    assert FastGroupNorm(4, 8, affine=False)(x).shape == x.shape
    assert ours.ladder.last_decline(ours).reason == "not_gpu"


def test_dtype_of_the_result_is_torchs_or_the_one_that_is_asked_for():
    x = torch.randn(1, 8, 2, 3, 4, dtype=BF16)
    with torch.autocast("cpu", BF16):
        assert group_norm(x, 2).dtype == torch.nn.functional.group_norm(x, 2).dtype
        assert torch.equal(group_norm(x, 2, out_dtype=None), group_norm(x, 2, out_dtype=F32).bfloat16())
    assert group_norm(x, 2).dtype == BF16
    assert group_norm(x.double(), 2).dtype == F64
    assert group_norm(x, 2, out_dtype=F16).dtype == F16


@pytest.mark.parametrize(
    "options", [{"activation": "gelu"}, {"out_dtype": F64}, {"out_dtype": "wide"}, {"num_groups": 0}, {"num_groups": True}]
)
def test_option_out_of_range_is_refused(options):
    with pytest.raises(InvalidSpec):
        group_norm(torch.randn(1, 8, 2, 2, 2), **{"num_groups": 2, **options})


def test_channels_that_groups_do_not_divide_are_torchs_error():
    with pytest.raises(RuntimeError):
        group_norm(torch.randn(1, 8, 2, 2, 2), 3)


def on_meta(shape: tuple[int, ...] = (2, 16, 3, 4, 5), dtype: torch.dtype = F32) -> torch.Tensor:
    """As a GPU's tensor would be seen, without one."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda", memory_format=torch.channels_last_3d)


def test_what_the_kernels_are_made_for():
    good = on_meta()
    assert is_supported(good, 4) and is_supported(on_meta((1, 8, 1, 1, 1)), 4) and is_supported(on_meta((1, 2048, 2, 2, 2)), 8)
    assert is_supported(on_meta((2, 16, 1, 1, 1)), 16)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fitting = [torch.empty(16, dtype=dtype, device="cuda") for dtype in (F32, BF16)]
        foreign = [torch.empty(16, device="cpu"), torch.empty(16, device="cuda", dtype=F16), torch.empty(8, device="cuda")]
        plain, flat = torch.empty(2, 16, 3, 4, 5, device="cuda"), torch.empty(2, 16, 3, 4, device="cuda")
    assert is_supported(good, 4, fitting[0]) and is_supported(on_meta(dtype=BF16), 4, *fitting)
    assert not any(is_supported(good, 4, None, parameter) for parameter in foreign)
    assert not is_supported(plain, 4) and not is_supported(flat, 4) and not is_supported(good[:, :8], 4)
    assert not is_supported(good, 4, activation="gelu")
    for groups in (0, 3, -4, True, 4.0):
        assert not is_supported(good, groups), groups
    for shape in ((0, 16, 3, 4, 5), (1, 16, 1, 1, 1), (1, 513, 2, 2, 2), (1, 4104, 2, 2, 2)):
        assert not is_supported(on_meta(shape), 16 if shape[1] == 16 else 1), shape
    assert not is_supported(on_meta(dtype=F64), 4)
    assert "cpu" in reason_for_reference(torch.randn(1, 8, 2, 2, 2), 2)


def test_every_voxel_has_one_block():
    for batches, spatial, channels, groups in [
        (1, 128**3, 64, 8),
        (2, 315, 64, 8),
        (1, 1, 8, 8),
        (300, 7, 24, 3),
        (1, 512, 1024, 8),
    ]:
        found = partition(batches, spatial, channels, num_groups=groups, itemsize=2)
        assert 1 <= found.splits <= spatial
        assert found.splits * batches <= max(264, batches) and found.splits * groups <= max(8192, groups)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own checker looks at one
def test_op_keeps_its_promises_to_torch():
    given = inputs((2, 8, 3, 4, 5))
    options = {"num_groups": 4, "eps": 1e-5, "relu": True, "out_dtype": F32}
    leaves = [tensor.requires_grad_() for tensor in given[:3]]
    torch.library.opcheck(torch.ops.kserve.group_norm.default, tuple(leaves), options)
    torch.library.opcheck(
        torch.ops.kserve.group_norm.default, (given.x.to(memory_format=torch.contiguous_format), None, None), options
    )
    norm = Norm(**options)
    traced = torch.compile(lambda *args: torch.ops.kserve.group_norm(*args, **options)[0], fullgraph=True, backend="aot_eager")
    check(served(given, norm, call=lambda *args: traced(*args[:3])), given, norm)
    check(served(given, norm, call=lambda *args: torch.ops.kserve.group_norm(*args[:3], **options)[0]), given, norm)


def test_module_traces_as_a_whole():
    module, x = FastGroupNorm(2, 8, activation="relu"), torch.randn(2, 8, 3, 4, 5)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


def test_second_derivative_through_the_op_is_refused():
    x = inputs((1, 8, 2, 2, 2)).x.requires_grad_()
    out = torch.ops.kserve.group_norm(x, None, None, num_groups=2, eps=1e-5, relu=False, out_dtype=F32)[0]
    with pytest.raises(InvalidSpec):
        torch.autograd.grad(out.sum(), x, create_graph=True)


# The launches of the op, with the kernels on the host


@pytest.fixture
def host(monkeypatch):
    def use(*, facts: bool = True, seed: int = 0) -> None:
        def get(name: str, **spec: Any) -> Any:
            return partial(host_kernel(name, facts=facts, **spec), seed=seed)

        monkeypatch.setattr(group_norm_kernels, "get_kernel", get)
        # Every gradient goes through the launches too, and memory is poisoned.
        monkeypatch.setattr(group_norm_kernels, "reason_for_reference", lambda *_: None)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, **o: empty(*size, **o).fill_(torch.nan))

    use()
    return use


RELU = Norm(8, 1e-5, True, F32)


@pytest.mark.toolchain
@pytest.mark.parametrize("shape", [(1, 64, 5, 7, 9), (2, 64, 3, 3, 7), (3, 64, 1, 1, 1), (1, 64, 1, 1, 2), (1, 64, 8, 8, 9)])
def test_launches_against_float64(host, shape):
    given = inputs(shape)
    check(served(given, RELU), given, RELU)


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        # Groups of three channels in accesses of eight; what autocast gives.
        (Norm(8, 1e-5, True, F32), {"shape": (2, 24, 3, 5, 7), "dtype": BF16, "out": F32, "affine": F32}),
        (Norm(6, 1e-3, False, F16), {"shape": (1, 6, 9, 7, 5), "dtype": F16, "affine": None}),
    ],
)
def test_launches_of_other_dtypes_and_groups(host, norm, options):
    given = inputs(**options)
    check(served(given, norm), given, norm)


@pytest.mark.toolchain
def test_golden_example_by_the_kernels(host):
    host(facts=False)
    assert_golden(served(golden(), Norm(2, 1e-5, True, F32)))


@pytest.mark.toolchain
def test_order_of_threads_and_blocks_changes_no_bit(host):
    given = inputs((2, 64, 5, 6, 7))
    expected = served(given, RELU)
    host(seed=7)
    assert all(torch.equal(a, b) for a, b in zip(served(given, RELU), expected, strict=True))


@pytest.mark.toolchain
@pytest.mark.parametrize(("mean", "std"), [(100.0, 1.0), (1e3, 1e-2), (1e4, 1.0)])
def test_large_means_cost_no_digits(host, mean, std):
    given = inputs((1, 64, 8, 8, 8), mean=mean, std=std)
    expected = exact(given, RELU)[0]
    theirs = compare.largest_error(reference(*given[:3], RELU), expected) / float(expected.abs().max())
    found = compare.largest_error(differentiable(*given[:3], RELU), expected) / float(expected.abs().max())
    assert found <= max(4.0 * theirs, 1e-5)
    wide = given.x.reshape(8, -1)
    naive = ((wide.square().mean(1) - wide.mean(1).square()).clamp(min=0.0) + RELU.eps).rsqrt()
    rstd = (wide.double().var(1, correction=0) + RELU.eps).rsqrt()
    lost = compare.largest_error(naive / rstd, torch.ones_like(rstd))
    if lost > 1e-2:
        assert found <= lost / 10


@pytest.mark.toolchain
def test_an_outlier_at_the_start_costs_no_digits(host):
    given = inputs((1, 64, 8, 8, 8))
    given.x[:, :, 0, 0, 0] = 1e4
    check(served(given, RELU), given, RELU)


@pytest.mark.toolchain
def test_nan_passes_the_activation_and_stays_in_its_group(host):
    given = inputs((1, 64, 5, 7, 9))
    before = differentiable(*given[:3], RELU)
    given.x[0, 17, 2, 3, 4] = torch.nan
    found = differentiable(*given[:3], RELU)
    assert found[:, 16:24].isnan().all()
    rest = [c for c in range(64) if c // 8 != 2]
    assert torch.equal(found[:, rest], before[:, rest])


@pytest.mark.toolchain
def test_one_element_in_its_group_has_no_gradient(host):
    norm = Norm(6, 1e-5, False, F16)
    given = inputs((3, 6, 1, 1, 1), dtype=F16, affine=None)
    x = given.x.clone().requires_grad_()
    assert (torch.autograd.grad(differentiable(x, None, None, norm), x, given.grad)[0] == 0).all()


@pytest.mark.toolchain
def test_only_what_is_needed_is_computed(host):
    given = inputs((1, 64, 5, 7, 9))
    expected = served(given, RELU)
    for wanted in range(3):
        leaves = [tensor.clone().requires_grad_(i == wanted) for i, tensor in enumerate(given[:3])]
        found = torch.autograd.grad(differentiable(*leaves, RELU), leaves[wanted], given.grad)[0]
        assert torch.equal(found, expected[1 + wanted])


@pytest.mark.toolchain
def test_gradients_of_any_layout_are_taken(host):
    given = inputs((1, 64, 5, 7, 9))
    for grad in (given.grad.contiguous(), given.grad[:1].expand_as(given.grad), torch.ones(()).expand_as(given.grad)):
        check(served(given._replace(grad=grad), RELU), given._replace(grad=grad), RELU)


# The device code, under the compiler


CODE = [
    ({}, "sm_80"),
    ({}, "sm_90"),
    ({"dtype": "float32", "out_dtype": "float32"}, "sm_90"),
    ({"out_dtype": "float32", "channels": 24}, "sm_90"),
]


@pytest.mark.toolchain
@pytest.mark.parametrize(("spec", "arch"), CODE)
@pytest.mark.parametrize("name", ["group_norm_stats", "group_norm_apply", "group_norm_bwd_sums", "group_norm_bwd_apply"])
def test_compiles_without_spills_with_wide_accesses_and_two_blocks_at_once(name, spec, arch, tmp_path):
    code = device_code(name, tmp_path, arch=arch, relu=True, **spec)
    assert code.resources["spill_bytes"] == code.resources["stack_bytes"] == 0
    assert code.mix["atomics"] == code.mix["local_loads"] == 0
    # As many as are under way at once, and one for the voxels that are left over; alone there are none of these.
    ahead, tensors = {"group_norm_bwd_apply": (1, 2), "group_norm_bwd_sums": (2, 2)}.get(name, (4, 1))
    at_once = ahead + (ahead > 1)
    assert code.mix["global_loads_128"] >= tensors * at_once
    assert name.endswith(("stats", "sums")) or code.mix["global_stores_128"] >= at_once
    if spec.get("channels") is None:
        assert code.resources["registers"] <= 64 and code.resources["shared_bytes"] <= 48 << 10


@pytest.mark.toolchain
def test_groups_that_do_not_divide_the_channels_are_refused(tmp_path):
    with pytest.raises(CompileFailed, match="groups divide the channels"):
        device_code("group_norm_stats", tmp_path, channels=8, groups=3)


# The kernels, on a GPU


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


def on_gpu(given: Inputs, norm: Norm) -> tuple[torch.Tensor, ...]:
    """Through the front door, by the kernels."""

    def call(x: torch.Tensor, weight: Any, bias: Any, _: Norm) -> torch.Tensor:
        return group_norm(
            x, norm.num_groups, weight, bias, eps=norm.eps, activation="relu" if norm.relu else None, out_dtype=norm.out_dtype
        )

    assert is_supported(given.x, norm.num_groups, given.weight, given.bias)
    return served(given, norm, call)


PUBLISHED = [
    (1, 64, 8, 8, 8),
    (2, 64, 9, 7, 5),
    (1, 128, 5, 6, 7),
    (3, 256, 4, 4, 4),
    (1, 2048, 6, 6, 6),
    (2, 24, 11, 3, 5),
    (1, 96, 7, 1, 13),
]


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", PUBLISHED)
def test_kernels_against_float64(device, shape, dtype, relu):
    given = inputs(shape, dtype=dtype, device=device)
    norm = Norm(8, 1e-5, relu, dtype)
    check(on_gpu(given, norm), given, norm)


@pytest.mark.gpu
def test_kernels_on_a_view_that_is_aligned_for_one_element(device):
    given = inputs((1, 64, 5, 7, 9), dtype=BF16, device=device)
    buffer = torch.empty(given.x.numel() + 1, dtype=BF16, device=device)
    view = buffer[1:].view(1, 5, 7, 9, 64).permute(0, 4, 1, 2, 3)
    view.copy_(given.x)
    norm = Norm(8, 1e-5, True, BF16)
    moved = given._replace(x=view)
    out = group_norm(view, 8, given.weight, given.bias, activation="relu")
    assert view.data_ptr() % 16
    assert torch.equal(out, on_gpu(given, norm)[0])
    assert is_supported(moved.x, 8)


@pytest.mark.gpu
def test_narrow_result_is_the_wide_one_rounded_once(device):
    given = inputs((1, 64, 8, 8, 8), dtype=BF16, device=device)
    with torch.autocast("cuda", BF16):
        wide = group_norm(given.x, 8, given.weight, given.bias)
        narrow = group_norm(given.x, 8, given.weight, given.bias, out_dtype=None)
        assert torch.nn.functional.group_norm(given.x, 8).dtype == wide.dtype
    assert wide.dtype == F32 and torch.equal(wide.bfloat16(), narrow)


@pytest.mark.gpu
def test_fused_relu_is_the_unfused_one(device):
    given = inputs((2, 64, 9, 7, 5), device=device)
    plain = Norm(8, 1e-5, False, F32)

    def unfused(*args: Any) -> torch.Tensor:
        return torch.relu(differentiable(*args[:3], plain))

    assert all(torch.equal(a, b) for a, b in zip(on_gpu(given, RELU), served(given, RELU, unfused), strict=True))


REPEATED = """
import torch
from kserve.ops import group_norm
random = torch.Generator().manual_seed(0)
x = torch.randn(2, 64, 33, 17, 21, generator=random).to("cuda", memory_format=torch.channels_last_3d).requires_grad_()
w = torch.randn(64, generator=random).cuda().requires_grad_()
for _ in range(3):
    y = group_norm(x, 8, w, activation="relu")
    found = (y, *torch.autograd.grad(y.square().sum(), (x, w)))
    print(*(hash(t.detach().cpu().numpy().tobytes()) for t in found))
"""


@pytest.mark.gpu
def test_same_bits_every_time_and_in_every_process(device):
    lines = [python(REPEATED, PYTHONHASHSEED="0").stdout.split("\n")[:3] for _ in range(2)]
    assert len({line for found in lines for line in found}) == 1


@pytest.mark.gpu
def test_captured_traced_and_on_two_streams(device):
    given = inputs((1, 64, 16, 16, 16), dtype=BF16, device=device)
    module = FastGroupNorm(8, 64, activation="relu", device=device, dtype=BF16)
    expected = module(given.x)
    assert module.ladder.has_served(module)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = module(given.x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    leaf = given.x.clone().requires_grad_()
    traced = torch.compile(module, fullgraph=True)(leaf)
    assert torch.equal(traced, expected)
    traced.sum().backward()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(module(given.x))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.gpu
def test_more_elements_than_31_bits_can_count(device):
    shape = (2, 64, 256, 256, 257)
    x = torch.empty(shape, dtype=BF16, device=device, memory_format=torch.channels_last_3d).normal_()
    out = group_norm(x, 8)
    for batch in range(2):
        for channels in (slice(0, 8), slice(56, 64)):
            group = x[batch, channels].double()
            expected = (group - group.mean()) / group.std(correction=0)
            compare.assert_within_relative(out[batch, channels], expected, compare.RELATIVE["group_norm", BF16])
            del group, expected
