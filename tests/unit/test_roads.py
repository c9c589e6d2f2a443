"""The two quick roads of a launch, generated and compiled: what they take, what they leave to the slow road, what they pack."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kserve.artifact import Param
from kserve.client import compiled as compiled_client
from kserve.client.block import PARAMS_AT, layout
from kserve.client.loader import driver
from kserve.errors import InvalidDefinition, LoadError
from kserve.expression import Expression
from kserve.spec import DTYPES, SCALARS
from tests.support.processes import REPOSITORY, python, wait_for
from tests.support.roads import CUDA, DECLARED, GENERIC, RoadMaker, kernel_with, with_param
from tests.support.stub_driver import Launched

torch = pytest.importorskip("torch")
# One description of a kernel serves many examples; the fixture holds no state between them.
fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
both = pytest.mark.usefixtures("stub", "compiled")


def floats(n: int = 64, *, shift: int = 0):
    """n floats whose address is that many elements past a multiple of 64 bytes."""
    whole = torch.zeros(n + 64)
    first = -(whole.data_ptr() // 4) % 16
    return whole[first + shift : first + shift + n]


def packed(contract, *values: object) -> tuple[bytes, ...]:
    """Each parameter's bytes as the slow road packs them."""
    given = iter(values)
    plain = [next(given) for param in contract.params if param.kind != "scratch"]
    block = layout(contract).pack(1, 1, 1, 1, 1, 1, 0, 0, *plain)[PARAMS_AT:] + bytes(64)
    return tuple(block[param.offset : param.offset + param.size_bytes] for param in contract.params)


SCALE = with_param(kernel_with("*float32", "*float32", "i32", "f32", grid=("cdiv(c, 128)",)), "a", align=16)


def test_what_fits_is_launched_with_its_values(road):
    x, out = floats(), floats()
    assert road(SCALE)(x, out, 1000, 2.5) == Launched(
        DECLARED, (8, 1, 1, 128, 1, 1, 0), 0, packed(SCALE, x.data_ptr(), out.data_ptr(), 1000, 2.5)
    )


@pytest.mark.parametrize(
    ("shift", "divisible", "n", "function"),
    [
        (0, 0, 7, DECLARED),
        (1, 0, 7, GENERIC),
        (4, 0, 7, DECLARED),
        (0, 8, 16, DECLARED),
        (0, 8, 17, GENERIC),
        (2, 8, 16, GENERIC),
    ],
)
def test_the_variant_follows_the_facts(road, shift, divisible, n, function):
    call = road(with_param(SCALE, "c", divisible_by=divisible))
    assert call(floats(shift=shift), floats(), n, 1.0).function == function


# As good as a tensor, on another device.
DUCK = {"dtype": torch.float32, "is_contiguous": lambda: True, "get_device": lambda: 3, "data_ptr": lambda: 4096}


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:3],
        lambda a: [*a, 1],
        lambda a: [],
        lambda a: [a[0].double(), *a[1:]],
        lambda a: [a[0].half(), *a[1:]],
        lambda a: [a[0].int(), *a[1:]],
        lambda a: [a[0][::2], *a[1:]],
        lambda a: [a[0].view(8, 8).T, *a[1:]],
        lambda a: [torch.zeros(1).expand(5), *a[1:]],
        lambda a: [a[0][:0], *a[1:]],
        lambda a: [a[0].to("meta"), *a[1:]],
        lambda a: [a[0], a[1].to("meta"), *a[2:]],
        lambda a: [a[0].view(8, 8).to_sparse(), *a[1:]],
        lambda a: [torch._to_functional_tensor(a[0]), *a[1:]],
        lambda a: [torch._efficientzerotensor((64,)), *a[1:]],
        lambda a: [None, *a[1:]],
        lambda a: [a[0].data_ptr(), *a[1:]],
        lambda a: [a[0].numpy(), *a[1:]],
        lambda a: [[1.0], *a[1:]],
        lambda a: [a[0], SimpleNamespace(**DUCK), *a[2:]],
        lambda a: [torch.Tensor, *a[1:]],
        lambda a: [*a[:2], 0, a[3]],
        lambda a: [*a[:2], -1, a[3]],
        lambda a: [*a[:2], 2**31, a[3]],
        lambda a: [*a[:2], -(2**31) - 1, a[3]],
        lambda a: [*a[:2], 2**64, a[3]],
        lambda a: [*a[:2], 10**40, a[3]],
        lambda a: [*a[:2], 1.0, a[3]],
        lambda a: [*a[:2], True, a[3]],
        lambda a: [*a[:2], np.int64(5), a[3]],
        lambda a: [*a[:2], np.array(5), a[3]],
        lambda a: [*a[:2], type("Int", (int,), {})(5), a[3]],
        lambda a: [*a[:2], "5", a[3]],
        lambda a: [*a[:2], None, a[3]],
        lambda a: [*a[:2], a[0], a[3]],
        lambda a: [*a[:3], 2],
        lambda a: [*a[:3], True],
        lambda a: [*a[:3], "2"],
        lambda a: [*a[:3], np.float32(2)],
        lambda a: [*a[:3], 1e39],
        lambda a: [*a[:3], -1e39],
        lambda a: [*a[:3], 1j],
        lambda a: [*a[:3], a[0]],
    ],
)
def test_what_does_not_fit_takes_the_slow_road_as_it_came(road, change):
    args = change([floats(), floats(), 1000, 2.0])
    taken, stream, grid = road(SCALE)(*args)
    assert len(taken) == len(args)
    assert all(theirs is ours for theirs, ours in zip(taken, args, strict=True))
    assert (stream, grid) == (None, None)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4028234e38, 0.1])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_any_float_of_the_type_is_packed_as_it_is(road, kind, value):
    contract = kernel_with("*float32", kind)
    x = floats()
    assert road(contract)(x, value).params == packed(contract, x.data_ptr(), value)


@pytest.mark.parametrize("kind", [kind for kind in SCALARS if kind[0] in "iu"])
def test_integers_are_taken_up_to_the_ends_of_their_type(road, kind):
    bits = DTYPES[SCALARS[kind]].size_bytes * 8
    least, most = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    contract = kernel_with("*float32", kind)
    call, x = road(contract), floats()
    for value in (least, most, 1):
        if kind == "u64" and value == most and road.kind == "compiled":
            continue  # the slow road's: expressions count in signed numbers
        assert call(x, value).params == packed(contract, x.data_ptr(), value)
    for value in (least - 1, most + 1):
        assert call(x, value) == ((x, value), None, None)


@pytest.mark.parametrize("value", [True, False, 1, 0, None, "True", np.bool_(True)])
def test_a_bool_is_a_bool(road, value):
    contract, x = kernel_with("*float32", "bool"), floats()
    found = road(contract)(x, value)
    expected = packed(contract, x.data_ptr(), value) if type(value) is bool else None
    assert found.params == expected if expected else found == ((x, value), None, None)


@pytest.mark.parametrize("content", [b"abcde", b"abcd", b"abcdef", bytearray(b"abcde"), "abcde", None])
def test_a_struct_is_its_bytes(road, content):
    contract, x = kernel_with("*float32", "struct"), floats()
    found = road(contract)(x, content)
    assert found.params[1] == content if content == b"abcde" and type(content) is bytes else found[0] == (x, content)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_itself_and_no_other(road, dtype):
    contract = kernel_with(f"*{dtype}")
    call = road(contract)
    for other in DTYPES:
        tensor = torch.zeros(8, dtype=getattr(torch, other))
        found = call(tensor)
        assert found.params == packed(contract, tensor.data_ptr()) if other == dtype else found == ((tensor,), None, None)


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((64,), (1,), True),
        ((), (), True),
        ((1,), (7,), True),
        ((4, 8), (8, 1), True),
        ((4, 1), (1, 99), True),
        ((1, 8), (0, 1), True),
        ((4, 8), (1, 4), False),
        ((4, 8), (16, 1), False),
        ((2,), (0,), False),
        ((2, 1, 3), (3, 5, 1), True),
        ((2, 2, 3), (3, 6, 1), False),
    ],
)
def test_layouts_are_judged_as_torch_judges_them(road, shape, strides, fits):
    view = torch.zeros(200).as_strided(shape, strides)
    assert view.is_contiguous() is fits
    assert isinstance(road(kernel_with("*float32"))(view), Launched) is fits
    assert isinstance(road(with_param(kernel_with("*float32"), "a", contiguous=False))(view), Launched)


def test_parameters_of_a_module_are_plain_tensors(road):
    weight = torch.nn.Parameter(torch.zeros(8))
    contract = kernel_with("*float32")
    assert road(contract)(weight).params == packed(contract, weight.data_ptr())


def test_a_subclass_of_a_tensor_is_launched_as_itself_or_left_to_the_slow_road(road):
    class Mine(torch.Tensor):
        pass

    mine = torch.zeros(8).as_subclass(Mine)
    found = road(kernel_with("*float32"))(mine)
    assert found == ((mine,), None, None) or found.params == packed(kernel_with("*float32"), mine.data_ptr())


@pytest.mark.slow
def test_a_fake_tensor_has_no_memory_to_launch_on(road):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(8)
    assert road(kernel_with("*float32"))(fake)[0] == (fake,)


def test_scratch_is_no_argument_and_is_null(road):
    contract = kernel_with("*float32", "scratch", "i32", "scratch")
    x = floats()
    assert road(contract)(x, 7).params == packed(contract, x.data_ptr(), 7)
    assert road(contract)(x, 7).params[1] == bytes(8)


def test_a_nullable_pointer_takes_none(road):
    contract = with_param(kernel_with("*float32", "*float32"), "b", nullable=True)
    x = floats()
    assert road(contract)(x, None).params == packed(contract, x.data_ptr(), 0)
    assert road(contract)(x, x).params == packed(contract, x.data_ptr(), x.data_ptr())
    for other in (torch.empty(0), x.double(), x[::2], 0):
        assert road(contract)(x, other)[0] == (x, other), "what is neither is left to the slow road"
    assert road(contract)(None, x)[0] == (None, x)
    every = with_param(contract, "a", nullable=True)
    assert road(every)(None, None)[0] == (None, None), "no argument names a device"


@pytest.mark.parametrize("named", [{"stream": 0}, {"stream": 7}, {"grid": (3,)}, {"stream": 7, "grid": 3}])
def test_a_stream_or_a_grid_of_the_callers_takes_the_slow_road(road, named):
    args = (floats(), floats(), 1000, 2.0)
    call = road(SCALE)
    assert call(*args, **named) == (args, named.get("stream"), named.get("grid"))
    assert isinstance(call(*args, stream=None, grid=None), Launched)


def test_another_keyword_is_refused(road):
    with pytest.raises(TypeError, match="streem"):
        road(SCALE)(floats(), floats(), 1000, 2.0, streem=7)


def test_a_refusal_of_the_driver_is_reported_with_the_sizes(road):
    road.stub.set(launch_status=1)
    call = road(SCALE)
    assert call(floats(), floats(), 1000, 2.0) is None
    assert call.failures == [(1, (8, 1, 1, 128, 1, 1, 0))]


def test_what_reports_a_refusal_may_raise(road):
    road.stub.set(launch_status=1)
    call = road(SCALE)

    class Refused(Exception):
        pass

    def failed(status, sizes):
        raise Refused(status)

    call.failures = SimpleNamespace(append=lambda passed: failed(*passed))
    for _ in range(3):
        with pytest.raises(Refused):
            call(floats(), floats(), 1000, 2.0)
    road.stub.set(launch_status=0)
    assert isinstance(call(floats(), floats(), 1000, 2.0), Launched)


@pytest.mark.parametrize("knobs", [{"context_status": 201, "launch_status": 201}, {"launch_status": 201}])
def test_a_thread_without_a_context_takes_the_slow_road(road, knobs):
    road.stub.set(**knobs)
    args = (floats(), floats(), 1000, 2.0)
    assert road(SCALE)(*args) == (args, None, None)


def test_another_current_device_takes_the_slow_road(road):
    road.stub.set(device=1)
    road.torch._C._cuda_getDevice = lambda: 1
    args = (floats(), floats(), 1000, 2.0)
    call = road(SCALE)
    call.functions[0][1] = ctypes.c_void_p(DECLARED)  # loaded there too
    assert call(*args) == (args, None, None)


def test_a_tensor_of_the_cpu_takes_the_slow_road_where_a_device_is_current(road):
    road.torch._C._cuda_getDevice = lambda: 0
    road.device_type = CUDA
    args = (floats(), floats(), 1000, 2.0)
    assert road(SCALE)(*args) == (args, None, None)


def test_a_function_is_used_from_the_moment_the_slow_road_has_loaded_it(road):
    call = road(SCALE)
    args = (floats(), floats(), 1000, 2.0)
    functions = dict(call.functions[0])
    call.functions[0].clear()
    assert call(*args) == (args, None, None)
    call.functions[0].update(functions)
    assert call(*args).function == DECLARED


def test_an_object_that_raises_anything_takes_the_slow_road(road):
    class Boom(Exception):
        pass

    class Foreign:
        def __getattr__(self, name):
            raise Boom(name)

    foreign = Foreign()
    assert road(SCALE)(foreign, floats(), 1000, 2.0)[0][0] is foreign
    assert road(SCALE)(floats(), foreign, 1000, 2.0)[0][1] is foreign
    assert sys.exc_info() == (None, None, None)


def test_an_array_of_another_library_takes_the_slow_road(road):
    array = SimpleNamespace(__cuda_array_interface__={"typestr": "<f4", "data": (4096, False), "shape": (8,), "version": 3})
    assert road(SCALE)(array, floats(), 1000, 2.0)[0][0] is array


NAMES = ("a", "b", "size")
OPERATORS = ("+", "-", "*", "//", "%", "==", "!=", "<", "<=", ">", ">=")
numbers = st.integers(-(2**40), 2**40) | st.integers(-9, 9)
expressions = st.recursive(
    st.sampled_from(NAMES) | st.integers(0, 2**33).map(str) | st.integers(0, 9).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max", "cdiv"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        st.tuples(inner, inner, inner).map(lambda t: f"min({', '.join(t)})"),
        inner.map(lambda text: f"next_pow2({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
).filter(lambda text: len(text) <= 300)


@fuzz
@given(text=expressions, a=numbers, b=numbers, size=st.integers(-3, 64))
def test_a_grid_has_the_value_of_its_expression(road, text, a, b, size):
    contract = kernel_with("i64", "i64", grid=(text,), constants={"size": size})
    try:
        expected = Expression(text).evaluate({"a": a, "b": b, "size": size})
        call = road(contract)
    except InvalidDefinition:
        return  # no kernel has such a grid
    if call.launch is None:
        return  # the compiled launcher cannot express it
    found = call(a, b)
    fits = 1 <= expected <= 2**31 - 1
    assert found == Launched(DECLARED, (int(expected), 1, 1, 128, 1, 1, 0), 0, packed(contract, a, b)) or (
        found == ((a, b), None, None) and (not fits or road.kind == "compiled")
    )


@pytest.mark.parametrize(
    ("grid", "args", "x"),
    [
        ("cdiv(a, size)", (17, 0), 3),
        ("a // b", (7, 2), 3),
        ("-a // b", (7, -2), 3),
        ("a % b", (-7, 5), 3),
        ("-(a % b)", (7, -5), 3),
        ("max(a, b, 2)", (1, 3), 3),
        ("min(a, b, 99)", (3, 4), 3),
        ("next_pow2(a) - 1", (3, 0), 3),
        ("next_pow2(a) + 2", (-5, 0), 3),
        ("3 * (a >= b) * (mode == 'fast')", (1, 1), 3),
        ("3 * (a != b) + (mode != 'fast')", (1, 2), 3),
        ("a // b", (1, 0), None),
        ("a % b", (1, 0), None),
        ("a * b", (2**40, 2**40), None),
        ("a + b", (2**63 - 1, 2**63 - 1), None),
        ("a - b", (0, 1), None),
        ("a", (2**31, 0), None),
        ("a", (2**31 - 1, 0), 2**31 - 1),
        ("a // b", (-(2**63), -1), None),
        ("-a", (-(2**63), 0), None),
        ("next_pow2(a)", (2**62 + 1, 0), None),
    ],
)
def test_both_roads_count_as_python_does(road, grid, args, x):
    call = road(kernel_with("i64", "i64", grid=(grid,), constants={"size": 8, "mode": "fast"}))
    found = call(*args)
    assert found.sizes[0] == x if x is not None else found == (args, None, None)


@pytest.mark.parametrize(
    ("sizes", "b", "fits"),
    [
        ({"grid": ("b", "1", "1")}, 2**31 - 1, True),
        ({"grid": ("1", "b")}, 65535, True),
        ({"grid": ("1", "b")}, 65536, False),
        ({"grid": ("1", "1", "b")}, 65536, False),
        ({"grid": ("1", "70000")}, 1, False),
        ({"block": ("b",)}, 1024, True),
        ({"block": ("b",)}, 1025, False),
        ({"block": ("b",)}, 0, False),
        ({"block": ("2", "b", "3")}, 4, True),
        ({"shared_bytes": "b * 8"}, 0, True),
        ({"shared_bytes": "b * 8"}, -1, False),
        ({"shared_bytes": "b * 8"}, 2**28, False),
    ],
)
def test_sizes_stay_within_the_drivers_limits(road, sizes, b, fits):
    x = floats()
    assert isinstance(road(kernel_with("*float32", "i64", **sizes))(x, b), Launched) is fits


TENSORS = {
    "plain": lambda dtype: torch.zeros(40, dtype=dtype),
    "shifted": lambda dtype: torch.zeros(40, dtype=dtype)[1:],
    "strided": lambda dtype: torch.zeros(40, dtype=dtype)[::2],
    "matrix": lambda dtype: torch.zeros(4, 10, dtype=dtype),
    "turned": lambda dtype: torch.zeros(4, 10, dtype=dtype).T,
    "empty": lambda dtype: torch.zeros(0, dtype=dtype),
    "one": lambda dtype: torch.zeros((), dtype=dtype),
    "parameter": lambda dtype: torch.nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=False),
}
ODD = [
    None,
    True,
    "1",
    2**31,
    2**63,
    2**64,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    1e300,
    b"abcde",
    np.int32(3),
    np.float64(2),
    [],
    1j,
]
LIKELY = ["plain", "shifted", "matrix", "parameter", "one"]
INTEGERS = st.one_of(*[st.integers(1, 100)] * 9, st.integers(-200, 200), st.integers(-(2**63), 2**63 - 1))


@st.composite
def calls(draw):
    """A contract and arguments for it, most of which fit."""
    kinds = draw(
        st.lists(st.sampled_from(["*float32", "*int64", "*bfloat16", "*bool", *SCALARS, "struct", "scratch"]), max_size=7)
    )
    kinds = [kind for kind in kinds if kind != "f16"]  # the generated road's alone
    contract = kernel_with(*kinds)
    args = []
    for param in contract.params:
        if param.kind == "pointer":
            facts = {"align": draw(st.sampled_from([0, 8, 16])), "contiguous": draw(st.booleans())}
        else:
            facts = {"divisible_by": draw(st.sampled_from([0, 0, 4]))} if param.kind[0] in "iu" else {}
        contract = with_param(contract, param.name, **facts)
        if param.kind != "scratch":
            args.append(draw(st.sampled_from(ODD)) if draw(st.integers(0, 31)) == 0 else draw(_fitting(param)))
    names = [param.name for param in contract.params if param.kind[0] in "iu"]
    grid = draw(st.sampled_from([*names, *(f"cdiv({name}, 16)" for name in names), "3"]))
    return contract._replace(grid=(grid,)), args[: draw(st.sampled_from([99] * 19 + [1]))]


def _fitting(param: Param) -> st.SearchStrategy:
    if param.kind == "pointer":
        make = st.sampled_from([*LIKELY * 4, *TENSORS])
        dtype = st.sampled_from([param.dtype] * 15 + ["float32"])
        return st.builds(lambda name, of: TENSORS[name](getattr(torch, of)), make, dtype)
    if param.kind[0] == "f":
        return st.floats(width=32)
    return st.just(b"abcde") if param.kind == "struct" else st.booleans() if param.kind == "bool" else INTEGERS


@both
@pytest.mark.toolchain
@settings(parent=fuzz, max_examples=500)
@given(call=calls())
def test_any_call_ends_alike_on_both_roads(stub, call):
    contract, args = call
    ends = []
    for kind in ("generated", "compiled"):
        found = RoadMaker(kind, stub, SimpleNamespace(**vars(torch)))(contract)(*args)
        ends.append(found if isinstance(found, Launched) else "slow")
    assert ends[0] == ends[1] or (ends[1] == "slow" and any(type(arg) is int and arg >= 2**63 for arg in args))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_calls_leave_nothing_behind(road):
    call, launch = road(SCALE), road(SCALE).launch
    x, out, n, factor = floats(), floats(), 1000 * len(sys.argv), 2.5 * len(sys.argv)
    wrong = object()
    held = (x, out, n, factor, wrong, launch, *call.functions, *call.functions[0].values(), torch.Tensor, None)

    def work(times: int) -> None:
        for _ in range(times):
            launch(x, out, n, factor)
            launch(x, out, n, factor, stream=5)
            launch(x, wrong, n, factor)
            launch(x, x[::2], n, factor)
            launch(x, out, 2**70, factor)
            launch(x)

    taken = road(SCALE)
    launch = taken.launch
    taken.slow = SimpleNamespace(append=lambda passed: None)
    work(2000)
    before, size = [sys.getrefcount(one) for one in held], rss_bytes()
    work(10_000)
    assert [sys.getrefcount(one) for one in held][:-1] == before[:-1]
    assert rss_bytes() - size < 4 << 20


def test_a_road_that_is_dropped_is_freed_with_what_it_holds(road):
    call = road(SCALE)
    call.cycle = call.launch  # the road holds its slow road, and that the road
    call(floats(), floats(), 1000, 2.0)
    gone = weakref.ref(call)
    del call
    gc.collect()
    assert gone() is None


def test_threads_do_not_mix_their_arguments(road):
    contract = kernel_with("*float32", "i64", "i64", "f64")
    call, x = road(contract), floats()
    road.stub.expect(contract)

    def work(own: int) -> None:
        for step in range(200):
            call.launch(x, own, own * 1000 + step, float(own))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [struct.unpack("<qqd", b"".join(launched.params[1:])) for launched in road.stub.launches()]
    assert sorted(pair for _, pair, _ in seen) == sorted(own * 1000 + step for own in range(8) for step in range(200))
    assert all(own == pair // 1000 == number for own, pair, number in seen)


def test_a_launch_that_waits_for_a_full_queue_lets_other_threads_go_on(road):
    """Other threads can run: one of them makes room."""
    ours, theirs = os.pipe()
    call = road(SCALE)
    args = (floats(), floats(), 1000, 2.0)
    road.stub.set(gate=ours)
    thread = threading.Thread(target=call.launch, args=args)
    thread.start()
    wait_for(lambda: road.stub.get("at_gate"), what="the launch to reach the driver")
    os.write(theirs, b"x")
    thread.join()
    road.stub.set(gate=-1)
    os.close(ours)
    os.close(theirs)
    assert road.stub.get("shut") == 0
    assert road.stub.get("n_launches") == 1


def chosen(contract, launcher: str):
    libraries = [SimpleNamespace(functions={0: ctypes.c_void_p(1)})]
    namespace = SimpleNamespace(**vars(torch))
    namespace._C = SimpleNamespace(_cuda_getDevice=None, _cuda_getCurrentRawStream=None)
    road = compiled_client.best_road(contract, libraries, namespace, launcher=launcher, slow=print, failed=print)
    return "generated" if hasattr(road, "__code__") else "compiled"


@both
@pytest.mark.toolchain
@pytest.mark.parametrize(("launcher", "kind"), [("auto", "compiled"), ("compiled", "compiled"), ("python", "generated")])
def test_the_setting_chooses_the_road(launcher, kind):
    assert chosen(SCALE, launcher) == kind


@both
@pytest.mark.toolchain
@pytest.mark.parametrize(
    "contract",
    [
        kernel_with("*float32", "f16"),
        kernel_with("*float32")._replace(params=tuple(Param(f"p{i}", "i64", "", 8 * i, 8) for i in range(65))),
        kernel_with("struct")._replace(params=(Param("s", "struct", "", 0, 5000),)),
        with_param(kernel_with("*float32"), "a", align=24),
        kernel_with("i64", grid=("+".join(["(a"] * 40 + ["a"]) + ")" * 40,)),
    ],
    ids=["half", "many parameters", "a large block", "an odd alignment", "a deep expression"],
)
def test_a_kernel_that_the_launcher_cannot_express_takes_the_generated_road(contract):
    assert chosen(contract, "auto") == chosen(contract, "compiled") == "generated"


@pytest.mark.usefixtures("stub")
def test_without_a_launcher_only_a_wish_for_one_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "kserve.client._launcher", None)
    assert chosen(SCALE, "auto") == chosen(SCALE, "python") == "generated"
    with pytest.raises(LoadError, match="compiled launcher"):
        chosen(SCALE, "compiled")


@both
@pytest.mark.toolchain
def test_a_torch_without_the_exchange_api_takes_the_generated_road(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert chosen(SCALE, "auto") == "generated"


GOOD = {
    "params": (("p", 2, 32, 0, 8, 16, 0, True, False), ("i", 0, 0, 8, 4, 0, 0, False, False)),
    "sizes": tuple(((("k", 1),), 0, 9) for _ in range(7)),
    "tensor": torch.Tensor,
    "parameter": torch.nn.Parameter,
    "exchange": torch.Tensor.__dlpack_c_exchange_api__,
    "device_type": 1,
    "declared": {},
    "generic": {},
    "slow": print,
    "failed": print,
    "launch_kernel": 1,
    "current_device": 1,
}
SIX = GOOD["sizes"][:6]


@pytest.mark.toolchain
@pytest.mark.parametrize(
    "wrong",
    [
        {"params": (("x", 0, 0, 0, 8, 0, 0, False, False),)},
        {"params": (("p", 2, 32, 0, 4, 0, 0, False, False),)},
        {"params": (("p", 2, 32, -8, 8, 0, 0, False, False),)},
        {"params": (("p", 2, 32, 4090, 8, 0, 0, False, False),)},
        {"params": (("p", 2, 32, 2**31 - 1, 8, 0, 0, False, False),)},
        {"params": (("p", 2, 32, 0, 8, 24, 0, False, False),)},
        {"params": (("p", 2, 32, 0, 8, -8, 0, False, False),)},
        {"params": (("i", 0, 0, 0, 3, 0, 0, False, False),)},
        {"params": (("i", 0, 0, 0, 16, 0, 0, False, False),)},
        {"params": (("f", 0, 0, 0, 2, 0, 0, False, False),)},
        {"params": (("b", 0, 0, 0, 4, 0, 0, False, False),)},
        {"params": (("s", 0, 0, 0, 0, 0, 0, False, False),)},
        {"params": (("s", 0, 0, 0, 4097, 0, 0, False, False),)},
        {"params": (("ũ", 0, 0, 0, 8, 0, 0, False, False),)},
        {"params": (("\0", 0, 0, 0, 8, 0, 0, False, False),)},
        {"params": GOOD["params"][:1] * 65},
        {"sizes": SIX},
        {"sizes": (*SIX, ((), 0, 9))},
        {"sizes": (*SIX, ((("k", 1), ("k", 1)), 0, 9))},
        {"sizes": (*SIX, ((("+", 0),), 0, 9))},
        {"sizes": (*SIX, ((("k", 1), ("+", 0)), 0, 9))},
        {"sizes": (*SIX, ((("n", 0), ("k", 1)), 0, 9))},
        {"sizes": (*SIX, ((("v", 0),), 0, 9))},
        {"sizes": (*SIX, ((("v", 2),), 0, 9))},
        {"sizes": (*SIX, ((("v", -1),), 0, 9))},
        {"sizes": (*SIX, ((("k", 1), ("k", 1), ("?", 0)), 0, 9))},
        {"sizes": (*SIX, (tuple([("k", 1)] * 33 + [("+", 0)] * 32), 0, 9))},
        {"sizes": (*SIX, ((("k", 1),), -1, 9))},
        {"sizes": (*SIX, ((("k", 1),), 0, 2**31))},
        {"launch_kernel": 0},
        {"current_device": 0},
    ],
)
def test_a_description_that_would_read_or_write_beside_a_launch_is_refused(launcher_module, wrong):
    launcher_module.Launcher(**GOOD)
    with pytest.raises(ValueError):  # each says something else
        launcher_module.Launcher(**{**GOOD, **wrong})


@pytest.mark.toolchain
@pytest.mark.parametrize(
    "wrong",
    [
        {"params": []},
        {"params": ((),)},
        {"params": (("pp", 2, 32, 0, 8, 16, 0, True, False),)},
        {"params": (("p", "2", 32, 0, 8, 16, 0, True, False),)},
        {"sizes": (*SIX, 5)},
        {"sizes": (*SIX, ([], 0, 9))},
        {"sizes": (*SIX, ((5,), 0, 9))},
        {"exchange": None},
        {"declared": None},
        {"launch_kernel": 1.0},
        {"more": 1},
    ],
)
def test_a_description_of_other_types_is_refused(launcher_module, wrong):
    with pytest.raises((TypeError, ValueError, SystemError)):
        launcher_module.Launcher(**{**GOOD, **wrong})


@pytest.mark.toolchain
def test_a_capsule_of_another_version_is_refused_and_an_older_table_is_found(launcher_module):
    words = (ctypes.c_uint64 * 7)(*(ctypes.c_uint64 * 7).from_address(_table(GOOD["exchange"])))
    newer = (ctypes.c_uint64 * 7)(2)
    capsule = _capsule(newer)
    with pytest.raises(ValueError, match="version"):
        launcher_module.Launcher(**{**GOOD, "exchange": capsule})
    newer[1] = ctypes.addressof(words)
    launcher_module.Launcher(**{**GOOD, "exchange": capsule})


class View(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("n_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Elsewhere:
    """A tensor of a library that has more devices than this machine."""

    def __init__(self, **fields):
        fields = {"data": 4096, "device_type": CUDA, "code": 2, "bits": 32, "lanes": 1} | fields
        self.view = View(**fields)


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, (4096, 4096, 0xA)),
        ({"device": 1}, {"device": 1}, "slow"),  # not the current one
        ({}, {"device": 1}, "slow"),
        ({}, {"device_type": 1}, "slow"),
        ({}, {"lanes": 2}, "slow"),
        ({}, {"code": 4}, "slow"),
        ({"byte_offset": 64}, {"data": 8192}, (4160, 8192, 0xA)),
    ],
)
def test_views_are_judged_by_all_of_their_fields(stub, launcher_module, first, second, expected):
    def view_of(tensor, view):
        ctypes.memmove(view, ctypes.addressof(tensor.view), ctypes.sizeof(View))
        return 0

    def current_stream(device_type, device, stream):
        stream[0] = 0xA + device
        return 0

    view_type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
    stream_type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
    functions = (view_type(view_of), stream_type(current_stream))
    table = (ctypes.c_uint64 * 7)(1, 0, 0, 0, 0, *(ctypes.cast(one, ctypes.c_void_p).value for one in functions))
    contract, slow = kernel_with("*float32", "*float32"), []
    stub.expect(contract)
    launcher = launcher_module.Launcher(
        params=tuple(compiled_client._described(param) for param in contract.params),
        sizes=GOOD["sizes"],
        tensor=Elsewhere,
        parameter=Elsewhere,
        exchange=_capsule(table),
        device_type=CUDA,
        declared={0: ctypes.c_void_p(1), 1: ctypes.c_void_p(2)},
        generic={0: ctypes.c_void_p(1), 1: ctypes.c_void_p(2)},
        slow=lambda *passed: slow.append(passed),
        failed=print,
        launch_kernel=compiled_client._address(driver().slow.cuLaunchKernel),
        current_device=compiled_client._address(driver().quick.cuCtxGetDevice),
    )
    launcher.launch(Elsewhere(**first), Elsewhere(**second))
    launches = [(*(int.from_bytes(one, "little") for one in found.params), found.stream) for found in stub.launches()]
    assert launches == ([] if expected == "slow" else [expected])
    assert len(slow) == (expected == "slow")


def _capsule(table: ctypes.Array) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(table), b"dlpack_exchange_api", None)


def _table(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, b"dlpack_exchange_api")


@pytest.mark.toolchain
def test_importing_the_launcher_costs_less_than_a_millisecond(launcher_file):
    code = f"""
import importlib.util, time
began = time.perf_counter()
spec = importlib.util.spec_from_file_location("kserve.client._launcher", {str(launcher_file)!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print((time.perf_counter() - began) * 1000)
"""
    assert min(float(python(code).stdout) for _ in range(5)) < 1


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("environment", "tag", "has_launcher"),
    [
        ({}, "cp311-abi3", True),
        ({"KSERVE_LAUNCHER": "python"}, "py3-none-any", False),
        ({"CC": "no-compiler"}, "py3-none-any", False),
    ],
)
def test_a_wheel_has_the_launcher_where_it_can_be_built(tmp_path, launcher_file, environment, tag, has_launcher):
    pytest.importorskip("hatchling")
    import zipfile

    code = "import sys; from hatchling.builders.wheel import WheelBuilder as B; [*B(sys.argv[1]).build(directory=sys.argv[2])]"
    done = python(code, str(REPOSITORY), str(tmp_path), **environment)
    (wheel,) = tmp_path.glob("*.whl")
    assert tag in wheel.name
    assert ("kserve/client/_launcher.abi3.so" in zipfile.ZipFile(wheel).namelist()) is has_launcher
    assert ("no compiled launcher" in done.stdout + done.stderr) is ("CC" in environment)
