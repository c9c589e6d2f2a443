"""Every file of every kind of record, damaged in every way, under a running daemon: the client gets its kernel."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from kserve.artifact import Manifest
from kserve.config import load_settings
from kserve.key import digest_of
from tests.support.daemon import Daemon, assert_sound, daemon, place, variables
from tests.support.definitions import CUDA_TOML, TRITON_TOML, write_cuda, write_triton
from tests.support.processes import python

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"
NAMES = {"cuda": "scale", "triton": "tscale"}
MAIN = {"cuda": "kernel.cu", "triton": "kernel.py"}
# Another entry of the same kernel, with other bytes.
OTHER = {"cuda": {"size": 9}, "triton": {"block": 256}}
# The texts beside a binary.
SHOWN = [("cuda", "ptx"), ("cuda", "log"), ("triton", "ptx"), ("triton", "ttgir"), ("triton", "log")]
# An axis that only makes further keys.
TAGGED = ("[target]", 'tag = { type = "int", min = 0, max = 1000000, default = 0 }\n[target]')
TAGS = itertools.count(1)


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with place() as root:
        write_cuda(root / "kernels" / "scale", toml=CUDA_TOML.replace(*TAGGED))
        write_triton(root / "kernels" / "tscale", toml=TRITON_TOML.replace(*TAGGED))
        with daemon(root) as found:
            yield found


@pytest.fixture
def served(running: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One daemon and its warm workers for this file."""
    for name, value in variables(running.root).items():
        monkeypatch.setenv(name, value)
    return running


def again(name: str, **spec: Any) -> Any:
    """get_kernel as if this process had never asked."""
    client.forget()
    shutil.rmtree(load_settings().store / "alias", ignore_errors=True)  # the daemon is to be asked
    return get_kernel(name, target=TARGET, **spec)


class Boom:
    """Its pickle makes a directory when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    spare = path.with_name("spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


def trace_of(path: Path) -> Path:
    """What a pickle planted in that file leaves when anybody loads it."""
    return path.with_name("executed")


def plant(path: Path, other: Path) -> None:
    path.write_bytes(pickle.dumps(Boom(trace_of(path))))


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "cut to nothing": empty,
    "cut in half": halve,
    "one bit flipped": flip,
    "removed": remove,
    "swapped with another": swap,
    "a pickle in its place": plant,
}


def payload(store: Path, manifest: Manifest) -> Path:
    return store / "payload" / manifest.digest[:2] / manifest.digest


def manifest_file(store: Path, manifest: Manifest) -> Path:
    return store / "manifest" / manifest.key[:2] / f"{manifest.key}.json"


def source_file(store: Path, manifest: Manifest, name: str) -> Path:
    digest = digest_of((store.parent / "kernels" / manifest.name / name).read_bytes())
    return store / "source" / digest[:2] / digest


def n_quarantined(found: Daemon) -> int:
    count: int = found.call("GET", protocol.STATUS)["store"]["n_quarantined"]
    return count


def spoil(damage: str, path: Path, other: Path) -> None:
    for file in (path, other):
        file.chmod(0o600)
    DAMAGE[damage](path, other)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("record", [payload, manifest_file], ids=["payload", "manifest"])
@pytest.mark.parametrize("language", NAMES)
def test_a_damaged_binary_or_manifest_is_built_again(served: Daemon, language: str, record: Any, damage: str):
    store, name = served.root / "store", NAMES[language]
    first, other = again(name), again(name, **OTHER[language])
    path, whole = record(store, first.manifest), payload(store, first.manifest).read_bytes()
    before = n_quarantined(served)
    spoil(damage, path, record(store, other.manifest))
    found = again(name)
    assert (found.origin, found.key, found.digest) == ("built", first.key, first.digest)
    assert payload(store, first.manifest).read_bytes() == whole
    assert n_quarantined(served) - before == (damage != "removed")
    assert again(name).origin == "disk", "once"
    assert again(name, **OTHER[language]).digest == other.digest, "whatever lay in the other's place"
    assert not trace_of(path).exists()
    assert_sound(store)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["kernel.toml", "main"])
@pytest.mark.parametrize("language", NAMES)
def test_a_damaged_source_is_sent_again_and_never_compiled(served: Daemon, language: str, file: str, damage: str):
    store, name = served.root / "store", NAMES[language]
    first = again(name)
    toml, main = (source_file(store, first.manifest, which) for which in ("kernel.toml", MAIN[language]))
    path, other = (main, toml) if file == "main" else (toml, main)
    before, whole = n_quarantined(served), path.read_bytes()
    spoil(damage, path, other)
    assert again(name).digest == first.digest, "its binary is whole"
    built = again(name, tag=next(TAGS))  # another key of the same sources
    assert (built.origin, built.digest) == ("built", first.digest)
    assert path.read_bytes() == whole
    assert n_quarantined(served) - before >= (damage != "removed")
    assert not trace_of(path).exists()
    assert_sound(store)


@pytest.mark.parametrize("language", NAMES)
def test_equal_builds_share_their_texts(served: Daemon, language: str):
    """So a text that was damaged comes back with the next build of any of them."""
    texts = [again(NAMES[language], tag=next(TAGS)).manifest.attachments for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("language", "kind"), SHOWN)
def test_a_damaged_text_is_never_shown(served: Daemon, language: str, kind: str, damage: str):
    """PTX and logs: no request needs them. Whoever looks gets none rather than a wrong one."""
    store, name = served.root / "store", NAMES[language]
    first, other = again(name), again(name, **OTHER[language])
    digest, before = first.manifest.attachments[kind], n_quarantined(served)
    path = store / "payload" / digest[:2] / digest
    spoil(damage, path, payload(store, other.manifest))
    assert again(name).digest == first.digest
    assert served.call("GET", f"{protocol.ARTIFACTS}/{first.key}")["attachments"][kind] is None
    assert n_quarantined(served) - before == (damage != "removed")
    assert not trace_of(path).exists()
    again(name, **OTHER[language])
    manifest_file(store, first.manifest).unlink()
    assert again(name).origin == "built"
    assert served.call("GET", f"{protocol.ARTIFACTS}/{first.key}")["attachments"][kind] is not None
    assert_sound(store)


@pytest.fixture
def root(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for daemons that are started anew."""
    for name, value in variables(own_place).items():
        monkeypatch.setenv(name, value)
    write_cuda(own_place / "kernels" / "scale")
    return own_place


def test_a_damaged_file_of_the_daemons_own_costs_no_hit(root: Path):
    with daemon(root):
        first = again("scale")
    for damage in DAMAGE:
        for file in ("toolchains.json", "lock"):
            (root / "other").write_text("something else")
            spoil(damage, root / "store" / file, root / "other")
        shutil.rmtree(root / "store" / "alias", ignore_errors=True)  # the daemon is to be asked
        with daemon(root):
            found = again("scale")
        assert (found.origin, found.key, found.digest) == ("disk", first.key, first.digest), damage
        assert not trace_of(root / "store" / "lock").exists()


def test_no_flipped_bit_in_what_is_known_of_a_compiler_makes_another_key(root: Path):
    """Otherwise an entry would name a compiler that never was."""
    with daemon(root):
        first = again("scale")
    path = root / "store" / "toolchains.json"
    whole = path.read_text()
    for field in ("version", "files", "options"):
        (value,) = {known[field] for known in json.loads(whole)["toolchains"].values()}
        at = whole.index(json.dumps(value)) + 1
        path.write_text(whole[:at] + chr(ord(whole[at]) ^ 1) + whole[at + 1 :])
        with daemon(root):
            found = again("scale")
        assert (found.origin, found.key) == ("disk", first.key), field


LOADS = """
import sys
from pathlib import Path
import kserve.cli, kserve.service, kserve.build.worker, kserve.client.resolve, kserve.server.daemon
found = [name for name, module in sys.modules.items() if name.startswith("kserve") and (
    {"pickle", "marshal", "shelve", "dill"} & set(vars(module)))]
print(found)
"""


def test_nothing_of_kserve_can_load_a_pickle():
    assert python(LOADS).stdout.strip() == "[]"
