"""The step profiler: sections that add up, three tables, regions, and a file that cannot be profiled. On the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kserve.cli import main
from kserve.errors import RequestError
from kserve.measure import profile
from kserve.measure.profile import Profiled, Section
from tests.support.processes import REPOSITORY

STEP = REPOSITORY / "benchmarks" / "models" / "realspace_step.py"


@pytest.fixture(scope="module")
def step() -> Profiled:
    return profile.load_profiled(STEP, device="cpu")


@pytest.fixture(scope="module")
def tables(step: Profiled) -> list[profile.Table]:
    return profile.torch_tables(step, device="cpu", n_rows=12)


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def waits(self, milliseconds: float) -> profile.Closure:
        def wait() -> None:
            self.now_s += milliseconds / 1e3

        return wait


def test_the_lines_that_are_no_reference_add_up_to_the_forward(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(profile.time, "perf_counter", lambda: clock.now_s)
    waits = clock.waits
    parts = {"first": 4.0, "second": 8.0, "third": 2.0}
    sections = [Section(name, waits(cost)) for name, cost in parts.items()]
    subject = Profiled(
        "waiting",
        [*sections, Section("second", waits(16.0), reference=True)],
        forward=lambda: [waits(cost)() for cost in parts.values()],
        joint=waits(30.0),
    )
    lines = {line.label: line.time_ms for line in profile.time_sections(subject, device="cpu")}
    assert lines == pytest.approx({**parts, "second (unfused ref)": 16.0, "forward": 14.0, "forward + gradient": 30.0})
    assert sum(lines[name] for name in parts) == pytest.approx(lines["forward"], rel=0.10)


def test_a_label_says_whether_a_line_is_fused_or_the_reference():
    labels = [Section("a", list), Section("b", list, fused=True), Section("b", list, reference=True)]
    assert [section.label for section in labels] == ["a", "b (fused)", "b (unfused ref)"]


def test_the_demonstration_has_a_reference_line_and_no_fused_one_without_a_gpu(step):
    labels = [section.label for section in step.sections]
    assert "realspace (unfused ref)" in labels
    assert not [label for label in labels if label.endswith("(fused)")]


def test_there_are_three_tables(tables):
    assert [(table.title, table.sorted_by) for table in tables] == [
        ("forward, by self processor time", "self_ms"),
        ("forward + gradient, by self processor time", "self_ms"),
        ("forward + gradient, by self processor memory", "self_mb"),
    ]


def test_rows_are_sorted_and_limited_but_no_region_is_cut(tables):
    for table in tables:
        head, rest = table.rows[:12], table.rows[12:]
        values = [getattr(row, table.sorted_by) for row in head]
        assert values == sorted(values, reverse=True)
        assert all(row.is_region for row in rest)


def test_a_fused_operation_has_a_region_of_its_own(tables):
    for table in tables:
        assert [row.calls for row in table.rows if row.name == "realspace.fwd" and row.is_region] == [2]


def test_the_gradient_adds_rows_and_takes_none_away(step):
    forward, joint, _ = profile.torch_tables(step, device="cpu", n_rows=1000)
    names = [{row.name for row in table.rows} for table in (forward, joint)]
    assert names[0] < names[1]


def test_shares_are_of_what_is_no_region(step):
    forward, *_ = profile.torch_tables(step, device="cpu", n_rows=1000)
    assert sum(row.percent for row in forward.rows if not row.is_region) == pytest.approx(100.0)


def test_the_command_prints_sections_and_tables(capsys):
    assert main(["profile", str(STEP), "--device", "cpu", "--torch_profile", "--profile_rows", "3", "--n_timed", "1"]) == 0
    text = capsys.readouterr().out
    for line in (
        "realspace_step on cpu",
        "realspace (unfused ref)",
        "forward + gradient, by self processor memory",
        "% OF TOTAL",
    ):
        assert line in text


def test_the_command_as_json(capsys):
    assert main(["profile", str(STEP), "--device", "cpu", "--torch_profile", "--n_timed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [section["label"] for section in found["sections"]][-2:] == ["forward", "forward + gradient"]
    assert len(found["tables"]) == 3
    assert found["device"] == "cpu"
    assert not [kernel for kernel in found["kernels"] if kernel["name"].startswith("realspace")], "the reference served"


@pytest.mark.parametrize(("content", "reason"), [(None, "no Python file"), ("x = 1\n", "defines no")])
def test_a_file_that_cannot_be_profiled_is_refused(tmp_path: Path, content: str | None, reason: str):
    path = tmp_path / "model.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=reason):
        profile.load_profiled(path, device="cpu")
