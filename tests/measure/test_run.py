"""The op benchmark: what it refuses, what it writes, and that a workload is what its op takes. On the host, on small shapes."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from kserve import catalog, cli
from kserve.config import load_settings
from kserve.errors import InvalidSpec
from kserve.measure import workloads
from kserve.measure.check import Verdict, check, poisoned
from tests.support.processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import run

SMALL = {
    "edge_features": {"n": 9, "e": 31, "hidden": 6, "ordered": 1},
    "graph_norm_bce": {"e": 50, "g": 4, "mixed": 1},
    "group_norm": {"n": 2, "c": 16, "edge": 3},
    "norm_residual": {"n": 7, "hidden": 33, "training": 0},
    "realspace": {"n_e": 5, "f": 4, "n_ang": 3, "by_order": 1},
}
VOLUME = {**dict.fromkeys(("dtype", "out_dtype", "affine_dtype"), "bfloat16"), "channels": 16, "groups": 8}
FORMS = [(op, *form) for op in workloads.ops() for form in workloads.forms_of(op)]


def small(op: str, direction: str = "fwd", dtype: str = "float32") -> workloads.Workload:
    return workloads.workload(op, SMALL[op], direction=direction, dtype=dtype)


def bench(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", "--no-gpu", "--rounds", "4", "--out", str(out), *arguments])
    return run.main()


def test_every_op_has_a_small_shape_here():
    assert set(SMALL) == set(workloads.ops())


@pytest.mark.parametrize(("op", "direction", "dtype"), FORMS)
def test_an_op_is_right_on_its_workload(op, direction, dtype):
    verdict = check(small(op, direction, dtype), device="cpu")
    assert verdict.is_right, verdict
    assert verdict.error > 0.0, "float32 against float64"


@pytest.mark.parametrize(("op", "direction", "dtype"), FORMS)
def test_the_plain_form_computes_the_same(op, direction, dtype):
    one = small(op, direction, dtype)
    assert check(one._replace(served=one.plain), device="cpu").is_right


@pytest.mark.parametrize("op", workloads.ops())
def test_inputs_follow_the_seed(op):
    one = small(op)
    first, again, other = (one.make("cpu", seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_wrong_op_is_told_by_its_error_and_one_that_writes_nothing_by_its_nan():
    one = small("norm_residual")
    off = one._replace(served=lambda *args: one.plain(*args) + 1e-4)
    assert check(off, device="cpu").error == pytest.approx(1e-4, rel=0.1)
    idle = one._replace(served=lambda x, *_: torch.empty_like(x))
    assert math.isnan(check(idle, device="cpu").error)
    short = one._replace(served=lambda x, *_: x[:1])
    assert not check(short, device="cpu").is_right


def test_a_nan_is_never_right():
    assert not Verdict(math.nan, 1.0).is_right


def test_poison_ends_with_its_block():
    with poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_kernels_example_is_its_launch_arguments():
    for name, spec in {
        "fused_norm_residual": {"hidden": 8},
        "realspace_fwd": {"n_ang": 3},
        "realspace_bwd": {"n_ang": 2},
        "realspace_cuda_fwd": {"n_ang": 3, "dtype": "bfloat16"},
        **dict.fromkeys(("group_norm_stats", "group_norm_apply", "group_norm_bwd_sums", "group_norm_bwd_apply"), VOLUME),
    }.items():
        example = workloads.example(name)
        assert example is not None
        sizes = dict.fromkeys(example.sizes, 5)
        arguments = example.arguments(spec, sizes, "cpu", 0)
        assert any(torch.is_tensor(one) and one.isnan().all() for one in arguments), "an output nobody has written"
        assert example.n_bytes(spec, sizes) > 0
    assert workloads.example("somebody-elses") is None


def test_inputs_have_the_sizes_of_their_kernel_by_name():
    for op in workloads.ops():
        for name, example in importlib.import_module(f"kserve.measure.workloads.{op}").KERNELS.items():
            entry = catalog.definition_of(catalog.find(name, load_settings()).folder).entries[name]
            assert set(example.sizes) & set(entry.size_names), f"kserve tune {name} --shape would keep a winner for every size"


def test_a_size_that_the_inputs_do_not_have_is_refused(capsys):
    assert cli.main(["tune", "fused_edge_features", "--dry-run", "--target", "sm_90", "--shape", "edges=64"]) == 2
    assert "the inputs of fused_edge_features have no size 'edges'" in capsys.readouterr().err
    shape = ["--shape", "n_edges=1000", "--shape", "ordered=0"]
    assert cli.main(["tune", "fused_edge_features", "--dry-run", "--target", "sm_90", "--json", *shape]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"n_edges": 1000, "ordered": 0} and set(found["bucket"]) == {"n_edges"}


def test_rows_and_files(monkeypatch, tmp_path, capsys):
    shape = "n_e=5,f=4,n_ang=3,by_order=0"
    assert (
        bench(monkeypatch, tmp_path, "--op", "realspace", "--dtype", "float32", "--shape", shape, "--baseline", "eager,vendor")
        == 0
    )
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("ops-cpu-*.json"))
    assert [(row["direction"], row["arm"]) for row in found["rows"]] == [
        (direction, arm) for direction in ("fwd", "bwd") for arm in ("kserve", "eager")
    ]
    for row in found["rows"]:
        assert row["low_us"] <= row["time_us"] <= row["high_us"]
        assert row["share_of_copy"] == pytest.approx(row["gb_s"] / found["ceilings"]["copy_gb_s"], abs=0.02)
        assert (row["stop"], row["n_rounds"]) == ("fixed", 4)
    assert {(one["arm"], one["reason"]) for one in found["refused"]} == {("vendor", "no library has this op")}
    with next(tmp_path.glob("ops-cpu-*.csv")).open() as file:
        assert [row["arm"] for row in csv.DictReader(file)] == ["kserve", "eager"] * 2
    assert "of copy" in capsys.readouterr().out


def test_the_dtype_an_op_is_judged_by(monkeypatch, tmp_path, capsys):
    small = ["--op", "realspace", "--op", "group_norm", "--direction", "fwd", "--dtype", "first", "--baseline", "none"]
    monkeypatch.setattr(workloads, "sizes_of", lambda op: [SMALL[op]])
    assert bench(monkeypatch, tmp_path, *small) == 0
    written = json.loads(next(tmp_path.glob("ops-cpu-*.json")).read_text())
    assert [(row["op"], row["dtype"]) for row in written["rows"]] == [("realspace", "float32"), ("group_norm", "bfloat16")]


def test_baselines_may_be_left_to_the_first_shapes(monkeypatch, tmp_path):
    first, second = {**SMALL["norm_residual"]}, {**SMALL["norm_residual"], "n": 3}
    monkeypatch.setattr(workloads, "sizes_of", lambda op: [first, second])
    assert bench(monkeypatch, tmp_path, "--op", "norm_residual", "--baseline", "eager", "--baselines-on", "1") == 0
    written = json.loads(next(tmp_path.glob("ops-cpu-*.json")).read_text())
    assert [(row["arm"], row["shape"][:3]) for row in written["rows"]] == [
        ("kserve", "n=7"),
        ("eager", "n=7"),
        ("kserve", "n=3"),
    ]


def test_an_op_that_is_wrong_has_no_number(monkeypatch, tmp_path, capsys):
    right = small("norm_residual")
    monkeypatch.setattr(run.workloads, "workload", lambda *_, **__: right._replace(served=lambda x, *_: x))
    assert (
        bench(monkeypatch, tmp_path, "--op", "norm_residual", "--shape", "n=7,hidden=33,training=0", "--baseline", "eager") == 1
    )
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert found["rows"] == []
    assert "error against float64" in found["refused"][0]["reason"]
    assert "no number" in capsys.readouterr().out


def test_a_baseline_that_fails_costs_only_itself(monkeypatch, tmp_path):
    def broken(*_: object) -> None:
        raise RuntimeError("not today")

    right = small("norm_residual")
    monkeypatch.setattr(run.workloads, "workload", lambda *_, **__: right._replace(vendor=broken))
    assert (
        bench(
            monkeypatch, tmp_path, "--op", "norm_residual", "--shape", "n=7,hidden=33,training=0", "--baseline", "eager,vendor"
        )
        == 0
    )
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert [row["arm"] for row in found["rows"]] == ["kserve", "eager"]
    assert found["refused"][0]["reason"] == "RuntimeError: not today"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--op", "nothing"], 2),
        (["--op", "realspace", "--shape", "n=1"], 2),
        (["--op", "norm_residual", "--direction", "bwd"], 2),
    ],
)
def test_what_no_op_has_is_refused(monkeypatch, tmp_path, arguments, status):
    assert bench(monkeypatch, tmp_path, *arguments) == status
    assert not list(tmp_path.iterdir())


def test_sizes_directions_and_dtypes_are_named_when_refused():
    for changes in ({"sizes": {"n": 1}}, {"direction": "up"}, {"dtype": "int8"}):
        wanted = {"sizes": SMALL["norm_residual"], **changes}
        with pytest.raises(InvalidSpec) as refused:
            workloads.workload("norm_residual", **wanted)
        assert "allowed" in refused.value.facts
