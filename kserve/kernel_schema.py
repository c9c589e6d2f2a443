"""The JSON Schema of kernel.toml, made of the tables the reader reads by. `kernel.schema.json` holds what it gives, as
`kserve kernels --schema` prints it.

What the reader accepts, the schema accepts. What joins two places of a file is left to the reader: names that are used
elsewhere, expressions, a default among the values.
"""

from __future__ import annotations

import json
from typing import Any

from kserve.definition import (
    ALIGNS,
    ARGUMENT_FIELDS,
    AXIS_FIELDS,
    BINDINGS,
    CODE,
    ENTRY_NAME,
    EXTENSION,
    FEATURES,
    FIELDS,
    LACKING,
    LANGUAGES,
    LARGEST_STRUCT_BYTES,
    LAUNCH_FIELDS,
    MODULE_NAME,
    OPTION_FIELDS,
    REFUSED_COMPILER_FLAG,
    REFUSED_FLAG,
    STABLE_ABI,
    TRITON_FACT,
)
from kserve.expression import LONGEST
from kserve.key import canonical_json
from kserve.knobs import CONSTRAINTS, KNOB_ALIAS, KNOB_FIELDS, KNOB_NAME
from kserve.spec import AXIS_TYPES, DTYPES, NAME, REFUSED_NAMES, STRING
from kserve.target import CUDA_BASE, HIP_ARCH

Schema = dict[str, Any]


def kernel_schema() -> Schema:
    """The schema, as JSON Schema 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kernel.toml",
        "description": "A kernel of kserve: its sources, its spec, and how each of its entries is launched.",
        **_table(FIELDS["definition"], _DEFINITION, required="schema language sources entry"),
        "allOf": [_when("language", [language], _of_language(language)) for language in LANGUAGES],
        "$defs": {
            "axis_name": {**_text(NAME.pattern), "not": {"enum": sorted({*REFUSED_NAMES, *DTYPES})}},
            "argument_name": {**_text(NAME.pattern), "not": {"enum": sorted(REFUSED_NAMES)}},
            "dtype": {"enum": [*DTYPES]},
            "expression": {"type": ["integer", "string", "boolean"], "maxLength": LONGEST},
            "axis": _variants(_AXIS, AXIS_FIELDS, {kind: _of_axis(kind) for kind in AXIS_TYPES}),
            "argument": _variants(_ARGUMENT, ARGUMENT_FIELDS, _NEEDED, required="name type"),
        },
    }


def _table(fields: str, properties: Schema, *, required: str = "") -> Schema:
    """A table of these fields and no others."""
    found = {field: properties[field] for field in fields.split()}
    return {"type": "object", "properties": found, "required": required.split(), "additionalProperties": False}


def _when(field: str, values: list[str], then: Schema) -> Schema:
    return {"if": {"properties": {field: {"enum": values}}, "required": [field]}, "then": then}


def _variants(properties: Schema, fields: dict[str, str], more: dict[str, Schema], *, required: str = "type") -> Schema:
    """A table whose field `type` decides which others it may have: fields by type, and what else holds for that type."""
    kinds_of: dict[str, list[str]] = {}
    for kind, group in fields.items():
        kinds_of.setdefault(canonical_json({**_only(group), **more.get(kind, {})}), []).append(kind)
    narrowed = [_when("type", kinds, json.loads(rule)) for rule, kinds in kinds_of.items()]
    return {**_table(" ".join(fields.values()), properties, required=required), "allOf": narrowed}


def _only(fields: str) -> Schema:
    return {"propertyNames": {"enum": fields.split()}}


def _items(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def _said(description: str, schema: Schema) -> Schema:
    return {"description": description, **schema}


def _text(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _of_axis(kind: str) -> Schema:
    value = _AXIS_VALUES[kind]
    values = _items(value, minItems=1) if kind == "enum" else _items(value)
    return {"properties": {"values": values, "default": value}, "required": ["values"] if kind == "enum" else []}


def _of_language(language: str) -> Schema:
    """What one language narrows: its options, its targets, the types of arguments it has, what its launch says."""
    if language == EXTENSION:
        return _of_extension()
    kinds = [kind for kind in ARGUMENT_FIELDS if kind not in LACKING[language]]
    fact = {"multipleOf": TRITON_FACT} if language == "triton" else {}
    argument: Schema = {"properties": {"type": {"enum": kinds}, "align": fact, "divisible_by": fact}}
    launch = {**_only(LAUNCH_FIELDS[language]), "required": ["grid"] if language == "triton" else ["grid", "block"]}
    target: Schema = {} if language == "triton" else {"required": ["cuda"], "properties": {"hip": {"maxItems": 0}}}
    target |= {"anyOf": [{"required": ["cuda"]}, {"required": ["hip"], "properties": {"hip": {"minItems": 1}}}]}
    needed = [field for field in FIELDS["entry"].split() if field != "knob_defaults"]
    of_entry = {"name": _text(ENTRY_NAME.pattern), "arguments": {"items": argument}, "launch": launch}
    entry = {"properties": of_entry, "required": needed}
    narrowed = {"options": _only(OPTION_FIELDS[language]), "target": target, "entry": {"items": entry}}
    return {"properties": narrowed, "required": ["target"]}


def _of_extension() -> Schema:
    """An extension has neither arguments nor a launch, and a target only where it has device code."""
    narrowed = {
        "knobs": {"maxProperties": 0},
        "options": _only(OPTION_FIELDS[EXTENSION]),
        "target": {"properties": {"hip": {"maxItems": 0}}},
        "entry": {"items": {**_only(FIELDS["extension"]), "properties": {"name": _text(MODULE_NAME.pattern)}}},
    }
    return {"properties": narrowed}


_BOOLEAN = {"type": "boolean"}
_INTEGER = {"type": "integer"}
_COUNT = {**_INTEGER, "minimum": 0}
_EXPRESSION = {"$ref": "#/$defs/expression"}
_EXPRESSIONS = _items(_EXPRESSION, minItems=1, maxItems=3)
_FILES = _items({"type": "string", "pattern": r"^(?!/)(?!(.*/)?\.\.(/|$))[^\\]+$"})
_DTYPE = {"$ref": "#/$defs/dtype"}
_AXIS_NAME = {"$ref": "#/$defs/axis_name"}
_AXIS_DTYPE = {"anyOf": [_DTYPE, _text(f"torch\\.({'|'.join(DTYPES)})")]}
_FLAG = {"type": "string", "pattern": "^-", "not": {"pattern": f"^({REFUSED_FLAG.pattern})"}}
_AXIS_VALUES: dict[str, Schema] = {
    "dtype": _AXIS_DTYPE,
    "int": _INTEGER,
    "bool": _BOOLEAN,
    "enum": _text(STRING.pattern),
    "string": _text(STRING.pattern),
}

_AXIS = {
    "type": _said("What its values are. A dtype has torch's name.", {"enum": [*AXIS_TYPES]}),
    "min": _said("The least value of an int.", _INTEGER),
    "max": _said("The greatest value of an int.", _INTEGER),
    "values": _said("The values that are allowed.", {"type": "array"}),
    "default": _said("The value where the caller names none. Without one the axis is required.", {}),
}
_ARGUMENT = {
    "name": _said("The parameter's name, which no axis has.", {"$ref": "#/$defs/argument_name"}),
    "type": _said("The kind of parameter.", {"enum": [*ARGUMENT_FIELDS]}),
    "dtype": _said("The element type: a dtype or a dtype axis.", {"anyOf": [_DTYPE, _AXIS_NAME]}),
    "mutated": _said("The kernel writes through it. Default false.", _BOOLEAN),
    "nullable": _said("None is passed as a null pointer. Default false.", _BOOLEAN),
    "contiguous": _said("A strided view is refused. Default true.", _BOOLEAN),
    "align": _said("The fact that the pointer is divisible by this many bytes; 0 for none.", {"enum": [*ALIGNS]}),
    "divisible_by": _said(
        "The fact that the integer is divisible by this; 0 for none.", {**_INTEGER, "minimum": 0, "not": {"const": 1}}
    ),
    "size_bytes": _said("Of a struct, which is passed as bytes.", {**_INTEGER, "minimum": 1, "maximum": LARGEST_STRUCT_BYTES}),
    "value": _said("An expression over the spec and the knobs.", _EXPRESSION),
}
_NEEDED: dict[str, Schema] = {
    "pointer": {"required": ["dtype"]},
    "struct": {"required": ["size_bytes"]},
    "constexpr": {"required": ["value"]},
}
_KNOB = {
    "values": _said(
        "What kserve tune tries; all that is allowed without a range.", _items(_COUNT, minItems=1, uniqueItems=True)
    ),
    "min": _said("With it or max every number of the range is allowed too.", _COUNT),
    "max": _said("With it or min every number of the range is allowed too.", _COUNT),
    "default": _said("An expression over the axes.", _EXPRESSION),
    "alias": _said(
        "A further environment variable that overrides it.", {"type": "string", "pattern": f"^({KNOB_ALIAS.pattern})?$"}
    ),
}
_LAUNCH = {
    "grid": _said("One to three expressions over the spec, the knobs and the integer arguments.", _EXPRESSIONS),
    "block": _said("Threads of a block: one to three expressions.", _EXPRESSIONS),
    "shared_bytes": _said("Dynamic shared memory of a block.", _EXPRESSION),
}
_ENTRY = {
    "name": _said("What get_kernel is asked for.", {"type": "string"}),
    "summary": _said("One line.", {"type": "string"}),
    "function": _said("The function's name; in CUDA {axis} stands for a value of the spec or a knob.", {"type": "string"}),
    "knob_defaults": {
        "description": "Defaults of knobs that are this entry's own.",
        "type": "object",
        "propertyNames": _text(KNOB_NAME.pattern),
        "additionalProperties": _EXPRESSION,
    },
    "arguments": _said("The function's parameters in order.", _items({"$ref": "#/$defs/argument"})),
    "launch": _said("How it is launched.", _table(" ".join(LAUNCH_FIELDS.values()), _LAUNCH)),
}
_COMPILER_FLAG = {"type": "string", "not": {"pattern": f"^({REFUSED_COMPILER_FLAG.pattern})"}, "minLength": 1}
_OPTIONS = {
    "flags": _said("Compiler options, none that reads a file or names a target.", _items(_FLAG)),
    "num_warps": _said("Warps of a program.", _EXPRESSION),
    "num_stages": _said("Stages of software pipelining.", _EXPRESSION),
    "maxnreg": _said("The most registers of a thread.", _EXPRESSION),
    "cflags": _said("Options of the C++ compiler, none that reads or writes a file.", _items(_COMPILER_FLAG)),
    "cuda_cflags": _said("Options of nvcc, none that reads or writes a file, or names a target.", _items(_COMPILER_FLAG)),
    "ldflags": _said("Options of the linker; -lNAME for a library.", _items({"type": "string", "minLength": 1})),
    "arches": _said("Device code to make: sm_NN, compute_NN for PTX. Without it, the target's.", _items(_text(CODE.pattern))),
    "stable_abi": _said("The release of torch whose stable ABI it keeps to.", _text(STABLE_ABI.pattern)),
    "binding": _said("A Python module, which is the default, or operators that it registers.", {"enum": [*BINDINGS]}),
}
_TARGET = {
    "cuda": _said("The oldest arch, such as sm_80.", _text(f"(cuda:)?{CUDA_BASE}")),
    "features": _said("What bare sm_90 and newer stand for: sm_90, sm_90a, sm_100f.", {"enum": [*FEATURES]}),
    "hip": _said("The gfx arches.", _items(_text(f"(hip:)?{HIP_ARCH}"))),
}
_DEFINITION = {
    "schema": _said("The version of this form.", {"const": 1}),
    "language": _said("What the sources are written in.", {"enum": [*LANGUAGES]}),
    "sources": _said("Globs inside the folder. The first is a file, and the one that is compiled.", {**_FILES, "minItems": 1}),
    "headers": _said("Globs inside the folder.", _FILES),
    "shared_headers": _said("Globs inside the folder `include` beside the kernel's.", _FILES),
    "spec": {
        "description": "The axes a caller chooses.",
        "type": "object",
        "propertyNames": _AXIS_NAME,
        "additionalProperties": {"$ref": "#/$defs/axis"},
    },
    "knobs": {
        "description": "What a tuning may choose, and what must hold between the choices.",
        "type": "object",
        "properties": {CONSTRAINTS: _said("Expressions over axes and knobs that must not be 0.", _items(_EXPRESSION))},
        "patternProperties": {f"^{KNOB_NAME.pattern}$": _table(KNOB_FIELDS, _KNOB, required="values default")},
        "additionalProperties": False,
    },
    "derived": {
        "description": "Further integer axes, expressions over the axes, the knobs and those above.",
        "type": "object",
        "propertyNames": _AXIS_NAME,
        "additionalProperties": _EXPRESSION,
    },
    "options": _said("Compile options.", _table(" ".join(OPTION_FIELDS.values()), _OPTIONS)),
    "target": {
        "description": "What it can be built for.",
        **_table(FIELDS["target"], _TARGET),
    },
    "entry": _said(
        "The kernels of this folder.",
        _items(_table(FIELDS["entry"], _ENTRY, required="name summary"), minItems=1),
    ),
}
