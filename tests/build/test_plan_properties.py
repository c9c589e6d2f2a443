"""Keys over generated input: a build has one key however it is asked for, and no two builds share one."""

from __future__ import annotations

import os
import random
import tomllib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kserve.build.plan import Plan, contract_of, plan_builds
from kserve.errors import InvalidDefinition, KserveError
from kserve.kernel_toml import read_definition
from kserve.key import build_key
from kserve.spec import DTYPES
from kserve.target import parse_target
from kserve.toolchain.base import Built, Fingerprint
from tests.support.definitions import FULL_CUDA, FULL_TRITON
from tests.support.mutations import TOML_VALUES, mutated, toml_of
from tests.support.processes import python


class TorchDtype:
    """Prints as a torch dtype does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Build(NamedTuple):
    """Everything one compile and its launch depend on, in one form."""

    size: int
    dtype: str
    flag: bool
    twice: int | None
    function: str
    flags: tuple[str, ...]
    exact: str
    align: int
    divisible_by: int
    mutated: bool
    nullable: bool
    contiguous: bool
    names: tuple[str, str]
    grid: tuple[str, ...]
    block: tuple[str, ...]
    shared_bytes: str
    main: str
    files: frozenset[tuple[str, str]]
    compiler: tuple[str, str, str, str]


FILES = {"kernel.toml": "0" * 64, "kernel.cu": "1" * 64, "kernel.py": "2" * 64}
COMPILER = Fingerprint("compiler", "1", "f" * 64, {})
BUILT = Built("cubin", "symbol", params=None, kinds=[], resources={"shared_bytes": 0}, attachments={}, threads=128)

_DIGESTS = st.sampled_from(["1" * 64, "2" * 64])
_FLAGS = st.sampled_from(["-DA", "-DB", "-DA -DB", "-DAB"])
_EXPRESSIONS = st.sampled_from(["1", "11", "cdiv(n, 8)", "size"])
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "size": st.sampled_from([1, 8, 11]),
    "dtype": st.sampled_from(["float32", "float16"]),
    "flag": st.booleans(),
    "twice": st.none() | st.just(2),
    "function": st.sampled_from(["scale<{size}>", "scale<{size}, {dtype}>"]),
    "flags": st.lists(_FLAGS, max_size=3).map(tuple),
    "exact": st.sampled_from(["sm_80", "sm_90", "sm_90a"]),
    "align": st.sampled_from([0, 16, 32]),
    "divisible_by": st.sampled_from([0, 8]),
    "mutated": st.booleans(),
    "nullable": st.booleans(),
    "contiguous": st.booleans(),
    "names": st.sampled_from([("x", "n"), ("xn", "n"), ("y", "n")]),
    "grid": st.lists(st.sampled_from(["1", "11", "size"]), min_size=1, max_size=3).map(tuple),
    "block": st.lists(st.sampled_from(["1", "11", "size"]), min_size=1, max_size=2).map(tuple),
    "shared_bytes": st.sampled_from(["0", "1", "size"]),
    "main": st.sampled_from(["kernel.cu", "other.cu"]),
    "files": st.dictionaries(st.sampled_from(["a.cuh", "b.cuh", "a/b.cuh"]), _DIGESTS).map(lambda d: frozenset(d.items())),
    "compiler": st.tuples(
        st.sampled_from(["nvrtc", "nvcc"]), st.sampled_from(["13", "13.0"]), _DIGESTS, st.sampled_from(["", "-a"])
    ),
}
BUILDS = st.fixed_dictionaries(DRAWN).map(lambda fields: Build(**fields))
SPELLED_TARGETS = {
    "sm_80": [("sm_80", "none"), ("cuda:sm_80", "arch"), ("sm_80", "family")],
    "sm_90": [("sm_90", "none"), ("cuda:sm_90", "family")],
    "sm_90a": [("sm_90a", "none"), ("sm_90", "arch"), ("cuda:sm_90a", "family")],
}


@st.composite
def plans(draw: st.DrawFn, build: Build) -> list[Plan]:
    """The plans of that build, asked for in one of the ways there are."""

    def shuffled(table: dict[str, Any]) -> dict[str, Any]:
        return dict(draw(st.permutations(list(table.items()))))

    def optional(field: str, value: object, *, default: object) -> dict[str, Any]:
        return {} if value == default and draw(st.booleans()) else {field: value}

    spec = {
        "size": draw(st.sampled_from([build.size, str(build.size), np.int32(build.size)])),
        "dtype": draw(st.sampled_from([build.dtype, f"torch.{build.dtype}", TorchDtype(build.dtype), np.dtype(build.dtype)])),
        "flag": draw(st.sampled_from([build.flag, str(build.flag), str(int(build.flag)), np.bool_(build.flag)])),
    }
    default = draw(st.sampled_from(["nothing", *spec]))
    axes = {"size": {"type": "int"}, "dtype": {"type": "dtype"}, "flag": {"type": "bool"}}
    if default != "nothing":
        axes[default]["default"] = getattr(build, default)
        if draw(st.booleans()):
            del spec[default]
    asked, features = draw(st.sampled_from(SPELLED_TARGETS[build.exact]))
    pointer = {
        "name": build.names[0],
        "type": "pointer",
        "dtype": draw(st.sampled_from(["dtype", build.dtype])),
        # An element's own size always holds: it is no fact.
        **optional("align", build.align or draw(st.sampled_from([0, 2, DTYPES[build.dtype].size_bytes])), default=0),
        **optional("mutated", build.mutated, default=False),
        **optional("nullable", build.nullable, default=False),
        **optional("contiguous", build.contiguous, default=True),
    }
    count = {"name": build.names[1], "type": "i32", **optional("divisible_by", build.divisible_by, default=0)}
    launch = {
        "grid": [int(text) if text.isdecimal() and draw(st.booleans()) else text for text in build.grid],
        "block": list(build.block),
        **optional("shared_bytes", build.shared_bytes, default="0"),
    }
    entry = {
        "name": "scale",
        "summary": draw(st.sampled_from(["one", "two"])),
        "function": build.function,
        "arguments": [shuffled(pointer), shuffled(count)],
        "launch": shuffled(launch),
    }
    toml = {
        "schema": 1,
        "language": "cuda",
        "sources": [build.main],
        "spec": shuffled(axes),
        "derived": {} if build.twice is None else {"twice": draw(st.sampled_from(["2 * size", "size + size"]))},
        "options": {} if not build.flags and draw(st.booleans()) else {"flags": list(build.flags)},
        "target": shuffled({"cuda": draw(st.sampled_from(["sm_75", "sm_80"])), "features": features}),
        "entry": [shuffled(entry)],
    }
    files = {"kernel.toml": draw(_DIGESTS), "kernel.cu": "3" * 64, "other.cu": "4" * 64, **dict(build.files)}
    name, version, digest, options = build.compiler
    definition = read_definition(toml_of(shuffled(toml)).encode(), origin="kernel.toml")
    return plan_builds(
        definition,
        definition.entries["scale"],
        spec=shuffled(spec),
        target=parse_target(asked),
        fingerprint=Fingerprint(name, version, digest, {str(draw(st.integers(0, 9))): [1]}, options),
        files=shuffled(files),
    )


@given(st.data())
def test_a_build_has_one_key_however_it_is_asked_for(data: st.DataObject):
    build = data.draw(BUILDS)
    one, other = data.draw(plans(build)), data.draw(plans(build))
    assert [plan.key for plan in one] == [plan.key for plan in other]
    assert [plan.components for plan in one] == [plan.components for plan in other]
    assert [contract_of(plan, BUILT) for plan in one] == [contract_of(plan, BUILT) for plan in other]


@pytest.mark.parametrize("field", Build._fields)
@settings(max_examples=20)
@given(data=st.data())
def test_every_field_of_a_build_is_in_its_key(field: str, data: st.DataObject):
    build = data.draw(BUILDS)
    other = build._replace(**{field: data.draw(DRAWN[field].filter(lambda value: value != getattr(build, field)))})
    assert data.draw(plans(build))[0].key != data.draw(plans(other))[0].key


@given(st.data())
def test_the_generic_build_is_the_build_without_facts(data: st.DataObject):
    build = data.draw(BUILDS)
    (bare,) = {plan.key for plan in data.draw(plans(build._replace(align=0, divisible_by=0)))}
    declared, *generic = data.draw(plans(build))
    assert [plan.key for plan in generic] == [bare] * len(generic)
    assert (declared.key == bare) == (not build.align and not build.divisible_by)


# Few characters, those of the key's own form among them: parts that look alike when joined are drawn all the time.
_PARTS = st.text("ab1:2\n", max_size=5)
_COMPONENTS = st.dictionaries(_PARTS, _PARTS, max_size=5)


@given(_COMPONENTS, st.randoms(use_true_random=False))
def test_a_key_does_not_depend_on_the_order_of_its_components(components: dict[str, str], source: random.Random):
    items = list(components.items())
    source.shuffle(items)
    assert build_key(dict(items)) == build_key(components)


@given(_COMPONENTS, _COMPONENTS)
def test_keys_are_equal_exactly_when_the_components_are(one: dict[str, str], other: dict[str, str]):
    assert (build_key(one) == build_key(other)) == (one == other)


@given(st.lists(st.tuples(_PARTS, _PARTS), min_size=1, max_size=5, unique_by=lambda part: part[0]), st.data())
def test_a_character_moved_over_a_border_gives_another_key(components: list[tuple[str, str]], data: st.DataObject):
    parts = [part for component in components for part in component]
    border = data.draw(st.integers(0, len(parts) - 2))
    assume(parts[border])
    moved = [*parts[:border], parts[border][:-1], parts[border][-1] + parts[border + 1], *parts[border + 2 :]]
    assert "".join(moved) == "".join(parts)
    changed = dict(zip(moved[::2], moved[1::2], strict=True))
    assert build_key(changed) != build_key(dict(components))


VALUES = st.integers(-2, 300) | st.booleans() | st.sampled_from(["8", "float32", "torch.float16", "a", "x", 2**62, -(2**63)])


@given(st.data())
def test_what_the_reader_accepts_is_planned_or_refused_in_words(data: st.DataObject):
    valid = tomllib.loads(data.draw(st.sampled_from([FULL_CUDA, FULL_TRITON])))
    document = data.draw(st.just(valid) | mutated(valid, values=TOML_VALUES | VALUES, most=2))
    try:
        definition = read_definition(toml_of(document).encode(), origin="kernel.toml")
    except InvalidDefinition:
        return
    (entry,) = definition.entries.values()
    spec = data.draw(st.dictionaries(st.sampled_from([*definition.axes, "other"]), VALUES, max_size=3))
    target = parse_target(data.draw(st.sampled_from(["sm_75", "sm_90", "sm_100", "gfx942"])))
    try:
        for plan in plan_builds(definition, entry, spec=spec, target=target, fingerprint=COMPILER, files=FILES):
            assert build_key(plan.components) == plan.key
            contract_of(plan, BUILT)
    except KserveError as error:
        assert error.code in ("invalid-definition", "invalid-spec", "unsupported-target", "compile-failed")


PLAN_ALL = """
import importlib, json, random, sys
source = random.Random(int(sys.argv[1]))
modules = ["kserve.build.plan", "kserve.catalog", "kserve.kernel_toml", "kserve.config", "kserve.artifact", "kserve.protocol"]
source.shuffle(modules)
for module in modules:
    importlib.import_module(module)
from kserve.build.plan import plan_builds
from kserve.catalog import definition_of, find
from kserve.config import load_settings
from kserve.target import parse_target
from kserve.toolchain.base import Fingerprint

def shuffled(items):
    return source.sample(list(items), len(list(items)))

wanted = [(name, target) for name in ("fused_norm_residual", "realspace_fwd", "realspace_bwd") for target in ("sm_80", "sm_90")]
specs = {"fused_norm_residual": {"hidden": 96, "dtype": "float32", "training": False}}
keys = {}
for name, target in shuffled(wanted):
    found = find(name, load_settings())
    definition = definition_of(found.folder)
    spec = dict(shuffled(specs.get(name, {"n_ang": 4, "n_grid": 16}).items()))
    stamps = {path: [1, 2, 3] for path in shuffled({"/a", "/b", "/c"})}
    plans = plan_builds(
        definition, definition.entries[name], spec=spec, target=parse_target(target),
        fingerprint=Fingerprint("compiler", "1", "f" * 64, stamps), files=dict(shuffled(found.digests.items())),
    )
    keys[name + " " + target] = [plan.key for plan in plans]
print(json.dumps(keys, sort_keys=True))
"""


def test_twenty_processes_with_random_hash_seeds_give_one_key():
    """CASES 7: imports, kernels, specs and files in another order in each."""

    def keys(seed: int) -> str:
        return python(PLAN_ALL, str(seed), PYTHONHASHSEED=str(seed)).stdout

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = set(threads.map(keys, range(20)))
    assert len(found) == 1
    assert found.pop().count('"') > 20
