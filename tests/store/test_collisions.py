"""Two builds under one key, two records under one digest: hashes cut to four bits make what SHA-256 never will."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from kserve.build import plan as planning
from kserve.build.planner import KernelRequest
from kserve.errors import BuildError
from kserve.key import build_key
from kserve.protocol import Resolved
from kserve.service import KernelService
from kserve.store import base
from kserve.store.base import MemoryStore, Store
from kserve.store.files import FileStore
from tests.support.definitions import CUDA_TOML
from tests.support.inprocess import CUDA_FILES, service, wanted

# No argument facts: one build a request.
FILES = {**CUDA_FILES, "kernel.toml": CUDA_TOML.replace(", align = 16", "").encode()}


@pytest.fixture
def short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the usual form with sixteen values."""
    monkeypatch.setattr(planning, "build_key", lambda components: build_key(components)[0] * 64)


async def colliding(held: KernelService) -> list[KernelRequest]:
    """Two requests for different builds whose keys are equal: among 17 sizes there are two."""
    requests = [wanted(held, FILES, size=size) for size in range(1, 18)]
    keys = {request.spec["size"]: (await held.planner.plan(request))[0].key for request in requests}
    return next([a, b] for a, b in itertools.combinations(requests, 2) if keys[a.spec["size"]] == keys[b.spec["size"]])


async def ask(held: KernelService, request: KernelRequest) -> Resolved:
    """The one variant of that request, which is the one that was asked for."""
    (found,) = await held.resolve(request, client="test", wait_s=60)
    assert found.manifest.spec == request.spec
    assert found.manifest.components == (await held.planner.plan(request))[0].components
    assert held.artifacts.payload(found.manifest) is not None
    return found


@pytest.mark.toolchain
def test_an_entry_of_the_same_key_and_other_components_is_not_served(short_keys: None, caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        async with service() as held:
            first, second = await colliding(held)
            one = await ask(held, first)
            assert (await ask(held, first)).origin == "disk"
            with caplog.at_level(logging.WARNING):
                other = await ask(held, second)
            assert (one.manifest.key, one.origin) == (other.manifest.key, "built")
            assert other.origin == "built"
            assert other.manifest.reason.startswith("collided")
            assert f"collided key={one.manifest.key[:12]}" in caplog.text
            assert (await ask(held, second)).origin == "disk"
        async with service() as restarted:
            assert (await ask(restarted, second)).origin == "disk"
            assert (await ask(restarted, first)).origin == "built"

    asyncio.run(body())


@pytest.mark.toolchain
def test_who_joins_a_build_of_the_same_key_and_other_components_does_not_get_it(short_keys: None):
    async def body() -> None:
        async with service() as held:
            first, second = await colliding(held)
            both = [held.resolve(request, client=str(request.spec), wait_s=60) for request in (first, second)]
            answers = await asyncio.gather(*both, return_exceptions=True)
            (served,) = [place for place, answer in enumerate(answers) if isinstance(answer, list)]
            assert [found.manifest.spec for found in answers[served]] == [(first, second)[served].spec]
            assert isinstance(answers[1 - served], BuildError)
            assert (await ask(held, (second, first)[served])).origin == "built"

    asyncio.run(body())


@pytest.mark.toolchain
def test_the_two_variants_of_a_kernel_may_collide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "build_key", lambda _: "0" * 64)

    async def body() -> None:
        async with service() as held:
            request = wanted(held, size=8)
            plans = await held.planner.plan(request)
            with pytest.raises(BuildError):
                await held.resolve(request, client="test", wait_s=60)
            found = await held.resolve(request, client="test", wait_s=60)
            assert [variant.manifest.components for variant in found] == [plan.components for plan in plans]

    asyncio.run(body())


@pytest.mark.parametrize("kind", base.CONTENT_ADDRESSED)
@pytest.mark.parametrize("form", ["memory", "files"])
def test_a_record_is_never_replaced_by_other_bytes_of_its_digest(own_place, monkeypatch, kind: str, form: str):
    monkeypatch.setattr(base, "digest_of", lambda _: "0" * 64)
    store: Store = MemoryStore() if form == "memory" else FileStore(own_place / "store", writable=True)
    name = f"{kind}/" + "0" * 64
    store.put(name, b"this")
    store.put(name, b"this")
    with pytest.raises(ValueError, match="other bytes"):
        store.put(name, b"that")
    assert store.get(name) == b"this"
