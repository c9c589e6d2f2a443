"""Measures what the number of artifacts costs: a hit, a start, memory, a collection, an index that is made again.

`python benchmarks/scale.py --entries 100 100000` fills a store for each size, past the compiler (a payload, a PTX, a log and a
manifest an artifact, in memory where there is such a place), puts one real kernel into it, and takes with a real daemon:

    start_ms         from the start of the process to its first answered request, after a clean end and after a kill
    resolve          POST /v1/resolve of that kernel over one kept connection, p50 and p99 in microseconds, all sizes in turn;
                     and once more while the index is compared with the files after the kill
    status_ms, ls_ms GET /v1/status and GET /v1/artifacts
    rss_mib          resident memory: after the start, after the hits, after a listing of everything
    index            in this process: seconds and CPU seconds of making the index again, of comparing it after a kill, of a
                     collection of a tenth
    first_miss_ms    the first resolve that has to build, which reads what was built before

Writes scale-<kind of host>.json to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

N_REQUESTS = 2000
N_ROUNDS = 20
TOML = """
schema = 1
language = "cuda"
sources = ["kernel.cu"]
[spec]
size = { type = "int", min = 1, max = 4096 }
[target]
cuda = "sm_80"
[[entry]]
name = "tiny"
summary = "out = x"
function = "tiny<{size}>"
arguments = [{ name = "x", type = "pointer", dtype = "float32" }]
launch = { grid = [1], block = [32] }
"""
SOURCE = "template <int SIZE> __global__ void tiny(float* x) { x[threadIdx.x] = SIZE; }"


def fill(root: Path, n: int) -> None:
    """Artifacts like real ones, of four files each, without a compiler and without a sync."""
    from kserve.artifact import Contract, Manifest
    from kserve.key import digest_of
    from kserve.store.files import FileStore

    store = FileStore(root, writable=True)

    def write(name: str, content: bytes) -> None:
        path = store.path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(content)

    for number in range(n):
        payload, ptx, log = (f"{kind} {number} ".encode() * 40 for kind in ("payload", "ptx", "log"))
        for content in (payload, ptx, log):
            write(f"payload/{digest_of(content)}", content)
        components = {f"argument.{i:03}": "x" * 100 for i in range(4)} | {f"fact.{i}": digest_of(b"%d" % i) for i in range(15)}
        manifest = Manifest(
            key=digest_of(b"key %d" % number),
            digest=digest_of(payload),
            size_bytes=len(payload),
            name=f"kernel_{number % 50}",
            language="cuda",
            target="cuda:sm_90",
            spec={"size": number},
            variant="declared",
            contract=Contract("symbol", "cubin", (), {}, ("1",), ("128",)),
            resources={"registers": 8},
            components=components | {"source.kernel.cu": digest_of(b"source")},
            attachments={"ptx": digest_of(ptx), "log": digest_of(log)},
            closed_world=False,
            seconds=0.1,
            created_at=1.0 + number,
        )
        write(f"manifest/{manifest.key}", manifest.to_bytes())


class Daemon:
    """`kserve up` over one store."""

    def __init__(self, root: Path) -> None:
        from kserve.config import load_settings

        self.root = root
        (root / "kernels" / "tiny").mkdir(parents=True, exist_ok=True)
        (root / "kernels" / "tiny" / "kernel.toml").write_text(TOML)
        (root / "kernels" / "tiny" / "kernel.cu").write_text(SOURCE)
        own = {
            "KSERVE_STORE": str(root / "store"),
            "KSERVE_RUNTIME_DIR": str(root / "run"),
            "KSERVE_PATH": str(root / "kernels"),
            "KSERVE_MAX_FILES": "100000000",
            "KSERVE_MAX_BYTES": str(1 << 50),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KSERVE_")}
        self.environment = {**clean, **own}
        self.settings = load_settings(environ=self.environment)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Milliseconds to the first answer."""
        from kserve.client.connection import Connection
        from kserve.errors import KserveError

        began = time.perf_counter()
        with (self.root / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kserve", "up"], cwd=REPOSITORY, env=self.environment, stdout=log, stderr=log
            )
        while True:
            with contextlib.closing(Connection(self.settings)) as connection, contextlib.suppress(KserveError):
                connection.call("GET", "/v1/health")
                return (time.perf_counter() - began) * 1e3
            time.sleep(0.002)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()

    def rss_mib(self) -> float:
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return round(int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024, 1)

    def call(self, method: str, path: str, body: object = None) -> Any:
        from kserve.client.connection import Connection

        with contextlib.closing(Connection(self.settings)) as connection:
            return connection.call(method, path, body, wait_s=60.0)

    def body(self, size: int) -> dict[str, Any]:
        """A resolve request; its sources are uploaded."""
        import kserve
        from kserve import catalog, protocol
        from kserve.config import environment_of_process

        found = catalog.find("tiny", self.settings)
        for content in found.files.values():
            self.call("POST", protocol.SOURCES, content)
        wish = protocol.kernel_request(
            "tiny", files=found.digests, spec={"size": size}, target="cuda:sm_90", environment=environment_of_process()
        )
        return protocol.resolve_request([wish], client="scale", version=kserve.__version__, wait_s=60.0)


def hits(daemon: Daemon, body: dict[str, Any], n: int = N_REQUESTS) -> list[float]:
    """Microseconds of resolves that find everything."""
    from kserve.client.connection import Connection

    times = []
    with contextlib.closing(Connection(daemon.settings)) as connection:
        for _ in range(n):
            began = time.perf_counter()
            (answer,) = connection.call("POST", "/v1/resolve", body)["results"]
            times.append((time.perf_counter() - began) * 1e6)
            assert {variant["origin"] for variant in answer["variants"]} <= {"disk", "built"}, answer
    return times


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"p50_us": round(cuts[49]), "p99_us": round(cuts[98]), "max_us": round(max(times))}


def hits_in_turn(daemons: list[Daemon]) -> list[dict[str, float]]:
    """The same moments for every size: a machine is never as quiet twice."""
    for daemon in daemons:
        daemon.start()
        wait_for_index(daemon)
    bodies = [daemon.body(1) for daemon in daemons]
    times: list[list[float]] = [[] for _ in daemons]
    for _ in range(N_ROUNDS):
        for mine, daemon, body in zip(times, daemons, bodies, strict=True):
            mine.extend(hits(daemon, body, N_REQUESTS // N_ROUNDS))
    for daemon in daemons:
        daemon.end()
    return [spread(mine) for mine in times]


def wait_for_index(daemon: Daemon) -> None:
    until = time.monotonic() + 600
    while daemon.call("GET", "/v1/status")["store"]["index"] != "sound":
        assert time.monotonic() < until, "the index is not done"
        time.sleep(0.05)


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return round((time.perf_counter() - began) * 1e3, 1)


def measure(daemon: Daemon, n: int) -> dict[str, Any]:
    fill(daemon.root / "store", n)
    found: dict[str, Any] = {"entries": n, "index": index_times(daemon.root / "store", n)}
    daemon.start()
    wait_for_index(daemon)
    found["first_miss_ms"] = timed(lambda: daemon.call("POST", "/v1/resolve", daemon.body(1)))
    found["second_miss_ms"] = timed(lambda: daemon.call("POST", "/v1/resolve", daemon.body(2)))
    daemon.end()
    found["start_ms"] = {"after a clean end": round(daemon.start(), 1)}
    found["rss_mib"] = {"after the start": daemon.rss_mib()}
    body = daemon.body(1)
    hits(daemon, body)
    found["rss_mib"]["after the hits"] = daemon.rss_mib()
    found["status_ms"] = timed(lambda: daemon.call("GET", "/v1/status"))
    found["ls_ms"] = timed(lambda: daemon.call("GET", "/v1/artifacts"))
    found["rss_mib"]["after a listing"] = daemon.rss_mib()
    daemon.end(signal.SIGKILL)
    found["start_ms"]["after a kill"] = round(daemon.start(), 1)
    found["resolve_while_the_index_is_compared"] = spread(hits(daemon, body))
    wait_for_index(daemon)
    daemon.end()
    return found


def index_times(store: Path, n: int) -> dict[str, dict[str, float]]:
    """What the upkeep does in its own thread, here alone. The collection is undone."""
    from kserve.store.collect import Bounds
    from kserve.store.files import FileStore
    from kserve.store.upkeep import Upkeep

    wide, found = Bounds(1 << 50, 1 << 40), {}

    def take(name: str, action: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        found[name] = {"seconds": round(time.perf_counter() - wall, 2), "cpu_s": round(time.process_time() - cpu, 2)}

    upkeep = Upkeep(FileStore(store, writable=True), wide, in_use=tuple)
    take("made again", upkeep.start)
    again = Upkeep(FileStore(store, writable=True), wide, in_use=tuple)  # the other one was not closed
    take("compared after a kill", again.start)
    usage = again.index.usage()
    assert usage is not None and usage.n_artifacts == n, usage
    again.bounds = Bounds(1 << 50, usage.n_files - 1)
    take("a tenth collected", again.collect)
    again.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    arguments = parser.parse_args()
    daemons, rows = [], []
    with contextlib.ExitStack() as stack:
        for n in arguments.entries:
            place = tempfile.mkdtemp(prefix="ks-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            daemons.append(Daemon(Path(place)))
            rows.append(measure(daemons[-1], n))
            print(json.dumps(rows[-1]), flush=True)
        for row, resolve in zip(rows, hits_in_turn(daemons), strict=True):
            row["resolve"] = resolve
            print(row["entries"], resolve, flush=True)
    host = f"cpu-{len(os.sched_getaffinity(0))}-cores"
    head = {"host": host, "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d")}
    if len(rows) > 1:
        more = (rows[-1]["entries"] - rows[0]["entries"]) / 10_000
        grown = {when: (rows[-1]["rss_mib"][when] - rows[0]["rss_mib"][when]) / more for when in rows[0]["rss_mib"]}
        head["rss_mib_per_10000_entries"] = {when: round(mib, 2) for when, mib in grown.items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"scale-{host}.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
