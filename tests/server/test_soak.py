"""The long run in benchmarks/soak.py: a short one passes, and each of its checks can fail."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kserve.key import digest_of
from kserve.store.files import FileStore
from tests.support.entries import key_of, payload_of, put_entry
from tests.support.processes import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def side(soak: ModuleType, own_place: Path) -> Iterator[Any]:
    """A store with entries 0 to 4, each of which a client was given ten seconds ago."""
    found = soak.Side(own_place, n_clients=1, kills=True, chance=random.Random(0))
    store = FileStore(own_place / "store", writable=True)
    for number in range(5):
        manifest = put_entry(store, number)
        say(own_place, at=time.time() - 10, digests={manifest.key: manifest.digest})
    yield found
    for file in found._logs.values():
        file.close()


def say(root: Path, **answer: Any) -> None:
    """A line of a client's log."""
    line = {"at": time.time(), "seconds": 0.1, "origin": "built", "build": 0.1, "wrong": [], **answer}
    with (root / "client-0.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def failures(side: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What failed, of what there is without a daemon."""
    monkeypatch.setattr(side, "ask", lambda *_: {"damaged": [], "orphaned": []})
    return {name: n for name, n in side.report()["failures"].items() if n}


def test_a_sound_store_passes(side: Any, monkeypatch: pytest.MonkeyPatch):
    assert failures(side, monkeypatch) == {}
    assert side.report()["n_acknowledged_checked"] == 5


def test_an_artifact_that_went_without_a_word_is_lost(side: Any, monkeypatch: pytest.MonkeyPatch):
    store = FileStore(side.store, writable=True)
    store.delete(f"manifest/{key_of(1)}")
    store.delete(f"payload/{digest_of(payload_of(2))}")
    assert failures(side, monkeypatch) == {"lost entries": 2}
    side.touched[key_of(1)] = time.time()  # pruned by us since
    side.touched[digest_of(payload_of(2))] = time.time()
    assert failures(side, monkeypatch) == {}


def test_an_eviction_before_the_last_answer_is_no_excuse(side: Any, monkeypatch: pytest.MonkeyPatch, own_place: Path):
    FileStore(side.store, writable=True).delete(f"manifest/{key_of(1)}")
    log = side.settings.socket.parent / "daemon.log"
    log.parent.mkdir(parents=True)
    side._clients = []
    for ago_s, lost in ((60, 1), (5, 0)):
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - ago_s))
        log.write_text(f"{at} DEBUG evict key={key_of(1)}\n")
        side.tick()
        assert failures(side, monkeypatch).get("lost entries", 0) == lost


WRONG: dict[str, dict[str, Any]] = {
    "wrong bytes": {"wrong": [key_of(1)]},
    "stuck waiters": {"seconds": 11.0},
    "errors": {"error": "internal", "message": "KeyError"},
}


@pytest.mark.parametrize("which", WRONG)
def test_each_check_can_fail(side: Any, monkeypatch: pytest.MonkeyPatch, own_place: Path, which: str):
    say(own_place, **{"digests": {}, **WRONG[which]})
    assert failures(side, monkeypatch) == {which: 1}


def test_two_digests_for_one_key_are_wrong_bytes(side: Any, monkeypatch: pytest.MonkeyPatch, own_place: Path):
    say(own_place, at=0.0, digests={key_of(1): "0" * 64})
    assert failures(side, monkeypatch)["wrong bytes"] == 1


def test_an_error_is_expected_only_where_processes_are_killed(side: Any, monkeypatch: pytest.MonkeyPatch, own_place: Path):
    say(own_place, error="build-failed", message="the cuda worker ended")
    assert failures(side, monkeypatch) == {}
    side.kills = False
    assert failures(side, monkeypatch) == {"errors": 1}


def test_a_wait_is_counted_from_the_last_kill(side: Any, monkeypatch: pytest.MonkeyPatch, own_place: Path):
    say(own_place, digests={}, seconds=14.0)
    assert failures(side, monkeypatch) == {"stuck waiters": 1}
    side._kills.append(time.time() - 6)
    assert failures(side, monkeypatch) == {}


def test_a_store_that_stays_damaged_fails(side: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(side, "ask", lambda *_: {"damaged": ["payload/0"], "orphaned": [key_of(1)]})
    assert side.report()["failures"]["store"] == 2
    side.touched[key_of(1)] = time.time()
    assert side.report()["failures"]["store"] == 1


def test_memory_that_grows_fails_in_a_long_run(soak: ModuleType):
    grows = [(float(at), 100_000 + 20 * at) for at in range(600)]
    assert soak.memory(grows, 600.0)["failures"] == {"memory": 1}
    assert soak.memory([(at, 100_000) for at, _ in grows], 600.0)["failures"] == {"memory": 0}


@pytest.mark.toolchain
@pytest.mark.slow
def test_a_short_run_passes_and_names_no_machine(own_place: Path):
    command = [sys.executable, str(SCRIPT), "--minutes", "0.3", "--clients", "6", "--out", str(own_place / "results")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (own_place / "results").glob("soak-*.json")
    text = found.read_text()
    assert [place for place in ("/tmp", "/home", "/root", str(REPOSITORY)) if place in text] == []
    plain = json.loads(text)
    assert plain["churn"]["origins"]["built"] > 0
    assert plain["steady"]["errors"] == {}
    assert found.with_suffix(".csv").read_text().count("\n") == 2
