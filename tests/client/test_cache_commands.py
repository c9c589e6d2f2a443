"""`kserve cache prune`, `pin`, `unpin` and `quarantine`, as a person and a script see them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import cli, protocol
from kserve.errors import STATUS
from kserve.store.files import FileStore
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.entries import key_of, payload_of, put_entry
from tests.support.processes import wait_for

DAY_S = 86_400.0
# number -> (kernel, target, days since its last use)
ENTRIES = {
    0: ("scale", "cuda:sm_90", 0.0),
    1: ("scale", "cuda:sm_90", 10.0),
    2: ("scale", "cuda:sm_80", 20.0),
    3: ("shift", "cuda:sm_90", 10.0),
    4: ("shift", "cuda:sm_80", 0.0),
}


def filled(root: Path) -> FileStore:
    """Five artifacts that no compiler made."""
    store = FileStore(root / "store", writable=True)
    for number, (name, target, days) in ENTRIES.items():
        put_entry(store, number, name=name, target=target)
        then = time.time() - days * DAY_S
        os.utime(store.path(f"manifest/{key_of(number)}"), (then, then))
    return store


@pytest.fixture
def store(own_place: Path) -> FileStore:
    return filled(own_place)


@pytest.fixture
def found(own_place: Path, store: FileStore) -> Iterator[Daemon]:
    with daemon(own_place) as found:
        yield found


@pytest.fixture(scope="module")
def shared() -> Iterator[FileStore]:
    """A store under a daemon, for cases that change nothing."""
    with place() as root:
        store = filled(root)
        with daemon(root):
            yield store


@pytest.fixture
def unchanged(shared: FileStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    for name, value in variables(shared.root.parent).items():
        monkeypatch.setenv(name, value)
    before = shared.shape()
    yield shared
    assert shared.shape() == before


class Command:
    """`kserve cache …` in this process: status and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        status = cli.main(["cache", *arguments])
        return (status, *self._capsys.readouterr())

    def text(self, *arguments: str) -> str:
        status, out, error = self(*arguments)
        assert (status, error) == (0, "")
        return out

    def parsed(self, *arguments: str, status: int = 0) -> Any:
        """What `--json` prints."""
        found, out, error = self(*arguments, "--json")
        assert (found, error) == (status, "")
        return json.loads(out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def numbers(keys: list[str]) -> list[int]:
    known = {key_of(number): number for number in ENTRIES}
    return sorted(known[key] for key in keys)


def left(store: FileStore) -> list[int]:
    return numbers([*store.keys("manifest")])


CHOICES: list[tuple[list[str], list[int]]] = [
    ([], []),
    (["--all"], [0, 1, 2, 3, 4]),
    (["--name", "scale"], [0, 1, 2]),
    (["--target", "cuda:sm_80"], [2, 4]),
    (["--name", "scale", "--target", "cuda:sm_90"], [0, 1]),
    (["--unused-days", "15"], [2]),
    (["--unused-days", "5"], [1, 2, 3]),
    (["--unused-days", "5", "--name", "shift"], [3]),
    (["--name", "nothing"], []),
    (["--name", "nothing", "--all"], []),
    ([key_of(3)], [3]),
    ([key_of(3)[:8], key_of(0)[:6]], [0, 3]),
    ([key_of(3), "--name", "scale"], []),
    ([key_of(1), key_of(2), "--target", "cuda:sm_80"], [2]),
]


NAMES = [" ".join(choice) or "nothing" for choice, _ in CHOICES]


@pytest.mark.parametrize(("choice", "gone"), CHOICES, ids=NAMES)
def test_prune_chooses_what_fits_every_condition(unchanged: FileStore, command: Command, choice: list[str], gone: list[int]):
    tried = command.parsed("prune", *choice, "--dry-run")
    assert (tried["dry_run"], numbers(tried["keys"]), tried["pinned"], tried["freed_bytes"]) == (True, gone, [], 0)
    assert left(unchanged) == [*ENTRIES], "a dry run removes nothing"


@pytest.mark.parametrize(("choice", "gone"), [CHOICES[i] for i in (0, 4, 11)], ids=[NAMES[i] for i in (0, 4, 11)])
def test_prune_removes_what_it_chose(found: Daemon, store: FileStore, command: Command, choice: list[str], gone: list[int]):
    done = command.parsed("prune", *choice)
    assert (done["dry_run"], numbers(done["keys"]), done["pinned"]) == (False, gone, [])
    assert left(store) == [number for number in ENTRIES if number not in gone]
    assert done["freed_bytes"] == 8192 * len(gone)
    assert len([*store.keys("payload")]) == len(ENTRIES) - len(gone)


def test_prune_says_what_it_does(found: Daemon, command: Command):
    assert command.text("pin", key_of(0), "--note", "production") == f"pinned {key_of(0)[:12]}\n"
    tried = command.text("prune", "--name", "scale", "--dry-run")
    assert tried.startswith("2 artifacts would be removed, 1 pinned ones kept\n")
    done = command.text("prune", "--name", "scale")
    assert done.startswith("2 artifacts removed, 0.0 MB freed, 1 pinned ones kept\n")
    assert {key_of(1)[:12], key_of(2)[:12]} <= set(done.split())
    assert key_of(0)[:12] not in done.split()
    assert command.text("prune") == "0 artifacts removed, 0.0 MB freed\n"


def test_a_dry_run_over_the_bounds_removes_nothing(own_place: Path, store: FileStore, command: Command):
    """Not even what a collection would."""
    for number in ENTRIES:
        store.put(f"pin/{key_of(number)}", b"test")
    with daemon(own_place, KSERVE_MAX_FILES="3") as found:
        wait_for(lambda: found.call("GET", protocol.STATUS)["store"]["index"] == "sound", what="the first collection")
        store.delete(f"pin/{key_of(2)}")  # behind the daemon's back: it is over its bounds and could collect
        assert numbers(command.parsed("prune", "--all", "--dry-run")["keys"]) == [2]
        assert left(store) == [*ENTRIES]
        assert numbers(command.parsed("prune")["keys"]) == [2]


def test_what_is_pinned_stays_until_it_is_unpinned(found: Daemon, store: FileStore, command: Command):
    assert command.parsed("pin") == {"pins": {}}
    assert numbers(command.parsed("pin", key_of(1)[:10], key_of(2), "--note", "run 7")["pinned"]) == [1, 2]
    assert command.parsed("pin") == {"pins": {key_of(number): "run 7" for number in (1, 2)}}
    assert {line.split()[0] for line in command.text("pin").splitlines()} == {"KEY", key_of(1)[:12], key_of(2)[:12]}
    marked = {row["key"] for row in command.parsed("ls")["artifacts"] if row["pinned"]}
    assert numbers([*marked]) == [1, 2]
    done = command.parsed("prune", "--all")
    assert (numbers(done["keys"]), numbers(done["pinned"])) == ([0, 3, 4], [1, 2])
    assert left(store) == [1, 2]
    assert numbers(command.parsed("unpin", key_of(1)[:6])["unpinned"]) == [1]
    assert command.parsed("unpin", key_of(1)) == {"unpinned": []}
    assert command.text("unpin", key_of(1)) == "none of these is pinned\n"
    assert numbers(command.parsed("prune", "--all")["keys"]) == [1]
    assert left(store) == [2]


def test_a_pin_outlasts_the_daemon(own_place: Path, store: FileStore, command: Command):
    with daemon(own_place):
        command.parsed("pin", key_of(2), "--note", "für später")
    with daemon(own_place, KSERVE_MAX_FILES="5"):
        assert command.parsed("pin") == {"pins": {key_of(2): "für später"}}
        command.parsed("prune", "--all")
    assert left(store) == [2]


def test_the_quarantine_is_listed_and_purged(found: Daemon, store: FileStore, command: Command):
    assert command.parsed("quarantine") == {"files": []}
    assert command.text("quarantine").split() == ["FILE", "SIZE", "PUT", "ASIDE"]
    path = next((store.root / "payload").glob("??/*"))
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    assert len(command.parsed("verify", status=5)["damaged"]) == 1
    (file,) = command.parsed("quarantine")["files"]
    assert (file["name"].partition(".")[0], file["size_bytes"]) == (path.name, 7)
    assert time.time() - 60 < file["put_aside_at"] <= time.time() + 1
    assert path.name in command.text("quarantine")
    assert command.parsed("quarantine", "--purge") == {"n_files": 1, "freed_bytes": 4096}
    assert command.parsed("quarantine") == {"files": []}
    assert command.text("quarantine", "--purge") == "0 files removed, 0.0 MB freed\n"


BAD: list[tuple[list[str], str, str]] = [
    (["prune", "0" * 12], "not-built", "0" * 12),
    (["prune", "0" * 64], "not-built", ""),
    (["prune", "00000"], "bad-request", "keys.0"),
    (["prune", "no hex"], "bad-request", "keys.0"),
    (["prune", "../../etc"], "bad-request", "keys.0"),
    (["prune", key_of(0).upper()], "bad-request", "keys.0"),
    (["prune", key_of(0), "0" * 12], "not-built", "0" * 12),
    (["prune", "--unused-days", "-1"], "bad-request", "unused_s"),
    (["prune", "--unused-days", "nan", "--all"], "bad-request", "unused_s"),
    (["pin", "0" * 12], "not-built", "0" * 12),
    (["pin", "no hex"], "bad-request", "keys.0"),
    (["pin", key_of(0), "--note", "x" * 5000], "bad-request", "note"),
    (["unpin", "00000"], "bad-request", "keys.0"),
]


@pytest.mark.parametrize(("arguments", "code", "named"), BAD, ids=[" ".join(case[0])[:40] for case in BAD])
def test_a_bad_choice_is_an_error_and_removes_nothing(
    unchanged: FileStore, command: Command, arguments: list[str], code: str, named: str
):
    error = command.parsed(*arguments, status=STATUS[code][1])["error"]
    assert error["code"] == code
    assert named in json.dumps(error)
    assert command(*arguments)[2].startswith("kserve: ")
    assert left(unchanged) == [*ENTRIES]


def test_an_ambiguous_key_is_an_error_that_names_both(found: Daemon, store: FileStore, command: Command):
    content = payload_of(7)
    twin = key_of(0)[:8] + "0" * 56
    manifest = put_entry(store, 7, content)._replace(key=twin)
    store.put(f"manifest/{twin}", manifest.to_bytes())
    said = json.dumps(command.parsed("prune", key_of(0)[:8], status=STATUS["bad-request"][1]))
    assert twin in said
    assert key_of(0) in said
    assert {key_of(0), twin} <= set(store.keys("manifest"))
