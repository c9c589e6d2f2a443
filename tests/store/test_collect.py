"""Collection: what goes, in which order, what stays, and what it costs."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kserve.alias import Alias, Signpost
from kserve.artifact import compact
from kserve.key import digest_of
from kserve.store.artifacts import Artifacts
from kserve.store.base import KINDS
from kserve.store.collect import Bounds, records_of
from kserve.store.files import FileStore
from kserve.store.layers import Layers
from kserve.store.upkeep import Upkeep
from tests.support.entries import key_of, looked_up, manifest_of, payload_of, put_entry, write_fast

WIDE = Bounds(1 << 40, 1 << 30)
HOUR_S = 3600.0


@pytest.fixture
def store() -> Iterator[FileStore]:
    """In memory where there is such a place: these cases are about what goes, not about waiting for a disk."""
    with tempfile.TemporaryDirectory(prefix="kt-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield FileStore(Path(name) / "store", writable=True)


def opened(store: FileStore, bounds: Bounds = WIDE, *, in_use: tuple[str, ...] = ()) -> Upkeep:
    upkeep = Upkeep(store, bounds, in_use=lambda: in_use)
    upkeep.start()
    return upkeep


def artifacts_of(upkeep: Upkeep) -> Artifacts:
    return Artifacts(upkeep, Layers((), uids=frozenset()))


def publish(artifacts: Artifacts, number: int, payload: bytes | None = None) -> None:
    content = payload_of(number) if payload is None else payload
    artifacts.publish(manifest_of(number, content), [content])


def age(store: FileStore, name: str, seconds: float) -> None:
    """Make the record's file so old."""
    then = time.time() - seconds
    os.utime(store.path(name), (then, then))


def entries(store: FileStore, n: int) -> None:
    """Entries 0 … n-1, used in that order, the last one a minute ago; two files each."""
    for number in range(n):
        put_entry(store, number)
        age(store, f"manifest/{key_of(number)}", 60.0 * (n - number))


def numbers(store: FileStore) -> list[int]:
    """The entries that are there."""
    known = {key_of(number): number for number in range(1000)}
    return sorted(known[key] for key in store.keys("manifest"))


# ---- bounds and order ----------------------------------------------------------------------------------------------


def test_nothing_goes_while_the_store_is_within_its_bounds(store: FileStore):
    entries(store, 10)
    size, n_files, _ = looked_up(store.root)
    upkeep = opened(store, Bounds(size, n_files))
    assert numbers(store) == list(range(10))
    assert upkeep.collect() == ([], 0, 0)


def test_too_many_files_go_down_to_nine_tenths_the_oldest_use_first(store: FileStore):
    entries(store, 50)  # 100 files
    opened(store, Bounds(1 << 40, 99))
    assert numbers(store) == list(range(6, 50)), "89 files or fewer: 44 entries"


def test_too_many_bytes_go_down_to_nine_tenths(store: FileStore):
    entries(store, 50)
    size, _, _ = looked_up(store.root)
    opened(store, Bounds(size - 1, 1 << 30))
    assert looked_up(store.root)[0] <= 0.9 * size
    assert numbers(store) == list(range(50 - len(numbers(store)), 50))
    assert len(numbers(store)) >= 44, "and no further than that"


def test_a_use_saves_an_entry_within_the_same_minute_too(store: FileStore):
    """The files show a use to the minute; the order of uses is exact all the same."""
    upkeep = opened(store, Bounds(1 << 40, 20))
    artifacts = artifacts_of(upkeep)
    for number in range(10):
        publish(artifacts, number)
        upkeep.touch(key_of(number))
    for number in (0, 3):
        upkeep.touch(key_of(number))
    publish(artifacts, 10)
    assert numbers(store) == [0, *range(3, 11)]


def test_a_use_outlasts_the_daemon(store: FileStore):
    entries(store, 10)
    upkeep = opened(store)
    upkeep.touch(key_of(0))
    upkeep.close()
    opened(store, Bounds(1 << 40, 19))
    assert numbers(store) == [0, *range(3, 10)]


def test_the_store_fits_its_bounds_again_before_the_next_publication(store: FileStore):
    upkeep = opened(store, Bounds(1 << 40, 20))
    artifacts = artifacts_of(upkeep)
    for number in range(100):
        publish(artifacts, number)
        assert looked_up(store.root)[1] <= 20
    assert numbers(store)[-1] == 99


def test_uploads_are_within_the_bounds_too(store: FileStore):
    upkeep = opened(store, Bounds(1 << 40, 20))
    artifacts = artifacts_of(upkeep)
    for number in range(9):
        publish(artifacts, number)
    for number in range(12):
        artifacts.add_source(b"source %d" % number)
    assert looked_up(store.root)[1] <= 20


# ---- what stays ----------------------------------------------------------------------------------------------------


def test_equal_bytes_of_two_artifacts_stay_while_one_of_them_does(store: FileStore):
    shared = b"the declared and the generic variant alike"
    for number in (0, 1):
        put_entry(store, number, shared, attached=(b"log",), sources=(b"source",))
    age(store, f"source/{digest_of(b'source')}", 2 * HOUR_S)
    upkeep = opened(store)
    assert upkeep.prune([key_of(0)]).keys == [key_of(0)]
    assert [store.get(name) for name in records_of(manifest_of(1, shared, attached=(b"log",), sources=(b"source",)))] == [
        *(content for content in sorted([shared, b"log"], key=digest_of)),
        b"source",
    ]
    upkeep.prune([key_of(1)])
    assert looked_up(store.root) == (0, 0, 0)
    assert upkeep.index.usage() == (0, 0, 0)


def test_a_source_of_this_hour_stays_an_older_one_goes_with_its_last_artifact(store: FileStore):
    put_entry(store, 0, sources=(b"old", b"young"))
    age(store, f"source/{digest_of(b'old')}", 2 * HOUR_S)
    upkeep = opened(store)
    upkeep.prune([key_of(0)])
    assert [*store.keys("source")] == [digest_of(b"young")]
    age(store, f"source/{digest_of(b'young')}", 2 * HOUR_S)
    assert upkeep.prune([]).n_unnamed == 1
    assert looked_up(store.root) == (0, 0, 0) == upkeep.index.usage()


def test_pinned_entries_and_those_in_use_stay(store: FileStore):
    entries(store, 50)
    store.put(f"pin/{key_of(0)}", b"test")
    opened(store, Bounds(1 << 40, 99), in_use=(key_of(1), key_of(2)))
    assert numbers(store)[:4] == [0, 1, 2, 9]


def test_an_unpinned_entry_may_go_at_once(store: FileStore):
    entries(store, 10)
    for number in range(10):
        store.put(f"pin/{key_of(number)}", b"test")
    upkeep = opened(store, Bounds(1 << 40, 10))
    assert numbers(store) == list(range(10))
    upkeep.unpin([key_of(number) for number in range(8)])
    assert len(numbers(store)) < 5
    assert looked_up(store.root)[1] <= 10


def test_aliases_go_with_what_they_lead_to_and_are_within_the_bounds(store: FileStore):
    artifacts = artifacts_of(opened(store, Bounds(1 << 40, 30)))
    for number in range(40):
        publish(artifacts, number)
        alias = Alias([compact(manifest_of(number, payload_of(number)))], "cuda", "13.0", digest_of(b"{}"), "{}")
        artifacts.keep_alias(f"{number:064x}", alias, b"{}")
        assert sum(1 for kind in KINDS for _ in store.keys(kind)) <= 30
    left = set(numbers(store))
    assert {int(key, 16) for key in store.keys("alias")} == left
    assert list(store.keys("toolchain")) == [digest_of(b"{}")]
    artifacts.upkeep.prune([key_of(number) for number in left])
    assert list(store.keys("alias")) == []


def test_a_signpost_stays_as_long_as_an_answer_is_behind_it(store: FileStore):
    """Where a tuning is in force the answer for the defaults is not used, and the first to be evicted."""
    artifacts = artifacts_of(opened(store))
    signpost, chosen = digest_of(b"signpost"), digest_of(b"chosen")
    for number, name in enumerate((signpost, chosen)):
        publish(artifacts, number)
        answer = Alias([compact(manifest_of(number, payload_of(number)))], "cuda", "13.0", digest_of(b"{}"), "{}")
        more = {"behind": signpost} if number else {"signpost": Signpost("base", {}, [])}
        artifacts.keep_alias(name, answer._replace(**more), b"{}")
    artifacts.upkeep.prune([key_of(0)])
    assert {*store.keys("alias")} == {signpost, chosen}
    artifacts.upkeep.prune([key_of(1)])
    assert list(store.keys("alias")) == []


def test_everything_pinned_is_a_warning_and_no_loop(store: FileStore, caplog: pytest.LogCaptureFixture):
    entries(store, 30)
    for number in range(30):
        store.put(f"pin/{key_of(number)}", b"test")
    began = time.monotonic()
    upkeep = opened(store, Bounds(1, 1))
    artifacts = artifacts_of(upkeep)
    for number in range(100, 110):
        publish(artifacts, number)
    assert numbers(store) == list(range(30)), "what is not pinned goes at once"
    assert time.monotonic() - began < 5
    assert len([record for record in caplog.records if "bound exceeded" in record.message]) == 1


def test_a_record_that_cannot_be_removed_does_not_stop_the_collection(store: FileStore, caplog: pytest.LogCaptureFixture):
    entries(store, 50)
    upkeep = opened(store)
    blocked = store.path(f"manifest/{key_of(0)}")
    blocked.unlink()
    blocked.mkdir()  # what even root cannot unlink
    os.utime(blocked, (1, 1))
    upkeep.bounds = Bounds(1 << 40, 99)
    upkeep.collect()
    assert "kept" in caplog.text
    assert len([*store.keys("manifest")]) <= 45


# ---- what nothing names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["payload", "source"])
@pytest.mark.parametrize("hours", [0.9, 1.1])
def test_what_nothing_names_goes_after_an_hour_and_not_before(store: FileStore, kind: str, hours: float):
    """A build that was killed between its payload and its manifest; a build that is still between the two."""
    name = f"{kind}/{digest_of(b'unnamed')}"
    store.put(name, b"unnamed")
    age(store, name, hours * HOUR_S)
    upkeep = opened(store)
    assert upkeep.prune([]).n_unnamed == (hours > 1)
    assert (store.get(name) is None) == (hours > 1)
    assert upkeep.index.usage() == looked_up(store.root)


def test_what_nothing_names_goes_before_anything_that_was_used(store: FileStore):
    entries(store, 10)
    for number in range(5):
        name = f"payload/{digest_of(b'unnamed %d' % number)}"
        store.put(name, b"unnamed %d" % number)
        age(store, name, 2 * HOUR_S)
    opened(store, Bounds(1 << 40, 23))
    assert numbers(store) == list(range(10))
    assert len([*store.keys("payload")]) == 10


def test_a_clock_that_was_set_back_removes_nothing_young(store: FileStore):
    store.put(f"source/{digest_of(b'x')}", b"x")
    age(store, f"source/{digest_of(b'x')}", -10 * HOUR_S)
    assert opened(store).prune([]).n_unnamed == 0


def test_an_eviction_while_the_index_is_made_again_takes_nothing_that_another_may_name(store: FileStore):
    """Half of the manifests are not counted yet: one of them may name the payload too."""
    shared = b"shared"
    for number in range(8):
        put_entry(store, number, shared)
    upkeep = Upkeep(store, WIDE, in_use=tuple)
    assert upkeep.index.stale
    upkeep.index.added({f"manifest/{key_of(0)}": 4096}, names={f"manifest/{key_of(0)}": (f"payload/{digest_of(shared)}",)})
    upkeep.prune([key_of(0)])
    assert store.get(f"payload/{digest_of(shared)}") == shared
    upkeep.start()
    upkeep.prune([key_of(number) for number in range(8)])
    assert looked_up(store.root) == (0, 0, 0) == upkeep.index.usage()


def test_an_eviction_between_two_looks_is_a_miss_without_a_word_of_damage(store: FileStore, caplog: pytest.LogCaptureFixture):
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    publish(artifacts, 1)
    manifest = artifacts.manifest(key_of(1))
    assert manifest is not None
    upkeep.prune([key_of(1)])
    caplog.clear()
    assert not artifacts.is_sound(manifest)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert artifacts.reason_for(key_of(1), "scale", "declared", {}) == "evicted"


def test_the_reason_of_the_next_build_is_the_eviction(store: FileStore):
    upkeep = opened(store, Bounds(1 << 40, 20))
    artifacts = artifacts_of(upkeep)
    for number in range(11):
        publish(artifacts, number)
    gone = [number for number in range(11) if number not in numbers(store)]
    assert gone
    assert {artifacts.reason_for(key_of(number), "scale", "declared", {}) for number in gone} == {"evicted"}


def test_the_quarantine_is_bounded_and_its_oldest_go_first(store: FileStore):
    for number in range(1005):
        (store.root / "quarantine" / f"{number:04}").write_bytes(b"")
    opened(store).tend()
    left = sorted(path.name for path in (store.root / "quarantine").iterdir())
    assert len(left) == 1000
    assert "1004" in left


def test_a_directory_in_quarantine_can_be_purged(store: FileStore):
    store.path(f"manifest/{key_of(1)}").mkdir(parents=True)
    assert store.get(f"manifest/{key_of(1)}") is None
    (store.root / "quarantine" / "link").symlink_to(store.root / "manifest")
    assert opened(store).purge_quarantine()[0] == 2
    assert (store.root / "manifest").is_dir()
    assert [*(store.root / "quarantine").iterdir()] == []


# ---- beside everything else ----------------------------------------------------------------------------------------


def test_a_hit_never_waits_for_the_upkeep(store: FileStore):
    """Whatever it finds: it runs on the loop that answers everybody."""
    upkeep = opened(store)
    artifacts = artifacts_of(upkeep)
    for number in range(4):
        publish(artifacts, number)
    for number, kind in ((1, "payload"), (2, "manifest")):
        path = store.path(f"payload/{digest_of(payload_of(number))}" if kind == "payload" else f"manifest/{key_of(number)}")
        path.chmod(0o600)
        path.write_bytes(b"damaged")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with upkeep.publishing():
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5)
    try:
        began = time.monotonic()
        found = [artifacts.manifest(key_of(number)) for number in range(4)]
        assert [manifest is not None for manifest in found] == [True, True, False, True]
        assert [artifacts.is_sound(manifest) for manifest in found if manifest] == [True, False, True]
        upkeep.touch(key_of(0))
        assert time.monotonic() - began < 1
    finally:
        done.set()
        holder.join()
    upkeep.tend()
    assert upkeep.index.usage() == looked_up(store.root)
    assert numbers(store) == [0, 3]


def test_publications_go_on_while_the_index_is_made_again(store: FileStore):
    n = 4000
    for number in range(n):
        payload = payload_of(number, 40)
        manifest = manifest_of(number, payload)
        write_fast(store.root, "payload", manifest.digest, payload)
        write_fast(store.root, "manifest", manifest.key, manifest.to_bytes())
    upkeep = Upkeep(store, WIDE, in_use=tuple)
    artifacts = artifacts_of(upkeep)
    upkeep.mend()
    longest, number = 0.0, n
    while upkeep.index.stale:
        began = time.monotonic()
        publish(artifacts, number)
        upkeep.prune([key_of(number - 500)])
        longest, number = max(longest, time.monotonic() - began), number + 1
    assert number >= n + 2, "nobody published meanwhile"
    assert longest < 2
    assert upkeep.index.usage() == looked_up(store.root)
    upkeep.close()
    assert opened(store).index.usage() == looked_up(store.root)


# ---- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_entries_are_collected_in_seconds(store: FileStore):
    """A first look at them, a collection of a tenth, a start after a crash. benchmarks/scale.py has the figures of 100,000."""
    n = 20_000
    for number in range(n):
        payload = payload_of(number, 40)
        manifest = manifest_of(number, payload)
        write_fast(store.root, "payload", manifest.digest, payload)
        write_fast(store.root, "manifest", manifest.key, manifest.to_bytes())
    upkeep = Upkeep(store, WIDE, in_use=tuple)
    seconds = {"rebuild": timed(upkeep.start)}
    assert upkeep.index.usage() == (n * 8192, 2 * n, n)
    upkeep.bounds = Bounds(1 << 40, 2 * n - 1)
    seconds["collection"] = timed(upkeep.collect)
    assert upkeep.index.usage() == looked_up(store.root)
    assert looked_up(store.root)[2] == pytest.approx(0.9 * n, rel=0.001)
    again = Upkeep(store, WIDE, in_use=tuple)  # the one before was not closed
    seconds["start after a crash"] = timed(again.start)
    assert again.index.usage() == looked_up(store.root)
    again.close()
    last = Upkeep(store, WIDE, in_use=tuple)
    seconds["start after a clean end"] = timed(last.start)
    assert last.index.usage() == looked_up(store.root)
    assert seconds["rebuild"] < 60
    assert seconds["collection"] < 20
    assert seconds["start after a crash"] < 20
    assert seconds["start after a clean end"] < 1


def timed(action) -> float:
    began = time.monotonic()
    action()
    return round(time.monotonic() - began, 2)
