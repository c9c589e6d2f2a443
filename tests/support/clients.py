"""Client processes for tests: warm, waiting behind a barrier, asking in the same moment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import REPOSITORY

ASK = """
import json, sys, time
from kserve import get_kernel
from kserve.errors import KserveError
import kserve.client.resolve, http.client, tomllib
name, target, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    k = get_kernel(name, target=target, **spec)
    found = {"origin": k.origin, "key": k.key, "digest": k.digest, "reason": k.manifest.reason}
except KserveError as error:
    found = {"code": error.code, "text": str(error)}
print(json.dumps({**found, "waited_s": time.monotonic() - began}), flush=True)
"""


class Crowd:
    """Processes that each ask for one kernel when they are let go."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def let_go(self) -> None:
        """Everybody asks now."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Everybody's answer: origin, key, digest and reason, or code and text; and how long it waited."""
        return [json.loads(process.communicate(timeout=120)[0]) for process in self.processes]


@contextlib.contextmanager
def crowd(*wishes: tuple[str, dict[str, Any]], target: str = "cuda:sm_90", **environment: str) -> Iterator[Crowd]:
    """One process for each wish, all of them ready to ask; whoever is left at the end is killed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, name, target, json.dumps(spec)],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name, spec in wishes
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield Crowd(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ask_alone(
    name: str,
    *,
    target: str = "cuda:sm_90",
    spec: dict[str, Any] | None = None,
    python: str = sys.executable,
    cwd: Path = REPOSITORY,
    **environment: str,
) -> dict[str, Any]:
    """get_kernel in a process of its own: what `Crowd.answers` gives for it."""
    done = subprocess.run(
        [python, "-c", ASK, name, target, json.dumps(spec or {})],
        cwd=cwd,
        env={**os.environ, **environment},
        input="\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
