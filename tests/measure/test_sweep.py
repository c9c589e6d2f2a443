"""Sweeps over arms of known durations: what is pruned, checked, timed, dropped, carried over, and how it reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from kserve.artifact import Artifact, Contract, Param
from kserve.cli.heat import heat_map, rows_table
from kserve.client.resolve import Answer
from kserve.errors import CompileFailed, DoesNotFit, InvalidSpec, KserveError, LaunchError, LoadError, RequestError
from kserve.kernel_toml import read_definition
from kserve.measure.configurations import enumerate_all, label_of
from kserve.measure.device import instrument_for
from kserve.measure.outputs import Outputs
from kserve.measure.sweep import COPY, Bench, Row, Subject, carry_over, check_facts, compile_all, floor_us, time_new, written_of
from kserve.measure.timing import ArmFailed, Rule
from kserve.target import parse_target
from tests.support.definitions import KNOB_TOML, TRITON_TOML
from tests.support.entries import manifest_of, payload_of

NOISE = 0.003
QUICK = Rule(least=4, most=64, soft_s=1e9, hard_s=1e9)


def subject(toml: str = KNOB_TOML, wanted: Mapping[str, Sequence[int]] | None = None, **spec: int) -> Subject:
    definition = read_definition(toml.encode(), origin="kernel.toml")
    (entry,) = definition.entries.values()
    found = enumerate_all(definition, entry, spec, wanted or {})
    target = definition.resolve_target(entry, parse_target("cuda:sm_90"))
    return Subject(definition, entry, definition.specialise(entry, spec), target, found)


def answer(knobs: Mapping[str, int], *, registers: int = 32, content: str = "") -> Answer:
    payload = payload_of(hash(label_of(knobs)) % 10_000, 50) + content.encode() + label_of(knobs).encode()
    contract = Contract("scale", "cubin", (), {**knobs}, ("1",), (str(knobs.get("BLOCK", 128)),), knobs=tuple(knobs))
    resources = {"registers": registers, "shared_bytes": 16, "spill_bytes": 0}
    manifest = manifest_of(1, payload, contract=contract, resources=resources)
    return Answer("built", [Artifact(manifest, payload)], "asked for", "b" * 64)


def built(asked: Sequence[Mapping[str, int]]) -> list[Answer | KserveError]:
    return [answer(knobs) for knobs in asked]


class Ready(NamedTuple):
    arms: dict[str, Callable[[], float]]
    failed: dict[str, str]


class World:
    """Kernels that write what they should in the time they are said to take."""

    def __init__(self, durations_us: Mapping[str, float], *, right: float = 2.0) -> None:
        self.durations_us = dict(durations_us)
        self.x = torch.arange(8, dtype=torch.float32)
        self.out = torch.full((8,), torch.nan)
        self.effects: dict[str, Callable[[], None]] = {}
        self.runs: dict[str, int] = {}
        self.failing: dict[str, str] = {}
        self.loaded: list[str] = []
        self._right = right
        self._random = random.Random(1)

    def load(self, found: Answer) -> Callable[..., object]:
        label = label_of(found.artifacts[0].manifest.contract.constants)
        self.loaded.append(label)
        effect = self.effects.get(label, lambda: self.out.copy_(self._right * self.x))
        return lambda *arguments: effect()

    def prepare(self, calls: Mapping[str, Callable[[], object]]) -> Ready:
        arms = {name: self._arm(name) for name in calls if name not in self.failing}
        return Ready(arms, {name: self.failing[name] for name in calls if name in self.failing})

    def _arm(self, name: str) -> Callable[[], float]:
        def run() -> float:
            self.runs[name] = self.runs.get(name, 0) + 1
            return 1e-6 * self.durations_us[name] * self._random.lognormvariate(0.0, NOISE)

        return run

    def bench(self, **changes: Any) -> Bench:
        return Bench(self.prepare, (self.x, self.out), (self.out,), None, None)._replace(**changes)


def durations(found: Subject, seconds: Callable[[dict[str, int]], float]) -> dict[str, float]:
    return {label_of(knobs): seconds(knobs) for knobs in found.configurations.all}


def swept(
    found: Subject,
    world: World,
    build: Any = built,
    evidence: Sequence[Mapping[str, Any]] = (),
    rule: Rule = QUICK,
    **bench: Any,
):
    rows, answers = compile_all(found, build)
    return time_new(carry_over(rows, evidence), answers, world.bench(**bench), world.load, rule=rule)


def labels(rows: Sequence[Row], state: str) -> set[str]:
    return {row.label for row in rows if row.state == state}


def by_block(knobs: dict[str, int]) -> float:
    return {64: 10.0, 128: 14.0, 256: 30.0}[knobs["BLOCK"]] * (1.0 if knobs["UNROLL"] == 1 else 1.002)


def test_every_combination_but_those_the_constraints_forbid():
    found = subject().configurations
    assert found.default == found.all[0] == {"BLOCK": 128, "UNROLL": 1}
    assert len(found.all) == 5 and found.n_excluded == 1
    assert {"BLOCK": 256, "UNROLL": 2} not in found.all
    assert subject(size=16).configurations.default == {"BLOCK": 256, "UNROLL": 1}


def test_values_may_be_named_and_the_default_is_always_there():
    found = subject(wanted={"BLOCK": [64], "UNROLL": [2]}).configurations
    assert found.all == [{"BLOCK": 128, "UNROLL": 1}, {"BLOCK": 64, "UNROLL": 2}]
    with pytest.raises(InvalidSpec, match="BLOCK of scale cannot be 96"):
        subject(wanted={"BLOCK": [96]})
    with pytest.raises(InvalidSpec, match="no knob"):
        subject(wanted={"BLOK": [64]})
    with pytest.raises(RequestError, match="tscale has no knobs"):
        subject(TRITON_TOML)
    with pytest.raises(RequestError, match="too many"):
        subject(KNOB_TOML.replace("values = [1, 2]", f"values = {[*range(1, 500)]}"))


def test_what_cannot_fit_is_not_even_built():
    toml = KNOB_TOML.replace("[64, 128, 256]", "[64, 128, 2048]").replace("BLOCK * UNROLL <= 256", "BLOCK > 0")
    toml = toml.replace('block = ["BLOCK"]', 'block = ["BLOCK"], shared_bytes = "120000 * UNROLL"')
    asked: list[Mapping[str, int]] = []
    rows, _ = compile_all(subject(toml), lambda wanted: [asked.append(knobs) or answer(knobs) for knobs in wanted])
    assert {(knobs["BLOCK"], knobs["UNROLL"]) for knobs in asked} == {(128, 1), (64, 1)}
    reasons = {row.label: row.reason for row in rows if row.state == "pruned"}
    assert reasons["BLOCK=2048 UNROLL=1"] == "2048 threads a block, 1024 are the most"
    assert reasons["BLOCK=64 UNROLL=2"] == "240000 bytes of shared memory a block, 232448 are the most"


def test_warps_of_triton_count_as_threads():
    toml = TRITON_TOML.replace("[target]", "[knobs]\nWARPS = { values = [4, 64], default = 4 }\n[target]")
    rows, _ = compile_all(subject(toml.replace("num_warps = 4", 'num_warps = "WARPS"')), built)
    assert [(row.state, row.reason) for row in rows][1] == ("pruned", "2048 threads a block, 1024 are the most")


def test_what_does_not_fit_or_compile_is_told_from_what_does():
    def build(asked: Sequence[Mapping[str, int]]) -> list[Answer | KserveError]:
        special = {(64, 1): DoesNotFit("too much"), (64, 2): CompileFailed("no"), (256, 1): None}
        return [special.get((k["BLOCK"], k["UNROLL"])) or answer(k, registers=255 if k["BLOCK"] == 256 else 32) for k in asked]

    rows, answers = compile_all(subject(), build)
    found = {row.label: (row.state, row.reason) for row in rows}
    assert found["BLOCK=64 UNROLL=1"] == ("pruned", "too much")
    assert found["BLOCK=64 UNROLL=2"] == ("failed", "no")
    assert found["BLOCK=256 UNROLL=1"] == ("compiled", "")  # 65,536 are as many as there are
    assert set(answers) == labels(rows, "compiled")


def test_registers_over_what_a_block_has_are_pruned():
    rows, _ = compile_all(
        subject(wanted={"BLOCK": [256], "UNROLL": [1]}), lambda asked: [answer(k, registers=257) for k in asked]
    )
    assert {row.label: row.reason for row in rows if row.state == "pruned"} == {
        "BLOCK=256 UNROLL=1": "67584 registers a block, 65536 are the most"
    }


def test_the_fastest_wins_and_clear_losers_leave_early():
    found = subject()
    world = World(durations(found, by_block))
    result = swept(found, world)
    assert result.winner is not None and result.winner.knobs["BLOCK"] == 64
    assert {row.label for row in result.rows if row.is_on_plateau} <= {"BLOCK=64 UNROLL=1", "BLOCK=64 UNROLL=2"}
    assert labels(result.rows, "loser") == {"BLOCK=256 UNROLL=1", "BLOCK=128 UNROLL=2"}
    assert world.runs["BLOCK=256 UNROLL=1"] < world.runs["BLOCK=64 UNROLL=1"]
    assert (result.n_timed, result.stop) == (5, "converged")
    slow = next(row for row in result.rows if row.knobs["BLOCK"] == 256)
    assert slow.ratio is not None and 2.9 < slow.ratio[0] < 3.1 and slow.ratio[1] > 1.05
    assert result.winner.us is not None and result.winner.us[0] == pytest.approx(10.0, rel=0.01)


def test_a_run_with_nothing_new_times_nothing():
    found = subject()
    before = swept(found, World(durations(found, by_block)))
    world = World({})
    again = swept(found, world, evidence=[row._asdict() for row in before.rows])
    assert again.rows == before.rows and again.n_timed == 0
    assert world.loaded == [] and world.runs == {}


def test_one_added_configuration_is_timed_beside_the_winner_and_nothing_else():
    found = subject()
    world = World(durations(found, by_block))
    before = swept(found, world)
    more = subject(KNOB_TOML.replace("[64, 128, 256]", "[32, 64, 128, 256]"), wanted={"BLOCK": [32, 64, 128, 256]})
    extra = [{"BLOCK": 32, "UNROLL": 1}]
    more = more._replace(configurations=more.configurations._replace(all=[*found.configurations.all, *extra]))
    assert before.winner is not None
    world = World({"BLOCK=32 UNROLL=1": 5.0, before.winner.label: 10.0})
    after = swept(more, world, evidence=[row._asdict() for row in before.rows])
    assert set(world.runs) == {"BLOCK=32 UNROLL=1", before.winner.label}
    assert after.n_timed == 1 and after.winner is not None and after.winner.knobs["BLOCK"] == 32
    slow = {row.label: row.ratio for row in after.rows}["BLOCK=256 UNROLL=1"]
    assert slow is not None and slow[0] == pytest.approx(6.0, rel=0.03), "the ratio is to the new winner"


def test_a_slower_newcomer_leaves_the_winner_and_its_evidence():
    found = subject(wanted={"BLOCK": [64, 128], "UNROLL": [1]})
    before = swept(found, World(durations(found, by_block)))
    more = subject(wanted={"BLOCK": [64, 128, 256], "UNROLL": [1]})
    after = swept(more, World(durations(more, by_block)), evidence=[row._asdict() for row in before.rows])
    assert after.winner is not None and after.winner.knobs == {"BLOCK": 64, "UNROLL": 1}
    assert after.n_timed == 1
    assert next(row for row in after.rows if row.knobs["BLOCK"] == 128) in before.rows


def test_other_bytes_are_timed_again():
    found = subject(wanted={"BLOCK": [64, 128], "UNROLL": [1]})
    before = swept(found, World(durations(found, by_block)))
    world = World(durations(found, by_block))
    after = swept(found, world, lambda asked: [answer(k, content="new") for k in asked], [row._asdict() for row in before.rows])
    assert after.n_timed == 2 and len(world.runs) == 2


def test_evidence_of_another_form_is_no_evidence():
    found = subject(wanted={"BLOCK": [64, 128], "UNROLL": [1]})
    assert swept(found, World(durations(found, by_block)), evidence=[{}, {"knobs": {}, "more": 1}]).n_timed == 2


def test_a_wrong_result_is_named_and_not_timed():
    found = subject()
    world = World(durations(found, by_block))
    world.effects["BLOCK=64 UNROLL=1"] = lambda: world.out.copy_(2.001 * world.x)
    world.effects["BLOCK=64 UNROLL=2"] = lambda: world.out[:7].copy_(2.0 * world.x[:7])
    result = swept(found, world)
    assert labels(result.rows, "wrong") == {"BLOCK=64 UNROLL=1", "BLOCK=64 UNROLL=2"}
    assert not labels(result.rows, "wrong") & set(world.runs)
    assert result.winner is not None and result.winner.knobs["BLOCK"] == 128
    assert swept(found, world, tolerance=0.01).winner.knobs["BLOCK"] == 64


def test_arguments_that_are_written_are_as_they_were_before_each_block_and_in_the_end():
    found = subject(wanted={"BLOCK": [64, 128], "UNROLL": [1]})
    world = World(durations(found, by_block))
    world.out = torch.arange(8, dtype=torch.float32)
    seen = []

    def effect() -> None:
        seen.append(world.out.clone())
        world.out.add_(1.0)

    world.effects = dict.fromkeys(world.durations_us, effect)
    result = swept(found, world)
    assert result.winner is not None, "adding to what is there is right when every launch begins with the same"
    assert torch.equal(world.out, torch.arange(8, dtype=torch.float32))
    poisoned = [one for one in seen if one.isnan().any()]
    assert len(poisoned) == 1 and all(torch.equal(one, world.out) for one in seen if not one.isnan().any())


def test_what_cannot_be_loaded_or_run_is_a_row_of_its_own():
    found = subject()
    world = World(durations(found, by_block))
    world.failing = {"BLOCK=64 UNROLL=1": "cannot be captured"}
    load = world.load

    def refusing(one: Answer) -> Callable[..., object]:
        if one.artifacts[0].manifest.contract.constants == {"BLOCK": 64, "UNROLL": 2}:
            raise LoadError("no")
        return load(one)

    world.load = refusing
    result = swept(found, world)
    assert {row.label: row.reason for row in result.rows if row.state == "failed"} == {
        "BLOCK=64 UNROLL=1": "cannot be captured",
        "BLOCK=64 UNROLL=2": "no",
    }
    assert result.winner is not None and result.winner.knobs["BLOCK"] == 128


def test_an_arm_without_a_number_is_a_failed_row():
    found = subject(wanted={"BLOCK": [64, 128], "UNROLL": [1]})
    world = World(durations(found, by_block))
    ready = world.prepare

    def prepare(calls: Mapping[str, Callable[[], object]]) -> Ready:
        def fail() -> float:
            raise ArmFailed("nothing was launched")

        return Ready({**ready(calls).arms, "BLOCK=64 UNROLL=1": fail}, {})

    result = swept(found, world, prepare=prepare)
    assert labels(result.rows, "failed") == {"BLOCK=64 UNROLL=1"}
    assert result.winner is not None and result.winner.knobs["BLOCK"] == 128


def test_a_launch_that_breaks_the_device_ends_the_sweep_in_words():
    found = subject()
    world = World(durations(found, by_block))

    def effect() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nlong advice")

    world.effects["BLOCK=64 UNROLL=1"] = effect
    with pytest.raises(LaunchError, match="has broken the device: CUDA error: an illegal"):
        swept(found, world)


def test_the_copy_is_a_ceiling_and_no_configuration():
    found = subject()
    world = World({**durations(found, by_block), COPY: 4.0})
    result = swept(found, world, copy=(lambda: None, 16_000))
    assert COPY not in {row.label for row in result.rows}
    assert result.copy_gb_s == pytest.approx(4.0, rel=0.01)
    assert floor_us(result, 20_000) == pytest.approx(10.0 - 5.0, rel=0.05)
    assert floor_us(result, None) is None


def test_the_table_shows_the_winner_first_and_every_reason():
    found = subject()
    world = World(durations(found, by_block))
    world.effects["BLOCK=128 UNROLL=2"] = world.out.zero_
    text = rows_table(swept(found, world).rows, n_bytes=10_000_000)
    lines = text.splitlines()
    assert lines[0].split() == ["BLOCK", "UNROLL", "TIME", "RATIO", "GB/S", "REGISTERS", "SPILL", "SHARED", "STATE"]
    assert lines[1].startswith("64") and "1.000 (1.000 to 1.000)" in lines[1] and "plateau" in lines[1]
    assert lines[-1].startswith("128") and "wrong: differs by" in lines[-1]
    assert " us ± " in lines[1] and " 1000 " in lines[1]


def test_two_knobs_that_vary_are_a_heat_map():
    found = subject()
    rows = swept(found, World(durations(found, by_block))).rows
    lines = heat_map(rows)
    assert lines[1].split() == ["UNROLL", "1", "UNROLL", "2"]
    assert [line.split()[:2] for line in lines[2:]] == [["BLOCK", "64"], ["BLOCK", "128"], ["BLOCK", "256"]]
    assert len(lines[4].split()) == 3, "a combination that is not there is empty"
    assert heat_map([row for row in rows if row.knobs["UNROLL"] == 1]) == []
    assert heat_map([]) == []


def test_the_written_arguments_are_those_the_contract_names():
    params = tuple(Param(name, "pointer", "float32", 8 * i, 8, mutated=name != "x") for i, name in enumerate("xyz"))
    manifest = manifest_of(1, b"")._replace(
        contract=Contract("k", "cubin", (*params, Param("s", "scratch", "", 24, 8)), {}, ("1",), ("1",))
    )
    assert written_of(Artifact(manifest, b""), ("x", "y", None)) == ("y",)


def test_arguments_that_are_not_what_is_timed_are_refused():
    params = (Param("n", "i32", "", 0, 4, divisible_by=16), Param("f", "f32", "", 4, 4))
    artifact = Artifact(manifest_of(1, b"")._replace(contract=Contract("k", "cubin", params, {}, ("1",), ("1",))), b"")
    check_facts(artifact, (32, 1.0))
    with pytest.raises(RequestError, match="tuned for n as a multiple of 16, not for 17"):
        check_facts(artifact, (17, 1.0))
    with pytest.raises(RequestError, match="takes 2 arguments"):
        check_facts(artifact, (32,))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.uint8]
)
def test_outputs_of_any_dtype_are_compared(dtype):
    out = torch.ones(5, dtype=dtype)
    calls = {
        "right": lambda: out.fill_(1),
        "same": lambda: out.copy_(torch.ones(5, dtype=dtype)),
        "lazy": lambda: None,
        "wrong": lambda: out.fill_(0),
    }
    found = Outputs((out,)).wrong(calls, "right")
    assert set(found) == {"wrong"} | ({"lazy"} if dtype is not torch.bool else set())
    assert torch.equal(out, torch.ones(5, dtype=dtype))


def test_outputs_read_arrays_of_other_libraries_in_place():
    import numpy as np

    array = np.ones(4, dtype=np.float32)
    outputs = Outputs((array,))
    array[:] = 7
    outputs.restore()
    assert array.tolist() == [1.0] * 4


def test_the_instrument_of_the_device_layer_times_a_sweep():
    """The seam: what `measure.device` prepares is what a sweep takes. One kernel does sixteen times the work of the other."""
    found = subject(wanted={"BLOCK": [64, 128], "UNROLL": [1]})
    small, large = torch.ones(1 << 12), torch.ones(1 << 16)
    world = World({})
    world.effects = {"BLOCK=64 UNROLL=1": small.exp, "BLOCK=128 UNROLL=1": large.exp}
    world.out = torch.zeros(1)
    result = swept(found, world, rule=Rule(rounds=4), prepare=instrument_for("cpu").prepare)
    assert result.winner is not None and result.winner.knobs["BLOCK"] == 64
    assert result.n_timed == 2 and result.rows[1].ratio is not None and result.rows[1].ratio[0] > 1.5
