"""norm_residual: the front door on the CPU, the device code under the compiler, the kernel on a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import kserve.ops
from kserve.errors import InvalidSpec, LaunchError
from kserve.kernel_toml import read_definition
from kserve.ops.norm_residual import norm_residual, reason_for_reference, reference
from tests.support import compare
from tests.support.built_in import device_code
from tests.support.host_cuda import host_kernel
from tests.support.inputs import NormInputs, norm_inputs, odd, poisoned

CUDA_SRC = Path(__file__).parents[2] / "cuda_src"
FOLDER = CUDA_SRC / "norm_residual"
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SIZES = (1, 7, 33, 64, 100, 127, 128, 129, 256, 500, 512, 513, 1000, 4096, 4100, 8191, 8192)


def in_float64(inputs: NormInputs, eps: float = 1e-5) -> torch.Tensor:
    return reference(*inputs.double(), eps=eps)


# The reference and the front door, on the CPU


def golden() -> NormInputs:
    rows = ([[1, 2, 3, 4]], [[10, 20, 30, 40]], [1, 2, 1, 0.5], [0, 0, 1, -1])
    return NormInputs(*(torch.tensor(values, dtype=torch.float64) for values in rows))


def test_golden_example():
    expected = torch.tensor([[8.6583645800, 19.1055763867, 31.4472118067, 39.6708177100]], dtype=torch.float64)
    compare.assert_within(norm_residual(*golden()), expected, 5e-11)


@pytest.mark.parametrize("hidden", [1, 7, 33, 128, 1000])
def test_reference_is_the_formula(hidden):
    x, residual, gamma, beta = (tensor.numpy() for tensor in norm_inputs(5, hidden, mean=3.0, dtype=torch.float64))
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta + residual
    actual = norm_residual(*(torch.from_numpy(array) for array in (x, residual, gamma, beta)))
    compare.assert_within(actual, torch.from_numpy(expected), 1e-12)


@pytest.mark.parametrize("mean", [0.0, 10.0, 1000.0])
def test_float32_reference_keeps_its_digits_far_from_zero(mean):
    inputs = norm_inputs(64, 256, mean=mean)
    compare.assert_within(norm_residual(*inputs), in_float64(inputs), compare.NORM_RESIDUAL_F32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_wide_and_rounded_once(dtype):
    inputs = norm_inputs(9, 129, dtype=dtype)
    actual = norm_residual(*inputs)
    assert actual.dtype == dtype
    compare.assert_within_relative(actual, in_float64(inputs), compare.RELATIVE["norm_residual", dtype])


def test_half_types_take_a_float32_affine():
    inputs = norm_inputs(4, 16, dtype=torch.bfloat16)
    wide = norm_residual(inputs.x, inputs.residual, inputs.gamma.float(), inputs.beta.float())
    assert torch.equal(wide, norm_residual(*inputs))


def test_no_rows_give_an_empty_result():
    inputs = norm_inputs(0, 128)
    assert norm_residual(*inputs).shape == (0, 128)


def test_one_channel_gives_beta_and_residual():
    inputs = norm_inputs(6, 1)
    assert torch.equal(norm_residual(*inputs), inputs.beta + inputs.residual)


@pytest.mark.parametrize("value", [0.1, 1000.1, -3e7])
def test_constant_row_gives_exactly_beta_and_residual(value):
    inputs = norm_inputs(3, 129)
    inputs.x.fill_(value)
    assert torch.equal(norm_residual(*inputs), inputs.beta + inputs.residual)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_row(value):
    inputs = norm_inputs(4, 33)
    expected = norm_residual(*inputs)
    inputs.x[2, 5] = value
    actual = norm_residual(*inputs)
    assert actual[2].isnan().all()
    assert torch.equal(actual[[0, 1, 3]], expected[[0, 1, 3]])


def test_missing_affine_is_one_and_zero():
    x, residual, gamma, beta = norm_inputs(4, 33)
    ones, zeros = torch.ones_like(gamma), torch.zeros_like(beta)
    assert torch.equal(norm_residual(x, residual), norm_residual(x, residual, ones, zeros))
    assert torch.equal(norm_residual(x, residual, gamma), norm_residual(x, residual, gamma, zeros))
    assert torch.equal(norm_residual(x, residual, None, beta), norm_residual(x, residual, ones, beta))


def test_strided_x_goes_to_the_reference_and_gives_a_contiguous_result():
    inputs = norm_inputs(6, 8)
    strided = inputs.x.t().contiguous().t()
    actual = norm_residual(strided, *inputs[1:])
    assert actual.is_contiguous()
    compare.assert_within(actual, norm_residual(*inputs), 1e-6)


def test_reasons_for_the_reference():
    assert "cpu" in reason_for_reference(norm_inputs().x)
    assert reason_for_reference(norm_inputs(dtype=torch.float64).x) is not None


def refused_tensors() -> dict[str, NormInputs]:
    good = norm_inputs(4, 8)
    return {
        "flat x": good._replace(x=good.x[0]),
        "x without channels": NormInputs(good.x[:, :0], good.residual[:, :0], good.gamma[:0], good.beta[:0]),
        "integer x": good._replace(x=good.x.int()),
        "residual of another shape": good._replace(residual=good.residual[:3]),
        "residual that would broadcast": good._replace(residual=good.residual[:1]),
        "residual of another dtype": good._replace(residual=good.residual.double()),
        "strided residual": good._replace(residual=good.residual.t().contiguous().t()),
        "residual elsewhere": good._replace(residual=good.residual.to("meta")),
        "gamma of another length": good._replace(gamma=good.gamma[:7]),
        "gamma of another dtype": good._replace(gamma=good.gamma.double()),
        "strided gamma": good._replace(gamma=good.gamma.repeat(2)[::2]),
        "expanded beta": good._replace(beta=good.beta[:1].expand(8)),
    }


@pytest.mark.parametrize("case", refused_tensors())
def test_tensor_that_does_not_fit_is_refused(case):
    with pytest.raises(LaunchError):
        norm_residual(*refused_tensors()[case])


@pytest.mark.parametrize("name", NormInputs._fields)
def test_input_that_requires_a_gradient_is_refused_while_gradients_are_recorded(name):
    inputs = norm_inputs(4, 8)
    getattr(inputs, name).requires_grad_()
    with pytest.raises(LaunchError):
        norm_residual(*inputs)
    with torch.no_grad():
        norm_residual(*inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"eps": 0.0},
        {"eps": -1e-5},
        {"eps": float("nan")},
        {"eps": float("inf")},
        {"eps": 1e-50},
        {"dropout_p": -0.1},
        {"dropout_p": 1.1},
        {"dropout_p": float("nan")},
    ],
)
def test_option_out_of_range_is_refused(options):
    with pytest.raises(InvalidSpec):
        norm_residual(*norm_inputs(4, 8), **options)


def test_dropout_without_training_and_training_without_dropout_draw_nothing():
    inputs = norm_inputs(4, 8)
    expected = norm_residual(*inputs)
    assert torch.equal(norm_residual(*inputs, dropout_p=0.5), expected)
    assert torch.equal(norm_residual(*inputs, training=True), expected)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_the_reference_drops_and_scales(p):
    n, hidden = 200, 64
    ones, zeros = torch.ones(hidden), torch.zeros(n, hidden)
    found = norm_residual(zeros, zeros, torch.zeros(hidden), ones, dropout_p=p, training=True)
    kept = found != 0
    assert torch.equal(found[kept], torch.full_like(found[kept], 1 / (1 - p) if p < 1 else 0.0))
    assert abs(float(kept.double().mean()) - (1 - p)) <= 5 * (p * (1 - p) / (n * hidden)) ** 0.5


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_op_is_traced_as_one(dropout_p):
    inputs = norm_inputs(6, 16)
    traced = torch.compile(
        lambda *given: norm_residual(*given, dropout_p=dropout_p, training=True), fullgraph=True, backend="aot_eager"
    )
    found = traced(*inputs)
    assert found.shape == (6, 16)
    if dropout_p == 0.0:
        assert torch.equal(found, norm_residual(*inputs))


def test_a_compiler_never_takes_two_draws_for_one():
    inputs = norm_inputs(50, 64)

    def twice(*given: torch.Tensor) -> torch.Tensor:
        return torch.stack([norm_residual(*given, dropout_p=0.5, training=True) for _ in range(2)])

    first, second = torch.compile(twice, fullgraph=True, backend="aot_eager")(*inputs)
    assert not torch.equal(first, second)


def test_name_of_the_op_is_the_function_however_it_was_imported():
    assert kserve.ops.norm_residual is norm_residual
    assert "norm_residual" in dir(kserve.ops)
    with pytest.raises(AttributeError):
        _ = kserve.ops.no_such_op


# The device code, under the compiler


class Compiled(NamedTuple):
    derived: dict[str, object]
    log: str
    sass: str


def macros(*, aligned: bool) -> list[str]:
    definition = read_definition((FOLDER / "kernel.toml").read_bytes(), origin="kernel.toml")
    pointers = [argument for argument in definition.entries["fused_norm_residual"].arguments if argument.kind == "pointer"]
    stated = {argument.name.upper(): argument.align if aligned else 4 for argument in pointers}
    return ["--define-macro=KSERVE_DIV_N=1", *(f"--define-macro=KSERVE_ALIGN_{n}={align}" for n, align in stated.items())]


def compiled(hidden: int, arch: str, directory: Path, *, aligned: bool) -> Compiled:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    definition = read_definition((FOLDER / "kernel.toml").read_bytes(), origin="kernel.toml")
    entry = definition.entries["fused_norm_residual"]
    spec = definition.specialise(entry, {"hidden": hidden})
    function = entry.function.format_map(spec | {"dtype": "float", "training": "false"})
    options = [f"--gpu-architecture={arch}", "--ptxas-options=-v", f"--include-path={CUDA_SRC / 'include'}"]
    options += [*definition.options["flags"], *macros(aligned=aligned)]
    source = (FOLDER / "norm_residual.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, b"norm_residual.cu", 0, [], [])
    nvrtc.nvrtcAddNameExpression(program, function.encode())
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(status) == 0, log.decode()
    payload = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, payload)
    nvrtc.nvrtcDestroyProgram(program)
    file = directory / f"{arch}-{hidden}-{aligned}.cubin"
    file.write_bytes(payload)
    return Compiled(spec, log.decode(), disassembled(file))


def disassembled(file: Path) -> str:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.is_file():
        pytest.skip("nvdisasm does not come with this Triton")
    return subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True).stdout


def accesses(sass: str) -> list[tuple[str, int]]:
    """(LDG or STG, bits) of each access to global memory."""
    found = re.findall(r"\b(LDG|STG)\.([A-Z0-9.]+)", sass)
    return [(kind, int(bits[1]) if (bits := re.search(r"\b(64|128)\b", rest)) else 32) for kind, rest in found]


@pytest.mark.toolchain
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "generic"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("hidden", SIZES)
def test_compiles_without_spills_and_as_wide_as_allowed(hidden, arch, aligned, tmp_path):
    result = compiled(hidden, arch, tmp_path, aligned=aligned)
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", result.log)
    assert spilled and set(spilled) == {"0"}, result.log
    expected = 32 * (int(result.derived["width"]) if aligned else 1)
    found = accesses(result.sass)
    assert {kind for kind, _ in found} == {"LDG", "STG"}
    assert {bits for _, bits in found} == {expected}


@pytest.mark.toolchain
def test_each_input_is_read_once(tmp_path):
    result = compiled(128, "sm_90", tmp_path, aligned=True)
    rows = int(result.derived["rows"])
    # x and residual for each row that a thread holds, gamma and beta once, one store for each row.
    assert len([kind for kind, _ in accesses(result.sass) if kind == "LDG"]) == 2 * rows + 2
    assert len([kind for kind, _ in accesses(result.sass) if kind == "STG"]) == rows


def test_every_row_fits_its_block():
    definition = read_definition((FOLDER / "kernel.toml").read_bytes(), origin="kernel.toml")
    for hidden in range(1, 8193):
        spec = definition.specialise(definition.entries["fused_norm_residual"], {"hidden": hidden})
        lanes, groups, rows = (int(spec[name]) for name in ("lanes", "groups", "rows"))
        assert lanes in (1, 2, 4, 8, 16, 32) or (lanes % 32 == 0 and groups == rows == 1), hidden
        assert 32 <= lanes * groups <= 512, hidden
        assert -(-hidden // lanes) * rows <= 18, hidden  # elements of x that a thread holds


# The device code, on the host


def philox_rounds(counter: list[np.ndarray], key: list[int]) -> list[np.ndarray]:
    """Philox 4x32-10 as its paper has it (Salmon et al., SC 2011): another writing than the device's."""
    low = np.uint64(0xFFFFFFFF)
    keys = [np.uint64(word) for word in key]
    for _ in range(10):
        products = [np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]]
        high, rest = [product >> np.uint64(32) for product in products], [product & low for product in products]
        counter = [high[1] ^ counter[1] ^ keys[0], rest[1], high[0] ^ counter[3] ^ keys[1], rest[0]]
        keys = [(word + np.uint64(step)) & low for word, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return counter


def philox(seed: int, offset: int, n: int) -> np.ndarray:
    """The first n numbers in [0, 1) after `offset` blocks."""
    blocks = np.arange(offset, offset + -(-n // 4), dtype=np.uint64)
    nothing = np.zeros_like(blocks)
    counter = [blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), nothing, nothing]
    words = np.stack(philox_rounds(counter, [seed & 0xFFFFFFFF, seed >> 32]), axis=1).reshape(-1)[:n]
    return (words >> np.uint64(8)).astype(np.float64) / 2**24


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_the_expected_numbers_are_philox(word, expected):
    """Known answers of Random123 (kat_vectors): counter and key of zeros, of ones."""
    found = philox_rounds([np.array([word], dtype=np.uint64) for _ in range(4)], [word, word])
    assert [int(value[0]) for value in found] == expected


def on_host(inputs: NormInputs, *, facts: bool = True, seed: int = 0) -> torch.Tensor:
    kernel = host_kernel("fused_norm_residual", facts=facts, hidden=inputs.x.shape[1], dtype=NAMES[inputs.x.dtype])
    out = poisoned(inputs.x)
    kernel(*inputs, out, inputs.x.shape[0], 1e-5, seed=seed)
    return out


def dropped_on_host(inputs: NormInputs, state: tuple[int, int], p: float, *, facts: bool = True) -> torch.Tensor:
    kernel = host_kernel("fused_norm_residual_dropout", facts=facts, hidden=inputs.x.shape[1])
    out = poisoned(inputs.x)
    kernel(*inputs, out, torch.tensor(state), inputs.x.shape[0], 1e-5, p)
    return out


@pytest.mark.parametrize(("hidden", "facts"), [(1, True), (7, True), (64, True), (128, True), (129, False), (600, True)])
def test_device_code_against_float64(hidden, facts):
    inputs = norm_inputs(5, hidden)
    compare.assert_within(on_host(inputs, facts=facts, seed=hidden), in_float64(inputs), compare.NORM_RESIDUAL_F32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [7, 64, 128, 256, 1000])
def test_device_code_in_half_types_rounds_once(dtype, hidden):
    inputs = norm_inputs(5, hidden, dtype=dtype)
    inputs = inputs._replace(gamma=inputs.gamma.float(), beta=inputs.beta.float())
    compare.assert_within_relative(on_host(inputs), in_float64(inputs), compare.RELATIVE["norm_residual", dtype])


@pytest.mark.parametrize("state", [(0, 0), (1234, 7), (2**40 + 5, 2**33 + 1)])
@pytest.mark.parametrize(("hidden", "facts"), [(128, True), (64, False), (7, True), (600, True)])
def test_the_mask_depends_on_seed_offset_and_element_alone(hidden, facts, state):
    n, p = 9, 0.4
    mask = torch.from_numpy(philox(*state, n * hidden) >= np.float32(p)).view(n, hidden)
    inputs = norm_inputs(n, hidden)
    flat = inputs._replace(gamma=torch.zeros(hidden), beta=torch.ones(hidden), residual=torch.zeros(n, hidden))
    scale = torch.tensor(1.0) / (1.0 - torch.tensor(p))
    assert torch.equal(dropped_on_host(flat, state, p, facts=facts), torch.where(mask, scale, 0.0))
    kept = torch.where(mask, (in_float64(inputs) - inputs.residual) / (1 - p), 0.0) + inputs.residual
    compare.assert_within(dropped_on_host(inputs, state, p, facts=facts), kept, 2 * compare.NORM_RESIDUAL_F32)


def test_nothing_or_everything_dropped():
    inputs = norm_inputs(6, 128)
    assert torch.equal(dropped_on_host(inputs, (1, 2), 0.0), on_host(inputs))
    assert torch.equal(dropped_on_host(inputs, (1, 2), 1.0), inputs.residual)


def test_advancing_the_state_draws_what_comes_next():
    state = torch.tensor([5, 10])
    host_kernel("philox_advance")(state, 32)
    assert state.tolist() == [5, 42]


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("hidden", "dtype"), [(128, "float32"), (256, "bfloat16"), (1000, "float32")])
def test_dropout_spills_nothing(arch, hidden, dtype, tmp_path):
    code = device_code("fused_norm_residual_dropout", tmp_path, arch=arch, hidden=hidden, dtype=dtype)
    assert (code.resources["spill_bytes"], code.resources["stack_bytes"]) == (0, 0)


# The kernel, on a GPU


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("n", [1, 2, 15, 17, 129, 1023])
def test_kernel_against_float64(device, n, hidden):
    inputs = norm_inputs(n, hidden, device=device)
    assert reason_for_reference(inputs.x) is None
    compare.assert_within(norm_residual(*inputs), in_float64(inputs), compare.NORM_RESIDUAL_F32)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1, 255, 257])
@pytest.mark.parametrize("hidden", [1, 64, 129, 1000])
def test_kernel_writes_every_element_and_no_other(device, n, hidden):
    from kserve.client import get_kernel

    inputs = norm_inputs(n, hidden, device=device)
    buffer = torch.full((n * hidden + 128,), torch.nan, device=device)
    out = buffer[64 : 64 + n * hidden].view(n, hidden)
    get_kernel("fused_norm_residual", dtype="float32", hidden=hidden)(*inputs, out, n, 1e-5)
    compare.assert_within(out, in_float64(inputs), compare.NORM_RESIDUAL_F32)
    assert buffer[:64].isnan().all() and buffer[64 + n * hidden :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1, 7, 64, 128, 129, 256, 1000, 4096])
def test_misaligned_views_take_the_generic_variant(device, hidden):
    inputs = norm_inputs(131, hidden, device=device)
    assert all(tensor.data_ptr() % 16 for tensor in inputs.odd())
    compare.assert_within(norm_residual(*inputs.odd()), in_float64(inputs), compare.NORM_RESIDUAL_F32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NormInputs._fields)
def test_one_misaligned_input_is_enough_for_the_generic_variant(device, name):
    inputs = norm_inputs(33, 128, device=device)
    mixed = inputs._replace(**{name: odd(getattr(inputs, name))})
    compare.assert_within(norm_residual(*mixed), in_float64(inputs), compare.NORM_RESIDUAL_F32)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [7, 64, 128, 256, 1000, 8192])
def test_kernel_with_a_mean_of_ten_deviations(device, hidden):
    inputs = norm_inputs(300, hidden, mean=10.0, device=device)
    compare.assert_within(norm_residual(*inputs), in_float64(inputs), compare.NORM_RESIDUAL_F32_MEAN_10)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 128, 1000])
def test_kernel_with_a_mean_of_a_thousand_deviations_keeps_to_the_framework(device, hidden):
    inputs = norm_inputs(300, hidden, mean=1000.0, device=device)
    exact = in_float64(inputs)
    framework = torch.nn.functional.layer_norm(inputs.x, (hidden,), inputs.gamma, inputs.beta) + inputs.residual
    bound = max(4 * compare.largest_error(framework, exact), compare.NORM_RESIDUAL_F32_MEAN_10)
    compare.assert_within(norm_residual(*inputs), exact, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1, 7, 64, 129, 1000, 4100])
@pytest.mark.parametrize("value", [0.1, 1000.1, -3e7])
def test_kernel_gives_exactly_beta_and_residual_for_a_constant_row(device, hidden, value):
    inputs = norm_inputs(5, hidden, device=device)
    inputs.x.fill_(value)
    assert torch.equal(norm_residual(*inputs), inputs.beta + inputs.residual)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 129, 1000])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kernel_keeps_nan_and_infinity_in_their_row(device, hidden, value):
    inputs = norm_inputs(37, hidden, device=device)
    expected = norm_residual(*inputs)
    inputs.x[2, hidden // 2] = value
    actual = norm_residual(*inputs)
    assert actual[2].isnan().all()
    others = torch.arange(37, device=device) != 2
    assert torch.equal(actual[others], expected[others])


@pytest.mark.gpu
def test_kernel_gives_beta_and_residual_where_the_squares_overflow(device):
    inputs = norm_inputs(4, 128, device=device)
    inputs.x.mul_(1e21)
    compare.assert_within(norm_residual(*inputs), inputs.beta + inputs.residual, 0.0)


@pytest.mark.gpu
def test_kernel_without_affine_and_with_another_eps(device):
    x, residual, gamma, beta = norm_inputs(40, 96, device=device)
    plain = NormInputs(x, residual, torch.ones_like(gamma), torch.zeros_like(beta))
    compare.assert_within(norm_residual(x, residual, eps=0.25), in_float64(plain, 0.25), compare.NORM_RESIDUAL_F32)


@pytest.mark.gpu
def test_kernel_gives_the_same_bits_each_time(device):
    inputs = norm_inputs(1000, 1000, device=device)
    assert torch.equal(norm_residual(*inputs), norm_residual(*inputs))


@pytest.mark.gpu
def test_kernel_runs_on_the_current_stream(device):
    inputs = norm_inputs(4096, 256, device=device)
    late = poisoned(inputs.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late.copy_(inputs.x)
        actual = norm_residual(late, *inputs[1:])
        torch.cuda.current_stream().synchronize()
    compare.assert_within(actual, in_float64(inputs), compare.NORM_RESIDUAL_F32)


@pytest.mark.gpu
@pytest.mark.slow
def test_kernel_beyond_two_to_the_31_elements(device):
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    hidden = 8192
    n = 2**31 // hidden + 3
    x = torch.zeros(n, hidden, device=device)
    inputs = norm_inputs(n=3, hidden=hidden, device=device)
    x[-3:] = inputs.x
    actual = norm_residual(x, torch.zeros_like(x), inputs.gamma, inputs.beta)
    tail = inputs._replace(residual=torch.zeros_like(inputs.x))
    compare.assert_within(actual[-3:], in_float64(tail), compare.NORM_RESIDUAL_F32)
    assert torch.equal(actual[0], inputs.beta)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [7, 64, 128, 1000, 8192])
def test_kernel_in_half_types(device, dtype, hidden):
    inputs = norm_inputs(129, hidden, dtype=dtype, device=device)
    assert reason_for_reference(inputs.x) is None
    compare.assert_within_relative(norm_residual(*inputs), in_float64(inputs), compare.RELATIVE["norm_residual", dtype])


def mask_of(n: int, hidden: int, p: float, device: str) -> torch.Tensor:
    zeros = torch.zeros(n, hidden, device=device)
    flat = (zeros, zeros, torch.zeros(hidden, device=device), torch.ones(hidden, device=device))
    return norm_residual(*flat, dropout_p=p, training=True) != 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "hidden"), [(100, 32), (337, 128), (5, 7), (4096, 256)])
def test_dropout_on_the_device(device, n, hidden):
    p, inputs = 0.5, norm_inputs(n, hidden, device=device)
    torch.manual_seed(3)
    mask = mask_of(n, hidden, p, device)
    expected = torch.from_numpy(philox(3, 0, n * hidden) >= p).view(n, hidden).to(device)
    assert torch.equal(mask, expected)
    torch.manual_seed(3)
    found = norm_residual(*inputs, dropout_p=p, training=True)
    y = in_float64(inputs) - inputs.residual
    compare.assert_within(found, torch.where(mask, y / (1 - p), 0.0) + inputs.residual, 2 * compare.NORM_RESIDUAL_F32)
    assert not torch.equal(mask_of(n, hidden, p, device), mask), "the next call draws others"


@pytest.mark.gpu
def test_dropout_follows_torchs_generator(device):
    torch.manual_seed(7)
    first = [mask_of(50, 64, 0.5, device) for _ in range(2)]
    torch.manual_seed(7)
    again = [mask_of(50, 64, 0.5, device), torch.rand(1000, device=device), mask_of(50, 64, 0.5, device)]
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[1], again[2]), "torch drew in between"
    state = torch.cuda.get_rng_state()
    expected = mask_of(50, 64, 0.5, device)
    torch.cuda.set_rng_state(state)
    assert torch.equal(mask_of(50, 64, 0.5, device), expected)


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_another_mask(device):
    x = torch.zeros(64, 128, device=device)
    arguments = (x, x, torch.zeros(128, device=device), torch.ones(128, device=device))
    norm_residual(*arguments, dropout_p=0.5, training=True)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = norm_residual(*arguments, dropout_p=0.5, training=True)
    masks = []
    for _ in range(3):
        captured.replay()
        masks.append(out.clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.gpu
def test_kernel_is_traced_as_one(device):
    inputs = norm_inputs(337, 128, device=device)
    traced = torch.compile(lambda *given: norm_residual(*given) * 2.0, fullgraph=True)
    compare.assert_within(traced(*inputs), 2.0 * in_float64(inputs), 2 * compare.NORM_RESIDUAL_F32)
