"""Directories, daemons and children of one run: what each arm finds when its process starts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kserve.client.connection import Connection
from kserve.config import load_settings
from kserve.errors import KserveError
from kserve.measure.timing import ArmFailed
from kserve.ownership import listens
from kserve.protocol import STATUS

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
# The records of a store; anything else in it is made again from them.
RECORDS = {"payload", "source", "manifest", "quarantine", "tmp", "toolchains.json", "lock", "KSERVE_STORE"}
# What a user's shell may hold that would change an arm.
_FOREIGN = (
    "KSERVE_",
    "TRITON_",
    "CUPY_",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_CUDA_ARCH_LIST",
    "CUDA_CACHE_",
    "XDG_",
    "PYTHONDONTWRITE",
)
HIDDEN_CACHES_OFF = {"CUDA_CACHE_DISABLE": "1"}


class Options(NamedTuple):
    """What the command line says about every child."""

    gpu: bool
    torch: bool
    target: str
    n_further: int
    timeout_s: float


class Places:
    """The directories of one run, below one root that goes with it.

    Attributes:
        filled: caches of vendors that are warm, by name.
        n_cold: how many daemons over empty stores one round takes.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self.root = root
        self.options = options
        self.filled: set[str] = set()
        self.n_cold = 1
        self._numbers = itertools.count()
        self._daemons: list[dict[str, str]] = []
        self._cold: list[dict[str, str]] = []
        self._base = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        # Another HOME must not hide packages that are installed in the user's own.
        self._base["PYTHONUSERBASE"] = site.getuserbase()

    def fresh(self) -> Path:
        """A new directory. Short-named: a socket path holds 107 bytes."""
        path = self.root / str(next(self._numbers))
        path.mkdir()
        return path

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """What a child starts with: a HOME of its own, no setting of the user's."""
        home.mkdir(exist_ok=True)
        return {**self._base, "HOME": str(home), **more}

    def kserve(self, place: Path, *, autostart: bool = False, **more: str) -> dict[str, str]:
        """The same, with store and runtime directory below `place`."""
        place.mkdir(exist_ok=True)
        paths = {"KSERVE_STORE": str(place / "store"), "KSERVE_RUNTIME_DIR": str(place / "run")}
        return self.environment(place / "home", **paths, KSERVE_AUTOSTART=str(int(autostart)), **more)

    @property
    def filled_store(self) -> dict[str, str]:
        """The filled store; no daemon holds it once it is filled."""
        return self.kserve(self.root)

    @property
    def served_store(self) -> dict[str, str]:
        """Its copy, under a daemon."""
        return self.kserve(self.root / "served")

    def up(self, environment: dict[str, str]) -> None:
        """Start a daemon that stays; the run ends it."""
        self._daemons.append(environment)
        self._command(environment | {"KSERVE_IDLE_S": "3600"}, "up", "--detach")

    def down(self, environment: dict[str, str]) -> None:
        """End the daemon of that environment, if there is one."""
        if listens(load_settings(environ=environment).socket):
            self._command(environment, "down")
        self._daemons = [other for other in self._daemons if other != environment]

    def close(self) -> None:
        """End every daemon that may be left, those that a client started beside the filled store too."""
        for environment in [*self._daemons, self.filled_store]:
            with contextlib.suppress(ArmFailed):  # the others are ended all the same
                self.down(environment)

    def _command(self, environment: dict[str, str], *words: str) -> None:
        done = subprocess.run(_kserve(*words), env=environment, cwd=REPOSITORY, check=False, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise ArmFailed(f"kserve {' '.join(words)}: exit status {done.returncode}: {lines[0]}")

    def cold_daemon(self) -> dict[str, str]:
        """A daemon over an empty store, its toolchains loaded; those of a round start together, while nothing is timed."""
        if not self._cold:
            with ThreadPoolExecutor(self.n_cold) as pool:
                self._cold = [*pool.map(lambda _: self._start_cold(), range(self.n_cold))]
        return self._cold.pop()

    def _start_cold(self) -> dict[str, str]:
        environment = self.kserve(self.fresh(), **HIDDEN_CACHES_OFF)
        self.up(environment)
        # Builds for another target load the compilers: what is timed later is a build, not an import.
        other = "cuda:sm_86" if self.options.target.startswith("cuda:sm_80") else "cuda:sm_80"
        for name in ("realspace_fwd", "fused_norm_residual"):
            self._command(environment, "build", name, "--target", other)
        return environment

    def copy_of_store(self, place: Path) -> None:
        """The records of the filled store alone: no daemon has answered from this copy yet."""
        shutil.copytree(self.root / "store", place / "store", ignore=_not_records(self.root / "store"))

    def forget_aliases(self, environment: dict[str, str]) -> None:
        """Remove what lets a client find records without the daemon, which writes it anew when it is asked."""
        for path in Path(environment["KSERVE_STORE"]).glob("alias*/**/*"):
            if path.is_file():
                path.unlink()


def _kserve(*words: str) -> list[str]:
    return [sys.executable, "-m", "kserve", *words]


def _not_records(store: Path) -> Any:
    def ignore(folder: str, names: list[str]) -> set[str]:
        top = Path(folder) == store
        # The copy is another store, with a lock of its own and nothing under way.
        return {name for name in names if top and (name not in RECORDS or name == "lock")}

    return ignore


def n_requests(environment: dict[str, str]) -> int | None:
    """How often the daemon of that environment was asked to resolve; None where none answers."""
    with contextlib.closing(Connection(load_settings(environ=environment))) as connection:
        try:
            return int(connection.call("GET", STATUS)["counters"].get("requests", 0))
        except KserveError:
            return None


def forget_logs(environment: dict[str, str]) -> None:
    """Remove what daemons before have logged: a log found later is that of a daemon started since."""
    for log in _logs(environment):
        log.unlink()


def _logs(environment: dict[str, str]) -> list[Path]:
    return [*Path(environment["KSERVE_RUNTIME_DIR"]).glob("kserve/*/daemon.log*")]


def road_taken(environment: dict[str, str], before: int | None) -> str:
    """How a child was served: from the files alone, by the daemon that was up, or by one it started."""
    if before is None:
        return "started a daemon" if _logs(environment) else "files"
    after = n_requests(environment)
    return "daemon" if after is None or after > before else "files"


def start_child(
    places: Places, environment: dict[str, str], *, arm: str, kernel: str, pass_fds: tuple[int, ...] = (), **told: object
) -> Child:
    """Start one fresh process; `told` are further words for it."""
    options, folder = places.options, places.fresh()
    words = {
        "arm": arm, "kernel": kernel, "place": places.root, "report": folder / "report.json", "target": options.target,
        "gpu": int(options.gpu), "torch": int(options.torch), **told,
    }  # fmt: skip
    command = [sys.executable, str(CHILD), *(f"{key}={value}" for key, value in words.items())]
    with (folder / "output").open("wb") as output:
        spawned = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            pass_fds=pass_fds, start_new_session=True,
        )  # fmt: skip
    return Child(process, folder, spawned)


class Child(NamedTuple):
    """One running process and where it writes."""

    process: subprocess.Popen[bytes]
    folder: Path
    spawned: float

    def report(self, timeout_s: float) -> dict[str, Any]:
        """Wait for it; what it reports. Raises: ArmFailed when it has no number."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ArmFailed(f"no result in {timeout_s:.0f} s") from None
        except BaseException:  # the run is being ended
            self.kill()
            raise
        ended = time.perf_counter()
        if status != 0:
            raise ArmFailed(f"exit status {status}: {self._complaint()}")
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        for outcome in ("unavailable", "wrong"):
            if outcome in found:
                raise Unavailable(found[outcome]) if outcome == "unavailable" else ArmFailed(found[outcome])
        marks, seconds = found["marks"], found["seconds"]
        seconds["process"] = ended - self.spawned
        if "first" in marks:  # without the inputs, which are the benchmark's own
            seconds["start_to_first"] = marks["context"] - self.spawned + marks["first"] - marks["begun"]
        return found

    def _complaint(self) -> str:
        """The last line of the output that speaks of an error; the end of it goes to stderr."""
        lines = (self.folder / "output").read_text(errors="replace").strip().splitlines() or ["no output"]
        print(*lines[-12:], sep="\n", file=sys.stderr, flush=True)
        return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Unavailable(ArmFailed):
    """This machine cannot run the arm: no failure, and no number."""


@contextlib.contextmanager
def thrown_away(places: Places) -> Iterator[Path]:
    """A fresh directory for one process."""
    path = places.fresh()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
