"""The cold-start benchmark: children that fail, crowds, what is written; and the whole of it, without a GPU."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kserve.measure.timing import ArmFailed
from tests.support.processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import coldstart
from cold import arms, places, report, workloads

R = workloads.RealSpace.name
WHOLE = "import json, sys; told = dict(word.split('=', 1) for word in sys.argv[1:])\n"
REPORT = """
import os, time
if "barrier" in told:
    ready, go = map(int, told["barrier"].split(","))
    os.write(ready, b".")
    os.read(go, 1)
marks = {"up": 0.0, "context": 0.0, "begun": 0.0, "first": time.perf_counter()}
found = {"marks": marks, "seconds": {"first": 0.5}, "facts": {"digest": "d", "origin": "disk"}}
json.dump(found | CHANGES, open(told["report"], "w"))
"""


@pytest.fixture
def run_of(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    """Places whose children run the given code instead of an arm."""

    def make(code: str, *, timeout_s: float = 20.0) -> places.Places:
        script = own_place / "child.py"
        script.write_text(WHOLE + textwrap.dedent(code))
        monkeypatch.setattr(places, "CHILD", script)
        options = places.Options(gpu=False, torch=False, target="cuda:sm_90", n_further=1, timeout_s=timeout_s)
        return places.Places(own_place, options)

    return make


def an_arm(**changes: object) -> arms.Arm:
    return arms.Arm("an-arm", R, "driver", arms.bare)._replace(**changes)


def a_report(changes: str = "{}") -> str:
    return REPORT.replace("CHANGES", changes)


def test_a_child_reports_its_seconds_and_the_parent_adds_the_whole_process(run_of):
    found = arms.run_arm(run_of(a_report()), an_arm())
    assert found["seconds"]["first"] == 0.5
    assert found["seconds"]["process"] > 0.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "exit status 3: no output"),
        ("print('one.cu: fatal error: no such file'); print('stopped'); raise SystemExit(1)", "fatal error: no such file"),
        (a_report("{'wrong': 'off by 0.5'}"), "off by 0.5"),
        ("import time\ntime.sleep(600)", "no result in 1 s"),
    ],
)
def test_a_child_that_fails_has_no_number_and_a_reason(run_of, code, reason):
    with pytest.raises(ArmFailed, match=reason) as failure:
        arms.run_arm(run_of(code, timeout_s=1.0 if "sleep" in code else 20.0), an_arm())
    assert not isinstance(failure.value, places.Unavailable)


def test_what_this_machine_cannot_run_is_no_failure(run_of):
    with pytest.raises(places.Unavailable, match="no such thing here"):
        arms.run_arm(run_of(a_report("{'unavailable': 'no such thing here'}")), an_arm())


def test_a_crowd_is_let_go_together(run_of):
    found = arms.run_arm(run_of(a_report()), an_arm(n=3))
    assert found["facts"]["origins"] == {"disk": 3}
    assert 0.0 < found["seconds"]["wall"] < 20.0


def test_a_crowd_with_one_that_ends_early_fails_at_once(run_of):
    code = a_report().replace("os.write", "sys.exit('an error') if told['report'].split('/')[-2] == '1' else os.write")
    with pytest.raises(ArmFailed, match="an error"):
        arms.run_arm(run_of(code), an_arm(n=3))


def test_a_crowd_with_different_binaries_fails(run_of):
    code = a_report("{'facts': {'digest': str(os.getpid())}}")
    with pytest.raises(ArmFailed, match="2 different binaries"):
        arms.run_arm(run_of(code), an_arm(n=2))


def test_a_child_sees_no_setting_of_the_user(run_of, monkeypatch):
    for name in ("KSERVE_STORE", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/nowhere")
    place = run_of("")
    with arms.cache("CUPY_CACHE_DIR", "cupy", state="cold")(place) as (environment, _):
        folder = Path(environment["CUPY_CACHE_DIR"])
        assert folder.is_dir() and not list(folder.iterdir()) and not list(Path(environment["HOME"]).iterdir())
        assert environment["CUDA_CACHE_DISABLE"] == "1"
        assert not {name for name in environment if name.startswith(("KSERVE_", "TRITON_", "XDG_"))}
    assert not folder.exists()


def test_the_first_cold_cache_is_kept_as_the_warm_one(run_of):
    place = run_of("")
    filling, warm = (arms.cache("CUPY_CACHE_DIR", "cupy", state=state) for state in ("filling", "warm"))
    found = []
    for setting in (filling, warm, filling):
        with setting(place) as (environment, _):
            found.append(environment["CUPY_CACHE_DIR"])
    assert found[0] == found[1] != found[2]
    assert Path(found[0]).is_dir() and not Path(found[2]).exists()


def test_a_copy_of_a_store_has_its_records_and_no_aliases(run_of, own_place):
    place = run_of("")
    for name in ("payload/ab/abc", "alias/cd/cde", "lock", "KSERVE_STORE"):
        path = own_place / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    place.copy_of_store(own_place / "copy")
    copied = own_place / "copy" / "store"
    assert (copied / "payload/ab/abc").is_file() and (copied / "KSERVE_STORE").is_file()
    assert not (copied / "alias").exists() and not (copied / "lock").exists()
    place.forget_aliases(place.filled_store)
    left = {path.name for path in (own_place / "store").rglob("*") if path.is_file()}
    assert left == {"abc", "lock", "KSERVE_STORE"}


@pytest.mark.parametrize("kernel", [workloads.Norm(), workloads.RealSpace(17), workloads.RealSpaceGradient()])
def test_an_element_that_was_not_written_is_no_small_error(kernel):
    torch = pytest.importorskip("torch")
    kernel.place(torch, "cpu")
    for output in kernel.outputs[1:]:
        output.zero_()
    assert math.isnan(kernel.error(torch))


def test_what_a_kernel_has_to_give_agrees_with_its_reference():
    torch = pytest.importorskip("torch")
    from kserve.ops.norm_residual import reference as norm_reference
    from kserve.ops.realspace import reference as realspace_reference

    norm, real = workloads.Norm(100), workloads.RealSpace(17)
    norm.place(torch, "cpu")
    norm.outputs[0].copy_(norm_reference(*(tensor.double() for tensor in norm.arguments[:4])))
    real.place(torch, "cpu")
    for output, found in zip(
        real.outputs, realspace_reference(*(a[:, None] for a in real.arguments[:2]), n_grid=17), strict=True
    ):
        output.copy_(found[:, 0])
    assert norm.error(torch) <= workloads.BAR and real.error(torch) <= workloads.BAR


@pytest.mark.toolchain
def test_the_one_source_of_other_compilers_needs_no_include_directory():
    """CuPy and cuda.core get it as one text, with the macros and the expression that their arms use."""
    code = """
import sys
import child, providers
from cuda.bindings import nvrtc
source = child.inlined(open(f"{sys.argv[1]}/norm_residual/norm_residual.cu").read(), f"{sys.argv[1]}/include", set())
_, program = nvrtc.nvrtcCreateProgram(source.encode(), b"norm.cu", 0, [], [])
job = type("Job", (), {"fact": lambda self, wish: {"constants": {"hidden": 128, "lanes": 32, "groups": 8, "rows": 2}}})()
nvrtc.nvrtcAddNameExpression(program, providers._expression(job, None).encode())
macros = [f"-D{name}={value}".encode() for name, value in providers.ALIGNED.items()]
print(nvrtc.nvrtcCompileProgram(program, 2 + len(macros), [b"-arch=sm_90", b"--std=c++17", *macros])[0].name)
"""
    pytest.importorskip("cuda.bindings.nvrtc")
    command = [sys.executable, "-c", code, str(REPOSITORY / "cuda_src")]
    done = subprocess.run(command, cwd=REPOSITORY / "benchmarks" / "cold", capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "NVRTC_SUCCESS", done.stdout + done.stderr


def test_all_wishes_of_one_process_are_different():
    for kernel in (workloads.Norm.name, R):
        wishes = workloads.Wishes(kernel, n_further=workloads.MOST_FURTHER).all()
        assert len({workloads.variant(wish.name, wish.spec) for wish in wishes}) == 2 + 2 * workloads.MOST_FURTHER


def test_arms_are_chosen_by_name_group_and_pattern():
    chosen, processes = coldstart.choose("kserve-*,launch,!*-locked*", (1, 8, 16))
    names = {arm.name for arm in chosen}
    assert {"kserve-direct", "kserve-built", "kserve-built-further"} <= names and "kserve-locked" not in names
    assert processes == ["launch"]
    assert {arm.group for arm in coldstart.choose("crowd", (1, 8, 16))[0]} == {"crowd"}
    with pytest.raises(SystemExit, match="nothing is called 'kserv'"):
        coldstart.choose("kserv", (1, 8, 16))


def record(name: str, kernel: str, *firsts: float, group: str = "first") -> report.Record:
    arm = next(arm for arm in [*arms.FIRST, *arms.SLOW] if (arm.name, arm.first) == (name, kernel))
    facts = {"road": "files", "origins": {"disk": 1}}
    reports = [{"seconds": {"first": value, "process": 1.0}, "facts": facts} for value in firsts]
    return report.Record(arm._replace(group=group), reports)


def records(group: str = "first") -> dict[str, report.Record]:
    found = [record("triton-warm", R, 0.60, 0.62, 0.64, group=group), record("kserve-direct", R, 0.0200, 0.0205, 0.0210)]
    return {item.arm.id: item for item in found}


def test_arms_that_took_turns_have_a_paired_ratio():
    rows = {(row.arm, row.metric): row for row in report.rows_of(records())}
    ratio = rows[f"triton-warm:{R} / kserve-direct:{R}", "first"]
    assert ratio.unit == "ratio" and ratio.found.n == 3
    assert ratio.found.low < 0.62 / 0.0205 < ratio.found.high < math.inf
    assert rows[f"kserve-direct:{R}", "first"].found.value == pytest.approx(20.5)
    assert rows[f"kserve-direct:{R}", "first"].road == "files, disk"


def test_arms_that_did_not_have_no_interval():
    rows = {(row.arm, row.metric): row for row in report.rows_of(records(group="slow"))}
    assert rows[f"triton-warm:{R} / kserve-direct:{R}", "first"].found.high == math.inf


def test_the_summary_judges_the_bars_and_names_what_is_missing():
    text = report.summary(report.rows_of(records()), {"cupy-warm": "no CuPy here"}, bars=True)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "bar first kernel from disk, import included, ms <= 25 20.5 met" in lines
    assert "bar first: Triton's warm cache / kserve >= 20 30.2 met" in lines
    assert "bar a further kernel, ms <= 1 not measured" in lines
    assert "no number: cupy-warm: no CuPy here" in lines


@pytest.mark.slow
@pytest.mark.toolchain
def test_the_whole_benchmark_runs_without_a_gpu(own_place):
    out = own_place / "out"
    names = f"kserve-direct:{R},kserve-daemon,triton-cold,driver:{R},crowd-2-kserve-direct"
    done = subprocess.run(
        [sys.executable, "benchmarks/coldstart.py", "--no-gpu", "--quick", "--arms", names, "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(own_place)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (table,), (whole,) = out.glob("*.csv"), out.glob("*.json")
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == report.FIELDS
    assert all(line["gpu"] == "none" and "kserve" in line["versions"] and line["date"] for line in lines)
    figures = {(line["arm"], line["metric"]): line for line in lines}
    for metric in ("import", "get", "first", "second", "further", "batch", "memo", "start_to_first", "process"):
        assert float(figures[f"kserve-daemon:{R}", metric]["median"]) > 0.0
    assert figures[f"kserve-daemon:{R}", "first"]["road"] == "daemon, disk"
    assert f"crowd-2-kserve-direct:{R}" in {arm for arm, metric in figures if metric == "wall"}
    found = json.loads(whole.read_text())
    assert set(found["absent"]) == {f"driver:{R}"} and not found["failed"]
    assert not list(own_place.glob("kc-*"))
