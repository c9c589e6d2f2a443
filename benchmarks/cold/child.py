"""One fresh process of the cold-start benchmark: `python child.py key=value …`, its report in a file.

Before the clock starts nothing is imported that an arm would then find loaded, but what the arm is said to have: torch and a
context, or ctypes and a context.
"""

from __future__ import annotations

import os
import sys
import time

UP = time.perf_counter()

import devices  # noqa: E402 - the clock above comes first
import providers  # noqa: E402
import workloads  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

now = time.perf_counter
MEMO_CALLS = 10_000
# Arms that launch what kserve built need its symbols and sizes, and know one source.
OF_ONE_SOURCE = ("cupy", "cuda-core", "extension", "hugging-face")


class Job:
    """What this process was told, and what it reports."""

    def __init__(self, words: list[str]) -> None:
        told = dict(word.split("=", 1) for word in words)
        self.arm, self.kernel, self.place, self.report = (told[key] for key in ("arm", "kernel", "place", "report"))
        self.target = told["target"]  # of a run without a GPU
        self.gpu, self.torch = told["gpu"] == "1", told["torch"] == "1"
        self.n_further, self.only_first = int(told.get("further", "0")), "further" not in told
        self.cache = told.get("cache", "")
        self.barrier = [int(descriptor) for descriptor in told.get("barrier", "").split(",") if descriptor]
        self.repository = os.path.abspath(f"{__file__}/../../..")  # noqa: PTH100 - pathlib may not be loaded yet
        self.named_target = {} if self.gpu else {"target": self.target}
        self.marks: dict[str, float] = {"up": UP}
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.obtain: Any = None
        self._binaries: dict[str, Any] = {}
        self.norm_source = ""

    def mark(self, name: str) -> float:
        self.marks[name] = now()
        return self.marks[name]

    def read_binaries(self) -> None:
        """What kserve built for each wish, and the one source with its headers in it (cuda.core keys no include directory)."""
        import json

        self._binaries = json.loads(_text(f"{self.place}/binaries.json"))
        folder = f"{self.repository}/cuda_src"
        self.norm_source = inlined(_text(f"{folder}/norm_residual/norm_residual.cu"), f"{folder}/include", set())

    def fact(self, wish: Any) -> Any:
        return self._binaries[workloads.variant(wish.name, wish.spec)]

    @property
    def arch(self) -> str:
        return str(self.fact(workloads.Norm())["arch"])


def inlined(source: str, folder: str, seen: set[str]) -> str:
    """The source with each header of `folder` that it includes in its place, once."""
    lines = []
    for line in source.splitlines():
        if line.startswith("#include <kserve/"):
            name = line.partition("<")[2].partition(">")[0]
            if name not in seen:
                seen.add(name)
                lines.append(inlined(_text(f"{folder}/{name}"), folder, seen).replace("#pragma once", ""))
        else:
            lines.append(line)
    return "\n".join(lines)


def _text(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - pathlib may not be loaded yet
        return file.read()


def run(job: Job) -> None:
    """Everything an arm is asked for, timed; then every result checked."""
    device = devices.device_for(job)
    wishes = workloads.Wishes(job.kernel, n_further=job.n_further, one_source=job.arm in OF_ONE_SOURCE)
    if job.arm not in ("kserve", "triton"):
        job.read_binaries()
    asked = [wishes.first] if job.only_first else wishes.all()
    device.place(asked)
    _wait_for_the_others(job)
    kernels = [_first(job, device, wishes)]
    if not job.only_first:
        kernels += _further(job, device, wishes)
    if job.arm == "kserve" and not job.only_first:
        kernels += _batch(job, device, wishes)
        _memo(job, wishes.first)
    launched = asked[: len(kernels)]
    job.facts["error"] = device.check(launched)
    if job.arm == "kserve":
        _check_digests(job, kernels, launched)
    job.facts.update(device.facts(), versions=_versions())


def _wait_for_the_others(job: Job) -> None:
    """Say that this process is ready, and hold until the parent lets all of them go."""
    if job.barrier:
        ready, go = job.barrier
        os.write(ready, b".")
        os.read(go, 1)


def _first(job: Job, device: Any, wishes: Any) -> Any:
    began = job.mark("begun")
    job.obtain = providers.PROVIDERS[job.arm](job)
    imported = job.mark("imported")
    kernel = job.obtain(wishes.first)
    got = job.mark("got")
    device.launch(kernel, wishes.first)
    done = job.mark("first")
    context = job.marks["context"] - job.marks["up"]
    job.seconds.update(first=done - began, get=got - imported, first_launch=done - got, torch_and_context=context)
    job.seconds.update({"import": imported - began, "first_with_torch": context + done - began})
    return kernel


def _further(job: Job, device: Any, wishes: Any) -> list[Any]:
    """The second kernel, then one after the other of its further variants."""
    kernels, times = [], []
    for wish in (wishes.second, *wishes.singles):
        began = now()
        kernels.append(job.obtain(wish))
        device.launch(kernels[-1], wish)
        times.append(now() - began)
    job.seconds["second"] = times.pop(0)
    if times:
        job.seconds.update(further=sorted(times)[len(times) // 2], further_total=sum(times))
    return kernels


def _batch(job: Job, device: Any, wishes: Any) -> list[Any]:
    """As many again in one get_kernels."""
    if not wishes.batch:
        return []
    from kserve import get_kernels

    wanted = [(wish.name, wish.spec) for wish in wishes.batch]
    began = now()
    kernels = get_kernels(wanted, **job.named_target)
    job.seconds["batch"] = now() - began
    device.launch_all(kernels, wishes.batch)
    job.seconds["batch_launched"] = now() - began
    return kernels


def _memo(job: Job, wish: Any) -> None:
    for n in (MEMO_CALLS // 10, MEMO_CALLS):
        began = now()
        for _ in range(n):
            kernel = job.obtain(wish)
        job.seconds["memo"] = (now() - began) / n
    if kernel.origin != "memo":
        raise devices.WrongResult(f"the same kernel again came from {kernel.origin}, not from the memo")


def _check_digests(job: Job, kernels: list[Any], wishes: list[Any]) -> None:
    """The bytes are those the store was filled with, wherever they came from now."""
    job.read_binaries()
    for kernel, wish in zip(kernels, wishes, strict=True):
        if kernel.digest != job.fact(wish)["digest"]:
            raise devices.WrongResult(f"{workloads.variant(wish.name, wish.spec)} has other bytes than in the store")
    origins = [kernel.origin for kernel in kernels]
    job.facts.update(digest=kernels[0].digest, origin=origins[0], origins={one: origins.count(one) for one in set(origins)})


def prime(job: Job) -> None:
    """Build whatever any arm will ask for, in one batch, and write down what the binaries are."""
    import json

    from kserve import get_kernels

    device = devices.device_for(job)
    wishes = workloads.every_wish(job.kernel.split(","), n_further=job.n_further)
    began = now()
    kernels = get_kernels([(wish.name, wish.spec) for wish in wishes], **job.named_target)
    job.seconds["batch"] = now() - began
    found = {
        workloads.variant(wish.name, wish.spec): _binary(kernel, wish) for kernel, wish in zip(kernels, wishes, strict=True)
    }
    with open(f"{job.place}/binaries.json", "w") as file:  # noqa: PTH123
        json.dump(found, file)
    job.facts.update(device.facts(), versions=_versions(), target=str(kernels[0].target))


def _binary(kernel: Any, wish: Any) -> dict[str, Any]:
    """What an arm needs to launch these bytes itself."""
    from kserve.expression import parsed

    contract = kernel.manifest.contract
    values = {**contract.constants, **wish.sizes}
    grid, block, shared = (
        [int(parsed(text).evaluate(values)) for text in texts]
        for texts in (contract.grid, contract.block, [contract.shared_bytes])
    )
    return {
        "payload": f"{os.environ['KSERVE_STORE']}/payload/{kernel.digest[:2]}/{kernel.digest}",
        "digest": kernel.digest,
        "symbol": contract.symbol,
        "arch": kernel.target.arch,
        "constants": contract.constants,
        "kinds": [param.kind for param in contract.params],
        "grid": [*grid, 1, 1][:3],
        "block": [*block, 1, 1][:3],
        "shared_bytes": shared[0],
    }


def _versions() -> dict[str, str]:
    """Of this interpreter and of what the arm has loaded."""
    names = ("kserve", "torch", "triton", "cupy", "cuda.core", "kernels")
    found = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in names}
    return {"python": sys.version.split()[0], **{name: version for name, version in found.items() if version}}


def _arm(job: Job) -> Any:
    if job.arm in ("launch", "agree"):
        import launches

        return launches.launch if job.arm == "launch" else launches.agree
    if job.arm in ("op-calls", "first-results"):
        import op_calls

        return op_calls.calls if job.arm == "op-calls" else op_calls.first_results
    return prime if job.arm == "prime" else run


def main(words: list[str]) -> None:
    """Run the arm and write its report; an unforeseen error is the exit status and the text on stderr."""
    job = Job(words)
    sys.path.insert(0, job.repository)
    outcome: dict[str, str] = {}
    try:
        _arm(job)(job)
    except providers.Unavailable as reason:
        outcome["unavailable"] = str(reason)
    except devices.WrongResult as reason:
        outcome["wrong"] = str(reason)
    except ImportError as reason:
        if job.arm == "kserve":
            raise
        outcome["unavailable"] = str(reason)
    import json

    with open(job.report, "w") as file:  # noqa: PTH123
        json.dump({"marks": job.marks, "seconds": job.seconds, "facts": job.facts, **outcome}, file)


if __name__ == "__main__":
    main(sys.argv[1:])
