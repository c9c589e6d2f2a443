"""Artifacts over a node's store: verified reads, one way to publish, and what happens when the disk refuses.

A damaged or half-lost entry is a miss. What the disk does not take is kept in memory, served from there, and written down when
the disk works again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from heapq import nlargest
from sys import intern
from typing import TypeVar

from kserve.alias import Alias, alias_to_bytes
from kserve.artifact import Manifest, manifest_from_bytes
from kserve.errors import CorruptArtifact, StoreError
from kserve.key import digest_of
from kserve.store.base import KINDS, MemoryStore
from kserve.store.files import FileStore
from kserve.store.layers import Layers
from kserve.store.reasons import Reasons
from kserve.store.upkeep import Upkeep

logger = logging.getLogger("kserve")
_MOST_REMEMBERED = 2000
_MOST_LEARNT = 1000
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Artifacts:
    """The artifacts of one store and the read-only layers below it.

    Args:
        upkeep: of the writable store.
    Attributes:
        degraded: why the disk refused; empty when it works and has everything that was built.
        reasons:  what was built and what was lost; complete once `knows_reasons`.
    """

    def __init__(self, upkeep: Upkeep, layers: Layers, *, degraded: str = "") -> None:
        self.files: FileStore = upkeep.files
        self.upkeep = upkeep
        self.layers = layers
        self.degraded = degraded
        self._memory = MemoryStore()
        self._manifests: dict[str, tuple[bytes, Manifest]] = {}
        self._sound: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.reasons = Reasons()
        self.knows_reasons = False
        upkeep.on_evicted(self._evicted)

    def get(self, name: str) -> bytes | None:
        """A record's bytes; None where it is not there, was damaged, or cannot be read now."""
        return next(self._versions(name), None)

    def _versions(self, name: str) -> Iterator[bytes]:
        """The record from memory, the store and each layer that has it."""
        for tier in (self._memory, self.files):
            try:
                found = tier.get(name)
            except StoreError as error:
                self._degrade(error)
                continue
            if found is not None:
                yield found
        yield from self.layers.versions(name)

    def _read(self, name: str) -> bytes | None:
        """Memory, the store, the layers. Raises: StoreError when the store cannot be read now."""
        for tier in (self._memory, self.files, self.layers):
            found = tier.get(name)
            if found is not None:
                return found
        return None

    def put(self, name: str, content: bytes) -> bool:
        """Write a record, to memory where the disk refuses; whether it reached the disk."""
        try:
            self.files.put(name, content)
        except StoreError as error:
            self._degrade(error)
            self._memory.put(name, content)
            return False
        return True

    def publish(self, manifest: Manifest, payloads: list[bytes]) -> None:
        """Payloads first, manifest last: a reader never sees half an entry. Once the disk refuses one, memory has the rest."""
        records = {f"payload/{digest_of(content)}": content for content in payloads}
        records[f"manifest/{manifest.key}"] = manifest.to_bytes()
        written: list[str] = []
        is_refused = False
        with self.upkeep.publishing():
            for name, content in records.items():
                if is_refused:
                    self._memory.put(name, content)
                elif self.put(name, content):
                    written.append(name)
                else:
                    is_refused = True
            self.upkeep.written(written, None if is_refused else manifest)
        self.reasons.learn(manifest)

    def add_source(self, content: bytes) -> str:
        """Keep an uploaded file; its digest. What many clients upload at once is written and synced once."""
        name = f"source/{(digest := digest_of(content))}"
        if self.get(name) == content:
            return digest
        with self.upkeep.publishing():
            if self.put(name, content):
                self.upkeep.written([name])
        return digest

    def keep_alias(self, request: str, alias: Alias, toolchain: bytes) -> None:
        """Write what a request gave, and the stamps of its compiler. Only a help: a disk that refuses is no matter."""
        records = {f"toolchain/{alias.toolchain}": toolchain, f"alias/{request}": alias_to_bytes(alias)}
        try:
            with self.upkeep.publishing():
                for name in [name for name, content in records.items() if self.files.get(name) != content]:
                    self.files.put(name, records[name], durable=False)
                    self.upkeep.written([name])
        except StoreError as error:
            logger.debug("no alias error=%s", error.message)

    def restore(self) -> None:
        """Ask the disk whether it works again, and write down what memory has kept for it."""
        if not self.degraded and not self._memory:
            return
        try:
            self.files.probe()
            for kind in KINDS:  # content first, manifests after it
                for key in self._memory.keys(kind):
                    self._write_down(f"{kind}/{key}")
        except StoreError as error:
            self._degrade(error)
            return
        if self.degraded:
            logger.info("restored store=%s", self.files.root)
        self.degraded = ""

    def _write_down(self, name: str) -> None:
        content = self._memory.get(name)
        if content is None:  # dropped meanwhile
            return
        manifest = None
        if name.startswith("manifest/"):
            with contextlib.suppress(CorruptArtifact):
                manifest = manifest_from_bytes(content, key=name.partition("/")[2])
        with self.upkeep.publishing():
            self.files.put(name, content)
            self.upkeep.written([name], manifest)
        self._memory.delete(name)

    def manifest(self, key: str) -> Manifest | None:
        """The stored manifest; a damaged one is put aside and is a miss."""
        name = f"manifest/{key}"
        for content in self._versions(name):
            known = self._manifests.get(key)
            if known is not None and known[0] == content:
                return known[1]
            try:
                manifest = manifest_from_bytes(content, key=key)
            except CorruptArtifact as error:
                self._put_aside(name, content, error)
                continue
            shared = {intern(label): intern(text) for label, text in manifest.components.items()}
            manifest = manifest._replace(components=shared)  # most are equal in all artifacts of a kernel
            remember(self._manifests, key, (content, manifest))
            return manifest
        return None

    def _put_aside(self, name: str, content: bytes, error: CorruptArtifact) -> None:
        """A manifest is damaged: the store's own is moved away, a layer's is passed over."""
        if self.files.stamp(name) and self.files.quarantine(name, was=content):
            logger.warning("quarantined record=%s error=%s", name, error.message)
            self.reasons.lose(name.partition("/")[2], "quarantined: manifest damaged")

    def is_sound(self, manifest: Manifest) -> bool:
        """Whether the payload is there and whole. Hashed again only when the file was touched since: who loads it hashes it.

        Raises: StoreError when it cannot be read now.
        """
        name = f"payload/{manifest.digest}"
        stamp = self.files.stamp(name) or self.layers.stamp(name)
        if stamp and self._sound.get(manifest.key) == (manifest.digest, stamp):
            return True
        if self.payload(manifest) is None:
            return False
        if stamp:
            remember(self._sound, manifest.key, (manifest.digest, stamp))
        return True

    def payload(self, manifest: Manifest) -> bytes | None:
        """The verified binary; without it the manifest is worth nothing and is dropped.

        Raises: StoreError when it cannot be read now: that is no reason to drop anything.
        """
        content = self._read(f"payload/{manifest.digest}")
        if content is None:
            self._drop(manifest)
        return content

    def _drop(self, manifest: Manifest) -> None:
        self._memory.delete(f"manifest/{manifest.key}")
        if not self.files.stamp(f"manifest/{manifest.key}"):  # evicted this moment, or a layer's
            return
        logger.warning("dropped key=%s error=payload %s is gone or damaged", manifest.key[:12], manifest.digest[:12])
        self.reasons.lose(manifest.key, "quarantined: digest mismatch")
        with contextlib.suppress(StoreError):  # it is a miss all the same
            self.upkeep.drop(manifest)

    def attachment(self, manifest: Manifest, kind: str) -> str | None:
        """The text of that kind, such as `ptx` or `log`."""
        digest = manifest.attachments.get(kind)
        content = self.get(f"payload/{digest}") if digest else None
        return None if content is None else content.decode(errors="replace")

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of every artifact that begin so, in order."""
        return sorted({key for tier in (self.files, self._memory, self.layers) for key in tier.keys("manifest", prefix)})

    def manifests(self) -> Iterator[Manifest]:
        """Every readable manifest, one after the other: all of them together may be more than the memory of the machine."""
        for key in self.keys():
            for content in self._versions(f"manifest/{key}"):
                with contextlib.suppress(CorruptArtifact):  # its own request will say it
                    yield manifest_from_bytes(content, key=key)
                    break

    @property
    def n_in_memory(self) -> int:
        """Artifacts that the disk has not taken yet."""
        return sum(1 for _ in self._memory.keys("manifest"))

    def learn_reasons(self) -> None:
        """Read what was built before from the store: its thousand entries used last. As long as a look at every manifest."""
        if self.knows_reasons:
            return
        latest = nlargest(_MOST_LEARNT, ((found.st_mtime, key) for key, found in self.files.stats("manifest")))
        known = [manifest for _, key in latest if (manifest := self._quietly(key)) is not None]
        for manifest in sorted(known, key=lambda manifest: manifest.created_at):
            self.reasons.learn(manifest)
        self.knows_reasons = True

    def _quietly(self, key: str) -> Manifest | None:
        """A manifest that is read without a word about a damaged one: its own request will say it."""
        with contextlib.suppress(CorruptArtifact, StoreError):
            return manifest_from_bytes(self.files.get(f"manifest/{key}") or b"", key=key)
        return None

    def reason_for(self, key: str, name: str, variant: str, components: Mapping[str, str]) -> str:
        """Why that key has to be built."""
        return self.reasons.of(key, name, variant, components)

    def _evicted(self, key: str) -> None:
        self._manifests.pop(key, None)
        self._sound.pop(key, None)
        self.reasons.lose(key, "evicted")

    def _degrade(self, error: StoreError) -> None:
        if not self.degraded:
            logger.error("degraded error=%s", error.message)
        self.degraded = error.message


def remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keep it, and the memory bounded: when that is full, the oldest half goes."""
    if len(known) >= _MOST_REMEMBERED:
        for old in list(known)[: _MOST_REMEMBERED // 2]:
            known.pop(old, None)
    known[key] = value
