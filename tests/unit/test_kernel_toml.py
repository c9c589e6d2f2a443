"""kernel.toml: what a definition says, and every way it can be wrong."""

from __future__ import annotations

import pytest

from kserve.errors import InvalidDefinition, InvalidSpec, UnsupportedTarget
from kserve.kernel_toml import read_definition
from kserve.target import parse_target
from tests.support.definitions import CUDA_TOML

TRITON_TOML = """
schema = 1
language = "triton"
sources = ["k.py"]
[spec]
n_ang = { type = "int", min = 1, max = 8, default = 3 }
[derived]
points = "4 * n_ang - 3"
[target]
cuda = "sm_80"
hip = ["gfx942"]
[options]
num_warps = 4
[[entry]]
name = "fwd"
summary = "one line"
function = "fwd"
arguments = [
  { name = "x", type = "pointer", dtype = "float32", align = 16 },
  { name = "rows", type = "i64", divisible_by = 16 },
  { name = "BLOCK", type = "constexpr", value = "256 * (n_ang <= 4)" },
]
launch = { grid = ["cdiv(rows, BLOCK)"] }
"""

SIZE = 'size = { type = "int", min = 1, max = 4096, default = 8 }'
X = '{ name = "x", type = "pointer", dtype = "float32", align = 16 }'
N = '{ name = "n", type = "i32" }'
LAUNCH = 'launch = { grid = ["cdiv(n, 128)"], block = [128] }'


def read(toml: str, *edits: tuple[str, str]):
    """The definition of that text after the edits; each must change something."""
    for old, new in edits:
        assert old in toml
        toml = toml.replace(old, new, 1)
    return read_definition(toml.encode(), origin="folder/kernel.toml")


def test_a_cuda_definition_is_read_field_by_field():
    found = read(CUDA_TOML)
    entry = found.entries["scale"]
    assert (found.language, found.sources, found.headers, found.shared_headers) == ("cuda", ("kernel.cu",), (), ())
    assert (found.minimum_cuda, found.features, found.hip) == (80, "none", ())
    assert (found.axes["size"].low, found.axes["size"].high, found.axes["size"].default) == (1, 4096, 8)
    assert (entry.name, entry.summary, entry.function) == ("scale", "out = factor * x", "scale<{size}>")
    assert [(a.name, a.kind, a.dtype, a.mutated, a.nullable, a.contiguous, a.align) for a in entry.arguments] == [
        ("x", "pointer", "float32", False, False, True, 16),
        ("out", "pointer", "float32", True, False, True, 16),
        ("n", "i32", "", False, False, True, 0),
        ("factor", "f32", "", False, False, True, 0),
    ]
    assert [e.text for e in (*entry.launch.grid, *entry.launch.block)] == ["cdiv(n, 128)", "128"]
    assert entry.launch.shared_bytes is None
    assert entry.has_facts


def test_a_triton_definition_is_read_field_by_field():
    found = read(TRITON_TOML)
    entry = found.entries["fwd"]
    assert (found.language, found.hip, found.options["num_warps"].text) == ("triton", ("gfx942",), "4")
    assert found.derived["points"].text == "4 * n_ang - 3"
    assert (entry.arguments[1].divisible_by, entry.arguments[2].value.text) == (16, "256 * (n_ang <= 4)")
    assert entry.launch.block == ()


@pytest.mark.parametrize(
    ("edits", "look", "value"),
    [
        ([(N, '{ name = "n", type = "i64", divisible_by = 8 }')], lambda d: d.entries["scale"].arguments[2].divisible_by, 8),
        ([(X, X[:-1] + ", nullable = true, contiguous = false }")], lambda d: d.entries["scale"].arguments[0].nullable, True),
        ([(X, X[:-1] + ", contiguous = false }")], lambda d: d.entries["scale"].arguments[0].contiguous, False),
        ([(X, '{ name = "p", type = "struct", size_bytes = 24 }')], lambda d: d.entries["scale"].arguments[0].size_bytes, 24),
        ([(X, '{ name = "m", type = "tensor_map" }')], lambda d: d.entries["scale"].arguments[0].kind, "tensor_map"),
        (
            [("block = [128]", "block = [16, 8, 2], shared_bytes = 'size * 4'")],
            lambda d: len(d.entries["scale"].launch.block),
            3,
        ),
        (
            [("block = [128]", "block = [128], shared_bytes = 'size * 4'")],
            lambda d: d.entries["scale"].launch.shared_bytes.text,
            "size * 4",
        ),
        ([(SIZE, SIZE + '\nt = { type = "dtype", default = "torch.float16" }')], lambda d: d.axes["t"].default, "float16"),
        (
            [(SIZE, SIZE + '\nt = { type = "dtype" }'), ('dtype = "float32"', 'dtype = "t"')],
            lambda d: d.entries["scale"].arguments[0].dtype,
            "t",
        ),
        ([(SIZE, SIZE + '\nf = { type = "bool", default = false }')], lambda d: d.axes["f"].default, False),
        ([(SIZE, SIZE + '\nm = { type = "enum", values = ["a", "b"] }')], lambda d: d.axes["m"].values, ("a", "b")),
        ([(SIZE, SIZE + '\ns = { type = "string" }')], lambda d: d.axes["s"].default, None),
        ([('cuda = "sm_80"', 'cuda = "sm_90"\nfeatures = "arch"')], lambda d: (d.minimum_cuda, d.features), (90, "arch")),
        (
            [("[target]", '[options]\nflags = ["--std=c++17", "-use_fast_math", "-DX=1"]\n[target]')],
            lambda d: d.options["flags"],
            ("--std=c++17", "-use_fast_math", "-DX=1"),
        ),
        (
            [("headers = []", 'headers = ["*.cuh", "a/**/*.h"]\nshared_headers = ["kserve/x.cuh"]')],
            lambda d: (d.headers, d.shared_headers),
            (("*.cuh", "a/**/*.h"), ("kserve/x.cuh",)),
        ),
        ([("align = 16", "align = 0"), ("align = 16", "align = 0")], lambda d: d.entries["scale"].has_facts, False),
    ],
)
def test_a_field_is_read(edits, look, value):
    assert look(read(CUDA_TOML, *edits)) == value


def test_a_folder_may_define_several_entries():
    second = CUDA_TOML[CUDA_TOML.index("[[entry]]") :].replace('name = "scale"', 'name = "scale_again"')
    assert list(read(CUDA_TOML + second).entries) == ["scale", "scale_again"]


def test_an_entry_without_arguments_is_read():
    toml = CUDA_TOML[: CUDA_TOML.index("arguments = [")] + 'arguments = []\nlaunch = { grid = ["1"], block = [128] }'
    assert read(toml).entries["scale"].arguments == ()


CUDA_REFUSALS = [
    # field named in the message, edits
    ("schema", [("schema = 1", "schema = 2")]),
    ("schema", [("schema = 1", "schema = true")]),
    ("schema", [("schema = 1", "")]),
    ("language", [('language = "cuda"', 'language = "opencl"')]),
    ("language", [('language = "cuda"', "language = 1")]),
    ("language", [('language = "cuda"', "")]),
    ("colour", [("schema = 1", "schema = 1\ncolour = 1")]),
    ("sources", [('sources = ["kernel.cu"]', "")]),
    ("sources", [('sources = ["kernel.cu"]', "sources = []")]),
    ("sources", [('sources = ["kernel.cu"]', 'sources = "kernel.cu"')]),
    ("sources", [('sources = ["kernel.cu"]', "sources = [1]")]),
    ("sources", [('"kernel.cu"', '"/etc/passwd"')]),
    ("sources", [('"kernel.cu"', '"../kernel.cu"')]),
    ("sources", [('"kernel.cu"', '"a/../../kernel.cu"')]),
    ("sources", [('"kernel.cu"', '"a\\\\kernel.cu"')]),
    ("sources", [('"kernel.cu"', '""')]),
    ("headers", [("headers = []", 'headers = ["/usr/include/x.h"]')]),
    ("shared_headers", [("headers = []", 'shared_headers = ["../x.h"]')]),
    ("spec", [("[spec]\n" + SIZE, "spec = 1")]),
    ("spec.size", [(SIZE, "size = 8")]),
    ("spec.size.type", [(SIZE, "size = {}")]),
    ("spec.size.type", [('type = "int"', 'type = "integer"')]),
    ("spec.size.min", [("min = 1", 'min = "1"')]),
    ("spec.size.max", [("max = 4096", "max = 1.5")]),
    ("spec.size.default", [("default = 8", "default = 0")]),
    ("spec.size.default", [("default = 8", "default = true")]),
    ("spec.size.values", [("default = 8", "values = [1, 5000]")]),
    ("spec.size.values", [("default = 8", "values = 8")]),
    ("spec.size.default", [("default = 8", "values = [1, 2], default = 3")]),
    ("spec.size.step", [("default = 8", "step = 8")]),
    ("spec.m.values", [(SIZE, SIZE + '\nm = { type = "enum" }')]),
    ("spec.m.values", [(SIZE, SIZE + '\nm = { type = "enum", values = ["a b"] }')]),
    ("spec.b.min", [(SIZE, SIZE + '\nb = { type = "bool", min = 0 }')]),
    ("spec.t.values", [(SIZE, SIZE + '\nt = { type = "dtype", values = ["float33"] }')]),
    ("target", [(SIZE, SIZE + '\ntarget = { type = "int" }')]),
    ("if", [(SIZE, SIZE + '\nif = { type = "int" }')]),
    ("stream", [(SIZE, SIZE + '\nstream = { type = "int" }')]),
    ("derived.double", [("[target]", '[derived]\ndouble = "2 * missing"\n[target]')]),
    ("derived.double", [("[target]", '[derived]\ndouble = "2 ** size"\n[target]')]),
    ("derived.double", [("[target]", "[derived]\ndouble = 1.5\n[target]")]),
    ("derived.a", [("[target]", '[derived]\na = "b"\nb = "size"\n[target]')]),
    ("class", [("[target]", '[derived]\nclass = "size"\n[target]')]),
    ("target", [('[target]\ncuda = "sm_80"', "")]),
    ("target.cuda", [('cuda = "sm_80"', "")]),
    ("target.cuda", [('"sm_80"', '"sm_90a"')]),
    ("target.cuda", [('"sm_80"', '"gfx942"')]),
    ("sm80", [('"sm_80"', '"sm80"')]),
    ("target.cuda", [('"sm_80"', "80")]),
    ("target.features", [('cuda = "sm_80"', 'cuda = "sm_80"\nfeatures = "all"')]),
    ("target.hip", [('cuda = "sm_80"', 'cuda = "sm_80"\nhip = ["gfx942"]')]),
    ("target.rocm", [('cuda = "sm_80"', 'cuda = "sm_80"\nrocm = "gfx942"')]),
    ("options.num_warps", [("[target]", "[options]\nnum_warps = 4\n[target]")]),
    ("options.flags", [("[target]", '[options]\nflags = "-O3"\n[target]')]),
    ("options.flags", [("[target]", '[options]\nflags = ["kernel2.cu"]\n[target]')]),
    ("entry", [(CUDA_TOML[CUDA_TOML.index("[[entry]]") :], "")]),
    ("entry", [("[[entry]]", "[entry]")]),
    ("entry[0].name", [('name = "scale"', 'name = "Scale"')]),
    ("entry[0].name", [('name = "scale"', 'name = "scale-it"')]),
    ("entry[0].name", [('name = "scale"', 'name = ""')]),
    ("entry[0].name", [('name = "scale"', "")]),
    ("entry[0].summary", [('summary = "out = factor * x"', "")]),
    ("entry[0].function", [('function = "scale<{size}>"', "")]),
    ("entry[0].function", [("{size}", "{width}")]),
    ("entry[0].function", [("{size}", "{}")]),
    ("entry[0].shape", [('summary = "out = factor * x"', 'summary = "x"\nshape = 1')]),
    ("entry[0].arguments", [(CUDA_TOML[CUDA_TOML.index("arguments = [") : CUDA_TOML.index("launch")], "")]),
    ("entry[0].arguments[0]", [(X, '"x"')]),
    ("entry[0].arguments[2].name", [('name = "n"', 'name = "def"')]),
    ("entry[0].arguments[2].name", [('name = "n"', 'name = "stream"')]),
    ("entry[0].arguments[2].name", [('name = "n"', 'name = "_n"')]),
    ("arguments[2].name", [('name = "n"', 'name = "x"')]),
    ("arguments[2].name", [('name = "n"', 'name = "size"')]),
    ("entry[0].arguments[2].type", [('type = "i32"', 'type = "int"')]),
    ("entry[0].arguments[2].type", [('type = "i32"', 'type = "constexpr", value = 1')]),
    ("entry[0].arguments[2].divisible_by", [('type = "i32"', 'type = "i32", divisible_by = 1')]),
    ("entry[0].arguments[2].divisible_by", [('type = "i32"', 'type = "i32", divisible_by = -8')]),
    ("entry[0].arguments[2].align", [('type = "i32"', 'type = "i32", align = 8')]),
    ("entry[0].arguments[3].divisible_by", [('type = "f32"', 'type = "f32", divisible_by = 8')]),
    ("entry[0].arguments[0].dtype", [('dtype = "float32", align', "align")]),
    ("entry[0].arguments[0].dtype", [('dtype = "float32"', 'dtype = "size"')]),
    ("entry[0].arguments[0].dtype", [('dtype = "float32"', 'dtype = "half"')]),
    ("entry[0].arguments[0].align", [("align = 16", "align = 1")]),
    ("entry[0].arguments[0].align", [("align = 16", "align = 12")]),
    ("entry[0].arguments[0].align", [("align = 16", "align = 512")]),
    ("entry[0].arguments[0].align", [("align = 16", "align = true")]),
    ("entry[0].arguments[0].mutated", [("align = 16", "mutated = 1")]),
    ("entry[0].arguments[0].size_bytes", [(X, '{ name = "p", type = "struct" }')]),
    ("entry[0].arguments[0].size_bytes", [(X, '{ name = "p", type = "struct", size_bytes = 4097 }')]),
    ("entry[0].arguments[0].dtype", [(X, '{ name = "p", type = "struct", size_bytes = 8, dtype = "float32" }')]),
    ("entry[0].launch", [(LAUNCH, "")]),
    ("entry[0].launch", [(LAUNCH, "launch = 1")]),
    ("entry[0].launch.grid", [('grid = ["cdiv(n, 128)"], ', "")]),
    ("entry[0].launch.grid", [('["cdiv(n, 128)"]', "[]")]),
    ("entry[0].launch.grid", [('["cdiv(n, 128)"]', "[1, 1, 1, 1]")]),
    ("entry[0].launch.grid", [('["cdiv(n, 128)"]', '"cdiv(n, 128)"')]),
    ("entry[0].launch.grid", [('["cdiv(n, 128)"]', "[1.5]")]),
    ("entry[0].launch.grid", [("cdiv(n, 128)", "cdiv(rows, 128)")]),
    ("entry[0].launch.grid", [("cdiv(n, 128)", "cdiv(factor, 128)")]),
    ("entry[0].launch.grid", [("cdiv(n, 128)", "x // 128")]),
    ("entry[0].launch.block", [(", block = [128]", "")]),
    ("entry[0].launch.cluster", [("block = [128]", "block = [128], cluster = [2]")]),
    ("entry[0].launch.shared_bytes", [("block = [128]", "block = [128], shared_bytes = 'rows'")]),
]

TRITON_REFUSALS = [
    ("entry[0].launch.block", [('grid = ["cdiv(rows, BLOCK)"]', 'grid = ["cdiv(rows, BLOCK)"], block = [128]')]),
    ("entry[0].function", [('function = "fwd"', 'function = "fwd_{n_ang}"')]),
    ("options.flags", [("num_warps = 4", "flags = ['-O3']")]),
    ("options.num_warps", [("num_warps = 4", "num_warps = 'rows'")]),
    ("target.hip", [('"gfx942"', '"sm_90"')]),
    ("entry[0].arguments[0].type", [(X, '{ name = "p", type = "struct", size_bytes = 8 }')]),
    ("entry[0].arguments[0].type", [(X, '{ name = "p", type = "tensor_map" }')]),
    ("entry[0].arguments[0].align", [("align = 16", "align = 8")]),
    ("entry[0].arguments[1].divisible_by", [("divisible_by = 16", "divisible_by = 8")]),
    ("entry[0].arguments[2].value", [('value = "256 * (n_ang <= 4)"', 'value = "rows"')]),
    ("entry[0].arguments[2].value", [(', value = "256 * (n_ang <= 4)"', "")]),
    ("entry[0].arguments[2].name", [('"BLOCK", type', '"points", type')]),
]


@pytest.mark.parametrize(
    ("toml", "field", "edits"),
    [(CUDA_TOML, *case) for case in CUDA_REFUSALS] + [(TRITON_TOML, *case) for case in TRITON_REFUSALS],
)
def test_a_wrong_field_is_named_with_its_file(toml, field, edits):
    with pytest.raises(InvalidDefinition) as caught:
        read(toml, *edits)
    assert "folder/kernel.toml" in caught.value.message
    assert field in caught.value.message
    assert caught.value.facts["allowed"]


@pytest.mark.parametrize(
    "flag",
    [
        "-I.",
        "-I/usr/include",
        "--include-path=/usr/include",
        "--pre-include=x.h",
        "-include=x.h",
        "-arch=sm_90",
        "--gpu-architecture=sm_90",
        "-G",
        "--device-debug",
        "-lineinfo",
        "--generate-line-info",
        "-pch",
        "--pch",
        "--pch-dir=x",
        "--use-pch=x",
        "--create-pch=x",
        "-time=x.csv",
        "--time=x.csv",
        "--fdevice-time-trace=x.json",
        "--no-cache",
        "-dlto",
        "--dlink-time-opt",
    ],
)
def test_a_flag_that_names_a_file_a_target_or_another_product_is_refused(flag):
    with pytest.raises(InvalidDefinition) as caught:
        read(CUDA_TOML, ("[target]", f'[options]\nflags = ["{flag}"]\n[target]'))
    assert "options.flags" in caught.value.message


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(InvalidDefinition) as caught:
        read(CUDA_TOML + CUDA_TOML[CUDA_TOML.index("[[entry]]") :])
    assert "entry[1].name" in caught.value.message


def test_a_derived_axis_cannot_replace_an_axis():
    with pytest.raises(InvalidDefinition):
        read(CUDA_TOML, ("[target]", '[derived]\nsize = "2 * size"\n[target]'))


def test_arguments_that_differ_in_case_only_are_refused():
    # Their facts reach the source as macros with upper-case names.
    with pytest.raises(InvalidDefinition):
        read(CUDA_TOML, ('name = "out"', 'name = "X"'))


def test_a_range_without_a_value_is_refused():
    with pytest.raises(InvalidDefinition):
        read(CUDA_TOML, ("min = 1, max = 4096, default = 8", "min = 2, max = 1"))


@pytest.mark.parametrize("text", ["schema = 1 language", "schema = ", "a = 1\na = 2", "a = " + "[" * 5000], ids=range(4))
def test_what_is_not_toml_is_refused_with_its_file(text):
    with pytest.raises(InvalidDefinition) as caught:
        read_definition(text.encode(), origin="folder/kernel.toml")
    assert "folder/kernel.toml" in caught.value.message


@pytest.mark.parametrize(("wanted", "spec"), [({}, {"n_ang": 3, "points": 9}), ({"n_ang": "5"}, {"n_ang": 5, "points": 17})])
def test_derived_axes_follow_the_spec(wanted, spec):
    definition = read(TRITON_TOML)
    assert list(definition.specialise(definition.entries["fwd"], wanted).items()) == list(spec.items())


def test_a_derived_axis_may_use_an_earlier_one():
    definition = read(TRITON_TOML, ("[target]", 'twice = "2 * points"\n[target]'))
    assert definition.specialise(definition.entries["fwd"], {})["twice"] == 18


def test_a_derived_axis_without_a_value_is_the_callers_error():
    definition = read(TRITON_TOML, ("[target]", 'part = "8 // (n_ang - 3)"\n[target]'))
    with pytest.raises(InvalidSpec) as caught:
        definition.specialise(definition.entries["fwd"], {"n_ang": 3})
    assert "part" in caught.value.message


def test_a_derived_axis_cannot_be_asked_for():
    definition = read(TRITON_TOML)
    with pytest.raises(InvalidSpec):
        definition.specialise(definition.entries["fwd"], {"points": 9})


@pytest.mark.parametrize(
    ("toml", "edits", "asked", "exact"),
    [
        (CUDA_TOML, [], "sm_80", "cuda:sm_80"),
        (CUDA_TOML, [], "sm_90", "cuda:sm_90"),
        (CUDA_TOML, [], "sm_90a", "cuda:sm_90a"),
        (CUDA_TOML, [('"sm_80"', '"sm_80"\nfeatures = "arch"')], "sm_90", "cuda:sm_90a"),
        (CUDA_TOML, [('"sm_80"', '"sm_80"\nfeatures = "arch"')], "sm_80", "cuda:sm_80"),
        (CUDA_TOML, [('"sm_80"', '"sm_80"\nfeatures = "family"')], "sm_100", "cuda:sm_100f"),
        (TRITON_TOML, [], "sm_90", "cuda:sm_90a"),
        (TRITON_TOML, [], "gfx942", "hip:gfx942"),
        (TRITON_TOML, [('cuda = "sm_80"\n', "")], "gfx942", "hip:gfx942"),
        (TRITON_TOML, [('"gfx942"', '"hip:gfx942"')], "gfx942", "hip:gfx942"),
        (CUDA_TOML, [('"sm_80"', '"cuda:sm_80"')], "sm_90", "cuda:sm_90"),
    ],
)
def test_a_kernel_names_its_exact_target(toml, edits, asked, exact):
    definition = read(toml, *edits)
    entry = next(iter(definition.entries.values()))
    assert str(definition.resolve_target(entry, parse_target(asked))) == exact


@pytest.mark.parametrize(
    ("toml", "edits", "asked", "allowed"),
    [
        (CUDA_TOML, [], "sm_75", "cuda:sm_80"),
        (CUDA_TOML, [], "gfx942", "CUDA"),
        (TRITON_TOML, [], "gfx90a", "hip:gfx942"),
        (TRITON_TOML, [('cuda = "sm_80"\n', "")], "sm_90", "hip:gfx942"),
    ],
)
def test_a_target_the_kernel_is_not_made_for_is_refused(toml, edits, asked, allowed):
    definition = read(toml, *edits)
    entry = next(iter(definition.entries.values()))
    with pytest.raises(UnsupportedTarget) as caught:
        definition.resolve_target(entry, parse_target(asked))
    assert entry.name in caught.value.message
    assert allowed in caught.value.facts["allowed"]
