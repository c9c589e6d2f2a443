"""An old client with a new daemon and the reverse: it works, or a sentence names both versions; the way out works too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kserve
from kserve.protocol import PROTOCOL
from tests.support.clients import ASK
from tests.support.daemon import Daemon, daemon, variables
from tests.support.definitions import write_cuda
from tests.support.processes import REPOSITORY, wait_for

pytestmark = pytest.mark.toolchain

# The command line of another release: of this protocol, or of another one.
AS_RELEASE = """
import sys
import kserve
from kserve import protocol
kserve.__version__, protocol.PROTOCOL = "9.9.9", {protocol}
"""
COMMAND = "from kserve.cli import main\nsys.exit(main(sys.argv[1:]))"
PROTOCOLS = [PROTOCOL - 1, PROTOCOL + 1]


def run_release(code: str, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **variables(root)},
        input="\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def release(protocol: int) -> str:
    return AS_RELEASE.format(protocol=protocol)


@pytest.fixture
def root(own_place: Path) -> Path:
    write_cuda(own_place / "kernels" / "scale")
    return own_place


@pytest.fixture
def other_daemon(root: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon of another release; the parameter is its protocol."""
    with daemon(root, program=("-c", release(request.param) + COMMAND), awaited=False) as found:
        wait_for(lambda: "listening" in found.log or found.process.poll() is not None, what="the other release's daemon")
        yield found


def assert_names_both(text: str, protocol: int) -> None:
    for named in ("9.9.9", kserve.__version__, f"protocol {protocol}", "kserve down"):
        assert named in text
    assert "Traceback" not in text


@pytest.mark.parametrize("other_daemon", PROTOCOLS, indirect=True)
def test_a_daemon_of_another_protocol_is_a_sentence_for_this_client(root: Path, other_daemon: Daemon, request: Any):
    protocol = request.node.callspec.params["other_daemon"]
    asked = run_release(ASK, root, "scale", "sm_90", "{}")
    answer = json.loads(asked.stdout.splitlines()[-1])
    assert answer["code"] == "protocol-mismatch"
    assert_names_both(answer["text"], protocol)
    for command in (["status"], ["build", "scale", "--target", "sm_90"], ["cache", "ls"], ["up", "--detach"]):
        refused = run_release("import sys\n" + COMMAND, root, *command)
        assert refused.returncode == 6, command
        assert_names_both(refused.stderr, protocol)
    down = run_release("import sys\n" + COMMAND, root, "down")
    assert down.returncode == 0, down.stderr
    assert other_daemon.process.wait(10) == 0, "what the sentence advises works"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_of_another_protocol_is_a_sentence_too(root: Path, protocol: int):
    with daemon(root) as found:
        asked = run_release(release(protocol) + ASK, root, "scale", "sm_90", "{}")
        answer = json.loads(asked.stdout.splitlines()[-1])
        assert answer["code"] == "protocol-mismatch"
        assert_names_both(answer["text"], protocol)
        assert run_release(release(protocol) + COMMAND, root, "down").returncode == 0
        assert found.process.wait(10) == 0


@pytest.mark.parametrize("other_daemon", [PROTOCOL], indirect=True)
def test_another_release_of_this_protocol_works(root: Path, other_daemon: Daemon):
    first = run_release(ASK, root, "scale", "sm_90", "{}")
    assert json.loads(first.stdout.splitlines()[-1])["origin"] == "built"
    third = run_release(release(1).replace("9.9.9", "0.0.1") + ASK, root, "scale", "sm_90", "{}")
    assert json.loads(third.stdout.splitlines()[-1])["origin"] == "disk"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_importing_another_release_asks_nobody(root: Path, protocol: int):
    with daemon(root):
        imported = run_release(release(protocol) + "from kserve import get_kernel\nprint('imported')", root)
    assert (imported.stdout, imported.stderr) == ("imported\n", "")
