"""`kserve doctor toolchain`: what is used, and the reason for every other place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import kserve

pytestmark = pytest.mark.toolchain


def test_it_names_the_toolkit_in_use_and_where_each_piece_comes_from():
    found = json.loads(kserve("doctor", "toolchain", "--json").stdout)
    used = [one for one in found["candidates"] if one["state"] == "used"]
    if not used:
        pytest.skip("this machine has no CUDA toolkit")
    assert all(one["reason"] for one in found["candidates"] if one["state"] == "rejected")
    assert found["torch"]["version"]
    assert Path(found["pieces"]["cuda_runtime.h"]).is_file()
    shown = kserve("doctor", "toolchain").stdout
    assert used[0]["place"] in shown
    assert found["pieces"]["libcudart.so"] in shown


def test_a_named_toolkit_that_is_none_is_said_and_replaced_by_no_other(own_place: Path):
    found = json.loads(kserve("doctor", "toolchain", "--json", KSERVE_CUDA_HOME=str(own_place)).stdout)
    assert found["candidates"][0]["origin"] == "configured"
    assert "bin/nvcc" in found["candidates"][0]["reason"]
    assert [one for one in found["candidates"] if one["state"] == "used"] == []
    assert found["pieces"] == {}
