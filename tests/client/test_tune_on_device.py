"""Tuning on a real device: facts of the device, a sweep of RealSpace, the stored winner in later processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kserve.client.choice import device_for
from kserve.client.loader import driver
from tests.support import processes
from tests.support.processes import python

pytestmark = pytest.mark.gpu
LATER = """
import torch
torch.cuda.synchronize()
import time
from kserve import get_kernel
began = time.perf_counter()
k = get_kernel("realspace_fwd", n_ang=3, sizes={"rows": ROWS})
print(k.origin, *k.knobs.values(), 1e3 * (time.perf_counter() - began))
"""


def test_the_drivers_facts_are_those_torch_knows(gpu):
    torch = pytest.importorskip("torch")
    known = torch.cuda.get_device_properties(gpu)
    found = device_for(str(driver().target_of(gpu.index)))
    assert found is not None
    assert (found.name, found.sm_count, found.l2_bytes) == (known.name, known.multi_processor_count, known.L2_cache_size)


def tune(*arguments: str) -> dict[str, Any]:
    done = processes.kserve("tune", "realspace_fwd", "--set", "n_ang=3", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_twelve_configurations_of_realspace_and_the_winner_in_later_processes(gpu):
    pytest.importorskip("kserve.measure.device")
    rows = 1 << 20
    found = tune("--shape", f"rows={rows}")
    assert len(found["rows"]) == found["n_timed"] == 12
    assert {row["state"] for row in found["rows"]} <= {"timed", "loser"}
    assert found["copy_gb_s"] > 100 and found["n_bytes"] == 16 * rows * 3
    again = tune("--shape", f"rows={rows}")
    assert again["n_timed"] == 0 and again["winner"] == found["winner"]
    assert processes.kserve("down").returncode == 0
    later = python(LATER.replace("ROWS", str(rows)), KSERVE_AUTOSTART="0", KSERVE_NO_BUILD="1").stdout.split()
    assert later[0] == "disk"
    assert [*map(int, later[1:3])] == [found["winner"]["BLOCK"], found["winner"]["WARPS"]]
