"""The worker process and its lines: spoken to directly, without a pool."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve.build.reaper import members
from kserve.config import python_command, worker_environment
from kserve.key import digest_of
from kserve.toolchain.base import Job, JobArgument
from tests.support.definitions import TRITON_SOURCE
from tests.support.jobs import CUDA_FILES, SLOW_FILES, cuda_job, slow_job, staging
from tests.support.processes import wait_for

pytestmark = pytest.mark.toolchain
MEMORY_BYTES = 16 << 30


class Worker:
    """A worker of a language, one line at a time."""

    def __init__(self, root: Path, language: str) -> None:
        self.root = root
        self.scratch = root / "store" / "tmp" / f"worker-{language}"
        self.scratch.mkdir(parents=True)
        self.process = subprocess.Popen(
            python_command(sys.executable, "kserve.build.worker", language),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.scratch,
            env=worker_environment([], self.scratch),
            start_new_session=True,
        )

    def hear(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, "the worker ended"
        return json.loads(line)

    def send(self, number: int, job: Job, files: dict[str, bytes]) -> Any:
        found = staging(self.root, files)
        places = {"directory": str(found.root), "sources": str(found.sources)}
        order = {"id": number, "job": job.to_json(), **places, "memory_bytes": MEMORY_BYTES}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return found

    def build(self, job: Job, files: dict[str, bytes]) -> Any:
        """The staging directory of a finished build."""
        found = self.send(1, job, files)
        assert self.hear()["event"] == "started"
        finished = self.hear()
        assert (finished["event"], finished["id"]) == ("finished", 1)
        return found

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)


@contextlib.contextmanager
def worker(root: Path, language: str = "cuda") -> Iterator[Worker]:
    found = Worker(root, language)
    try:
        yield found
    finally:
        found.close()


def test_says_what_its_compiler_is_then_serves(own_place: Path):
    with worker(own_place) as held:
        ready = held.hear()
        assert ready["event"] == "ready"
        assert ready["fingerprint"]["name"] == "nvrtc"
        assert len(ready["fingerprint"]["files"]) == 64
        stamps = ready["fingerprint"]["stamps"]
        assert all(Path(path).exists() == bool(stamp) for path, stamp in stamps.items())
        found = held.build(cuda_job(), CUDA_FILES)
        assert found.result()["built"]["symbol"].startswith("_Z5scale")
        assert found.output("payload")[:4] == b"\x7fELF"
        assert "ptxas info" in found.log()


def test_a_toolchain_that_does_not_load_is_said(own_place: Path):
    broken = own_place / "broken"
    (broken / "triton").mkdir(parents=True)
    (broken / "triton" / "__init__.py").write_text("raise ImportError('libtriton.so is missing')")
    process = subprocess.run(
        python_command(sys.executable, "kserve.build.worker", "triton"),
        input=b"",
        capture_output=True,
        env=worker_environment([str(broken)], own_place),
        check=False,
        timeout=30,
    )
    said = json.loads(process.stdout)
    assert (said["event"], said["error"]["code"]) == ("failed", "toolchain-missing")
    assert "libtriton.so is missing" in said["error"]["message"]


def test_jobs_overlap_and_end_in_any_order(own_place: Path):
    with worker(own_place) as held:
        held.hear()
        held.send(1, slow_job(), SLOW_FILES)
        held.send(2, cuda_job(), CUDA_FILES)
        heard = [held.hear() for _ in range(3)]
        assert [(event["event"], event["id"]) for event in heard] == [("started", 1), ("started", 2), ("finished", 2)]
        assert all(os.getpgid(event["pid"]) == event["pid"] for event in heard[:1])


def test_a_job_is_charged_for_its_process_from_start_to_end(own_place: Path):
    def children_s() -> float:
        fields = Path(f"/proc/{held.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")

    with worker(own_place) as held:
        held.hear()
        before, charged = children_s(), 0.0
        for number in range(5):
            held.send(number, cuda_job(), CUDA_FILES)
            charged += [held.hear() for _ in range(2)][1]["cpu_s"]
        assert charged == pytest.approx(children_s() - before, abs=2 / os.sysconf("SC_CLK_TCK"))
        assert charged > 0.05


def test_a_job_whose_directory_is_gone_is_not_begun(own_place: Path):
    """It was cancelled before its turn; nothing is said of it where a worker's own faults are."""
    with worker(own_place) as held:
        held.hear()
        os.kill(held.process.pid, signal.SIGSTOP)
        held.send(1, cuda_job(), CUDA_FILES).remove()
        os.kill(held.process.pid, signal.SIGCONT)
        assert held.hear() == {"event": "finished", "id": 1, "status": 1, "cpu_s": 0.0}


def test_the_session_ends_when_the_input_closes(own_place: Path):
    with worker(own_place) as held:
        held.hear()
        held.send(1, slow_job(), SLOW_FILES)
        held.hear()
        assert len(members(held.process.pid)) == 2
        held.process.stdin.close()
        wait_for(lambda: not members(held.process.pid), deadline_s=2)


# A Triton file may import nothing that could look around; through Triton's own modules it can.
LOOK = TRITON_SOURCE + "os = triton.knobs.os\nprint({**os.environ, 'cwd': os.getcwd(), 'nice': os.nice(0)})\n"


def test_a_build_sees_its_own_directory_and_a_clean_environment(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("CPATH", "NVCC_APPEND_FLAGS", "PTXAS_OPTIONS", "TRITON_OVERRIDE_DIR", "A_TOKEN"):
        monkeypatch.setenv(name, "leaked")
    arguments = (
        JobArgument("x", "pointer", "float32"),
        JobArgument("out", "pointer", "float32"),
        JobArgument("n", "i32", "int32", size_bytes=4),
        JobArgument("factor", "f32", "float32", size_bytes=4),
        JobArgument("BLOCK", "constexpr", value=128),
    )
    job = Job("triton", "cuda:sm_90a", "kernel.py", "tscale", arguments, {"num_warps": 4})
    with worker(own_place, "triton") as held:
        assert held.hear()["event"] == "ready"
        first = held.build(job, {"kernel.py": LOOK.encode()})
        second = held.build(job, {"kernel.py": LOOK.encode()})
    seen = eval(first.log().splitlines()[0])
    assert "leaked" not in seen.values()
    assert seen["cwd"] == str(first.root / "src")
    assert {seen[name] for name in ("HOME", "TMPDIR")} == {str(first.root / "scratch")}
    assert seen["TRITON_CACHE_DIR"].startswith(str(first.root / "scratch"))
    assert seen["nice"] > 0
    assert digest_of(first.output("payload")) == digest_of(second.output("payload")), "the directory left a trace"


def test_what_a_job_imports_ends_with_it(own_place: Path):
    """A second job with another file of the same name compiles that one."""
    other = TRITON_SOURCE.replace("factor * tl.load", "2.0 * factor * tl.load")
    arguments = tuple(JobArgument(name, "pointer", "float32") for name in ("x", "out"))
    arguments += (JobArgument("n", "i32", "int32", 4), JobArgument("factor", "f32", "float32", 4))
    job = Job("triton", "cuda:sm_90a", "kernel.py", "tscale", (*arguments, JobArgument("BLOCK", "constexpr", value=128)), {})
    with worker(own_place, "triton") as held:
        held.hear()
        digests = [
            digest_of(held.build(job, {"kernel.py": text.encode()}).output("payload")) for text in (TRITON_SOURCE, other)
        ]
    assert digests[0] != digests[1]
