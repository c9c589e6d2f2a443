"""Build throughput: hundreds of builds by a daemon whose compilers are loaded, and what share of the machine they kept busy.

    python benchmarks/throughput.py --jobs 2 --kernels 100 --out DIR

Each kernel is two builds (with the declared argument facts, with none) of one built-in kernel at another size. Efficiency is
the sum of the compiles' own processor seconds over jobs x wall; the rest is staging, publishing, waiting. The machine must be
quiet. Then `--clients` processes ask for what is there now, for `--load-s` seconds, through the daemon: rate, median and 99th
percentile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kserve import protocol
from kserve.client.connection import Connection
from kserve.config import load_settings

KERNELS = {
    "cuda": ("fused_norm_residual", "hidden", lambda number: 4 * (number + 1)),
    "triton": ("realspace_fwd", "n_grid", lambda number: 5 + number),
}
ASK = """
import sys, time, json
from kserve.client.direct import Wanted
from kserve.client.local import local
from kserve.client.resolve import ask
name, axis, seconds, values = sys.argv[1], sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
took, until, number = [], time.perf_counter() + seconds, 0
while time.perf_counter() < until:
    began = time.perf_counter()
    ask([Wanted(name, "cuda:sm_90", {axis: values[number % len(values)]})], deadline=time.monotonic() + 60)
    took.append(time.perf_counter() - began)
    number += 1
print(json.dumps(took))
"""


def main() -> int:
    """Measure, print a table, write JSON."""
    arguments = parse()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="kb-", dir="/tmp") as folder:
        os.environ.update(
            KSERVE_STORE=f"{folder}/store",
            KSERVE_RUNTIME_DIR=f"{folder}/run",
            KSERVE_JOBS=str(arguments.jobs),
            KSERVE_IDLE_S="600",
        )
        subprocess.run([sys.executable, "-m", "kserve", "up", "--detach"], check=True, stdout=subprocess.DEVNULL)
        try:
            for language in arguments.language or KERNELS:
                rows[language] = throughput(language, arguments.kernels, arguments.jobs)
                rows[language] |= load(language, arguments.kernels, arguments.clients, seconds=arguments.load_s)
                print(language, json.dumps(rows[language]), flush=True)
        finally:
            subprocess.run([sys.executable, "-m", "kserve", "down"], check=False, stdout=subprocess.DEVNULL)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {
        "jobs": arguments.jobs,
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "languages": rows,
    }
    (arguments.out / f"throughput-{arguments.jobs}-jobs.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="builds at once; the usable cores")
    parser.add_argument("--kernels", type=int, default=100, help="of each language, two builds each")
    parser.add_argument("--language", action="append", choices=KERNELS)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--load-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def throughput(language: str, n_kernels: int, jobs: int) -> dict[str, Any]:
    """Build so many kernels in one request, after one that loads the compiler."""
    name, axis, value = KERNELS[language]
    resolve(name, [{axis: value(n_kernels)}])
    began = time.perf_counter()
    resolve(name, [{axis: value(number)} for number in range(n_kernels)])
    wall_s = time.perf_counter() - began
    builds = [build for build in every_build() if build["name"] == name and build["state"] == "done"][: 2 * n_kernels]
    cpu_s = sum(build["cpu_s"] for build in builds)
    return {
        "builds": len(builds),
        "wall_s": round(wall_s, 3),
        "builds_per_s": round(len(builds) / wall_s, 1),
        "cpu_s": round(cpu_s, 3),
        "efficiency": round(cpu_s / (jobs * wall_s), 3),
    }


def resolve(name: str, specs: list[dict[str, int]]) -> None:
    from kserve.client import direct

    direct.resolve([direct.Wanted(name, "cuda:sm_90", spec) for spec in specs], timeout_s=1200, load=False)


def every_build() -> list[dict[str, Any]]:
    with contextlib.closing(Connection(load_settings())) as connection:
        found: list[dict[str, Any]] = connection.call("GET", f"{protocol.BUILDS}?limit=2000")["builds"]
    return found


def load(language: str, n_kernels: int, n_clients: int, *, seconds: float) -> dict[str, Any]:
    """The hits of many clients at once, each through the daemon."""
    name, axis, value = KERNELS[language]
    values = json.dumps([value(number) for number in range(n_kernels)])
    command = [sys.executable, "-c", ASK, name, axis, str(seconds), values]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
        for _ in range(n_clients)
    ]
    for client in clients:
        assert client.stdout is not None
        client.stdout.readline()
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    took = sorted(one for client in clients for one in json.loads(client.communicate()[0].splitlines()[-1]))
    return {
        "clients": n_clients,
        "hits_per_s": round(len(took) / seconds),
        "p50_ms": round(1e3 * took[len(took) // 2], 2),
        "p99_ms": round(1e3 * took[len(took) * 99 // 100], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
