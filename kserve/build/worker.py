"""The worker process: imports one toolchain, then forks a child for each job.

Single-threaded, so that forking is safe. The parent never compiles: a crash, a leak or a memory limit costs one child, and
what a job imports ends with it. Lines of JSON come in on standard input (a job) and go out on standard output (an event). When
the input closes, the worker kills everything in its session and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from kserve.build.limits import is_limit, no_process
from kserve.build.reaper import kill_session
from kserve.build.sandbox import World
from kserve.build.staging import LOG_NAME
from kserve.config import enter_scratch
from kserve.errors import BuildError, KserveError
from kserve.toolchain.base import Toolchain, check_parameters, job_from_json, load_toolchain

# A waiting client's process is served before a compiler: p99 of a hit beside four compilers is 8.7 ms at nice 0, 0.4 at 10.
_NICE = 10
_MOST_OUTPUT_BYTES = 1 << 30  # a compiler that prints without end must not fill the disk


def main() -> None:
    """Serve the language named on the command line until standard input closes."""
    language = sys.argv[1]
    _close_strays()
    try:
        toolchain = load_toolchain(language)
        _say({"event": "ready", "fingerprint": toolchain.fingerprint()._asdict()})
    except KserveError as error:
        _say({"event": "failed", "error": error.to_wire()})
        return
    except OSError as error:
        if not is_limit(error):
            raise
        _say({"event": "failed", "error": no_process(f"a process of the {language} toolchain", error).to_wire()})
        return
    _serve(toolchain, World(toolchain.roots()))
    kill_session(os.getsid(0), spare=os.getpid())


def _close_strays() -> None:
    """Close every descriptor but the three standard ones.

    An event loop may leave a second copy of each pipe in its child; a compiler would inherit it and hide our death.
    """
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        if int(entry) > 2:
            with contextlib.suppress(OSError):
                os.close(int(entry))


def _serve(toolchain: Toolchain, world: World) -> None:
    """Start a child for each line, report each child that ends."""
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to make the wake-up descriptor fire
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    buffered = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ended(children)
        if 0 in ready:
            received = os.read(0, 1 << 20)
            if not received:
                return
            *lines, buffered = (buffered + received).split(b"\n")
            for line in lines:
                _take(toolchain, world, json.loads(line), children)


def _take(toolchain: Toolchain, world: World, order: dict[str, Any], children: dict[int, int]) -> None:
    """Start the child of one order, and note it; or say why there is none."""
    if not os.path.isdir(order["directory"]):  # noqa: PTH112 - cancelled since, and its directory removed
        _finish(order["id"], 1)
        return
    try:
        pid = _start(toolchain, order, world)
    except OSError as error:
        _refuse(order, error)
        return
    children[pid] = order["id"]
    _say({"event": "started", "id": order["id"], "pid": pid})


def _report_ended(children: dict[int, int]) -> None:
    while children:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in children:
            _finish(children.pop(pid), os.waitstatus_to_exitcode(status), cpu_s=used.ru_utime + used.ru_stime)


def _finish(number: int, status: int, *, cpu_s: float = 0.0) -> None:
    """Say that a job has ended.

    Args:
        cpu_s: processor seconds of its process from the fork to the end, with those of the programs it ran.
    """
    _say({"event": "finished", "id": number, "status": status, "cpu_s": cpu_s})


def _say(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def _start(toolchain: Toolchain, order: dict[str, Any], world: World) -> int:
    """Fork a child that runs the job in its own process group; the child's pid."""
    pid = os.fork()
    if pid:
        # On both sides of the fork, so that the group exists before anyone is told of it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        directory = Path(order["directory"])
        _become_job(directory, order["memory_bytes"])
        os.chdir(order["sources"])
        _run(toolchain, order, closed_world=world.enter(directory, Path(order["sources"]), order["job"]["roots"]))
        sys.stdout.flush()
        status = 0
    except BaseException:  # nothing may unwind into the worker's own loop  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _refuse(order: dict[str, Any], error: OSError) -> None:
    """Answer a job for which there is no process."""
    with contextlib.suppress(OSError):
        _leave(Path(order["directory"]) / "out", {"error": no_process("a process for the compile", error).to_wire()})
    _finish(order["id"], 1)


def _become_job(directory: Path, memory_bytes: int) -> None:
    """Leave everything of the worker behind: pipes, signals, caches, priority."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_OUTPUT_BYTES, _MOST_OUTPUT_BYTES))
    os.umask(0o077)
    enter_scratch(directory / "scratch")


def _run(toolchain: Toolchain, order: dict[str, Any], *, closed_world: bool) -> None:
    """Build, and leave either the outputs or the error in `out/`."""
    out = Path(order["directory"]) / "out"
    try:
        job = job_from_json(order["job"])
        built, payload = toolchain.build(job)
        check_parameters(job, built)
        (out / "payload").write_bytes(payload)
        for kind, text in built.attachments.items():
            (out / kind).write_text(text)
        facts = {"attachments": sorted(built.attachments), "closed_world": closed_world}
        answer = {"built": {**built._asdict(), **facts}}
    except KserveError as error:
        answer = {"error": error.to_wire()}
    except Exception as error:  # a job may fail in any way: it is this job's answer  # noqa: BLE001
        traceback.print_exc()
        answer = {"error": _fault(order["job"]["language"], error).to_wire()}
    _leave(out, answer)


def _fault(language: str, error: Exception) -> BuildError:
    if is_limit(error):
        return no_process(f"a process of the {language} toolchain", error)
    return BuildError(f"the {language} toolchain failed: {error!r}")


def _leave(out: Path, answer: dict[str, Any]) -> None:
    """Write the answer. It is read when this process has ended, and half of one is none."""
    (out / "result.json").write_text(json.dumps(answer))
