"""What the keys of an extension and of its units differ on, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest

from kserve.build.extension_job import Outside, Root
from kserve.build.includes import MissingIncludes, as_built, with_includes
from kserve.build.plan import Debug, Plan, job_of, plan_builds, plan_extension
from kserve.build.unit_plan import unit_plans
from kserve.errors import InvalidDefinition, InvalidSpec
from kserve.kernel_toml import read_definition
from kserve.target import parse_target
from kserve.toolchain.base import Fingerprint

TOML = """
schema = 1
language = "torch-extension"
sources = ["first.cpp", "device.cu"]
headers = ["all.h"]
[spec]
wide = { type = "int", min = 1, max = 64, default = 8 }
[target]
cuda = "sm_80"
[options]
cflags = ["-O2"]
cuda_cflags = ["-O3"]
ldflags = ["-lm"]
[[entry]]
name = "named"
summary = "for its key"
"""
FILES = dict.fromkeys(("kernel.toml", "first.cpp", "device.cu", "all.h"), "0" * 64)
FACTS = {"torch": "2.14 abc", "stable_headers": "s" * 64, "python": "cpython-311", "cxx": "1"}
COMPILERS = Fingerprint("torch-extension", "c++ 12, nvcc 13", "f" * 64, {}, "reproducible 1", FACTS)
SOURCES = Root("/here/src", "quote .")


def planned(toml: str = TOML, *, target: str = "sm_90", spec: dict[str, Any] | None = None, **changes: Any) -> Plan:
    definition = read_definition(toml.encode(), origin="kernel.toml")
    files = {**FILES, **changes.pop("files", {})}
    fingerprint = COMPILERS._replace(**changes.pop("fingerprint", {}))
    (entry,) = definition.entries.values()
    made_of: dict[str, Any] = {"spec": spec or {}, "target": parse_target(target), "fingerprint": fingerprint, "files": files}
    if "outside" not in changes:
        (plan,) = plan_builds(definition, entry, **made_of, **changes)
        return plan
    return plan_extension(definition, entry, **made_of, **changes)


def keys(plan: Plan) -> tuple[str, str, str]:
    """Of the library, of the C++ unit, of the CUDA unit."""
    units = {unit.job.main: unit.key for unit in unit_plans(plan)}
    return plan.key, units["first.cpp"], units["device.cu"]


def facts(**changes: str) -> dict[str, Any]:
    return {"fingerprint": {"facts": {**FACTS, **changes}}}


STABLE = TOML.replace("[options]", '[options]\nstable_abi = "2.11"\nbinding = "operators"')
# What changes -> which keys do: the library's, the C++ unit's, the CUDA unit's.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[bool, bool, bool]]] = {
    "a C++ source": ({}, {"files": {"first.cpp": "1" * 64}}, (True, True, False)),
    "a CUDA source": ({}, {"files": {"device.cu": "1" * 64}}, (True, False, True)),
    "a header": ({}, {"files": {"all.h": "1" * 64}}, (True, True, True)),
    "options of C++": ({}, {"toml": TOML.replace("-O2", "-O1")}, (True, True, False)),
    "options of CUDA": ({}, {"toml": TOML.replace("-O3", "-O1")}, (True, False, True)),
    "options of the linker": ({}, {"toml": TOML.replace("-lm", "-lz")}, (True, False, False)),
    "the target": ({}, {"target": "sm_80"}, (True, False, True)),
    "named arches": ({}, {"toml": TOML.replace("[options]", '[options]\narches = ["sm_80"]')}, (True, False, True)),
    "the name": ({}, {"toml": TOML.replace('"named"', '"other"')}, (True, True, True)),
    "the spec": ({}, {"spec": {"wide": 16}}, (True, True, True)),
    "the order of the sources": (
        {},
        {"toml": TOML.replace('"first.cpp", "device.cu"', '"*.cpp", "*.cu"')},
        (True, False, False),
    ),
    "the compilers": ({}, {"fingerprint": {"files": "e" * 64}}, (True, True, True)),
    "torch": ({}, facts(torch="2.15 def"), (True, True, True)),
    "Python": ({}, facts(python="cpython-312"), (True, True, True)),
    "the C++ library": ({}, facts(cxx="0"), (True, True, True)),
    "stable headers that are not read": ({}, facts(stable_headers="t" * 64), (False, False, False)),
    "torch of a stable build": ({"toml": STABLE}, {"toml": STABLE, **facts(torch="2.15 def")}, (False, False, False)),
    "Python of operators": ({"toml": STABLE}, {"toml": STABLE, **facts(python="cpython-312")}, (False, False, False)),
    "stable headers": ({"toml": STABLE}, {"toml": STABLE, **facts(stable_headers="t" * 64)}, (True, True, True)),
    "the stable ABI": ({"toml": STABLE}, {"toml": STABLE.replace("2.11", "2.12")}, (True, True, True)),
    "a place outside": (
        {"outside": Outside((SOURCES,), {})},
        {"outside": Outside((SOURCES._replace(path="/there/src"),), {})},
        (False, False, False),
    ),
    "the use of a place": (
        {"outside": Outside((SOURCES,), {})},
        {"outside": Outside((SOURCES._replace(use="include"),), {})},
        (True, True, True),
    ),
    "a package": (
        {"outside": Outside((Root("/p", "include", "pack-1"),), {})},
        {"outside": Outside((Root("/p", "include", "pack-2"),), {})},
        (True, True, True),
    ),
    "a project around": (
        {"outside": Outside((SOURCES,), {})},
        {"outside": Outside((SOURCES, Root("/here", "project")), {})},
        (False, False, False),
    ),
}


@pytest.mark.parametrize(("before", "after", "differ"), CHANGES.values(), ids=CHANGES.keys())
def test_what_a_key_differs_on(before: dict[str, Any], after: dict[str, Any], differ: tuple[bool, bool, bool]):
    old, new = keys(planned(**before)), keys(planned(**after))
    assert tuple(one != other for one, other in zip(old, new, strict=True)) == differ


def test_a_stored_key_gives_the_job_again():
    plan = planned()
    for one in (plan, *unit_plans(plan)):
        job, files = job_of(one.components)
        assert job == one.job
        assert files == one.files


def test_what_was_read_outside_is_in_the_key_of_what_was_built():
    plan = planned(outside=Outside((SOURCES,), {"0/a.h": "a" * 64}))
    built = as_built(plan, {"0/b.h": "b" * 64})
    assert built.key != plan.key
    assert as_built(built, {}) == plan
    assert with_includes(plan, {"0/b.h": "c" * 64}).key != built.key
    assert as_built(planned(), {"0/b.h": "b" * 64}) == planned()
    assert MissingIncludes(["0/a.h"]).names


def test_a_flag_names_no_place_that_the_request_has_not():
    toml = TOML.replace('"-lm"', '"{root1}/libfar.a"')
    planned(toml, outside=Outside((SOURCES, Root("/far", "read")), {}))
    with pytest.raises(InvalidDefinition, match="root1"):
        planned(toml, outside=Outside((SOURCES,), {}))
    with pytest.raises(InvalidDefinition, match="root1"):
        planned(toml)


def test_an_extension_has_no_debug_variant():
    with pytest.raises(InvalidSpec, match="without debug variants"):
        planned(debug=Debug("lineinfo", "/root"))


def test_a_folder_without_a_unit_is_refused():
    with pytest.raises(InvalidDefinition, match="nothing to compile"):
        planned(TOML.replace('["first.cpp", "device.cu"]', '["notes.txt"]').replace('["all.h"]', '["first.cpp", "device.cu"]'))
