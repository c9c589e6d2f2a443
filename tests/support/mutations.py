"""Documents that are nearly right: hypothesis strategies that change a valid one, as values or as bytes, and a writer of TOML.

For any reader: `mutated` for one that is given decoded values, `damaged` for one that is given bytes.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from datetime import date
from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_INTEGERS = st.integers(-3, 300) | st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63) - 1, 2**200])
_LEAVES = (
    st.booleans() | _INTEGERS | st.floats() | TEXTS | st.sampled_from(["", "x" * 1000, "../x", "n", "size", "sm_90", "\0"])
)


def _nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


# Half characters can be written in JSON, not in TOML.
JSON_VALUES = _nested(st.none() | _LEAVES | st.just("\ud800") | st.text(max_size=5))
TOML_VALUES = _nested(st.just(date(1979, 5, 27)) | _LEAVES)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or position) of every value below the document."""
    inner = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in list(inner):
        yield document, key
        yield from places(value)


@st.composite
def mutated(draw: st.DrawFn, document: Any, *, values: st.SearchStrategy[Any] = JSON_VALUES, most: int = 3) -> Any:
    """The document after one to `most` changes: a value removed, replaced by a new one or by another of its own, or added."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        every = list(places(found))
        if not every:
            break
        container, key = draw(st.sampled_from(every))
        match draw(st.sampled_from(["remove", "replace", "repeat", "add"])):
            case "remove":
                del container[key]
            case "replace":
                container[key] = draw(values)
            case "repeat":
                other, name = draw(st.sampled_from(every))
                container[key] = copy.deepcopy(other[name])
            case "add" if isinstance(container, dict):
                container[draw(TEXTS | st.sampled_from([str(name) for _, name in every]))] = draw(values)
            case "add":
                container.insert(key, draw(values))
    return found


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes with a piece of them replaced by others."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 40)))
    return content[:start] + draw(st.binary(max_size=8) | TEXTS.map(str.encode)) + content[end:]


def toml_of(value: Any) -> str:
    """The value as TOML: a table as `key = value` lines, whatever is in it inline."""
    return "".join(f"{_text(key)} = {_inline(inner)}\n" for key, inner in value.items())


def _inline(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float() if math.isnan(value):
            return "nan"
        case str():
            return _text(value)
        case list():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_text(key)} = {_inline(inner)}" for key, inner in value.items()) + "}"
    return str(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
