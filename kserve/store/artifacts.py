"""Artifacts over a node's store: verified reads, one way to publish, and what happens when the disk refuses.

A damaged or half-lost entry is a miss. What the disk does not take is kept in memory and served from there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

from kserve.artifact import Manifest, manifest_from_bytes
from kserve.errors import CorruptArtifact, StoreError
from kserve.key import digest_of
from kserve.store.base import MemoryStore
from kserve.store.files import FileStore
from kserve.store.reasons import Reasons

logger = logging.getLogger("kserve")
_MOST_REMEMBERED = 2000
_MOST_LEARNT = 1000
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Artifacts:
    """The artifacts of one store.

    Args:
        files: the store, writable.
    Attributes:
        degraded: why the last write or read failed; empty while the disk does its work.
    """

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self.degraded = ""
        self._memory = MemoryStore()
        self._manifests: dict[str, tuple[bytes, Manifest]] = {}
        self._reasons: Reasons | None = None

    def get(self, name: str) -> bytes | None:
        """A record's bytes; None where it is not there, was damaged, or cannot be read now."""
        found = self._memory.get(name)
        if found is not None:
            return found
        try:
            return self.files.get(name)
        except StoreError as error:
            self._degrade(error)
            return None

    def put(self, name: str, content: bytes) -> None:
        """Write a record, to memory where the disk refuses."""
        try:
            self.files.put(name, content)
            self.degraded = ""
        except StoreError as error:
            self._degrade(error)
            self._memory.put(name, content)

    def publish(self, manifest: Manifest, payloads: list[bytes]) -> None:
        """Payloads first, manifest last: a reader never sees half an entry."""
        for content in payloads:
            self.put(f"payload/{digest_of(content)}", content)
        self.put(f"manifest/{manifest.key}", manifest.to_bytes())
        self.reasons.learn(manifest)

    def add_source(self, content: bytes) -> str:
        """Keep an uploaded file; its digest."""
        digest = digest_of(content)
        self.put(f"source/{digest}", content)
        return digest

    def manifest(self, key: str) -> Manifest | None:
        """The stored manifest; a damaged one is put aside and is a miss."""
        content = self.get(f"manifest/{key}")
        if content is None:
            return None
        known = self._manifests.get(key)
        if known is not None and known[0] == content:
            return known[1]
        try:
            manifest = manifest_from_bytes(content, key=key)
        except CorruptArtifact as error:
            logger.warning("quarantined key=%s error=%s", key[:12], error.message)
            self.files.quarantine(f"manifest/{key}")
            self.reasons.lose(key, "quarantined: manifest damaged")
            return None
        remember(self._manifests, key, (content, manifest))
        return manifest

    def payload(self, manifest: Manifest) -> bytes | None:
        """The verified binary; without it the manifest is worth nothing and is dropped.

        Raises: StoreError when it cannot be read now: that is no reason to drop anything.
        """
        name = f"payload/{manifest.digest}"
        content = self._memory.get(name) or self.files.get(name)
        if content is None:
            logger.warning("dropped key=%s error=payload %s is gone or damaged", manifest.key[:12], manifest.digest[:12])
            self.reasons.lose(manifest.key, "quarantined: digest mismatch")
            try:
                self.files.delete(f"manifest/{manifest.key}")
            except StoreError as error:
                self._degrade(error)
            self._memory.delete(f"manifest/{manifest.key}")
        return content

    def attachment(self, manifest: Manifest, kind: str) -> str | None:
        """The text of that kind, such as `ptx` or `log`."""
        digest = manifest.attachments.get(kind)
        content = self.get(f"payload/{digest}") if digest else None
        return None if content is None else content.decode(errors="replace")

    def keys(self) -> list[str]:
        """The keys of every artifact, in order."""
        return sorted({*self.files.keys("manifest"), *self._memory.keys("manifest")})

    def manifests(self) -> list[Manifest]:
        """Every readable manifest."""
        return [manifest for key in self.keys() if (manifest := self.manifest(key)) is not None]

    @property
    def reasons(self) -> Reasons:
        """What was built before, read from the store when it is first needed: its thousand entries built last."""
        if self._reasons is None:
            self._reasons = Reasons()
            latest = sorted(self.manifests(), key=lambda manifest: manifest.created_at)[-_MOST_LEARNT:]
            for manifest in latest:
                self._reasons.learn(manifest)
        return self._reasons

    def reason_for(self, key: str, name: str, variant: str, components: Mapping[str, str]) -> str:
        """Why that key has to be built."""
        return self.reasons.of(key, name, variant, components)

    def _degrade(self, error: StoreError) -> None:
        if not self.degraded:
            logger.error("degraded error=%s", error.message)
        self.degraded = error.message


def remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keep it, and the memory bounded: when that is full, the oldest half goes."""
    if len(known) >= _MOST_REMEMBERED:
        for old in list(known)[: _MOST_REMEMBERED // 2]:
            del known[old]
    known[key] = value
