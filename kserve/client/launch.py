"""Kernel: a loaded kernel that can be called.

A call has two roads. The quick one is a function generated for the kernel's own parameters: torch tensors and plain numbers
that pass every guard, on the device that is current. Everything else takes the slow one, which reads any array library, names
what is wrong, and ends in the same driver call (docs/decisions/0002-generated-launch.md says why there are two).
"""

from __future__ import annotations

import operator
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kserve.artifact import Artifact, Contract, LaterArtifact, Manifest, Param
from kserve.client import arguments
from kserve.client.block import MOST_BLOCKS, MOST_SHARED, MOST_THREADS, Slot, layout
from kserve.client.loader import Library, driver
from kserve.errors import InvalidDefinition, LaunchError, LoadError
from kserve.expression import parsed
from kserve.target import Target, parse_target

Grid = tuple[int, ...]
GridLike = Grid | list[int] | int | Callable[[Mapping[str, Any]], Grid | int]


class Kernel:
    """A kernel, compiled and loaded.

    `k(*args)` launches with the grid of its definition, `k[grid](*args)` with the caller's; both take `stream=`, a driver
    handle or a torch or CuPy stream, where the arguments' own library should not decide.

    Attributes:
        key, digest, target, resources: of the variant for the declared argument facts. Resources are `artifact.Manifest`'s
            and, where the launch alone decides nothing of it, `blocks_per_sm` and `occupancy_percent` (occupancy.py).
        origin:  memo, disk, remote, built or joined.
        generic: the manifest of the variant without facts; None where the kernel declares no facts.
        knobs:   the values of its knobs.
        seconds: what this call of get_kernel took, load included; 0.0 for a memo hit.
    Raises (on a call):
        LaunchError: a wrong argument, before anything is launched.
        LoadError: no device, or the binary does not fit it.
    """

    # A call goes straight to the function in this slot: a method in between would cost as much as the guards of a tensor.
    __slots__ = ("__call__", "__weakref__", "_roads", "origin", "seconds")
    __call__: Callable[..., None]

    def __init__(self, roads: Roads, *, origin: str, seconds: float) -> None:
        self._roads = roads
        self.origin = origin
        self.seconds = seconds
        self.__call__ = self._launch

    @property
    def manifest(self) -> Manifest:
        return self._roads.artifacts[0].manifest

    @property
    def generic(self) -> Manifest | None:
        return self._roads.artifacts[1].manifest if len(self._roads.artifacts) > 1 else None

    @property
    def artifact(self) -> Artifact:
        """The variant for the declared argument facts, with its verified bytes."""
        first = self._roads.artifacts[0]
        return Artifact(first.manifest, first.payload)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def target(self) -> Target:
        return parse_target(self.manifest.target)

    @property
    def resources(self) -> dict[str, int]:
        from kserve.occupancy import Occupancy, occupancy_of

        found = occupancy_of(self.manifest)
        if not isinstance(found, Occupancy) or found.depends_on:
            return dict(self.manifest.resources)
        return {**self.manifest.resources, "blocks_per_sm": found.blocks_per_sm, "occupancy_percent": found.percent}

    @property
    def knobs(self) -> dict[str, int]:
        contract = self.manifest.contract
        return {name: contract.constants[name] for name in contract.knobs}

    def __repr__(self) -> str:
        return f"<Kernel {self.name} {self.manifest.target} {self.key[:12]} {self.origin}>"

    def _launch(self, *args: Any, stream: Any = None, grid: GridLike | None = None) -> None:
        """Take the road of the moment; call it directly once it is the kernel's own."""
        self._roads.launch(*args, stream=stream, grid=grid)
        if self._roads.settled:
            self.__call__ = self._roads.launch

    def __getitem__(self, grid: GridLike) -> Callable[..., None]:
        def launch(*args: Any, stream: Any = None) -> None:
            self._roads.launch(*args, stream=stream, grid=grid)

        return launch

    def as_memo(self) -> Kernel:
        """The same kernel, as a later get_kernel of this process returns it."""
        return Kernel(self._roads, origin="memo", seconds=0.0)

    def as_cupy(self) -> Any:
        """A `cupy.RawKernel` over the same bytes, for code that launches CuPy's way: (grid, block, args).

        It is the variant without argument facts, since CuPy guards none. CuPy must be installed.
        """
        import tempfile

        import cupy

        artifact = self._roads.artifacts[-1]
        if any(param.kind == "scratch" for param in artifact.manifest.contract.params):
            raise LoadError(
                f"{self.name} cannot be a cupy.RawKernel: its compiler added parameters that CuPy would not pass",
                hint="call the kernel itself: it takes CuPy arrays",
            )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(artifact.payload)
            file.flush()
            module = cupy.RawModule(path=file.name)
            return module.get_function(artifact.manifest.contract.symbol)


class Roads:
    """The binaries of one kernel, and the two ways to launch them.

    Args:
        artifacts: the variant for the declared facts, then the one for none, where there are two. That one may be read later.
        device:    where they are launched: the first is loaded now, the other by the first launch that needs it. None: a launch
                   is an error.
        launcher:  the setting: auto, python or compiled.
    Attributes:
        launch:  the road to take, called with the arguments, `stream` and `grid`.
        settled: it is the last one.
    """

    def __init__(self, artifacts: Sequence[Artifact | LaterArtifact], *, device: int | None, launcher: str = "auto") -> None:
        self.artifacts = artifacts
        self._launcher = launcher
        # Variants with equal bytes, where the compiler made nothing of the facts, are one library.
        by_digest = {artifact.digest: artifact for artifact in reversed(artifacts)} if device is not None else {}
        # Most programs never pass an argument that the facts do not hold for: half the work waits for the first one.
        loaded = {
            digest: Library(artifact, device=device or 0, ahead=digest == artifacts[0].digest)
            for digest, artifact in by_digest.items()
        }
        self.libraries = [loaded[artifact.digest] for artifact in artifacts] if loaded else []
        self.launch: Callable[..., None] = self._first_call
        self.settled = False
        self._contract = artifacts[0].manifest.contract
        self._name = artifacts[0].manifest.name
        self._params = [param for param in self._contract.params if param.kind != "scratch"]
        self._prepared: _Prepared | None = None

    def _first_call(self, *args: Any, stream: Any = None, grid: GridLike | None = None) -> None:
        """Take the slow road once: a kernel that is launched once does not pay a millisecond for generated code."""
        if not self.libraries:
            found = driver()
            device = found.current_device()
            target = self.artifacts[0].manifest.target
            raise LoadError(f"{self._name} was built for {target}, CUDA device {device} is {found.target_of(device)}")
        self.slow(args, stream, grid)
        self.launch = self._later_call

    def _later_call(self, *args: Any, stream: Any = None, grid: GridLike | None = None) -> None:
        """Generate the quick road where torch is there to take it."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            from kserve.client.compiled import best_road

            given = (self._contract, self.libraries, torch)
            self.launch = best_road(*given, launcher=self._launcher, slow=self.slow, failed=self.failed)
            self.settled = True
            self.launch(*args, stream=stream, grid=grid)
        else:
            self.slow(args, stream, grid)

    def slow(self, args: tuple[Any, ...], stream: Any, grid: GridLike | None) -> None:
        """Read every argument, then launch. Raises: LaunchError, LoadError."""
        name, params = self._name, self._params
        if len(args) != len(params):
            listed = ", ".join(param.name for param in params)
            raise LaunchError(f"{name} takes {len(params)} arguments ({listed}), {len(args)} were given")
        passed = [arguments.read(name, param, argument) for param, argument in zip(params, args, strict=True)]
        device = _common_device(name, params, passed)
        handle = _stream(name, passed, stream)
        values = {param.name: item.value for param, item in zip(params, passed, strict=True)}
        library = self.libraries[0 if facts_hold(params, values) else -1]
        if grid is not None and self._contract.tuned and not callable(grid):
            names = ", ".join(self._contract.tuned)
            raise LaunchError(
                f"{name}: grid {grid!r} does not follow {names}, which a tuning may change",
                facts={"allowed": f"its own grid ({', '.join(self._contract.grid)}), or a function of the values"},
                hint=f"{name}[lambda meta: (… meta[{self._contract.tuned[0]!r}] …,)](…), or leave the grid out",
            )
        prepared = self._prepared = self._prepared or _Prepared(self._contract)
        sizes = prepared.sizes(name, self._contract.constants | values, grid)
        if 0 in sizes[:3]:
            return
        slot = Slot(self._contract)
        try:
            prepared.layout.pack_into(slot.buffer, 0, *sizes, handle, *(item.value for item in passed))
        except (struct.error, OverflowError) as error:
            raise LaunchError(f"{name}: an argument does not fit its type: {error}") from None
        found = driver()
        with found.on_device(device):
            function = library.functions.get(device) or library.load_on(device)
            status = found.launch(slot.config, function, slot.params, None)
        if status:
            self.failed(status, sizes)

    def failed(self, status: int, sizes: tuple[int, ...]) -> None:
        """Raises LaunchError for the driver's refusal: status, and the seven sizes of the launch."""
        try:
            driver().check(status, f"launch {self._name}")
        except LoadError as error:
            facts = {"grid": str(sizes[:3]), "block": str(sizes[3:6]), "shared": f"{sizes[6]} bytes"}
            raise LaunchError(error.message, facts=facts, hint=error.hint) from None


class _Prepared:
    """What the slow road needs of a contract, read once."""

    def __init__(self, contract: Contract) -> None:
        self.layout = layout(contract)
        self._grid = [parsed(text) for text in contract.grid]
        self._block = [parsed(text) for text in contract.block]
        self._shared = parsed(contract.shared_bytes)

    def sizes(self, name: str, values: Mapping[str, Any], grid: GridLike | None) -> tuple[int, ...]:
        """Grid, block and dynamic shared memory: seven numbers within the driver's limits. Raises: LaunchError."""
        try:
            default = tuple(expression.evaluate(values) for expression in self._grid) if grid is None else grid
            block = _three(expression.evaluate(values) for expression in self._block)
            shared = self._shared.evaluate(values)
        except InvalidDefinition as error:
            raise LaunchError(f"{name}: {error.message}") from None
        if min(block) < 1 or max(block) > MOST_THREADS or not 0 <= shared <= MOST_SHARED:
            raise LaunchError(f"{name}: block {block} with {shared} bytes of shared memory cannot be launched")
        return (*checked_grid(name, default, values), *block, shared)


def _three(values: Any) -> tuple[int, int, int]:
    x, y, z = (*values, 1, 1)[:3]
    return int(x), int(y), int(z)


def _common_device(kernel: str, params: list[Param], passed: list[arguments.Passed]) -> int:
    places = {p.name: found.device for p, found in zip(params, passed, strict=True) if found.device is not None}
    if len(set(places.values())) > 1:
        raise LaunchError(f"{kernel}: arguments lie on different devices", facts={k: f"device {v}" for k, v in places.items()})
    return next(iter(places.values()), driver().current_device())


def _stream(kernel: str, passed: list[arguments.Passed], stream: Any) -> int:
    """The stream's driver handle: the caller's, else the one current stream of the arguments' own libraries."""
    if stream is not None:
        for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
            stream = getattr(stream, attribute, stream)
        if not isinstance(stream, int):
            raise LaunchError(f"{kernel}: stream is {stream!r}", facts={"allowed": "a driver handle, a torch or a CuPy stream"})
        return stream
    found = {item.stream for item in passed if item.stream is not None}
    if len(found) == 1:
        return found.pop()
    if any(item.device is not None for item in passed):
        why = f"the arguments' libraries have different current streams ({sorted(found)})" if found else "no argument names one"
        raise LaunchError(f"{kernel}: which stream? {why}", hint="pass stream=")
    return 0


def facts_hold(params: Iterable[Param], values: Mapping[str, Any]) -> bool:
    """Whether these arguments are what a variant was compiled for: addresses and numbers by the parameters' names."""
    return all(
        not (param.align and values[param.name] % param.align)
        and not (param.divisible_by and values[param.name] % param.divisible_by)
        for param in params
    )


def checked_grid(kernel: str, grid: GridLike, values: Mapping[str, Any]) -> tuple[int, int, int]:
    """The caller's grid as three extents. Raises: LaunchError for one the driver would refuse, or cut to 32 bits."""
    found: Any = grid(values) if callable(grid) else grid
    try:
        extents = found if isinstance(found, tuple | list) else (found,)
        dimensions = tuple(operator.index(extent) for extent in extents)
    except TypeError:
        dimensions = ()
    fits = all(0 <= extent <= most for extent, most in zip(dimensions, MOST_BLOCKS, strict=False))
    if not 1 <= len(dimensions) <= 3 or not fits:
        allowed = "one to three integers from 0, up to " + ", ".join(map(str, MOST_BLOCKS))
        raise LaunchError(f"{kernel}: grid is {found!r}", facts={"allowed": allowed})
    return _three(dimensions)
