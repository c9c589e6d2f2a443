"""GroupNorm's kernels as torch knows them: launches, the same in plain torch, gradients. `group_norm` is the front door."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from kserve.client import get_kernel
from kserve.errors import InvalidSpec
from kserve.ops import region
from kserve.ops.backend import is_plain, serve
from kserve.ops.library import define

WIDEST = 4096
KERNEL_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The launch table. Threads of a block in cuda_src/group_norm; two blocks for each of 132 multiprocessors; partial results of
# a batch, all of which every block of the second launch reads. Nothing else decides the order of a sum.
_THREADS, _BLOCKS, _MOST_PARTIALS, _LEAST_VOXELS = 512, 264, 8192, 2

Parameter: TypeAlias = torch.Tensor | None


class Norm(NamedTuple):
    """What a call is for, besides its tensors."""

    num_groups: int
    eps: float
    relu: bool
    out_dtype: torch.dtype


class Partition(NamedTuple):
    """The voxels of a batch, the blocks that take turns at them, and the batches."""

    spatial: int
    splits: int
    batches: int


def reference(input: torch.Tensor, weight: Parameter, bias: Parameter, norm: Norm) -> torch.Tensor:  # noqa: A002
    """The same function by torch's group_norm, for any layout, rank and derivative: in f32 at least, rounded once."""
    wide = torch.promote_types(input.dtype, torch.float32)
    affine = [None if parameter is None else parameter.to(wide) for parameter in (weight, bias)]
    found = torch.nn.functional.group_norm(input.to(wide), norm.num_groups, *affine, norm.eps)
    return (torch.relu(found) if norm.relu else found).to(norm.out_dtype)


def reason_for_reference(
    input: torch.Tensor,  # noqa: A002
    num_groups: int,
    weight: Parameter = None,
    bias: Parameter = None,
) -> str | None:
    """Why the kernels are not made for a call, or None when they are."""
    if input.dim() != 5 or input.device.type != "cuda" or input.dtype not in KERNEL_DTYPES:
        return f"the input has {input.dim()} dimensions, dtype {input.dtype} and lies on {input.device}"
    if input.numel() == 0 or not input.is_contiguous(memory_format=torch.channels_last_3d):
        return "the input is empty" if input.numel() == 0 else "the input is not channels-last"
    channels = input.shape[1]
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1 or channels % num_groups:
        return f"num_groups {num_groups!r} does not divide {channels} channels"
    if channels // _width(channels, input.element_size()) > _THREADS or channels > WIDEST:
        return f"the input has {channels} channels: the kernels take up to {WIDEST}, or {_THREADS} accesses"
    if input.numel() == num_groups:
        return "each group has one element of one batch: torch refuses it"
    return next(filter(None, (_reason_for_parameter(input, parameter) for parameter in (weight, bias))), None)


def _reason_for_parameter(input: torch.Tensor, parameter: Parameter) -> str | None:  # noqa: A002
    if parameter is None:
        return None
    if parameter.device != input.device or parameter.dtype not in (torch.float32, input.dtype):
        return f"a parameter has dtype {parameter.dtype} and lies on {parameter.device}"
    return None if parameter.shape == (input.shape[1],) else f"a parameter has shape {list(parameter.shape)}"


@lru_cache(maxsize=256)
def partition(batches: int, spatial: int, channels: int, *, num_groups: int, itemsize: int) -> Partition:
    """The blocks of a launch: a function of the shape and the table above, so that every process adds in the same order."""
    lanes = _THREADS // (channels // _width(channels, itemsize))  # voxels side by side in a block
    wanted = max(1, min(_BLOCKS // batches, _MOST_PARTIALS // num_groups))
    per_lane = max(_LEAST_VOXELS, -(-spatial // (wanted * lanes)))
    return Partition(spatial, -(-spatial // (per_lane * lanes)), batches)


def _width(channels: int, itemsize: int) -> int:
    """Channels of one access: the most that are 16 bytes and divide a voxel."""
    width = 16 // itemsize
    while channels % width:
        width //= 2
    return width


def _partition(input: torch.Tensor, num_groups: int) -> Partition:  # noqa: A002
    batches, channels = input.shape[:2]
    spatial = input.numel() // (batches * channels)
    return partition(batches, spatial, channels, num_groups=num_groups, itemsize=input.element_size())


def differentiable(input: torch.Tensor, weight: Parameter, bias: Parameter, norm: Norm) -> torch.Tensor:  # noqa: A002
    """By the kernels, recorded where a gradient is asked for."""
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    records = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    out: torch.Tensor = (_GroupNorm.apply if records else _launch)(input, weight, bias, norm)[0]
    return out


def traced(input: torch.Tensor, weight: Parameter, bias: Parameter, norm: Norm) -> torch.Tensor:  # noqa: A002
    """The same as one node of a graph."""
    out: torch.Tensor = _op(input, weight, bias, **norm._asdict())[0]
    return out


class _GroupNorm(torch.autograd.Function):  # type: ignore[misc]
    """Forward and backward by kernel; keeps the input and the statistics."""

    @staticmethod
    def forward(input: torch.Tensor, weight: Parameter, bias: Parameter, norm: Norm) -> Any:  # noqa: A002
        return _launch(input, weight, bias, norm)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep(ctx, inputs[:3], inputs[3]._asdict(), output)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        return (*_gradient(ctx, grad_out), None)


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.norm = Norm(**keyword_only_inputs)
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise InvalidSpec(
            "group_norm has no second derivative, and create_graph=True asks for one",
            hint="use kserve.ops.group_norm.reference, which torch differentiates twice",
        )
    input, weight, bias, mean, rstd = ctx.saved_tensors  # noqa: A001
    options = {"num_groups": ctx.norm.num_groups, "relu": ctx.norm.relu}
    needed = list(ctx.needs_input_grad[:3])
    with region("group_norm.bwd"):
        run = _run_backward if is_plain(grad_out) else _backward_op
        found = run(grad_out, input, weight, bias, mean=mean, rstd=rstd, needed=needed, **options)
    return tuple(gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True))


def _run(input: torch.Tensor, weight: Parameter, bias: Parameter, **options: Any) -> Any:  # noqa: A002
    reason = reason_for_reference(input, options["num_groups"], weight, bias)
    arguments = (input, weight, bias, Norm(**options))
    return serve("group_norm", arguments, kernel=_launch, reference=_reference_with_statistics, reason=reason)


def _run_backward(*tensors: Any, **options: Any) -> Any:
    reason = reason_for_reference(tensors[1], options["num_groups"], *tensors[2:])
    arguments = (tensors, options)
    return serve("group_norm_backward", arguments, kernel=_launch_backward, reference=_reference_gradient, reason=reason)


def _shapes(input: torch.Tensor, *_: Parameter, num_groups: int, out_dtype: torch.dtype, **__: Any) -> Any:  # noqa: A002
    statistics = (input.new_empty((input.shape[0], num_groups), dtype=torch.float32) for _ in range(2))
    return (_like(input, out_dtype), *statistics)


def _shapes_backward(*tensors: Any, needed: list[bool], **_: Any) -> Any:
    return _gradients_like(tensors[1:], needed)


_op = define(
    "group_norm(Tensor input, Tensor? weight, Tensor? bias, *, int num_groups, float eps, bool relu, ScalarType out_dtype)"
    " -> (Tensor, Tensor, Tensor)",
    run=_run,
    shapes=_shapes,
)
_backward_op = define(
    "group_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? bias, *, Tensor mean, Tensor rstd,"
    " int num_groups, bool relu, bool[] needed) -> (Tensor, Tensor, Tensor)",
    run=_run_backward,
    shapes=_shapes_backward,
)
torch.library.register_autograd("kserve::group_norm", _gradient, setup_context=_keep)


def _launch(input: torch.Tensor, weight: Parameter, bias: Parameter, norm: Norm) -> Any:  # noqa: A002
    parts = _partition(input, norm.num_groups)
    affine, affine_dtype = _affine(weight, bias)
    spec = {"dtype": KERNEL_DTYPES[input.dtype], "channels": input.shape[1], "groups": norm.num_groups}
    stats = get_kernel("group_norm_stats", **spec)
    spec |= {"out_dtype": KERNEL_DTYPES[norm.out_dtype], "affine_dtype": affine_dtype, "relu": norm.relu}
    apply = get_kernel("group_norm_apply", **spec)
    partial = _floats(input, 3 * parts.batches * parts.splits * norm.num_groups)
    out, mean, rstd = _shapes(input, num_groups=norm.num_groups, out_dtype=norm.out_dtype)
    stats(input, partial, *parts)
    apply(input, *affine, partial, out, mean, rstd, *parts, norm.eps)
    return out, mean, rstd


def _launch_backward(tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    grad_out, input, weight, bias = tensors  # noqa: A001
    num_groups, needed = options["num_groups"], options["needed"]
    parts = _partition(input, num_groups)
    affine, affine_dtype = _affine(weight, bias)
    spec = {"dtype": KERNEL_DTYPES[input.dtype], "channels": input.shape[1], "groups": num_groups, "relu": options["relu"]}
    spec |= {"out_dtype": KERNEL_DTYPES[grad_out.dtype], "affine_dtype": affine_dtype}
    sums, apply = get_kernel("group_norm_bwd_sums", **spec), get_kernel("group_norm_bwd_apply", **spec)
    blocks = parts.batches * parts.splits
    scratch = (_floats(input, 2 * blocks * num_groups), _floats(input, 2 * blocks * input.shape[1]))
    given = (grad_out.contiguous(memory_format=torch.channels_last_3d), input, *affine, options["mean"], options["rstd"])
    found = _gradients_like((input, *affine), needed)
    sums(*given, *scratch, *parts)
    apply(*given, *scratch, *(gradient if gradient.numel() else None for gradient in found), *parts)
    return tuple(_as(gradient, like) for gradient, like in zip(found, tensors[1:], strict=True))


def _affine(weight: Parameter, bias: Parameter) -> tuple[list[Parameter], str]:
    """Both contiguous and of one dtype, and its name."""
    dtypes = {parameter.dtype for parameter in (weight, bias) if parameter is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return [_readable(parameter, dtype) for parameter in (weight, bias)], KERNEL_DTYPES[dtype]


def _readable(parameter: Parameter, dtype: torch.dtype) -> Parameter:
    """As a kernel reads it. Conversions that do nothing cost a call 5 us."""
    if parameter is None or (parameter.dtype is dtype and parameter.is_contiguous() and not parameter.is_neg()):
        return parameter
    return parameter.detach().to(dtype).contiguous()


def _as(gradient: torch.Tensor, like: Parameter) -> torch.Tensor:
    return gradient if like is None else gradient.to(like.dtype)


def _gradients_like(tensors: tuple[Any, ...], needed: list[bool]) -> tuple[torch.Tensor, ...]:
    """Room for the gradients; none where one is not needed or the parameter is absent."""
    input = tensors[0]  # noqa: A001
    absent = [tensor is None or not wanted for tensor, wanted in zip(tensors, needed, strict=True)]
    found = [_like(input, input.dtype), *(input if p is None else p.new_empty(p.shape) for p in tensors[1:])]
    return tuple(input.new_empty(0) if gone else room for gone, room in zip(absent, found, strict=True))


def _like(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: A002
    return torch.empty(input.shape, dtype=dtype, device=input.device, memory_format=torch.channels_last_3d)


def _floats(input: torch.Tensor, count: int) -> torch.Tensor:  # noqa: A002
    return torch.empty(count, dtype=torch.float32, device=input.device)


def _by_group(input: torch.Tensor, num_groups: int) -> torch.Tensor:  # noqa: A002
    """[N, G, elements of a group], in f32 at least."""
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    return wide.reshape(input.shape[0], num_groups, -1)


def _reference_with_statistics(input: torch.Tensor, weight: Parameter, bias: Parameter, norm: Norm) -> Any:  # noqa: A002
    groups = _by_group(input, norm.num_groups)
    variance, mean = torch.var_mean(groups, dim=2, correction=0)
    out = _like(input, norm.out_dtype).copy_(reference(input, weight, bias, norm))
    return out, mean.to(torch.float32), torch.rsqrt(variance + norm.eps).to(torch.float32)


def _reference_gradient(tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """By the formula of docs/kernels.md."""
    grad_out, input, weight, bias = tensors  # noqa: A001
    groups, shape = _by_group(input, options["num_groups"]), (1, -1, 1, 1, 1)
    mean, rstd = (value.to(groups.dtype)[..., None] for value in (options["mean"], options["rstd"]))
    xhat = ((groups - mean) * rstd).reshape(input.shape)
    w = 1.0 if weight is None else weight.to(groups.dtype).reshape(shape)
    b = 0.0 if bias is None else bias.to(groups.dtype).reshape(shape)
    grad = grad_out.to(groups.dtype)
    if options["relu"]:
        grad = torch.where(xhat * w + b <= 0.0, 0.0, grad)
    first, second = (_by_group(value, options["num_groups"]) for value in (grad * w, grad * w * xhat))
    flat = xhat.reshape(groups.shape)
    of_input = rstd * (first - first.mean(dim=2, keepdim=True) - flat * second.mean(dim=2, keepdim=True))
    sums = (of_input.reshape(input.shape), *(value.sum(dim=(0, 2, 3, 4)) for value in (grad * xhat, grad)))
    found = _gradients_like(tensors[1:], options["needed"])
    return tuple(room.copy_(value) if room.numel() else room for room, value in zip(found, sums, strict=True))
