"""`kserve tune`: without a device it compiles and prunes; with one it checks, times and keeps the winner for everybody."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kserve import client, get_kernel
from kserve.alias import survey
from kserve.cli import main
from kserve.client import loader
from kserve.client.local import local
from kserve.errors import DaemonUnreachable
from kserve.measure.bench import Inputs
from kserve.measure.sweep import Bench
from tests.support import processes
from tests.support.definitions import KNOB_SOURCE, KNOB_TOML, write_cuda
from tests.support.processes import wait_for
from tests.support.stub_driver import StubDriver, build_stub

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"
# What each block size takes here, in microseconds: the winner is not the default.
TIMES = {64: 30.0, 128: 20.0, 256: 10.0, 512: 5.0}


@pytest.fixture
def folder(kernels: Path) -> Path:
    found = write_cuda(kernels / "things", toml=KNOB_TOML, source=KNOB_SOURCE)
    client.forget()
    wait_for(lambda: survey(local().roots, str(found)))
    return found


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory) -> StubDriver:
    return StubDriver(build_stub(tmp_path_factory.mktemp("stub")))


@pytest.fixture
def timed(stub_library: StubDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device where every block size takes its time; the configurations that were timed, in order."""
    stub_library.reset()
    monkeypatch.setattr(loader, "_driver", loader.Driver(str(stub_library.path)))
    ran: list[str] = []
    noise = random.Random(1)

    def prepare(calls: Mapping[str, Callable[[], object]]) -> Any:
        ran.extend(calls)

        def arm(label: str) -> Callable[[], float]:
            seconds = 1e-6 * TIMES[int(label.split(maxsplit=1)[0].partition("=")[2])]
            return lambda: seconds * noise.lognormvariate(0.0, 0.002)

        return SimpleNamespace(arms={label: arm(label) for label in calls}, failed={})

    def bench_for(inputs: Inputs, *_: object, spec: dict[str, Any], sizes: dict[str, int], tolerance: object) -> Bench:
        return Bench(prepare, inputs.arguments(spec, sizes, "cuda", 0), ())

    monkeypatch.setattr("kserve.cli.tune.bench_for", bench_for)
    monkeypatch.setattr("kserve.measure.sweep._wrong", lambda *_: {})
    return ran


@pytest.fixture
def inputs(own_place: Path) -> str:
    file = own_place / "inputs.py"
    file.write_text("def make(spec, device, n=8):\n    return (0x10000, 0x20000, n, 2.0)\n")
    return f"{file}:make"


def tune(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    client.forget()
    assert main(["tune", "scale", *arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def states(found: dict[str, Any]) -> dict[tuple[int, ...], str]:
    return {tuple(row["knobs"].values()): row["state"] for row in found["rows"]}


def test_without_a_device_it_compiles_and_prunes_and_says_that_nothing_was_timed(folder: Path):
    (folder / "kernel.toml").write_text(KNOB_TOML.replace("[64, 128, 256]", "[64, 96, 128, 2048]").replace("<= 256", "< 4096"))
    (folder / "kernel.cu").write_text(KNOB_SOURCE.replace("BLOCK % 32 == 0", "BLOCK % 64 == 0"))
    done = processes.kserve("tune", "scale", "--target", TARGET, "--json")
    assert done.returncode == 7, done.stderr
    found = json.loads(done.stdout)
    expected = {64: "compiled", 96: "failed", 128: "compiled", 2048: "pruned"}
    every = {(block, unroll): state for block, state in expected.items() for unroll in (1, 2)}
    assert states(found) == {knobs: state for knobs, state in every.items() if knobs != (2048, 2)}
    assert (found["winner"], found["device"], found["n_timed"], found["n_excluded"]) == (None, None, 0, 1)
    assert found["rows"][0]["resources"]["registers"] > 0 and found["rows"][0]["us"] is None
    text = processes.kserve("tune", "scale", "--target", TARGET)
    assert text.returncode == 7
    for said in ("nothing was timed: no device here runs cuda:sm_90", "whole warps", "2048 threads a block", "1 combinations"):
        assert said in text.stdout


def test_a_dry_run_builds_nothing(folder: Path, own_place: Path):
    done = processes.kserve("tune", "scale", "--target", TARGET, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 5
    assert not (own_place / "store" / "manifest").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--knob", "BLOCK=96"], 2, "BLOCK of scale cannot be 96"),
        (["--knob", "BLOK=64"], 2, "did you mean BLOCK?"),
        (["--knob", "BLOCK"], 2, "--knob 'BLOCK' cannot be read"),
        (["--shape", "n=many"], 2, "--shape 'n=many' cannot be read"),
        (["--shape", "m=8"], 2, "no size 'm'"),
        (["--shape", "n=0"], 2, "sizes cannot be"),
        (["--set", "size=0"], 2, "axis size cannot be"),
        (["--target", "sm_75"], 2, "not made for cuda:sm_75"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_built(folder: Path, capsys, arguments, status, said):
    client.forget()
    given = arguments if "--target" in arguments else [*arguments, "--target", TARGET]
    assert main(["tune", "scale", *given]) == status
    assert said in capsys.readouterr().err


def test_the_winner_is_kept_with_its_evidence_and_served(folder: Path, timed: list[str], inputs: str, capsys, monkeypatch):
    found = tune(capsys, "--shape", "n=1000", "--inputs", inputs)
    assert found["winner"] == {"BLOCK": 256, "UNROLL": 1} and found["n_timed"] == 5
    assert (found["sizes"], found["bucket"]) == ({"n": 1000}, {"n": 1024})
    assert states(found)[64, 2] == "loser"
    client.forget()
    assert get_kernel("scale", target=TARGET, sizes={"n": 900}).knobs["BLOCK"] == 256
    assert get_kernel("scale", target=TARGET).knobs["BLOCK"] == 128, "tuned for that bucket only"
    assert len(timed) == 5
    again = tune(capsys, "--shape", "n=600", "--inputs", inputs)
    assert (again["n_timed"], len(timed)) == (0, 5), "another size of the same bucket"
    assert again["rows"] == found["rows"]


def test_a_stored_winner_needs_no_daemon_no_compile_and_no_timing(
    folder: Path, timed: list[str], inputs: str, capsys, monkeypatch
):
    tune(capsys, "--inputs", inputs)
    client.forget()
    assert processes.kserve("down").returncode == 0

    def refuse(*_: object, **__: object) -> None:
        raise DaemonUnreachable("the daemon was asked")

    monkeypatch.setattr("kserve.client.connection.start_daemon", refuse)
    found = get_kernel("scale", target=TARGET)
    assert (found.knobs["BLOCK"], found.origin) == (256, "disk")
    assert found.generic is not None, "the winner is built whole, not only as it was timed"


def test_one_added_configuration_is_the_only_one_that_is_timed(folder: Path, timed: list[str], inputs: str, capsys):
    tune(capsys, "--inputs", inputs)
    timed.clear()
    (folder / "kernel.toml").write_text(
        KNOB_TOML.replace("[64, 128, 256]", "[64, 128, 256, 512]").replace("BLOCK * UNROLL <= 256", "BLOCK * UNROLL <= 512")
    )
    found = tune(capsys, "--inputs", inputs, "--knob", "UNROLL=1")
    assert sorted(timed) == ["BLOCK=256 UNROLL=1", "BLOCK=512 UNROLL=1"]
    assert found["n_timed"] == 1 and found["winner"]["BLOCK"] == 512
    assert states(found)[128, 1] in ("timed", "loser")
    client.forget()
    assert get_kernel("scale", target=TARGET).knobs["BLOCK"] == 512


def test_a_winner_for_every_size_and_its_end(folder: Path, timed: list[str], inputs: str, capsys):
    tune(capsys, "--shape", "n=1000", "--any-size", "--inputs", inputs)
    client.forget()
    assert get_kernel("scale", target=TARGET, sizes={"n": 3}).knobs["BLOCK"] == 256
    assert len(tune(capsys, "--forget")["forgotten"]) == 64
    client.forget()
    assert get_kernel("scale", target=TARGET, sizes={"n": 3}).knobs["BLOCK"] == 128
    assert tune(capsys, "--forget") == {"forgotten": None}


def test_a_person_reads_a_table_a_map_and_the_winner(folder: Path, timed: list[str], inputs: str, capsys, monkeypatch):
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "64")
    client.forget()
    assert main(["tune", "scale", "--inputs", inputs]) == 0
    text = capsys.readouterr().out
    assert "scale for cuda:sm_90 on Stub GPU" in text and "winner: BLOCK=256 UNROLL=1; timed 5 (" in text
    assert "1 combinations are excluded by the constraints" in text and "BLOCK 256" in text
    assert "KSERVE_SCALE_BLOCK overrides the tuning in this shell" in text


def test_without_arguments_to_launch_with_it_says_how_to_give_them(folder: Path, timed: list[str], capsys, monkeypatch):
    client.forget()
    assert main(["tune", "scale"]) == 2
    assert "--inputs FILE.py:FUNCTION" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere.py:make", "'nowhere.py:make' cannot be read"),
        ("make", "'make' cannot be read"),
        ("{file}:other", "no function other"),
    ],
)
def test_inputs_that_are_not_there_are_named(folder: Path, timed: list[str], inputs: str, capsys, place, said):
    client.forget()
    assert main(["tune", "scale", "--inputs", place.format(file=inputs.rpartition(":")[0])]) == 2
    assert said in capsys.readouterr().err
