"""realspace: the front door on the CPU, the Triton source under the interpreter, the kernels on a GPU.

Run as a script, this file is the interpreted part: Triton must see TRITON_INTERPRET before it is imported.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kserve.ops
from kserve.errors import InvalidSpec, LaunchError
from kserve.kernel_toml import read_definition
from kserve.ops.realspace import Bases, bases, default_n_grid, realspace, reason_for_reference, reference
from tests.support import compare
from tests.support.inputs import circle_inputs, odd, poisoned

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "triton_src" / "realspace"
F64 = torch.float64
# (n_ang, n_grid): each number of orders with its default grid, then grids that are not the default.
SHAPES = [*((n_ang, default_n_grid(n_ang)) for n_ang in range(1, 9)), (1, 4), (2, 3), (3, 5), (3, 16), (3, 48), (4, 7), (8, 15)]
Pair = tuple[torch.Tensor, torch.Tensor]


def formula_forward(a: np.ndarray, b: np.ndarray, n_grid: int) -> tuple[np.ndarray, np.ndarray]:
    c, s, ca, sa = formula_bases(a.shape[-1], n_grid)
    f = a @ c + b @ s
    h = f / (1.0 + np.exp(-f))
    return h @ ca, h @ sa


def formula_backward(gc: np.ndarray, gs: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    c, s, ca, sa = formula_bases(a.shape[-1], default_n_grid(a.shape[-1]))
    f = a @ c + b @ s
    sigma = 1.0 / (1.0 + np.exp(-f))
    df = (gc @ ca.T + gs @ sa.T) * sigma * (1.0 + f * (1.0 - sigma))
    return df @ c.T, df @ s.T


def formula_bases(n_ang: int, n_grid: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    theta = 2.0 * np.pi * np.arange(n_grid) / n_grid
    orders = np.arange(n_ang)[:, None]
    weight = np.where(orders == 0, 1.0, 2.0).T / n_grid
    c, s = np.cos(orders * theta), np.sin(orders * theta)
    return c, s, c.T * weight, s.T * weight


def in_float64(a_cos: torch.Tensor, a_sin: torch.Tensor, **options: Any) -> Pair:
    return reference(a_cos.double(), a_sin.double(), **options)


def gradients_in_float64(operands: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    """d(a_cos), d(a_sin) from g_cos, g_sin, a_cos, a_sin, by torch."""
    g_cos, g_sin, a_cos, a_sin = (tensor.detach().double() for tensor in operands)
    leaves = (a_cos.requires_grad_(), a_sin.requires_grad_())
    return torch.autograd.grad(reference(*leaves, **options), leaves, (g_cos, g_sin))


# The reference and the front door, on the CPU


def golden() -> Pair:
    return torch.tensor([[[1.0, 0.5]]], dtype=F64), torch.tensor([[[0.0, -0.25]]], dtype=F64)


def test_golden_example():
    a_cos, a_sin = (tensor.requires_grad_() for tensor in golden())
    out = realspace(a_cos, a_sin)
    compare.assert_within(out[0], torch.tensor([[[0.7546356976, 0.4579677653]]], dtype=F64), 5e-11)
    compare.assert_within(out[1], torch.tensor([[[0.0, -0.2289943558]]], dtype=F64), 5e-11)
    gradient = torch.autograd.grad(out, (a_cos, a_sin), (torch.ones_like(out[0]), torch.ones_like(out[1])))
    compare.assert_within(gradient[0], torch.tensor([[[0.9800093041, 0.9819527689]]], dtype=F64), 5e-11)
    compare.assert_within(gradient[1], torch.tensor([[[0.0, 0.8828991330]]], dtype=F64), 5e-11)


@pytest.mark.parametrize(("n_ang", "n_grid"), SHAPES)
def test_reference_is_the_formula(n_ang, n_grid):
    a_cos, a_sin = circle_inputs((2, 5, n_ang), dtype=F64)
    actual = realspace(a_cos, a_sin, n_grid=n_grid)
    expected = formula_forward(a_cos.numpy(), a_sin.numpy(), n_grid)
    for found, wanted in zip(actual, expected, strict=True):
        compare.assert_within(found, torch.from_numpy(wanted), compare.REALSPACE_F64)


@pytest.mark.parametrize("n_ang", [1, 2, 3, 4])
def test_gradient_of_the_reference_is_the_formula(n_ang):
    operands = circle_inputs((2, 5, n_ang), count=4, dtype=F64)
    expected = formula_backward(*(tensor.numpy() for tensor in operands))
    for found, wanted in zip(gradients_in_float64(operands), expected, strict=True):
        compare.assert_within(found, torch.from_numpy(wanted), compare.REALSPACE_F64)


def test_finite_differences():
    operands = [tensor.requires_grad_() for tensor in circle_inputs((1, 2, 3), dtype=F64)]
    assert torch.autograd.gradcheck(realspace, operands)
    assert torch.autograd.gradgradcheck(realspace, operands)


@pytest.mark.parametrize(("n_ang", "n_grid"), SHAPES)
def test_identity_comes_back_from_the_grid(n_ang, n_grid):
    a_cos, a_sin = circle_inputs((4, 3, n_ang), dtype=F64)
    a_sin[..., 0] = 0.0
    out_cos, out_sin = realspace(a_cos, a_sin, n_grid=n_grid, activation="identity")
    compare.assert_within(out_cos, a_cos, 1e-14 * n_grid)
    compare.assert_within(out_sin, a_sin, 1e-14 * n_grid)


@pytest.mark.parametrize("activation", ["silu", "relu", "tanh", "gelu"])
@pytest.mark.parametrize("n_ang", [2, 3, 4])
def test_turning_by_a_grid_step_commutes(n_ang, activation):
    operands = circle_inputs((4, 3, n_ang), dtype=F64)
    operands[1][..., 0] = 0.0
    phi = 2.0 * math.pi * 2 / default_n_grid(n_ang)
    turned_last = turned(realspace(*operands, activation=activation), phi)
    turned_first = realspace(*turned(operands, phi), activation=activation)
    for found, wanted in zip(turned_first, turned_last, strict=True):
        compare.assert_within(found, wanted, 1e-13)


def turned(pair: Any, phi: float) -> Pair:
    a, b = pair
    angle = phi * torch.arange(a.shape[-1], dtype=a.dtype)
    return a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()


def test_sine_of_order_zero_has_no_influence():
    operands = circle_inputs((4, 3, 3), count=4)
    expected = realspace(*operands[:2])
    operands[1][..., 0] += 5.0
    actual = realspace(*operands[:2])
    assert all(torch.equal(found, wanted) for found, wanted in zip(actual, expected, strict=True))
    assert (actual[1][..., 0] == 0).all()
    assert (gradients_in_float64([*operands[2:], *operands[:2]])[1][..., 0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (0, 0, 1)])
def test_no_rows_give_empty_results_with_empty_gradients(shape):
    a_cos, a_sin = (torch.empty(shape, requires_grad=True) for _ in range(2))
    out_cos, out_sin = realspace(a_cos, a_sin)
    assert out_cos.shape == out_sin.shape == shape
    assert torch.autograd.grad(out_cos.sum() + out_sin.sum(), a_cos)[0].shape == shape


def test_large_values_give_no_nan():
    a_cos = torch.tensor([-3e38, -1e30, -1e3, 1e3, 1e30, 3e38]).view(6, 1, 1)
    out_cos, _ = realspace(a_cos, torch.zeros_like(a_cos))
    assert torch.equal(out_cos, torch.relu(a_cos))


def test_nan_stays_in_its_row():
    operands = circle_inputs((2, 3, 3))
    expected = realspace(*operands)
    operands[0][1, 2, 0] = torch.nan
    out_cos, _ = realspace(*operands)
    assert out_cos[1, 2].isnan().all()
    assert torch.equal(out_cos[0], expected[0][0]) and torch.equal(out_cos[1, :2], expected[0][1, :2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_wide_and_rounded_once(dtype):
    operands = circle_inputs((6, 8, 3), dtype=dtype)
    actual = realspace(*operands)
    for found, wanted in zip(actual, in_float64(*operands), strict=True):
        assert found.dtype == dtype
        compare.assert_within_relative(found, wanted, compare.RELATIVE["realspace", dtype])


def test_results_have_the_dtype_of_the_cosines():
    a_cos, a_sin = circle_inputs((2, 3, 3))
    assert realspace(a_cos.bfloat16(), a_sin)[1].dtype == torch.bfloat16


def layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in the layouts that callers have."""
    return {
        "row-major": tensor,
        "order-major": tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "padded rows": torch.nn.functional.pad(tensor, (0, 1))[..., :-1],
        "transposed": tensor.transpose(0, 1).contiguous().transpose(0, 1),
        "negated": torch.complex(tensor, -tensor).conj().imag,
    }


@pytest.mark.parametrize("second", layouts(torch.zeros(2, 3, 3)))
@pytest.mark.parametrize("first", layouts(torch.zeros(2, 3, 3)))
def test_layout_of_an_operand_does_not_matter(first, second):
    a_cos, a_sin = circle_inputs((4, 5, 3))
    actual = realspace(layouts(a_cos)[first], layouts(a_sin)[second])
    for found, wanted in zip(actual, in_float64(a_cos, a_sin), strict=True):
        assert found.is_contiguous()
        compare.assert_within(found, wanted, compare.REALSPACE_F32)


def test_bases_are_computed_in_float64_and_rounded_once():
    exact = formula_bases(4, 13)
    for name, found, wanted in zip(Bases._fields, bases(4), exact, strict=True):
        assert found.dtype == torch.float32, name
        compare.assert_within(found, torch.from_numpy(wanted), 6e-8)
    for found, wanted in zip(bases(4, dtype=F64), exact, strict=True):
        compare.assert_within(found, torch.from_numpy(wanted), 1e-14)


def test_bases_of_the_caller_are_used():
    operands = circle_inputs((4, 5, 3), dtype=F64)
    own = bases(3, 7, dtype=F64)
    for found, wanted in zip(realspace(*operands, basis=own), realspace(*operands, n_grid=7), strict=True):
        assert torch.equal(found, wanted)
    doubled = Bases(own.c, own.s, 2.0 * own.ca, 2.0 * own.sa)
    compare.assert_within(realspace(*operands, basis=doubled)[0], 2.0 * realspace(*operands, n_grid=7)[0], 1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {"n_grid": 4},
        {"n_grid": 0},
        {"n_grid": -1},
        {"n_grid": 9.0},
        {"n_grid": True},
        {"n_grid": [9]},
        {"activation": "softmax"},
        {"n_grid": 9, "basis": bases(3, 7)},
    ],
)
def test_option_out_of_range_is_refused(options):
    with pytest.raises(InvalidSpec):
        realspace(*circle_inputs((2, 3, 3)), **options)


def refused_tensors() -> dict[str, tuple[torch.Tensor, torch.Tensor, Bases | None]]:
    a, b = circle_inputs((2, 3, 3))
    good = bases(3, 7)
    return {
        "flat": (a[0], b[0], None),
        "no orders": (a[..., :0], b[..., :0], None),
        "integers": (a.int(), b.int(), None),
        "another shape": (a, b[:1], None),
        "elsewhere": (a, b.to("meta"), None),
        "bases of other orders": (a, b, bases(2, 7)),
        "bases of float16": (a, b, Bases(*(tensor.half() for tensor in good))),
        "strided basis": (a, b, good._replace(c=good.ca.T)),
    }


@pytest.mark.parametrize("case", refused_tensors())
def test_tensor_that_does_not_fit_is_refused(case):
    a_cos, a_sin, basis = refused_tensors()[case]
    with pytest.raises(LaunchError):
        realspace(a_cos, a_sin, basis=basis)


def test_name_of_the_op_is_the_function_however_it_was_imported():
    assert kserve.ops.realspace is realspace


def test_reasons_for_the_reference():
    assert "cpu" in reason_for_reference(*circle_inputs(), 9, "silu")


# The kernels, interpreted


def definition_and_values(n_ang: int, n_grid: int, name: str = "realspace_fwd") -> tuple[Any, dict[str, Any]]:
    """The definition, and what its expressions may use: the spec, and every knob at its default."""
    definition = read_definition((FOLDER / "kernel.toml").read_bytes(), origin="kernel.toml")
    entry = definition.entries[name]
    spec = definition.specialise(entry, {"n_ang": n_ang, "n_grid": n_grid})
    return definition, {**spec, **definition.knob_values(entry, spec, {})}


@pytest.mark.parametrize("n_ang", range(1, 9))
def test_grid_of_zero_is_the_default_grid(n_ang):
    assert definition_and_values(n_ang, 0)[1]["points"] == default_n_grid(n_ang)
    assert definition_and_values(n_ang, 200)[1]["points"] == 200


def test_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith("cases\n")


def interpret_all() -> None:
    sys.path.insert(0, str(FOLDER))
    import realspace as source

    count = 0
    for n_ang, n_grid in SHAPES:
        sizes = (0, 1, 127, 129, 511, 513) if n_grid == 9 else (1, 129)
        for rows in sizes:
            operands = circle_inputs((1, rows, n_ang), count=4, seed=rows)
            interpret(source, operands, n_grid)
            count += 1
    large = torch.tensor([-3e38, -1e30, -90.0, 90.0, 1e30, 3e38]).view(1, 6, 1)
    interpret(source, [torch.ones_like(large), torch.ones_like(large), large, torch.zeros_like(large)], 1)
    print(f"{count + 1} cases")


def interpret(source: Any, operands: list[torch.Tensor], n_grid: int) -> None:
    g_cos, g_sin, a_cos, a_sin = operands
    expected = in_float64(a_cos, a_sin, n_grid=n_grid)
    launch(source, "realspace_fwd", (a_cos, a_sin), n_grid, expected)
    launch(source, "realspace_bwd", (g_cos, g_sin, a_cos, a_sin), n_grid, gradients_in_float64(operands, n_grid=n_grid))


def launch(source: Any, name: str, operands: tuple[torch.Tensor, ...], n_grid: int, expected: Any) -> None:
    """One interpreted launch, with the constants and the grid of the definition."""
    rows, n_ang = operands[0].shape[1:]
    definition, values = definition_and_values(n_ang, n_grid, name)
    entry = definition.entries[name]
    constants = {a.name: a.value.evaluate(values) for a in entry.arguments if a.kind == "constexpr"}
    grid = tuple(expression.evaluate({**values, **constants, "rows": rows}) for expression in entry.launch.grid)
    outputs = (poisoned(operands[0]), poisoned(operands[0]))
    if grid[0]:
        getattr(source, name)[grid](*operands, *bases(n_ang, n_grid), *outputs, rows, **constants)
    for found, wanted in zip(outputs, expected, strict=True):
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        compare.assert_within(found, wanted, compare.REALSPACE_F32 * scale)


# The kernels, under the compiler


def compiled(name: str, n_ang: int, n_grid: int, target: str, *, aligned: bool) -> Any:
    """As the toolchain does it: the source imported as a module, the signature of the definition."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    definition, values = definition_and_values(n_ang, n_grid, name)
    arguments = definition.entries[name].arguments
    located = importlib.util.spec_from_file_location("realspace", FOLDER / "realspace.py")
    source = importlib.util.module_from_spec(located)
    located.loader.exec_module(source)
    kinds = {"constexpr": "constexpr", "pointer": "*fp32"}
    stated = ASTSource(
        fn=getattr(source, name),
        signature={a.name: kinds.get(a.kind, a.kind) for a in arguments},
        constexprs={a.name: a.value.evaluate(values) for a in arguments if a.kind == "constexpr"},
        attrs={(i,): [["tt.divisibility", 16]] for i, a in enumerate(arguments) if aligned and a.align == 16},
    )
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    return triton.compile(stated, target=gpu, options={"num_warps": definition.options["num_warps"].evaluate(values)})


def spilled(artifact: Any, directory: Path) -> list[str]:
    """Every count of spilled registers or bytes of local memory that the compiler states."""
    if "amdgcn" in artifact.asm:
        return re.findall(r"gpr_spill_count:\s+(\d+)", artifact.asm["amdgcn"])
    tool = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("cuobjdump does not come with this Triton")
    file = directory / "kernel.cubin"
    file.write_bytes(artifact.asm["cubin"])
    usage = subprocess.run([str(tool), "-res-usage", str(file)], capture_output=True, text=True, check=True)
    return re.findall(r"(?:STACK|LOCAL):(\d+)", usage.stdout + usage.stderr)


@pytest.mark.toolchain
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "generic"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(("n_ang", "n_grid"), [(1, 0), (3, 0), (5, 0), (8, 0), (8, 256)])
@pytest.mark.parametrize("name", ["realspace_fwd", "realspace_bwd"])
def test_compiles_without_spills_and_without_matrix_instructions(name, n_ang, n_grid, target, aligned, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    artifact = compiled(name, n_ang, n_grid, target, aligned=aligned)
    found = spilled(artifact, tmp_path)
    assert found and set(found) == {"0"}
    assert not re.search(r"\b(mma|wgmma|v_mfma)", artifact.asm.get("ptx") or artifact.asm["amdgcn"])


@pytest.mark.toolchain
@pytest.mark.parametrize("name", ["realspace_fwd", "realspace_bwd"])
def test_kernel_refuses_a_grid_that_cannot_tell_the_orders_apart(name, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(triton.compiler.errors.CompileTimeAssertionFailure):
        compiled(name, 3, 4, "sm_90", aligned=True)


# The kernels, on a GPU


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


def assert_served(operands: list[torch.Tensor], n_grid: int | None = None) -> None:
    """Forward and backward through the front door, against float64."""
    g_cos, g_sin, a_cos, a_sin = operands
    assert reason_for_reference(a_cos, a_sin, n_grid or default_n_grid(a_cos.shape[2]), "silu") is None
    leaves = (a_cos.detach().requires_grad_(), a_sin.detach().requires_grad_())
    out = realspace(*leaves, n_grid=n_grid)
    for found, wanted in zip(out, in_float64(a_cos, a_sin, n_grid=n_grid), strict=True):
        assert found.is_contiguous() and found.dtype == torch.float32
        compare.assert_within(found, wanted, compare.REALSPACE_F32)
    gradient = torch.autograd.grad(out, leaves, (g_cos, g_sin))
    for found, wanted in zip(gradient, gradients_in_float64(operands, n_grid=n_grid), strict=True):
        compare.assert_within(found, wanted, compare.REALSPACE_F32)
    assert (out[1][..., 0] == 0).all() and (gradient[1][..., 0] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n_ang", "n_grid"), SHAPES)
def test_kernels_against_float64(device, n_ang, n_grid):
    assert_served(circle_inputs((50, 13, n_ang), count=4, device=device), n_grid)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 127, 3), (1, 129, 3), (3, 171, 3), (200, 48, 3), (200, 32, 4), (8, 6, 3)])
def test_kernels_on_awkward_and_published_shapes(device, shape):
    assert_served(circle_inputs(shape, count=4, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", layouts(torch.zeros(2, 3, 3)))
@pytest.mark.parametrize("position", range(4))
def test_kernels_on_any_layout_of_any_operand(device, position, layout):
    operands = circle_inputs((40, 13, 3), count=4, device=device)
    operands[position] = layouts(operands[position])[layout]
    assert_served(operands)


@pytest.mark.gpu
def test_kernels_on_misaligned_views(device):
    operands = [odd(tensor) for tensor in circle_inputs((40, 13, 3), count=4, device=device)]
    assert all(tensor.data_ptr() % 16 for tensor in operands)
    assert_served(operands)


@pytest.mark.gpu
def test_kernels_on_expanded_gradients_and_one_unused_result(device):
    a_cos, a_sin = circle_inputs((40, 13, 3), device=device)
    expected = gradients_in_float64([torch.ones_like(a_cos), torch.zeros_like(a_cos), a_cos, a_sin])
    leaves = (a_cos.requires_grad_(), a_sin.requires_grad_())
    for found, wanted in zip(torch.autograd.grad(realspace(*leaves)[0].sum(), leaves), expected, strict=True):
        compare.assert_within(found, wanted, compare.REALSPACE_F32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 511, 513])
def test_kernel_writes_every_element_and_no_other(device, rows):
    from kserve.client import get_kernel

    operands = circle_inputs((1, rows, 3), device=device)
    buffers = [torch.full((rows * 3 + 128,), torch.nan, device=device) for _ in range(2)]
    outputs = [buffer[64 : 64 + rows * 3].view(1, rows, 3) for buffer in buffers]
    get_kernel("realspace_fwd", n_ang=3)(*operands, *bases(3, device=device), *outputs, rows)
    for found, wanted, buffer in zip(outputs, in_float64(*operands), buffers, strict=True):
        compare.assert_within(found, wanted, compare.REALSPACE_F32)
        assert buffer[:64].isnan().all() and buffer[64 + rows * 3 :].isnan().all()


@pytest.mark.gpu
def test_kernel_gives_no_nan_for_large_values(device):
    a_cos = torch.tensor([-3e38, -1e30, -1e3, 1e3, 1e30, 3e38], device=device).view(6, 1, 1).requires_grad_()
    out_cos, _ = realspace(a_cos, torch.zeros_like(a_cos))
    assert torch.equal(out_cos, torch.relu(a_cos))
    assert torch.equal(torch.autograd.grad(out_cos.sum(), a_cos)[0], (a_cos > 0).float())


@pytest.mark.gpu
def test_kernel_keeps_nan_in_its_row(device):
    operands = circle_inputs((2, 300, 3), device=device)
    expected = realspace(*operands)[0].clone()
    operands[0][1, 2, 0] = torch.nan
    out_cos, _ = realspace(*operands)
    assert out_cos[1, 2].isnan().all()
    expected[1, 2] = torch.nan
    assert torch.equal(out_cos.nan_to_num(), expected.nan_to_num())


@pytest.mark.gpu
def test_second_derivative_is_refused(device):
    leaves = [tensor.requires_grad_() for tensor in circle_inputs((4, 5, 3), device=device)]
    with pytest.raises(InvalidSpec):
        torch.autograd.grad(realspace(*leaves)[0].sum(), leaves, create_graph=True)


@pytest.mark.gpu
def test_bases_made_under_inference_mode_serve_training_later(device):
    operands = circle_inputs((4, 5, 2), count=4, device=device)
    with torch.inference_mode():
        realspace(*operands[2:], n_grid=6)
    assert_served(operands, 6)


@pytest.mark.gpu
def test_other_routes_on_the_gpu(device):
    operands = circle_inputs((4, 5, 3), device=device)
    for found, wanted in zip(realspace(*operands, activation="tanh"), in_float64(*operands, activation="tanh"), strict=True):
        compare.assert_within(found, wanted, compare.REALSPACE_F32)
    half = [tensor.half() for tensor in operands]
    for found, wanted in zip(realspace(*half), in_float64(*half), strict=True):
        compare.assert_within_relative(found, wanted, compare.RELATIVE["realspace", torch.float16])
    assert realspace(operands[0][:0], operands[1][:0])[0].shape == (0, 5, 3)


if __name__ == "__main__":
    interpret_all()
