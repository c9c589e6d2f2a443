"""The published schema of kernel.toml and the reader: one never refuses what the other accepts, and the reader says why."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kserve.kernel_schema
from kserve.config import built_in_roots
from kserve.definition import KernelDef
from kserve.errors import InvalidDefinition
from kserve.kernel_schema import kernel_schema
from kserve.kernel_toml import read_definition
from kserve.outline import read_outline
from tests.support.definitions import CUDA_TOML, FULL_CUDA, FULL_EXTENSION, FULL_TRITON, TRITON_TOML
from tests.support.mutations import TOML_VALUES, damaged, mutated, places, toml_of
from tests.support.processes import kserve as command
from tests.support.slow_kernel import TOML as SLOW_TOML

PUBLISHED = Path(kserve.kernel_schema.__file__).parent / "kernel.schema.json"
BUILT_IN = sorted(path for root in built_in_roots() for path in root.glob("*/kernel.toml"))
SCHEMA = jsonschema.Draft202012Validator(kernel_schema())

VALID = [CUDA_TOML, TRITON_TOML, SLOW_TOML, FULL_CUDA, FULL_TRITON, FULL_EXTENSION, *(path.read_text() for path in BUILT_IN)]
DOCUMENTS = [tomllib.loads(text) for text in VALID]


def read(document: dict[str, Any]) -> KernelDef | InvalidDefinition:
    """What the reader makes of a document: its definition, or its error in the documented form."""
    try:
        return read_definition(toml_of(document).encode(), origin="folder/kernel.toml")
    except InvalidDefinition as error:
        return documented(error)


def documented(error: InvalidDefinition) -> InvalidDefinition:
    """The error itself, which names the file and what is allowed, and can be printed and sent."""
    assert error.message.startswith("folder/kernel.toml: ")
    assert error.facts["allowed"]
    assert len(str(error)) < 20_000
    json.dumps(error.to_wire()).encode()
    return error


def test_the_published_schema_is_the_one_the_reader_has():
    assert PUBLISHED.read_text() == json.dumps(kernel_schema(), indent=2) + "\n", (
        "kserve kernels --schema > kserve/kernel.schema.json"
    )


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(kernel_schema())


def test_the_command_prints_it():
    assert command("kernels", "--schema").stdout == PUBLISHED.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_what_is_valid_is_valid_for_both(document: dict[str, Any]):
    assert list(SCHEMA.iter_errors(document)) == []
    assert isinstance(read(document), KernelDef)


# What an editor marks: (old, new) in FULL_CUDA or FULL_TRITON.
MARKED = {
    "a field that is none": (FULL_CUDA, "schema = 1", "schema = 1\ncolour = 1"),
    "a field of another type of argument": (FULL_CUDA, 'type = "f32"', 'type = "f32", align = 4'),
    "a field of another type of axis": (FULL_CUDA, 'type = "string"', 'type = "string", min = 1'),
    "a field left out": (FULL_CUDA, 'function = "scale<{size}, {dtype}, {twice}, {UNROLL}>"', ""),
    "a type that is none": (FULL_CUDA, '"tensor_map"', '"tensormap"'),
    "a dtype that is none": (FULL_CUDA, '"torch.float16"', '"torch.half"'),
    "another language": (FULL_CUDA, 'language = "cuda"', 'language = "triton"'),
    "an argument of another language": (FULL_TRITON, 'type = "constexpr", value = true', 'type = "struct", size_bytes = 8'),
    "a fact Triton does not know": (FULL_TRITON, "align = 32", "align = 8"),
    "an alignment that is none": (FULL_CUDA, "align = 16", "align = 24"),
    "too large a struct": (FULL_CUDA, "size_bytes = 24", "size_bytes = 5000"),
    "a launch without a block": (FULL_CUDA, ', block = ["THREADS"]', ""),
    "a file outside": (FULL_CUDA, '"*.cuh"', '"../*.cuh"'),
    "a path from the root": (FULL_CUDA, '"*.cuh"', '"/usr/include/*.h"'),
    "a flag that reads a file": (FULL_CUDA, '"-DX=1"', '"--include-path=/usr"'),
    "no target": (FULL_TRITON, 'cuda = "cuda:sm_80"\nhip = ["gfx942", "hip:gfx90a"]', ""),
    "a target of another backend": (FULL_CUDA, '"sm_80"', '"gfx942"'),
    "an axis of a reserved name": (FULL_CUDA, "tag =", "stream ="),
    "an axis with the name of a dtype": (FULL_CUDA, "tag =", "float32 ="),
    "a derived axis of a reserved name": (FULL_CUDA, "twice =", "lambda ="),
    "an argument of a reserved name": (FULL_CUDA, 'name = "flag"', 'name = "class"'),
    "an entry in upper case": (FULL_CUDA, 'name = "scale"', 'name = "Scale"'),
    "a number as text": (FULL_CUDA, "default = 8", 'default = "8"'),
    "an expression that is a fraction": (FULL_CUDA, 'twice = "2 * size"', "twice = 0.5"),
    "a launch of an extension": (FULL_EXTENSION, 'summary = "one line"', 'summary = "one line"\nlaunch = { grid = [1] }'),
    "an option of another language": (FULL_EXTENSION, "[options]", "[options]\nnum_warps = 4"),
    "a target of another backend than an extension has": (FULL_EXTENSION, 'cuda = "sm_80"', 'cuda = "sm_80"\nhip = ["gfx942"]'),
    "device code that is none": (FULL_EXTENSION, '"sm_90a"', '"90a"'),
    "a stable ABI that is none": (FULL_EXTENSION, '"2.11"', '"latest"'),
    "a binding that is none": (FULL_EXTENSION, '"operators"', '"both"'),
    "a compiler's flag that reads a file": (FULL_EXTENSION, '"-DX=1"', '"-I/usr"'),
    "a compiler's flag that names a target": (FULL_EXTENSION, '"--use_fast_math"', '"-gencode=arch=compute_80,code=sm_80"'),
    "a name that is no module's": (FULL_EXTENSION, '"Named_1"', '"named-1"'),
    "a knob in lower case": (FULL_CUDA, "THREADS = {", "threads = {"),
    "a knob without a default": (FULL_CUDA, ', default = "1 + (size > 8)"', ""),
    "a knob without values": (FULL_CUDA, "values = [1, 2]", "values = []"),
    "a knob's value twice": (FULL_CUDA, "values = [1, 2]", "values = [1, 1]"),
    "a negative knob": (FULL_CUDA, "values = [1, 2]", "values = [-1, 2]"),
    "a knob with another field": (FULL_CUDA, "min = 32", "least = 32"),
    "an alias in lower case": (FULL_CUDA, '"FULL_THREADS"', '"full_threads"'),
    "an alias that is a setting": (FULL_CUDA, '"FULL_THREADS"', '"KSERVE_STORE"'),
    "constraints that are no list": (FULL_CUDA, 'constraints = ["THREADS % 32 == 0", "UNROLL <= size"]', 'constraints = "1"'),
    "a default that is a list": (FULL_CUDA, "knob_defaults = { UNROLL = 2 }", "knob_defaults = { UNROLL = [2] }"),
    "a long expression": (FULL_CUDA, '"2 * size"', '"2 * ' + "1 * " * 100 + 'size"'),
}


@pytest.mark.parametrize(("text", "old", "new"), MARKED.values(), ids=MARKED.keys())
def test_what_the_schema_marks_the_reader_refuses(text: str, old: str, new: str):
    assert old in text
    document = tomllib.loads(text.replace(old, new, 1))
    assert not SCHEMA.is_valid(document)
    assert isinstance(read(document), InvalidDefinition)


WRONG = [..., "text!", "", 7, -1, 1.5, True, [1], {"a": 1}]
# Where a definition agrees with itself is the reader's alone to say.
JOINED = re.compile(
    r"field (spec\.\w+\.(default|values|max)|knobs\.(constraints|\w+\.(values|min|max|default))|derived\.\w+"
    r"|options\.(num_warps|num_stages|maxnreg)"
    r"|entry\[0\]\.(function|knob_defaults\.\w+|arguments\[\d\]\.(name|dtype|value)|launch\.(grid|block|shared_bytes)))[ :]"
)


@pytest.mark.parametrize("document", DOCUMENTS[3:6], ids=["cuda", "triton", "extension"])
def test_one_wrong_field_is_wrong_for_both(document: dict[str, Any]):
    n_refused = 0
    for position in range(len(list(places(document)))):
        for value in WRONG:
            changed = copy.deepcopy(document)
            container, key = list(places(changed))[position]
            if value is ...:
                del container[key]
            else:
                container[key] = value
            found, is_valid = read(changed), SCHEMA.is_valid(changed)
            n_refused += not is_valid
            if isinstance(found, KernelDef):
                assert is_valid, (key, value)
            elif is_valid:
                assert JOINED.search(found.message)
    assert n_refused > 0.7 * len(WRONG) * len(list(places(document)))


# Each of these once raised another error, hung, or was accepted.
HOSTILE = {
    "a number nobody can print": ("default = 8", "default = 0x" + "f" * 5000),
    "a bound nobody can print": ("max = 4096", "max = 0x" + "f" * 5000),
    "a block nobody can print": ("block = [128]", "block = [0x" + "f" * 5000 + "]"),
    "an alignment of 64 bits": ("align = 16", "align = 0x8000000000000000"),
    "a value nested too deep to print": ("default = 8", "default." + ".".join("a" * 990) + " = 1"),
    "a table nested too deep to print": ("[target]", "[derived." + ".".join("a" * 990) + "]\n[target]"),
    "a key of many parts": ("schema = 1", "schema = 1\n" + ".".join("a" * 30_000) + " = 1"),
    "a file of many megabytes": ("schema = 1", "schema = 1 # " + "x" * (4 << 20)),
    "a flag that ends its line": ("[target]", '[options]\nflags = ["-I/usr/include\\n"]\n[target]'),
    "a pattern that ends its line": ('"kernel.cu"', '"kernel.cu\\n"'),
    "an axis that is a dtype": ("size =", "float32 ="),
    "digits of another script": ("default = 8", 'default = "\\uff18"'),
}


@pytest.mark.parametrize(("old", "new"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_definition_is_refused(old: str, new: str):
    assert old in CUDA_TOML
    with pytest.raises(InvalidDefinition) as caught:
        read_definition(CUDA_TOML.replace(old, new, 1).encode(), origin="folder/kernel.toml")
    documented(caught.value)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale<{size}>", "{" * 60_000),
        ("arguments = [", "arguments = [" + "".join(f'{{name="a{i}",type="i8"}},' for i in range(2000))),
        ("[target]", "[derived]\n" + "".join(f"d{i}=1\n" for i in range(4000)) + "[target]"),
    ],
    ids=["braces", "arguments", "derived axes"],
)
def test_a_definition_is_read_in_time_that_grows_with_its_size(old: str, new: str):
    read_definition(CUDA_TOML.replace(old, new, 1).encode(), origin="folder/kernel.toml")


@given(st.data())
def test_what_the_reader_accepts_the_schema_accepts(data: st.DataObject):
    document = data.draw(mutated(data.draw(st.sampled_from(DOCUMENTS)), values=TOML_VALUES))
    if isinstance(read(document), KernelDef):
        assert list(SCHEMA.iter_errors(document)) == []


@given(st.dictionaries(st.sampled_from(list(kernel_schema()["properties"])) | st.text(max_size=5), TOML_VALUES, max_size=8))
def test_no_table_of_values_is_more_than_refused(document: dict[str, Any]):
    assert isinstance(read(document), InvalidDefinition)


@given(st.data())
def test_no_bytes_are_more_than_refused(data: st.DataObject):
    content = data.draw(st.binary(max_size=200) | st.sampled_from(VALID).flatmap(lambda text: damaged(text.encode())))
    for reader in (read_definition, read_outline):
        try:
            reader(content, origin="folder/kernel.toml")
        except InvalidDefinition as error:
            documented(error)
