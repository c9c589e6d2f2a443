"""Artifacts without a compiler: a valid baseline and what a case changes in it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from kserve.artifact import Contract, Manifest
from kserve.key import digest_of
from kserve.store.base import KINDS
from kserve.store.files import FileStore


def key_of(number: int) -> str:
    return digest_of(b"key %d" % number)


def payload_of(number: int, size: int = 100) -> bytes:
    return (b"payload %d " % number * size)[:size]


def manifest_of(
    number: int, payload: bytes, *, attached: tuple[bytes, ...] = (), sources: tuple[bytes, ...] = (), **changes: str
) -> Manifest:
    """The manifest of entry `number`: its payload, attachments and sources, `changes` of its fields, the rest as anywhere."""
    found = Manifest(
        key=key_of(number),
        digest=digest_of(payload),
        size_bytes=len(payload),
        name="scale",
        language="cuda",
        target="cuda:sm_90",
        spec={"size": number},
        variant="declared",
        contract=Contract("scale", "cubin", (), {}, ("1",), ("128",)),
        resources={"registers": 8},
        components={f"source.{i}.cu": digest_of(content) for i, content in enumerate(sources)},
        attachments={f"text{i}": digest_of(content) for i, content in enumerate(attached)},
        closed_world=False,
        seconds=0.1,
        created_at=1.0 + number,
    )
    return found._replace(**changes)  # type: ignore[arg-type]


def put_entry(store: FileStore, number: int, payload: bytes | None = None, **parts: Any) -> Manifest:
    """Write an entry as a publication does, past the index: payload, attachments, sources, then the manifest."""
    content = payload_of(number) if payload is None else payload
    manifest = manifest_of(number, content, **parts)
    for part in (content, *parts.get("attached", ())):
        store.put(f"payload/{digest_of(part)}", part)
    for part in parts.get("sources", ()):
        store.put(f"source/{digest_of(part)}", part)
    store.put(f"manifest/{manifest.key}", manifest.to_bytes())
    return manifest


def write_fast(root: Path, kind: str, key: str, content: bytes) -> None:
    """A record without a sync: for stores of many thousands."""
    suffix = ".json" if kind == "manifest" else ""
    path = root / kind / key[:2] / (key + suffix)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(content)


def looked_up(root: Path) -> tuple[int, int, int]:
    """Bytes, files and artifacts of a store, by a look at its files; one that goes meanwhile is left out."""
    found = {}
    for kind in KINDS:
        for path in (root / kind).glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.lstat().st_blocks * 512
    return sum(found.values()), len(found), sum(path.parent.parent.name == "manifest" for path in found)
