"""The benchmark of the ops' host time and first results, the whole of it, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.processes import REPOSITORY

OPS = ("edge_features", "norm_residual", "norm_residual with dropout", "graph_norm_bce", "realspace", "group_norm")


@pytest.mark.slow
@pytest.mark.toolchain
def test_the_whole_benchmark_runs_without_a_gpu(own_place):
    out = own_place / "out"
    done = subprocess.run(
        [sys.executable, "benchmarks/calls.py", "--no-gpu", "--rounds", "1", "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(own_place)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("calls-cpu-*-cores.json")
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert not found["failed"] and found["device"] == "none"
    launchers = {row["launcher"] for row in found["calls"]}
    assert "python" in launchers
    assert {(row["op"], row["launcher"]) for row in found["calls"]} == {(op, road) for op in OPS for road in launchers}
    assert all(row["us"][0] > 0.0 and row["torch_add_us"][0] > 0.0 for row in found["calls"])
    assert set(found["first_results"]) == {"up", "loaded"}
    for name, one in found["first_results"].items():
        assert one["first_s"][0] > one["second_process_s"][0] > 0.0, name
        ((first, again),) = one["origins"]
        assert (first, again) == ({"built": 4}, {"disk": 4})
        assert one["parts_s"][0][0]["import"] > 0.001, "kserve was there before the clock started"
    assert not list(own_place.glob("kc-*"))
