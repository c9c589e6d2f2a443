"""What kernels cost a process: in the process, from outside, and what is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kserve
from kserve import client, get_kernel
from kserve.client.report import process_start, report
from kserve.config import load_settings
from tests.client.test_direct import TARGET, settle
from tests.support.definitions import CUDA_SOURCE, write_cuda
from tests.support.processes import REPOSITORY, python, wait_for
from tests.support.processes import kserve as command

pytestmark = pytest.mark.toolchain


@pytest.fixture
def folder(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kserve.client.report._report", None)
    return write_cuda(kernels / "scale")


def last() -> dict:
    return report().to_json()["calls"][-1]


def test_a_call_says_its_parts_and_why_the_files_did_not_do(folder: Path):
    settle(folder)
    get_kernel("scale", target=TARGET)
    (line,) = last()["kernels"]
    assert (line["origin"], line["rung"], line["reason"]) == ("built", "served", "first build")
    assert "no store yet" in line["why"]
    assert last()["ask_s"] > last()["look_s"] >= 0


def test_a_hit_on_the_files_asked_nobody(folder: Path):
    settle(folder)
    get_kernel("scale", target=TARGET)
    client.forget()
    get_kernel("scale", target=TARGET)
    (line,) = last()["kernels"]
    assert (line["origin"], line["why"]) == ("disk", "")
    assert last()["ask_s"] < 0.01


def test_the_file_that_changed_is_named(folder: Path):
    settle(folder)
    get_kernel("scale", target=TARGET)
    (folder / "kernel.cu").write_text(CUDA_SOURCE + "\n")
    client.forget()
    get_kernel("scale", target=TARGET)
    (line,) = last()["kernels"]
    assert str(folder / "kernel.cu") in line["why"]
    assert line["reason"] == "source kernel.cu changed"


def test_a_memo_hit_is_no_call(folder: Path):
    get_kernel("scale", target=TARGET)
    n_calls = len(report().calls)
    get_kernel("scale", target=TARGET)
    assert len(report().calls) == n_calls


def test_a_build_after_warm_is_counted(folder: Path):
    get_kernel("scale", target=TARGET)
    kserve.warmed()
    get_kernel("scale", target=TARGET, size=16)
    assert report().missed_after_warm == 1


def test_why_cold_shows_another_process(folder: Path):
    get_kernel("scale", target=TARGET)
    shown = command("why-cold", str(os.getpid()))
    assert shown.returncode == 0, shown.stderr
    assert "built because first build" in shown.stdout
    assert str(kserve.report()).splitlines()[1] == shown.stdout.splitlines()[1]
    (plain,) = json.loads(command("report", "--json").stdout)
    assert (plain["pid"], plain["origins"]) == (os.getpid(), {"built": 1})


def test_a_process_without_a_report_is_an_error_that_names_those_with_one(folder: Path):
    get_kernel("scale", target=TARGET)
    done = command("why-cold", "1")
    assert (done.returncode, str(os.getpid()) in done.stderr) == (2, True)


def test_the_files_of_ended_processes_are_removed(folder: Path):
    done = python(f"from kserve import get_kernel\nimport os\nget_kernel('scale', target='{TARGET}')\nprint(os.getpid())")
    path = load_settings().socket.parent / "report" / f"{int(done.stdout)}.json"
    assert path.exists()
    assert json.loads(command("report", "--json").stdout) == []
    assert not path.exists()


def test_a_runtime_directory_that_takes_no_file_is_no_error(folder: Path):
    get_kernel("scale", target=TARGET)
    (load_settings().socket.parent / "report").rename(folder.parent.parent / "moved")
    (load_settings().socket.parent / "report").touch()
    get_kernel("scale", target=TARGET, size=16)
    assert len(report().calls) == 2


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_it():
    assert process_start(os.getpid()).isdecimal()
    assert process_start(2**22 + 1) == ""


def test_ops_are_served_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    """As at the limit of a container's processes, or while the interpreter ends."""
    pytest.importorskip("torch")
    monkeypatch.setattr("kserve.client.report._report", None)
    before = threading.stack_size(1 << 46)  # more than there is to map
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        report().watch(lambda: {"op": {}})
    finally:
        threading.stack_size(before)
    assert report().to_json()["ops"] == {"op": {}}


NORMS = """
import sys, torch
from kserve.ops.group_norm import FastGroupNorm
norm = FastGroupNorm(2, 4)
for line in sys.stdin:
    norm(torch.ones(1, 4, 2, 2, 2))
"""


def test_status_and_report_show_what_ops_were_served_by(own_place: Path):
    """Written a second after it changed, by a process that has loaded no kernel."""
    pytest.importorskip("torch")
    assert command("up", "--detach").returncode == 0

    def served() -> dict[str, dict]:
        (plain,) = json.loads(command("status", "--json").stdout)["processes"] or [{"ops": {}}]
        return plain["ops"].get("group_norm", {})

    process = subprocess.Popen([sys.executable, "-c", NORMS], stdin=subprocess.PIPE, text=True, cwd=REPOSITORY)
    with process:
        for n_calls in (1, 2):
            process.stdin.write("again\n")
            process.stdin.flush()
            found = wait_for(lambda n_calls=n_calls: served().get("served") == {"pytorch": n_calls} and served(), deadline_s=60)
        assert found["latch"] == "" and found["declines"] == {"FastGroupNorm": {"not_gpu": 1}}
        assert found["last_declines"]["FastGroupNorm"] == {"reason": "not_gpu", "detail": "the input lies on cpu"}
        line = (
            f"ops of {process.pid} -c: group_norm: 2 pytorch; FastGroupNorm left to torch (1 not_gpu), last not_gpu: the input"
        )
        for shown in (command("status"), command("report")):
            assert line in shown.stdout, shown.stdout + shown.stderr
        process.stdin.close()
