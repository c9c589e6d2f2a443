"""Launching, as far as it goes without a driver: arguments, parameter blocks, grids, streams, and what is refused."""

from __future__ import annotations

import ctypes
import struct
import sys
import types
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from kserve.artifact import Artifact, Contract, Manifest, Param
from kserve.client import arguments, launch, quick
from kserve.client.arguments import Passed
from kserve.client.block import PARAMS_AT, Slot, layout
from kserve.client.launch import Kernel
from kserve.client.quick import quick_source
from kserve.errors import KserveError, LaunchError

SIZES = (10, 1, 1, 128, 1, 1, 0)
STREAM = 0x5EED
X = Param("x", "pointer", "float32", 0, 8, align=16)
OUT = Param("out", "pointer", "float32", 8, 8, mutated=True)


def contract(*params: Param, **overrides) -> Contract:
    return Contract("scale", "cubin", params, {"size": 8}, ("1",), ("128",))._replace(**overrides)


def kernel(*params: Param, n_variants: int = 1, **given) -> Kernel:
    """A kernel, not loaded unless a device is given. Its variants have different bytes."""
    facts = ("ab" * 32, "cd" * 32, 7, "scale", "cuda", "cuda:sm_90", {"size": 8})
    manifests = [
        Manifest(*facts, variant, contract(*params), {"registers": 12}, {}, {}, closed_world=False, seconds=1.0, created_at=1.0)
        for variant in ("declared", "generic")[:n_variants]
    ]
    manifests[1:] = [found._replace(digest="ef" * 32) for found in manifests[1:]]
    roads = launch.Roads([Artifact(found, b"payload") for found in manifests], **{"device": None, **given})
    return Kernel(roads, origin="built", seconds=1.5)


def grid_of(found: Contract, values, grid):
    """The grid a launch with these values would have."""
    return launch._Prepared(found).sizes("k", values, grid)[:3]


def scalar(kind: str) -> Param:
    return Param("value", kind, "", 0, 8)


def array(**overrides) -> SimpleNamespace:
    """Two by three floats at a null pointer: the one address that needs no driver to judge."""
    interface = {"typestr": "<f4", "data": (0, False), "shape": (2, 3), "strides": None, "version": 3, **overrides}
    return SimpleNamespace(__cuda_array_interface__=interface)


@pytest.mark.parametrize(
    ("params", "values", "block"),
    [
        ([], [], b""),
        ([X], [0x1122334455667788], "8877665544332211"),
        ([Param("b", "bool", "", 0, 1), Param("n", "i64", "", 8, 8)], [True, -1], "01" + "00" * 7 + "ff" * 8),
        (
            [Param("c", "i8", "", 0, 1), Param("s", "i16", "", 2, 2), Param("f", "f32", "", 4, 4)],
            [-1, -2, 1.0],
            "ff00feff0000803f",
        ),
        ([Param("h", "f16", "", 0, 2), Param("d", "f64", "", 8, 8)], [1.0, -2.0], "003c" + "00" * 6 + "00000000000000c0"),
        (
            [Param("u", "u8", "", 0, 1), Param("v", "u16", "", 2, 2), Param("w", "u32", "", 4, 4)],
            [255, 65535, 2**32 - 1],
            "ff00" + "ff" * 6,
        ),
        (
            [Param("n", "i32", "", 0, 4), Param("p", "struct", "", 8, 5), Param("q", "u64", "", 16, 8)],
            [1, b"abcde", 2**64 - 1],
            "0100000000000000" + "6162636465000000" + "ff" * 8,
        ),
        ([Param("m", "tensor_map", "", 64, 128)], [b"\x07" * 128], "00" * 64 + "07" * 128),
        ([X, Param("scratch_0", "scratch", "", 8, 8)], [1], "0100000000000000"),
    ],
    ids=range(9),
)
def test_values_lie_where_the_binary_expects_them(params, values, block):
    expected = bytes.fromhex(block) if isinstance(block, str) else block
    packed = layout(contract(*params)).pack(*SIZES, STREAM, *values)
    assert packed[PARAMS_AT:] == expected


def test_the_config_in_front_of_the_parameters_is_the_drivers_own():
    class Config(ctypes.Structure):  # CUlaunchConfig, as cuda.h declares it
        _fields_ = (
            *((name, ctypes.c_uint) for name in ("x", "y", "z", "bx", "by", "bz", "shared_bytes")),
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.c_void_p),
            ("n_attributes", ctypes.c_uint),
        )

    sizes = (2**31 - 1, 2, 65535, 1024, 3, 4, 2**31 - 1)
    slot = Slot(contract(X))
    layout(contract(X)).pack_into(slot.buffer, 0, *sizes, STREAM, 1)
    config = Config.from_address(slot.config.value)
    assert ctypes.sizeof(Config) <= PARAMS_AT
    assert tuple(getattr(config, name) for name, _ in Config._fields_) == (*sizes, STREAM, None, 0)


@pytest.mark.parametrize(
    ("kind", "size_bytes", "value"),
    [
        ("i32", 4, 2**31),
        ("i32", 4, 1.0),
        ("u8", 1, -1),
        ("u64", 8, 2**64),
        ("f16", 2, 70000.0),
        ("f32", 4, 1e39),
        ("f32", 4, "1"),
        ("pointer", 8, -1),
    ],
)
def test_a_value_that_does_not_fit_is_never_packed(kind, size_bytes, value):
    packing = layout(contract(Param("value", kind, "float32", 0, size_bytes)))
    with pytest.raises((struct.error, OverflowError)):
        packing.pack(*SIZES, STREAM, value)


def test_a_slot_points_at_every_parameter_and_leaves_scratch_null():
    params = [X, Param("n", "i32", "", 8, 4), Param("scratch_0", "scratch", "", 16, 8)]
    slot = Slot(contract(*params))
    layout(contract(*params)).pack_into(slot.buffer, 0, *SIZES, STREAM, 5, 7)
    base = ctypes.addressof(slot.buffer) + PARAMS_AT
    assert [pointer - base for pointer in slot.params] == [0, 8, 16]
    assert ctypes.c_int32.from_address(slot.params[1]).value == 7
    assert ctypes.c_int64.from_address(slot.params[2]).value == 0


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        ("i32", 5, 5),
        ("i32", -(2**31), -(2**31)),
        ("i32", 2**31 - 1, 2**31 - 1),
        ("i8", -128, -128),
        ("u8", 255, 255),
        ("u32", 2**32 - 1, 2**32 - 1),
        ("i64", -(2**63), -(2**63)),
        ("u64", 2**64 - 1, 2**64 - 1),
        ("i32", np.int8(5), 5),
        ("i64", np.uint32(5), 5),
        ("i32", np.array(5), 5),
        ("f32", 1.5, 1.5),
        ("f32", 3, 3.0),
        ("f32", np.float16(1.5), 1.5),
        ("f64", np.int64(3), 3.0),
        ("f64", Fraction(1, 2), 0.5),
        ("f32", float("inf"), float("inf")),
        ("bool", True, True),
        ("bool", False, False),
        ("bool", np.bool_(True), True),
    ],
)
def test_a_number_becomes_the_plain_value_that_is_packed(kind, argument, value):
    found = arguments.read("k", scalar(kind), argument)
    assert found == Passed(value)
    assert type(found.value) is type(value)


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("i32", 2**31),
        ("i32", -(2**31) - 1),
        ("u32", -1),
        ("u8", 256),
        ("i8", np.int64(128)),
        ("u64", 2**64),
        ("i32", 1.0),
        ("i32", np.float64(1)),
        ("i32", True),
        ("i32", np.bool_(True)),
        ("i32", "1"),
        ("i32", None),
        ("i32", [1]),
        ("i32", array()),
        ("i32", SimpleNamespace(data_ptr=0)),
        ("i32", np.zeros(3)),
        ("i32", np.array([1])),
        ("f32", "1.5"),
        ("f32", b"1"),
        ("f32", True),
        ("f32", np.bool_(True)),
        ("f32", None),
        ("f32", 1j),
        ("f32", np.complex64(1)),
        ("f32", array()),
        ("f32", np.zeros(3)),
        pytest.param("f64", 10**400, id="f64-huge"),
        ("bool", 1),
        ("bool", 0),
        ("bool", "True"),
        ("bool", "yes"),
        ("bool", None),
        ("bool", array()),
        ("bool", np.ones(2, bool)),
    ],
)
def test_a_number_that_does_not_fit_is_refused_with_what_is_allowed(kind, argument):
    with pytest.raises(LaunchError) as caught:
        arguments.read("scale", scalar(kind), argument)
    assert "scale" in caught.value.message
    assert "value" in caught.value.message
    assert caught.value.facts["allowed"]


@pytest.mark.parametrize("content", [b"abcde", bytearray(b"abcde"), memoryview(b"abcde")])
def test_a_struct_is_passed_as_its_bytes(content):
    assert arguments.read("k", Param("p", "struct", "", 0, 5), content) == Passed(b"abcde")


@pytest.mark.parametrize("content", [b"abcd", b"abcdef", "abcde", None, 5, [1, 2, 3, 4, 5]])
def test_a_struct_of_another_size_is_refused(content):
    with pytest.raises(LaunchError) as caught:
        arguments.read("k", Param("p", "struct", "", 0, 5), content)
    assert "5" in caught.value.facts["allowed"]


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, {}),
        ({}, {"strides": (12, 4)}),
        ({}, {"shape": (), "strides": ()}),
        ({}, {"shape": (0, 3), "strides": (12, 4)}),
        ({}, {"shape": (3, 0), "strides": (100, 4)}),
        ({}, {"shape": (1, 3), "strides": (999, 4)}),
        ({"contiguous": False}, {"strides": (4, 8)}),
        ({"mutated": False}, {"data": (0, True)}),
        ({"dtype": "bool"}, {"typestr": "|b1"}),
        ({"dtype": "int64"}, {"typestr": "<i8"}),
    ],
    ids=range(10),
)
def test_an_array_that_fits_is_passed_by_its_address(changes, overrides):
    assert arguments.read("k", OUT._replace(**changes), array(**overrides)) == Passed(0)


def test_an_interface_without_strides_is_contiguous():
    found = array()
    del found.__cuda_array_interface__["strides"]
    assert arguments.read("k", X, found) == Passed(0)


def test_the_interface_names_its_stream():
    assert arguments.read("k", X, array(stream=7)).stream == 7


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        (array(typestr="<f8"), "<f8"),
        (array(typestr=">f4"), ">f4"),
        (array(typestr="<i4"), "<i4"),
        (array(strides=(4, 8)), "(4, 8)"),
        (array(strides=(24, 8)), "(24, 8)"),
        (array(strides=(0, 4)), "(0, 4)"),
        (array(data=(0, True)), "read-only"),
        (None, "None"),
        (np.zeros((2, 3), "f4"), "host"),
        ([1.0], "list"),
        ("text", "str"),
    ],
    ids=range(11),
)
def test_an_array_that_does_not_fit_is_refused_with_what_came_and_what_is_allowed(argument, named):
    with pytest.raises(LaunchError) as caught:
        arguments.read("scale", OUT, argument)
    assert "out" in caught.value.message
    assert named in caught.value.message
    assert caught.value.facts["allowed"]


def test_a_strided_view_is_refused_before_the_driver_is_asked_about_its_address():
    with pytest.raises(LaunchError):
        arguments.read("k", X, array(data=(0x7F0000000000, False), strides=(4, 8)))


@pytest.mark.slow
def test_a_tensor_without_memory_is_refused():
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():  # a device that is not there serves it
        fake = torch.zeros(8, device="cuda")
    with pytest.raises(LaunchError, match="memory"):
        arguments.read("k", X, fake)


MEMORY = 0x7F0000000000  # 4096 bytes of the stub's device


@pytest.fixture
def memory(stub):
    stub.own(MEMORY, 4096)
    return stub


@pytest.mark.parametrize("address", [MEMORY, MEMORY + 4, MEMORY + 4092])
def test_a_plain_integer_is_a_device_address(memory, address):
    memory.set(device=3)
    assert arguments.read("k", X, address) == Passed(address, 3, None)


@pytest.mark.parametrize(
    "address", [0, -1, -MEMORY, MEMORY - 4, MEMORY + 4096, 2**64, 2**64 + MEMORY, 10**40, True, False, MEMORY + 1, MEMORY + 2.0]
)
def test_an_address_of_no_memory_is_refused(memory, address):
    with pytest.raises(LaunchError) as caught:
        arguments.read("scale", X, address)
    assert "x" in caught.value.message
    assert caught.value.facts["allowed"]


def test_a_null_address_is_none(memory):
    assert arguments.read("k", X._replace(nullable=True), 0) == Passed(0)


def loaded(memory, *, launcher: str = "auto") -> Kernel:
    """out = f(x) with a 16-byte fact on x, loaded by the stub."""
    found = kernel(X, OUT, Param("n", "i32", "", 16, 4), n_variants=2, device=0, launcher=launcher)
    memory.expect(found.manifest.contract)
    return found


def test_addresses_are_launched_on_the_stream_that_is_named(memory):
    found = loaded(memory)
    for _ in range(3):
        found(MEMORY, MEMORY + 64, 7, stream=5)
    found[2, 3](MEMORY + 4, MEMORY, 7, stream=0)
    launches = memory.launches()
    assert [launched.stream for launched in launches] == [5, 5, 5, 0]
    assert [launched.sizes for launched in launches] == [*[(1, 1, 1, 128, 1, 1, 0)] * 3, (2, 3, 1, 128, 1, 1, 0)]
    functions = [library.functions[0].value for library in found._roads.libraries]
    assert [launched.function for launched in launches] == [*[functions[0]] * 3, functions[1]], "a fact did not hold"
    assert functions[0] != functions[1]
    assert launches[-1].params == (*(value.to_bytes(8, "little") for value in (MEMORY + 4, MEMORY)), b"\x07\0\0\0")


def test_the_driver_gets_the_second_variant_with_the_launch_that_needs_it(memory):
    found = loaded(memory)
    declared, generic = found._roads.libraries
    assert (list(declared.functions), list(generic.functions)) == ([0], [])
    found(MEMORY, MEMORY + 64, 7, stream=5)
    assert generic.functions == {}
    found(MEMORY + 4, MEMORY + 64, 7, stream=5)
    assert list(generic.functions) == [0]
    assert memory.get("capture_mode") == 0, "as it was before"


@pytest.mark.parametrize("launcher", ["python", pytest.param("compiled", marks=pytest.mark.toolchain)])
def test_from_the_second_call_on_a_kernel_is_its_own_quick_road(memory, monkeypatch, request, launcher):
    torch = pytest.importorskip("torch")
    if launcher == "compiled":
        request.getfixturevalue("compiled")
    begun = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**{**vars(torch), "cuda": begun}))
    found = loaded(memory, launcher=launcher)
    again, roads = found.as_memo(), found._roads
    kinds = []
    for caller in (found, found, again, again, found[3]):
        caller(MEMORY, MEMORY + 64, 7, stream=5)
        kinds.append(found.__call__ is roads.launch)
    assert len(memory.launches()) == 5
    assert kinds == [False, True, True, True, True]
    assert again.__call__ is roads.launch
    assert isinstance(roads.launch, types.BuiltinFunctionType) is (launcher == "compiled")


def test_addresses_alone_name_no_stream(memory):
    with pytest.raises(LaunchError, match="which stream"):
        loaded(memory)(MEMORY, MEMORY + 64, 7)
    assert memory.launches() == []


def test_an_address_runs_on_the_stream_that_another_argument_names(memory):
    loaded(memory)(MEMORY, array(data=(MEMORY + 64, False), stream=9), 7)
    assert [launched.stream for launched in memory.launches()] == [9]


def test_bfloat16_is_never_taken_for_another_two_byte_type():
    for typestr in ("<f2", "<u2", "<i2", "<V2"):
        with pytest.raises(LaunchError):
            arguments.read("k", X._replace(dtype="bfloat16"), array(typestr=typestr))


@pytest.mark.parametrize(("nullable", "refused"), [(True, False), (False, True)])
def test_none_is_a_null_pointer_where_the_definition_allows_it(nullable, refused):
    param = X._replace(nullable=nullable)
    if refused:
        with pytest.raises(LaunchError):
            arguments.read("k", param, None)
    else:
        assert arguments.read("k", param, None) == Passed(0)


@pytest.mark.parametrize(
    ("params", "values", "hold"),
    [
        ([X], {"x": 0x1000}, True),
        ([X], {"x": 0x1008}, False),
        ([X], {"x": 0x1001}, False),
        ([X], {"x": 0}, True),
        ([X._replace(align=0)], {"x": 0x1001}, True),
        ([X, OUT._replace(align=256)], {"x": 0x1000, "out": 0x1080}, False),
        ([X, OUT._replace(align=256)], {"x": 0x1000, "out": 0x1100}, True),
        ([Param("n", "i32", "", 0, 4, divisible_by=8)], {"n": 24}, True),
        ([Param("n", "i32", "", 0, 4, divisible_by=8)], {"n": 28}, False),
        ([Param("n", "i32", "", 0, 4, divisible_by=8)], {"n": 0}, True),
        ([X, Param("n", "i32", "", 8, 4, divisible_by=8)], {"x": 0x1000, "n": 9}, False),
        ([], {}, True),
    ],
    ids=range(12),
)
def test_declaredfacts_hold_for_all_arguments_or_not_at_all(params, values, hold):
    assert launch.facts_hold(params, values) is hold


@pytest.mark.parametrize(("address", "n"), [(0x1000, 16), (0x1008, 16), (0x1000, 17), (0x1001, 1), (0, 0)])
def test_the_generated_condition_agrees_with_the_slow_one(address, n):
    params = [X, OUT._replace(align=32), Param("n", "i32", "", 16, 4, divisible_by=16)]
    values = {"x": address, "out": 0x2000, "n": n}
    condition = quick._fact_condition(params)
    assert eval(condition, {}, {"_p_x": address, "_p_out": 0x2000, "n": n}) is launch.facts_hold(params, values)


NAMES = {"n": 1000, "size": 8}


@pytest.mark.parametrize(
    ("grid", "dimensions"),
    [
        (None, (8, 1, 1)),
        (5, (5, 1, 1)),
        ((5,), (5, 1, 1)),
        ([5, 6], (5, 6, 1)),
        ((5, 6, 7), (5, 6, 7)),
        (0, (0, 1, 1)),
        (lambda meta: (meta["n"] // meta["size"],), (125, 1, 1)),
        (lambda meta: meta["size"], (8, 1, 1)),
        ((2**31 - 1, 65535, 65535), (2**31 - 1, 65535, 65535)),
        (np.int64(5), (5, 1, 1)),
        ((np.int32(5), 6), (5, 6, 1)),
    ],
    ids=range(11),
)
def test_a_grid_is_the_definitions_or_the_callers(grid, dimensions):
    found = grid_of(contract(grid=("cdiv(n, 128)",)), NAMES, grid)
    assert found == dimensions
    assert all(type(extent) is int for extent in found)


@pytest.mark.parametrize(
    "grid",
    [
        (),
        (1, 2, 3, 4),
        -1,
        (4, -1),
        1.5,
        (1.5,),
        "12",
        "x",
        {"x": 1},
        object(),
        lambda meta: None,
        lambda meta: (None,),
        2**32,
        2**32 + 1,
        (1, 2**32 + 1),
    ],
    ids=range(15),
)
def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(LaunchError) as caught:
        grid_of(contract(), NAMES, grid)
    assert caught.value.facts["allowed"]


@pytest.mark.parametrize(
    ("grid", "names"),
    [("cdiv(n, size)", {"n": 8, "size": 0}), ("n", {"n": -3}), ("n", {"n": 2**33 + 1})],
    ids=["division by zero", "negative", "beyond the driver's range"],
)
def test_a_definition_whose_grid_has_no_value_refuses_the_launch(grid, names):
    with pytest.raises(LaunchError):
        grid_of(contract(grid=(grid,)), names, None)


@pytest.mark.parametrize(
    ("values", "three"), [((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 6, 7), (5, 6, 7)), ((True,), (1, 1, 1))]
)
def test_missing_dimensions_are_one(values, three):
    assert launch._three(values) == three


@pytest.mark.parametrize(
    ("streams", "stream", "handle"),
    [
        ([7, 7], None, 7),
        ([0], None, 0),
        ([7, None], None, 7),
        ([7, 9], 5, 5),
        ([7], 0, 0),
        ([7], SimpleNamespace(cuda_stream=3), 3),
        ([7], SimpleNamespace(ptr=4), 4),
        ([], None, 0),
    ],
)
def test_the_stream_is_the_callers_or_the_one_of_the_arguments(streams, stream, handle):
    passed = [Passed(0x1000, 0, found) for found in streams]
    assert launch._stream("k", passed, stream) == handle


@pytest.mark.parametrize(("streams", "stream"), [([7, 9], None), ([None], None), ([7], "default"), ([7], object()), ([7], 1.5)])
def test_a_stream_that_cannot_be_told_is_asked_for(streams, stream):
    with pytest.raises(LaunchError):
        launch._stream("k", [Passed(0x1000, 0, found) for found in streams], stream)


def test_arguments_on_different_devices_are_refused_with_their_devices():
    with pytest.raises(LaunchError) as caught:
        launch._common_device("k", [X, OUT], [Passed(0x1000, 0), Passed(0x2000, 1)])
    assert set(caught.value.facts) == {"x", "out"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_arguments_is_refused_with_their_names(count):
    with pytest.raises(LaunchError) as caught:
        kernel(X, OUT)._roads.slow((0,) * count, None, None)
    assert all(word in caught.value.message for word in ("x", "out", "2", str(count)))


def test_scratch_is_no_argument():
    with pytest.raises(LaunchError) as caught:
        kernel(X, Param("scratch_0", "scratch", "", 8, 8))._roads.slow((), None, None)
    assert "scratch" not in caught.value.message


@pytest.mark.parametrize(
    "params",
    [
        [],
        [X],
        [X, OUT, Param("n", "i64", "", 16, 8, divisible_by=8), Param("f", "f32", "", 24, 4), Param("b", "bool", "", 28, 1)],
        [Param("p", "struct", "", 0, 5)],
    ],
    ids=range(4),
)
def test_the_generated_launch_is_python(params):
    compile(quick_source(contract(*params)), "<launch>", "exec")


def test_a_kernel_shows_the_facts_of_its_manifest():
    found = kernel(X)
    assert (found.name, found.key, found.digest) == ("scale", "ab" * 32, "cd" * 32)
    assert (str(found.target), found.origin, found.seconds) == ("cuda:sm_90", "built", 1.5)
    assert found.resources == {"registers": 12, "blocks_per_sm": 16, "occupancy_percent": 100}
    assert found.generic is None
    assert kernel(X, n_variants=2).generic.variant == "generic"


def test_changing_the_shown_resources_changes_nothing():
    found = kernel(X)
    found.resources["registers"] = 0
    assert found.resources["registers"] == 12


def test_a_memo_hit_says_so_and_leaves_the_first_kernel_alone():
    first = kernel(X)
    again = first.as_memo()
    assert (again.origin, again.seconds, again.key) == ("memo", 0.0, first.key)
    assert (first.origin, first.seconds) == ("built", 1.5)
    assert again._roads is first._roads, "loaded once"


def test_a_kernel_that_is_not_loaded_refuses_to_launch():
    found = kernel(X)
    for call in (found, found[1], found[lambda meta: 1]):
        with pytest.raises(KserveError) as caught:
            call(None)
        assert caught.value.code == "load-failed"
