"""The small process that NVIDIA's tools watch: one kernel, one launch, on example inputs."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kserve.client import get_kernel
from kserve.client.loader import driver
from kserve.errors import KserveError, RequestError
from kserve.measure.workloads import Example, example

# Makes the arguments of one launch, in order, for a whole spec and a device as torch names it.
Maker = Callable[[dict[str, Any], str], tuple[Any, ...]]
_SEED = 0


def main() -> int:
    """Launch what the JSON object on the command line names; its exit status."""
    try:
        _launch(json.loads(sys.argv[1]))
    except KserveError as error:
        sys.stderr.write(f"kserve: {error}\n")
        return error.exit_status
    return 0


def _launch(wish: dict[str, Any]) -> None:
    # Whoever asks for the current context before there is one gets an error, which compute-sanitizer would report.
    driver().use(0)
    kernel = get_kernel(wish["name"], target=wish["target"], debug=wish["debug"], **wish["spec"])
    arguments = maker_of(wish["name"], wish["inputs"])(dict(kernel.manifest.spec), "cuda")
    driver().synchronize()  # on whatever stream the inputs were made
    kernel(*arguments, stream=0)
    driver().synchronize()


def place_of(name: str, inputs: str | None) -> str:
    """Where the example inputs of a kernel come from: `FILE.py:FUNCTION` with the file's whole path, or empty for `workloads`.

    Raises: RequestError where there are none.
    """
    if inputs is None:
        if example_of(name) is not None:
            return ""
        raise RequestError(
            f"there are no example inputs for {name}",
            facts={
                "allowed": "--inputs FILE.py:FUNCTION; FUNCTION(spec, device) returns the arguments of one launch, in order"
            },
        )
    file, _, function = inputs.rpartition(":")
    if not Path(file).is_file() or not function.isidentifier():
        raise RequestError(f"--inputs {inputs!r} cannot be read", facts={"allowed": "FILE.py:FUNCTION, a file that exists"})
    return f"{Path(file).resolve()}:{function}"


def maker_of(name: str, place: str) -> Maker:
    """What makes the inputs; running a caller's file is what was asked for. Raises: RequestError if it lacks the function."""
    if not place:
        known = example_of(name)
        assert known is not None, "`place_of` has looked"
        return lambda spec, device: known.arguments(spec, known.sizes, device, _SEED)
    file, _, function = place.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    found: Maker | None = runpy.run_path(file).get(function)
    if not callable(found):
        raise RequestError(f"{file} has no function {function}")
    return found


def example_of(name: str) -> Example | None:
    """The inputs that benchmarks use, for a kernel behind an op; None where it has none, or torch is absent."""
    try:
        return example(name)
    except ImportError:  # without torch there are none
        return None
