"""Runs the service for minutes under load while processes are killed, artifacts evicted and files damaged; then counts.

`python benchmarks/soak.py --minutes 10` uses two stores of 400 kernels (800 artifacts), each store small enough for about 100
artifacts, so that most requests evict and build. Every client asks for random kernels through the public client code, in
processes that live for 2 to 20 s, with a new session for one call in five, and checks every byte it is given.

    churn    16 clients. Every few seconds one of: the daemon is killed (SIGKILL), a worker, a client; artifacts are pruned; a
             file of the store is damaged: a bit flipped, cut short, removed, swapped with another one. The index's own files
             among them. The clients start the next daemon themselves.
    steady   4 clients and a daemon of their own that nobody kills, with the same prunes and the same damage to records. Its
             memory is measured every 2 s: medians around one fifth of the time (minute 2 of 10) and over the last tenth.

What fails the run:
    wrong bytes     a payload that is not its digest, two digests for one key, another kernel than the one asked for
    lost entries    an artifact that was answered and is not in the store at the end, although since that answer it was not
                    evicted or pruned (the daemon's log has each key), and since its last build not damaged by us: an answer
                    from an alias never looks at the manifest. Two seconds of doubt are left out.
    stuck waiters   a call that took longer than its build and 10 s, counted from the last kill of a daemon or a worker that
                    fell into it: after one the wait begins anew
    errors          in `steady` any; in `churn` any but those of a killed worker or of daemons killed again and again
    store           a second `verify` that still finds damage, or finds artifacts without payload that we did not damage
    memory          more than 1.05 times as much at the end as after a fifth (only judged from 5 minutes on)

Writes soak-<kind of host>.json and .csv to --out; exit status 1 when anything failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

N_KERNELS = 400
MAX_FILES = 400
STUCK_S = 10.0
DOUBT_S = 2.0
MOST_MEMORY = 1.05
# What a caller may be told when its worker, or one daemon after another, is killed under it.
EXPECTED = {"build-failed", "daemon-ending", "daemon-unreachable"}
TOML = """
schema = 1
language = "cuda"
sources = ["kernel.cu"]
[spec]
size = { type = "int", min = 1, max = 4096 }
[target]
cuda = "sm_80"
[[entry]]
name = "soak"
summary = "out = factor * x + size"
function = "soak<{size}>"
arguments = [
  { name = "x", type = "pointer", dtype = "float32", align = 16 },
  { name = "out", type = "pointer", dtype = "float32", mutated = true, align = 16 },
  { name = "n", type = "i32" },
  { name = "factor", type = "f32" },
]
launch = { grid = ["cdiv(n, 128)"], block = [128] }
"""
SOURCE = """
template <int SIZE>
__global__ void soak(const float* x, float* out, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = factor * x[i] + SIZE;
}
"""


# ---- a client: a process that asks until its input ends or its time is over -----------------------------------------


def client(log: Path, seed: int) -> None:
    """Ask for random kernels; a line of JSON for each answer."""
    from kserve import client as kserve_client
    from kserve.client.direct import Wanted, resolve
    from kserve.errors import KserveError

    chance = random.Random(seed)
    until = time.monotonic() + chance.uniform(2, 20)
    with log.open("a", buffering=1) as file:
        while time.monotonic() < until and not select.select([sys.stdin], [], [], chance.uniform(0, 0.05))[0]:
            if chance.random() < 0.2:
                kserve_client.forget()
            size = 1 + int(N_KERNELS * chance.random() ** 2)  # some are asked for more often than others
            began = time.monotonic()
            try:
                (kernel,) = resolve([Wanted("soak", "cuda:sm_90", {"size": size})], load=False)
                found = {"origin": kernel.origin, **answered(kernel, size)}
            except KserveError as error:
                found = {"error": error.code, "message": error.message}
            file.write(json.dumps({"at": time.time(), "seconds": time.monotonic() - began, **found}) + "\n")


def answered(kernel: Any, size: int) -> dict[str, Any]:
    """What was got: digest by key, the time of the build, and what is wrong with it."""
    from kserve.key import digest_of

    artifacts = kernel._roads.artifacts
    wrong = [
        artifact.manifest.key
        for artifact in artifacts
        if digest_of(artifact.payload) != artifact.manifest.digest
        or artifact.manifest.spec != {"size": size}
        or f"soakILi{size}E".encode() not in artifact.payload
    ]
    build = max(artifact.manifest.seconds for artifact in artifacts) if kernel.origin in ("built", "joined") else 0.0
    return {"digests": {a.manifest.key: a.manifest.digest for a in artifacts}, "build": build, "wrong": wrong}


# ---- one store, its clients, and what is done to it -------------------------------------------------------------------


class Side:
    """A store under load.

    Args:
        kills: whether processes are killed and the index's files damaged.
    """

    def __init__(self, root: Path, *, n_clients: int, kills: bool, chance: random.Random) -> None:
        from kserve.config import load_settings

        self.root = root
        self.kills = kills
        self.chance = chance
        self.events: collections.Counter[str] = collections.Counter()
        # key or `kind/hex` -> the last time we removed or damaged it
        self.touched: dict[str, float] = {}
        self.memory: list[tuple[float, int]] = []
        self._kills: list[float] = []
        (root / "kernels" / "soak").mkdir(parents=True)
        (root / "kernels" / "soak" / "kernel.toml").write_text(TOML)
        (root / "kernels" / "soak" / "kernel.cu").write_text(SOURCE)
        own = {
            "KSERVE_STORE": str(root / "store"),
            "KSERVE_RUNTIME_DIR": str(root / "run"),
            "KSERVE_PATH": str(root / "kernels"),
            "KSERVE_MAX_FILES": str(MAX_FILES),
            "KSERVE_AUTOSTART": "1",
            "KSERVE_LOG": "debug",
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KSERVE_")}
        self.environment = {**clean, **own}
        self.settings = load_settings(environ=self.environment)
        self._clients: list[subprocess.Popen[bytes] | None] = [None] * n_clients
        self._logs: dict[int, Any] = {}

    @property
    def store(self) -> Path:
        return self.root / "store"

    def tick(self) -> None:
        """Start clients where some have ended; keep hold of each daemon's log."""
        for number, child in enumerate(self._clients):
            if child is None or child.poll() is not None:
                self.events["clients"] += 1
                command = [sys.executable, __file__, "--client", str(self.root / f"client-{number}.jsonl")]
                self._clients[number] = subprocess.Popen(
                    [*command, "--seed", str(self.chance.randrange(1 << 30))],
                    env=self.environment,
                    stdin=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
        with contextlib.suppress(OSError):
            log = self.settings.socket.parent / "daemon.log"
            if log.stat().st_ino not in self._logs:
                self._logs[log.stat().st_ino] = log.open()

    def measure(self, at: float) -> None:
        pid = self.daemon()
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{pid}/status").read_text()
            self.memory.append((at, int(re.findall(r"VmRSS:\s+(\d+)", text)[0])))

    def daemon(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self.store / "lock").read_text())
        return None

    def disturb(self) -> None:
        """One event, drawn at random."""
        choices = {"prune": 3, "damage": 6}
        if self.kills:
            choices |= {"kill_daemon": 2, "kill_worker": 2, "kill_client": 2, "damage_index": 1}
        name = self.chance.choices([*choices], [*choices.values()])[0]
        if getattr(self, name)():
            self.events[name] += 1

    def kill_daemon(self) -> bool:
        self._kills.append(time.time())
        return kill(self.daemon())

    def kill_worker(self) -> bool:
        workers = [worker for worker in (self.ask("GET", "/v1/status") or {}).get("workers", ()) if worker["alive"]]
        self._kills.append(time.time())
        return bool(workers) and kill(self.chance.choice(workers)["pid"])

    def kill_client(self) -> bool:
        child = self.chance.choice(self._clients)
        return child is not None and kill(child.pid)

    def prune(self) -> bool:
        """Some keys of those that are there. Also in doubt when the daemon goes down meanwhile."""
        found = self.records("manifest")
        keys = [path.stem for path in self.chance.sample(found, min(5, len(found)))]
        done = self.ask("POST", "/v1/prune", {"keys": keys}) if keys else None
        self.touched.update(dict.fromkeys(keys, time.time()))
        return done is not None

    def ask(self, method: str, path: str, body: object = None) -> Any:
        from kserve.client.connection import Connection
        from kserve.errors import KserveError

        with contextlib.closing(Connection(self.settings)) as connection, contextlib.suppress(KserveError):
            return connection.call(method, path, body)
        return None

    def records(self, kind: str) -> list[Path]:
        return sorted((self.store / kind).glob("??/*"))

    def damage(self) -> bool:
        found = self.records(self.chance.choice(["payload", "payload", "manifest", "source"]))
        return len(found) > 1 and self._damage(*self.chance.sample(found, 2))

    def damage_index(self) -> bool:
        found = [path for path in (self.store / "index").glob("cache.db*") if not path.name.endswith("-shm")]
        return bool(found) and self._damage(self.chance.choice(found), self.chance.choice(found), ways=3)

    def _damage(self, path: Path, other: Path, *, ways: int = 4) -> bool:
        way = self.chance.randrange(ways)
        self.touched[path.stem] = time.time()  # before too: what fails halfway has done half
        with contextlib.suppress(OSError):
            match way:
                case 0:
                    content = bytearray(path.read_bytes())
                    content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
                    overwrite(path, content)
                case 1:
                    os.truncate(path, self.chance.randrange(path.stat().st_size))
                case 2:
                    path.unlink()
                case 3:
                    one, two = path.read_bytes(), other.read_bytes()
                    self.touched[other.stem] = time.time()
                    overwrite(path, two)
                    overwrite(other, one)
                    self.touched[other.stem] = time.time()
            self.touched[path.stem] = time.time()
            return True
        return False

    def end(self) -> list[str]:
        """Let every client end its call; what did not end in time is stuck."""
        for child in self._clients:
            if child is not None and child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        stuck = []
        until = time.monotonic() + 2 * STUCK_S
        for number, child in enumerate(self._clients):
            try:
                if child is not None:
                    child.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                stuck.append(f"client {number} did not end")
                child.kill()
                child.wait()
        return stuck

    # ---- what it all came to

    def answers(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.root.glob("client-*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a client that was killed
                    yield json.loads(line)

    def removals(self) -> dict[str, float]:
        """key -> the last time it was evicted, pruned or dropped, as the daemons' logs have it; to the second, rounded up."""
        found: dict[str, float] = {}
        for file in self._logs.values():
            file.seek(0)
            for line in file:
                if match := re.match(r"(\S+) DEBUG evict key=([0-9a-f]{64})", line):
                    at = datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S%z").timestamp() + 1
                    found[match[2]] = max(at, found.get(match[2], 0.0))
        return found

    def tracebacks(self) -> int:
        found = 0
        for file in self._logs.values():
            file.seek(0)
            found += file.read().count("Traceback")
        return found

    def report(self) -> dict[str, Any]:
        answers = list(self.answers())
        good = [answer for answer in answers if "error" not in answer]
        errors = collections.Counter(answer["error"] for answer in answers if "error" in answer)
        digests: dict[str, set[str]] = collections.defaultdict(set)
        acknowledged: dict[str, float] = {}
        built: dict[str, float] = {}
        for answer in good:
            for key, digest in answer["digests"].items():
                digests[key].add(digest)
                acknowledged[key] = max(answer["at"], acknowledged.get(key, 0.0))
                if answer["origin"] in ("built", "joined"):
                    built[key] = max(answer["at"], built.get(key, 0.0))
        slow = [answer for answer in answers if self.waited(answer) > answer.get("build", 0.0) + STUCK_S]
        first, second = (self.ask("POST", "/v1/verify") for _ in range(2))
        checked, lost = self.lost(acknowledged, built, digests)
        tolerated = EXPECTED if self.kills else set()
        return {
            "n_calls": len(answers),
            "origins": dict(collections.Counter(answer["origin"] for answer in good)),
            "call_ms": {
                origin: percentiles([answer["seconds"] * 1e3 for answer in good if answer["origin"] == origin])
                for origin in sorted({answer["origin"] for answer in good})
            },
            "slowest_call_s": round(max((answer["seconds"] for answer in answers), default=0.0), 3),
            "events": dict(self.events),
            "errors": dict(errors),
            "messages": sorted(
                {answer["message"][:160] for answer in answers if answer.get("error", "") not in {"", *tolerated}}
            ),
            "n_keys": len(digests),
            "n_acknowledged_checked": checked,
            "lost": lost,
            "damage_found_at_the_end": len(first["damaged"]) if first else None,
            "n_tracebacks": self.tracebacks(),
            "failures": {
                "wrong bytes": sum(bool(answer["wrong"]) for answer in good)
                + sum(len(found) > 1 for found in digests.values()),
                "lost entries": len(lost),
                "stuck waiters": len(slow),
                "errors": sum(count for code, count in errors.items() if code not in tolerated),
                "store": 1 if not first or not second else len(second["damaged"]) + len(self.unexplained(second["orphaned"])),
            },
        }

    def waited(self, answer: dict[str, Any]) -> float:
        """Seconds that a call took, from the last kill in it on."""
        began = answer["at"] - answer["seconds"]
        return answer["at"] - max([began, *(at for at in self._kills if began <= at <= answer["at"])])

    def lost(
        self, acknowledged: dict[str, float], built: dict[str, float], digests: dict[str, set[str]]
    ) -> tuple[int, list[str]]:
        """How many artifacts must be there, and what is missing of the others."""
        from kserve.errors import StoreError
        from kserve.store.files import FileStore

        store, removed = FileStore(self.store, writable=False), self.removals()
        checked, lost = 0, []
        for key, at in acknowledged.items():
            hands = max(self.touched.get(name, 0.0) for name in (key, *digests[key]))
            if at < removed.get(key, 0.0) + DOUBT_S or built.get(key, 0.0) < hands + DOUBT_S:
                continue
            checked += 1
            for name in (f"manifest/{key}", *(f"payload/{digest}" for digest in digests[key])):
                with contextlib.suppress(StoreError):
                    if store.get(name):
                        continue
                lost.append(f"{name} of {key}, answered at {at:.2f}")
        return checked, lost

    def unexplained(self, orphaned: list[str]) -> list[str]:
        """Those whose payload and attachments we never damaged."""
        found = []
        for key in orphaned:
            with contextlib.suppress(OSError, ValueError):
                plain = json.loads((self.store / "manifest" / key[:2] / f"{key}.json").read_bytes())
                if not {key, plain["digest"], *plain["attachments"].values()} & set(self.touched):
                    found.append(key)
        return found


def overwrite(path: Path, content: bytes | bytearray) -> None:
    path.chmod(0o600)
    path.write_bytes(content)


def kill(pid: int | None) -> bool:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"n": len(values), "p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(max(values), 2)}


# ---- the run -------------------------------------------------------------------------------------------------------


def run(place: Path, *, minutes: float, n_clients: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    churn = Side(place / "churn", n_clients=n_clients, kills=True, chance=random.Random(chance.random()))
    steady = Side(place / "steady", n_clients=max(1, n_clients // 4), kills=False, chance=random.Random(chance.random()))
    sides = {"churn": churn, "steady": steady}
    began, length = time.monotonic(), minutes * 60
    due = {"churn": 2.0, "steady": 2.0, "memory": 0.0}
    while (at := time.monotonic() - began) < length:
        for name, side in sides.items():
            side.tick()
            if at > due[name]:
                side.disturb()
                due[name] = at + chance.uniform(0.2, 3.0)
        if at > due["memory"]:
            steady.measure(at)
            due["memory"] = at + 2.0
        time.sleep(0.1)
    stuck = {name: side.end() for name, side in sides.items()}
    time.sleep(2.5)  # every count is written down, every loss accounted for
    found = {name: side.report() for name, side in sides.items()}
    for name in sides:
        found[name]["failures"]["stuck waiters"] += len(stuck[name])
    found["memory"] = memory(steady.memory, length)
    for side in sides.values():
        side.ask("POST", "/v1/shutdown")
    return found


def memory(samples: list[tuple[float, int]], length: float) -> dict[str, Any]:
    """The steady daemon's resident memory after a fifth of the time and at the end."""
    early = [kib for at, kib in samples if 0.175 * length <= at <= 0.225 * length]
    late = [kib for at, kib in samples if at >= 0.9 * length]
    if not early or not late:
        return {"ratio": None, "failures": {}}
    ratio = statistics.median(late) / statistics.median(early)
    is_judged = length >= 300
    return {
        "after_a_fifth_mib": round(statistics.median(early) / 1024, 1),
        "at_the_end_mib": round(statistics.median(late) / 1024, 1),
        "ratio": round(ratio, 4),
        "each_tenth_mib": tenths(samples, length),
        "failures": {"memory": int(is_judged and ratio > MOST_MEMORY)},
    }


def tenths(samples: list[tuple[float, int]], length: float) -> list[float]:
    groups = [[kib for at, kib in samples if i * length / 10 <= at < (i + 1) * length / 10] for i in range(10)]
    return [round(statistics.median(group) / 1024, 1) for group in groups if group]


def write(found: dict[str, Any], folder: Path) -> int:
    """The results; how many failures there were."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = {f"{part}: {name}": n for part in ("churn", "steady", "memory") for name, n in found[part]["failures"].items()}
    stem = folder / f"soak-{found['host']}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    row = {
        "host": found["host"],
        "minutes": found["minutes"],
        "clients": found["clients"],
        "date": found["date"],
        **{f"{part}_calls": found[part]["n_calls"] for part in ("churn", "steady")},
        **{f"{part}_builds": found[part]["origins"].get("built", 0) for part in ("churn", "steady")},
        "kills": sum(n for name, n in found["churn"]["events"].items() if name.startswith("kill")),
        "damages": sum(found[part]["events"].get("damage", 0) for part in ("churn", "steady")),
        "memory_ratio": found["memory"]["ratio"],
        "failures": sum(failures.values()),
    }
    with stem.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, row)
        table.writeheader()
        table.writerow(row)
    print(json.dumps({**row, "failed": {name: n for name, n in failures.items() if n}}, indent=1))
    return sum(failures.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--keep", action="store_true", help="leave stores and logs where they are")
    parser.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client, arguments.seed)
        return
    # A short name: the path of a socket holds 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="ks-"))
    try:
        found = run(place, minutes=arguments.minutes, n_clients=arguments.clients, seed=arguments.seed)
    finally:
        if arguments.keep:
            print(place, file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)
    head = {
        "host": f"cpu-{len(os.sched_getaffinity(0))}-cores",
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "seed": arguments.seed,
    }
    sys.exit(1 if write({**head, **found}, arguments.out) else 0)


if __name__ == "__main__":
    main()
