"""The build key: a hash of everything that is known before a build.

A key is made of components, label -> text, which are kept with the artifact: two keys can always be compared in words. What
goes in is decided in `kserve/build/plan.py`; this file only says how components become one hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Part of every key. Raise it when the meaning of a component changes: old entries then simply no longer match.
KEY_SCHEMA = 1
_SOURCES = (".cu", ".py", ".c", ".cc", ".cpp", ".cxx")
# In every sealed record other fields follow: the comma goes with it.
_SEAL, _SEAL_LENGTH = b'"self_sha256":"', len('"self_sha256":"",') + 64


def build_key(components: Mapping[str, str]) -> str:
    """SHA-256, hex, over the schema number and each component: label and text, each led by its length.

    The order of `components` plays no part; an ordered list carries its position in the label.
    """
    hasher = hashlib.sha256(b"kserve-key %d\n" % KEY_SCHEMA)
    for label in sorted(components):
        for part in (label.encode(), components[label].encode()):
            hasher.update(b"%d:" % len(part))
            hasher.update(part)
    return hasher.hexdigest()


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What changed between the components of two keys, in a few words each: `header scan.cuh changed`, `hidden 64 -> 128`."""
    changed = [label for label in sorted({*old, *new}) if old.get(label) != new.get(label)]
    if any(label.startswith(("spec.", "knob.")) for label in changed):
        changed = [label for label in changed if not _follows(label, old.get(label, ""), new.get(label, ""))]
    toolchain = new.get("toolchain.name", "toolchain")
    return [_difference(label, old.get(label), new.get(label), toolchain=toolchain) for label in changed]


def _follows(label: str, before: str, after: str) -> bool:
    """Whether a component's change is only that of an axis or a knob: the function's name, the value of a constexpr."""
    return label == "function" or (label.startswith("argument.") and '"constexpr"' in before and '"constexpr"' in after)


def _difference(label: str, before: str | None, after: str | None, *, toolchain: str) -> str:
    group, _, name = label.partition(".")
    if group in ("source", "include"):
        kind = "source" if name.endswith(_SOURCES) else "header"
        return f"{kind} {name} " + ("added" if before is None else "removed" if after is None else "changed")
    if label == "toolchain.version":
        return f"{toolchain} {before} -> {after}"
    if label == "toolchain.files":
        return f"files of {toolchain} changed"
    return f"{name if group in ('spec', 'option', 'knob') else label} {before} -> {after}"


def sealed(plain: Mapping[str, object]) -> bytes:
    """Canonical JSON of an object with a hash over itself in it: a record that was damaged says so."""
    seal = digest_of(canonical_json(plain).encode())
    return canonical_json({**plain, "self_sha256": seal}).encode()


def unsealed(content: bytes) -> dict[str, Any] | None:
    """The object that `sealed` wrote; None when a byte of it was changed.

    The hash is taken over the bytes as they are, less the one field: half the time of writing them anew.
    """
    begin = content.find(_SEAL)
    end = begin + _SEAL_LENGTH
    try:
        plain: dict[str, Any] = json.loads(content)
        seal = plain.pop("self_sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_one = begin >= 0 and content.find(_SEAL, end) < 0
    return plain if is_one and digest_of(content[:begin] + content[end:]) == seal else None


def digest_of(content: bytes) -> str:
    """SHA-256 of the bytes, hex: the name of a payload or a source."""
    return hashlib.sha256(content).hexdigest()


def canonical_json(value: object) -> str:
    """JSON with one spelling per value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
