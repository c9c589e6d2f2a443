"""Checks a whole store: every record against its digest, every manifest against itself and what it names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from kserve.artifact import Manifest, manifest_from_bytes
from kserve.errors import CorruptArtifact
from kserve.store.base import CONTENT_ADDRESSED
from kserve.store.files import FileStore
from kserve.tuning import tuning_from_bytes


class Verified(NamedTuple):
    """What was found.

    Fields:
        n_checked: records that were read.
        damaged:   names of records that did not match, `kind/hex`; they are in quarantine now.
        orphaned:  keys of sound manifests whose payload or attachment is missing: they will be built again.
    """

    n_checked: int
    damaged: list[str]
    orphaned: list[str]


def verify(store: FileStore, *, sample: int | None = None) -> Verified:
    """Read records and put aside what is damaged.

    Args:
        sample: at most this many of each kind, drawn at random; None for all.
    """
    damaged, orphaned, n_checked = [], [], 0
    for kind in CONTENT_ADDRESSED:
        for digest in _drawn(store, kind, sample):
            n_checked += 1
            if store.is_damaged(f"{kind}/{digest}"):
                damaged.append(f"{kind}/{digest}")
    for key in _drawn(store, "manifest", sample):
        content = store.get(f"manifest/{key}")
        n_checked += 1
        if content is None:  # evicted meanwhile
            continue
        try:
            manifest = manifest_from_bytes(content, key=key)
        except CorruptArtifact:
            store.quarantine(f"manifest/{key}", was=content)
            damaged.append(f"manifest/{key}")
            continue
        if _is_orphaned(store, manifest):
            orphaned.append(key)
    tunings = [f"tuning/{key}" for key in _drawn(store, "tuning", sample)]
    damaged += [name for name in tunings if _is_no_tuning(store, name)]
    n_checked += len(tunings)
    return Verified(n_checked, sorted(damaged), sorted(orphaned))


def _is_no_tuning(store: FileStore, name: str) -> bool:
    """Whether what lies there is damaged, and is put aside now."""
    content = store.get(name)
    is_damaged = content is not None and tuning_from_bytes(content) is None
    if is_damaged:
        store.quarantine(name)
    return is_damaged


def _is_orphaned(store: FileStore, manifest: Manifest) -> bool:
    """Whether something it names is gone while it is there: of an evicted artifact the manifest goes first."""
    named = (manifest.digest, *manifest.attachments.values())
    is_whole = all(store.path(f"payload/{digest}").is_file() for digest in named)
    return not is_whole and store.path(f"manifest/{manifest.key}").is_file()


def _drawn(store: FileStore, kind: str, sample: int | None) -> Iterable[str]:
    if sample is None:
        return store.keys(kind)
    found = list(store.keys(kind))
    return random.sample(found, min(sample, len(found)))
