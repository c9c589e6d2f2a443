"""The index: nothing foreign in it is decoded, opened or removed, no damage stays, and its sums are those of the files."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve.key import digest_of
from kserve.store.artifacts import Artifacts
from kserve.store.collect import Bounds
from kserve.store.files import FileStore
from kserve.store.index import Index
from kserve.store.layers import Layers
from kserve.store.safe_disk import SafeDisk
from kserve.store.upkeep import Upkeep
from tests.support.entries import key_of, looked_up, manifest_of, payload_of, put_entry
from tests.support.processes import fill, mounted, wait_for

WIDE = Bounds(1 << 40, 1 << 30)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory where there is such a place: these cases are about the index, not about waiting for a disk."""
    with tempfile.TemporaryDirectory(prefix="kt-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def root(place: Path) -> Path:
    return place / "store"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root, writable=True)


def opened(store: FileStore, bounds: Bounds = WIDE) -> Upkeep:
    """The upkeep of a store, its index made true: what a daemon has a moment after its start."""
    upkeep = Upkeep(store, bounds, in_use=tuple)
    upkeep.start()
    return upkeep


def artifacts_of(upkeep: Upkeep) -> Artifacts:
    return Artifacts(upkeep, Layers((), uids=frozenset()))


def publish(artifacts: Artifacts, number: int, payload: bytes | None = None, attached: tuple[bytes, ...] = ()) -> None:
    content = payload_of(number) if payload is None else payload
    artifacts.publish(manifest_of(number, content, attached=attached), [content, *attached])


def database(root: Path) -> Path:
    return root / "index" / "cache.db"


def plant(root: Path, **columns: Any) -> None:
    """A row as anybody who can write to the file may make it."""
    row = {"key": "count/hits", "raw": 1, "store_time": 0.0, "access_time": 0.0, "mode": 1, "value": "1", **columns}
    with contextlib.closing(sqlite3.connect(database(root))) as connection, connection:
        connection.execute("DELETE FROM Cache WHERE key = ?", (row["key"],))
        marks = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO Cache ({', '.join(row)}) VALUES ({marks})", (*row.values(),))


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_the_sums_are_those_of_the_files(store: FileStore, root: Path):
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    for number in range(20):
        publish(artifacts, number, attached=(b"the same log",))
    artifacts.add_source(b"a source")
    upkeep.pin([key_of(3)], "test")
    assert upkeep.index.usage() == looked_up(root)
    assert upkeep.index.stale == ""
    assert upkeep.prune([key_of(number) for number in range(10)]).keys == sorted(
        key_of(number) for number in range(10) if number != 3
    )
    assert upkeep.index.usage() == looked_up(root)
    publish(artifacts, 3)  # again, with fewer attachments
    assert upkeep.index.usage() == looked_up(root)


class Life:
    """What may happen to a store, drawn at random."""

    def __init__(self, store: FileStore, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = store
        self.upkeep = opened(store)
        self.artifacts = artifacts_of(self.upkeep)

    def key(self) -> str:
        return key_of(self.chance.randrange(12))

    def publish(self) -> None:
        payload, log = payload_of(self.chance.randrange(6), 9000), b"log %d" % self.chance.randrange(3)
        publish(self.artifacts, self.chance.randrange(12), payload, (log,))

    def upload(self) -> None:
        self.artifacts.add_source(b"source %d" % self.chance.randrange(5))

    def prune(self) -> None:
        self.upkeep.prune([self.key()])

    def pin(self) -> None:
        self.upkeep.pin([self.key()], "note")

    def unpin(self) -> None:
        self.upkeep.unpin([self.key()])

    def damage(self) -> None:
        if found := sorted((self.store.root / self.chance.choice(["payload", "manifest"])).glob("??/*")):
            path = self.chance.choice(found)
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[:-1])

    def ask(self) -> None:
        manifest = self.artifacts.manifest(self.key())
        if manifest is not None:
            self.artifacts.payload(manifest)
            self.artifacts.attachment(manifest, "text0")

    def restart(self) -> None:
        if self.chance.random() < 0.5:
            self.upkeep.close()
        self.upkeep = opened(self.store)
        self.artifacts = artifacts_of(self.upkeep)

    def step(self) -> None:
        steps = (self.publish, self.upload, self.prune, self.pin, self.unpin, self.damage, self.ask, self.ask, self.restart)
        self.chance.choice(steps)()
        self.upkeep.tend()


@pytest.mark.parametrize("seed", range(6))
def test_the_sums_stay_true_whatever_happens(store: FileStore, root: Path, seed: int):
    """Publications, equal payloads, evictions, damage, repairs, drops, pins and restarts in a random order."""
    life = Life(store, seed)
    for number in range(150):
        life.step()
        assert life.upkeep.index.stale == "", number
        if number % 5 == 0:
            assert life.upkeep.index.usage() == looked_up(root), number
    for number in range(12):
        life.artifacts.manifest(key_of(number))  # what is damaged and was not noticed yet
    life.upkeep.tend()
    assert life.upkeep.index.usage() == looked_up(root)
    named = named_by_files(life.artifacts)
    assert {name: references(life.upkeep, name) for name in named} == named


def named_by_files(artifacts: Artifacts) -> dict[str, int]:
    """How many manifests name each record, by a look at all of them."""
    found: dict[str, int] = {}
    for manifest in artifacts.manifests():
        for digest in {manifest.digest, *manifest.attachments.values()}:
            found[f"payload/{digest}"] = found.get(f"payload/{digest}", 0) + 1
    return found


def references(upkeep: Upkeep, name: str) -> int:
    kind, _, digest = name.partition("/")
    record = upkeep.index.records(f"{kind}/{digest[:2]}").get(name)
    return 0 if record is None else record.n_named


def test_a_record_that_is_put_again_is_counted_once(store: FileStore, root: Path):
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    for _ in range(3):
        publish(artifacts, 1)
        artifacts.add_source(b"source")
    assert upkeep.index.usage() == looked_up(root)
    upkeep.prune([key_of(1)])
    assert [*store.keys("payload")] == []


def test_a_damaged_manifest_lets_go_of_what_it_named(store: FileStore, root: Path):
    """Its bytes are gone, what it named is not for ever."""
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    publish(artifacts, 1, attached=(b"log",))
    path = store.path(f"manifest/{key_of(1)}")
    path.chmod(0o600)
    path.write_bytes(b"{")
    assert artifacts.manifest(key_of(1)) is None
    upkeep.tend()
    assert [*store.keys("payload")] == []
    assert upkeep.index.usage() == looked_up(root) == (0, 0, 0)


# ---- starts --------------------------------------------------------------------------------------------------------


def test_a_clean_end_is_believed_and_another_is_not(store: FileStore, root: Path):
    upkeep = opened(store)
    publish(artifacts_of(upkeep), 1)
    upkeep.close()
    again = Upkeep(store, WIDE, in_use=tuple)
    assert (again.index.stale, again.index.usage()) == ("", looked_up(root))
    unclosed = Upkeep(store, WIDE, in_use=tuple)  # the one before was never closed
    assert unclosed.index.stale == "not closed"
    assert unclosed.index.usage() is None
    unclosed.start()
    assert (unclosed.index.stale, unclosed.index.usage()) == ("", looked_up(root))


@pytest.mark.parametrize("how", ["added", "removed", "copied", "restored"])
def test_files_that_changed_after_a_clean_end_are_noticed(store: FileStore, root: Path, how: str):
    """By hand, by another tool, by a copy whose blocks are of another size, by a power cut."""
    upkeep = opened(store)
    for number in range(3):
        publish(artifacts_of(upkeep), number)
    upkeep.close()
    match how:
        case "added":
            put_entry(store, 9)
        case "removed":
            store.path(f"payload/{digest_of(payload_of(1))}").unlink()
        case "copied":
            root.rename(root.with_name("old"))
            shutil.copytree(root.with_name("old"), root)
        case "restored":
            shutil.copytree(root / "index", root / "old")
            second = opened(store)
            publish(artifacts_of(second), 9)
            shutil.rmtree(root / "index")
            (root / "old").rename(root / "index")
    again = Upkeep(store, WIDE, in_use=tuple)
    assert again.index.stale == "files changed"
    again.start()
    assert (again.index.stale, again.index.usage()) == ("", looked_up(root))


@pytest.mark.parametrize("torn", [False, True])
def test_after_a_power_cut_the_records_are_counted_again(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
):
    """Whatever the database says of them; the counters stay where it is whole."""
    upkeep = opened(store)
    for number in range(40):
        publish(artifacts_of(upkeep), number)
    upkeep.index.count({"hits": 5})
    plant(root, key=f"record/payload/{digest_of(payload_of(1))}", value="4096 7")  # of another age than the rest
    if torn:
        with database(root).open("r+b") as file:
            file.seek(8 * 4096)
            file.write(bytes(4 * 4096))
    (root.parent / "boot").write_text("the next one")
    monkeypatch.setattr("kserve.store.index._BOOT", root.parent / "boot")
    again = opened(store)
    assert again.index.usage() == looked_up(root)
    assert references(again, f"payload/{digest_of(payload_of(1))}") == 1
    assert again.index.counters() == ({} if torn else {"hits": 5})


def test_nothing_of_it_is_mapped_into_memory(store: FileStore, root: Path):
    """A mapped file that somebody cuts short kills the process that touches it."""
    upkeep = opened(store)
    publish(artifacts_of(upkeep), 1)
    assert {path.name for path in (root / "index").iterdir()} <= {"cache.db", "cache.db-journal"}
    assert str(root) not in Path("/proc/self/maps").read_text()


def test_a_use_is_no_change_of_the_files(store: FileStore):
    upkeep = opened(store)
    publish(artifacts_of(upkeep), 1)
    upkeep.close()
    store.touch(f"manifest/{key_of(1)}")
    assert Upkeep(store, WIDE, in_use=tuple).index.stale == ""


def test_a_publication_after_the_end_is_noticed_at_the_next_start(store: FileStore, root: Path):
    """A build that is cancelled with the daemon may still be writing in its thread."""
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    upkeep.close()
    publish(artifacts, 1)
    again = Upkeep(store, WIDE, in_use=tuple)
    assert again.index.stale != ""
    again.start()
    assert again.index.usage() == looked_up(root)


def test_an_index_that_is_made_again_knows_what_names_what(store: FileStore, root: Path):
    shared, log = b"payload of two", b"log of all"
    for number in range(3):
        put_entry(store, number, shared if number < 2 else None, attached=(log,), sources=(b"source",))
    upkeep = opened(store)
    assert upkeep.index.usage() == looked_up(root)
    assert references(upkeep, f"payload/{digest_of(shared)}") == 2
    assert references(upkeep, f"payload/{digest_of(log)}") == references(upkeep, f"source/{digest_of(b'source')}") == 3
    upkeep.prune([key_of(0)])
    assert store.get(f"payload/{digest_of(shared)}") == shared
    upkeep.prune([key_of(1)])
    assert store.get(f"payload/{digest_of(shared)}") is None
    assert store.get(f"payload/{digest_of(log)}") == log


def test_counters_outlast_a_restart_clean_or_not(store: FileStore):
    index = opened(store).index
    index.count({"hits": 3, "built": 1})
    index.count({"hits": 2})
    assert index.counters() == {"hits": 5, "built": 1}
    index.close()
    again = opened(store).index
    again.count({"hits": 1})
    assert opened(store).index.counters() == {"hits": 6, "built": 1}


# ---- what somebody else put there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{}, [1], (1,), {"a"}, None, 1, 1.5, b"bytes", object(), Payload(Path("/"))], ids=repr)
def test_nothing_but_text_goes_in(root: Path, value: object):
    disk = SafeDisk(str(root))
    for call in (lambda: disk.put(value), lambda: disk.store(value, False)):
        with pytest.raises(TypeError):
            call()


def test_a_file_goes_neither_in_nor_out(root: Path):
    disk = SafeDisk(str(root))
    with pytest.raises(TypeError):
        disk.store("text", True)
    with pytest.raises(ValueError, match="files"):
        disk.filename("key", "value")
    root.mkdir(parents=True)
    (root / "kept").write_text("x")
    disk.remove("kept")
    disk.remove("../kept")
    assert (root / "kept").exists()


FOREIGN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a pickle": lambda path: {"mode": 4, "value": pickle.dumps(Payload(path))},
    "a pickle as bytes": lambda path: {"value": pickle.dumps(Payload(path))},
    "a pickled key": lambda path: {"key": pickle.dumps(Payload(path)), "raw": 0, "value": "1"},
    "a key that is said to be pickled": lambda _: {"raw": 0},
    "a file of pickle": lambda path: {"mode": 4, "filename": str(path.parent / "evil.pickle"), "value": None},
    "a file outside": lambda path: {"mode": 2, "filename": "../../victim.txt", "value": None},
    "a text file outside": lambda path: {"mode": 3, "filename": "../../victim.txt", "value": None},
    "a file beside a text": lambda path: {"filename": "../../victim.txt"},
    "a number": lambda _: {"value": 5},
    "a word for a number": lambda _: {"value": "many"},
    "nothing": lambda _: {"value": None},
    "a mode that is none": lambda _: {"mode": 99},
}


@pytest.mark.parametrize("which", FOREIGN)
@pytest.mark.parametrize("key", ["count/hits", "total", "failure/" + "a" * 64, "shape", "schema", "record"])
def test_a_planted_row_is_refused_and_the_index_made_again(
    place: Path, store: FileStore, root: Path, which: str, key: str, caplog: pytest.LogCaptureFixture
):
    """Nothing of it is decoded, opened or removed, whichever key it has and whoever asks first."""
    upkeep = opened(store)
    for number in range(3):
        publish(artifacts_of(upkeep), number)
    upkeep.close()
    made, victim = place / "made", place / "victim.txt"
    victim.write_text("mine")
    (place / "evil.pickle").write_bytes(pickle.dumps(Payload(made)))
    key = f"record/payload/{digest_of(payload_of(1))}" if key == "record" else key
    plant(root, **{"key": key, **FOREIGN[which](made)})
    caplog.clear()
    again = opened(store)
    again.index.counters()
    again.index.failures()
    again.prune([key_of(1)])
    with contextlib.suppress(TimeoutError):
        wait_until_mended(again)
    assert not made.exists(), "a pickle was executed"
    assert victim.read_text() == "mine"
    assert (again.index.stale, again.index.usage()) == ("", looked_up(root))
    assert again.index.counters().get("hits", 0) in (0, 1)
    assert len([record for record in caplog.records if "index closed" in record.message]) <= 1


def wait_until_mended(upkeep: Upkeep) -> None:
    """What the daemon does each second, until there is nothing to mend."""

    def is_mended() -> bool:
        upkeep._mend_after = 0.0
        upkeep.tend()
        return upkeep.index.is_open and not upkeep.index.stale

    wait_for(is_mended, what="the index to be mended")


SETTINGS = {
    "an attribute": ("_directory", "/elsewhere"),
    "the disk": ("_disk", "text"),
    "an unknown pragma": ("sqlite_no_such_pragma", "1"),
    "an argument of the disk": ("disk_no_such_argument", "1"),
}


@pytest.mark.parametrize("which", SETTINGS)
def test_a_planted_setting_never_reaches_the_cache(store: FileStore, root: Path, which: str):
    upkeep = opened(store)
    publish(artifacts_of(upkeep), 1)
    upkeep.close()
    with contextlib.closing(sqlite3.connect(database(root))) as connection, connection:
        connection.execute("INSERT INTO Settings VALUES (?, ?)", SETTINGS[which])
    again = opened(store)
    assert (again.index.stale, again.index.usage()) == ("", looked_up(root))
    with contextlib.closing(sqlite3.connect(database(root))) as connection:
        assert connection.execute("SELECT count(*) FROM Settings WHERE key = ?", (SETTINGS[which][0],)).fetchone() == (0,)


def _named_elsewhere(text: str) -> Callable[[Path], None]:
    def planted(root: Path) -> None:
        plant(root, key=f"record/manifest/{key_of(1)}", value=f"4096 0 {text}")

    return planted


@pytest.mark.parametrize("text", ["payload/../../victim", f"manifest/{'a' * 64}", f"pin/{'a' * 64}", "", "tmp/x", "payload/ab"])
def test_a_planted_name_removes_nothing(place: Path, store: FileStore, root: Path, text: str):
    upkeep = opened(store)
    for number in range(3):
        publish(artifacts_of(upkeep), number)
    upkeep.pin(["a" * 64], "kept")
    store.put(f"manifest/{'a' * 64}", b"{}")
    upkeep.close()
    (place / "victim").write_text("mine")
    _named_elsewhere(text)(root)
    again = opened(store)
    again.prune([key_of(1)])
    wait_until_mended(again)
    assert (place / "victim").exists()
    assert store.get(f"pin/{'a' * 64}") == b"kept"
    assert store.get(f"manifest/{'a' * 64}") == b"{}"
    assert again.index.usage() == looked_up(root)


# ---- damage --------------------------------------------------------------------------------------------------------


def _replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _scramble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    chance = random.Random(1)
    for _ in range(200):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _to_directory(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _to_link(path: Path) -> None:
    outside = path.parent.parent.parent / "outside.db"
    shutil.move(path, outside)
    path.symlink_to(outside)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "one byte": lambda path: os.truncate(path, 1),
    "half a page": lambda path: os.truncate(path, 2048),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeroed": lambda path: _replace(path, bytes(path.stat().st_size)),
    "text": lambda path: _replace(path, b"no database\n" * 5000),
    "bits flipped": _scramble,
    "a directory": _to_directory,
    "a link": _to_link,
    "a database of another program": lambda path: (
        path.unlink(),
        sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close(),
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_database_is_made_again(place: Path, store: FileStore, root: Path, how: str):
    upkeep = opened(store)
    for number in range(40):
        publish(artifacts_of(upkeep), number)
    upkeep.close()
    DAMAGE[how](database(root))
    again = opened(store)
    again.index.counters()
    again.prune([key_of(number) for number in range(20)])
    wait_until_mended(again)
    assert again.index.usage() == looked_up(root)
    assert database(root).is_file()
    assert not database(root).is_symlink()
    if how == "a link":
        assert (place / "outside.db").exists(), "what a link leads to is not ours"


PLACES: dict[str, Callable[[Path], None]] = {
    "a file": lambda path: path.write_text("x"),
    "a link to nothing": lambda path: path.symlink_to("/nonexistent/place"),
    "a link to a directory": lambda path: (
        (path.parent.parent / "outside").mkdir(),
        path.symlink_to(path.parent.parent / "outside"),
    ),
    "a link to itself": lambda path: path.symlink_to(path),
    "open to everybody": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a pipe in it": lambda path: (path.mkdir(mode=0o700), os.mkfifo(path / "cache.db")),
}


@pytest.mark.parametrize("which", PLACES)
def test_whatever_lies_in_its_place_is_replaced(place: Path, store: FileStore, root: Path, which: str):
    put_entry(store, 1)
    PLACES[which](root / "index")
    upkeep = opened(store)
    assert (upkeep.index.stale, upkeep.index.usage()) == ("", looked_up(root))
    assert (root / "index").stat().st_mode & 0o777 == 0o700
    assert not (root / "index").is_symlink()
    assert [*place.glob("outside/*")] == []


@pytest.mark.parametrize("how", ["removed", "empty", "half", "zeroed", "text"])
@pytest.mark.parametrize("which", ["cache.db", "cache.db-journal"])
def test_damage_while_it_is_open_is_mended(store: FileStore, root: Path, how: str, which: str):
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    for number in range(20):
        publish(artifacts, number)
    DAMAGE[how](root / "index" / which)
    for number in range(20, 30):
        publish(artifacts, number)
    upkeep.prune([key_of(number) for number in range(10)])
    upkeep.index.counters()
    wait_until_mended(upkeep)
    upkeep.close()
    again = opened(store)
    assert again.index.usage() == looked_up(root)
    for number in range(10, 30):
        assert store.get(f"payload/{digest_of(payload_of(number))}") == payload_of(number)


def test_an_index_that_goes_away_is_made_again(store: FileStore, root: Path):
    upkeep = opened(store)
    publish(artifacts_of(upkeep), 1)
    shutil.rmtree(root / "index")
    for number in range(2, 5):
        publish(artifacts_of(upkeep), number)
    upkeep.close()
    assert opened(store).index.usage() == looked_up(root)


@pytest.mark.parametrize("mode", ["persist", "wal"])
def test_a_database_that_somebody_holds_costs_no_start(store: FileStore, root: Path, mode: str):
    """It is opened when he lets go of it; diskcache alone would try for a minute."""
    upkeep = opened(store)
    publish(artifacts_of(upkeep), 1)
    upkeep.index.count({"hits": 5})
    upkeep.close()
    with contextlib.closing(sqlite3.connect(database(root), isolation_level=None)) as somebody:
        somebody.execute(f"PRAGMA journal_mode = {mode}")
        somebody.execute("BEGIN IMMEDIATE")
        somebody.execute("UPDATE Cache SET tag = 1")
        began = time.monotonic()
        again = opened(store)
        assert time.monotonic() - began < 3
        assert "locked" in again.index.stale
        assert again.usage() == looked_up(root)
    wait_until_mended(again)
    assert (again.index.usage(), again.index.counters()) == (looked_up(root), {"hits": 5})


# ---- disks that refuse ---------------------------------------------------------------------------------------------


@needs_root
def test_a_full_disk_costs_the_bounds_not_the_store(place: Path):
    with mounted(place / "small", "-o", "size=2m") as small:
        store = FileStore(small / "store", writable=True)
        put_entry(store, 1)
        filler = fill(small)
        began = time.monotonic()
        upkeep = opened(store)
        assert time.monotonic() - began < 1
        assert not upkeep.index.is_open
        assert "unusable" in upkeep.index.stale
        assert upkeep.usage() == looked_up(small / "store")
        assert artifacts_of(upkeep).manifest(key_of(1)) is not None
        filler.unlink()
        wait_until_mended(upkeep)
        assert upkeep.index.usage() == looked_up(small / "store")
        upkeep.close()


@needs_root
def test_a_disk_that_fills_up_does_not_cost_the_counters(place: Path):
    with mounted(place / "small", "-o", "size=2m") as small:
        store = FileStore(small / "store", writable=True)
        upkeep = opened(store)
        upkeep.index.count({"hits": 7})
        fill(small)
        upkeep.index.count({f"counter {i}": i for i in range(20_000)})
        assert not upkeep.index.is_open
        upkeep.tend()
        (small / "filler").unlink()
        wait_until_mended(upkeep)
        assert upkeep.index.counters()["hits"] == 7
        upkeep.close()


@needs_root
def test_a_disk_that_becomes_read_only_answers_at_once(place: Path):
    """diskcache alone would try for minutes."""
    with mounted(place / "small", "-o", "size=4m") as small:
        store = FileStore(small / "store", writable=True)
        upkeep = opened(store)
        artifacts = artifacts_of(upkeep)
        publish(artifacts, 1)
        upkeep.close()
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        began = time.monotonic()
        found = Index(small / "store" / "index", shape=store.shape)
        assert (found.is_open, found.usage(), found.counters(), found.failures()) == (False, None, {}, [])
        found.count({"hits": 1})
        found.close()
        assert time.monotonic() - began < 1
        assert artifacts.manifest(key_of(1)) is not None


# ---- remembered failures -------------------------------------------------------------------------------------------


def test_a_failure_is_remembered_until_it_expires(store: FileStore):
    index = opened(store).index
    index.remember_failure("a" * 64, '{"code": "compile-failed"}', for_s=60)
    index.remember_failure("b" * 64, "{}", for_s=-1)
    ((key, error, until),) = index.failures()
    assert (key, error) == ("a" * 64, '{"code": "compile-failed"}')
    assert 0 < until - time.time() <= 60
    index.close()
    assert [key for key, _, _ in opened(store).index.failures()] == ["a" * 64]
