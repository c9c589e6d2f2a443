"""The check of a whole store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kserve import client, get_kernel
from kserve.config import load_settings
from kserve.key import digest_of
from kserve.store.files import FileStore
from kserve.store.verify import verify
from tests.support.definitions import write_cuda
from tests.support.processes import kserve


def test_a_sound_store_is_sound_and_stays_as_it_is(own_place: Path):
    store = FileStore(own_place / "store", writable=True)
    for i in range(5):
        store.put(f"source/{digest_of(bytes([i]))}", bytes([i]))
    assert verify(store) == (5, [], [])
    assert verify(store, sample=2) == (2, [], [])


@pytest.mark.parametrize("kind", ["payload", "source"])
def test_a_damaged_record_is_named_and_put_aside(own_place: Path, kind: str):
    store = FileStore(own_place / "store", writable=True)
    name, other = f"{kind}/{digest_of(b'x')}", f"{kind}/{digest_of(b'y')}"
    store.put(name, b"x")
    store.put(other, b"y")
    store.path(name).chmod(0o600)
    store.path(name).write_bytes(b"z")
    assert verify(store) == (2, [name], [])
    assert verify(store) == (1, [], [])
    assert store.n_quarantined == 1


@pytest.mark.toolchain
def test_the_command_names_what_is_bad_and_the_next_call_builds_it(kernels: Path):
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale", target="sm_90")
    sound = kserve("cache", "verify", "--json")
    assert (sound.returncode, json.loads(sound.stdout)["damaged"]) == (0, [])
    store = load_settings().store
    manifest = store / "manifest" / kernel.key[:2] / f"{kernel.key}.json"
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    bad = kserve("cache", "verify")
    assert bad.returncode == 5
    assert f"manifest/{kernel.key}" in bad.stdout
    payload = store / "payload" / kernel.digest[:2] / kernel.digest
    payload.unlink()
    client.forget()
    assert get_kernel("scale", target="sm_90").digest == kernel.digest
    assert kserve("cache", "verify").returncode == 0
