"""Quick roads over the stub driver, which take torch tensors of the CPU for those of a device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from kserve.artifact import Contract, Param
from kserve.client.compiled import compiled_road
from kserve.client.quick import quick_road
from kserve.spec import DTYPES, SCALARS
from tests.support.stub_driver import Launched, StubDriver

CPU, CUDA = 1, 2  # DLPack's kDLCPU and kDLCUDA
DECLARED, GENERIC = 0xDEC, 0x6E
PLACES = (-1, 0)  # of the CPU: to torch, to DLPack


class Road:
    """One launch function, and what came of it. Call it; then look at `outcome`."""

    def __init__(self, maker: RoadMaker, contract: Contract) -> None:
        self.contract, self._stub = contract, maker.stub
        self.slow: list[tuple[Any, ...]] = []
        self.failures: list[tuple[Any, ...]] = []
        self.functions = [{place: ctypes.c_void_p(handle) for place in PLACES} for handle in (DECLARED, GENERIC)]
        libraries = [SimpleNamespace(functions=functions) for functions in self.functions]
        given = {"slow": lambda *passed: self.slow.append(passed), "failed": lambda *passed: self.failures.append(passed)}
        if maker.kind == "generated":
            self.launch = quick_road(contract, libraries, maker.torch, **given)
        else:
            self.launch = compiled_road(contract, libraries, maker.torch, **given, device_type=maker.device_type)

    def __call__(self, *args: Any, **named: Any) -> Launched | tuple[Any, ...] | None:
        """The launch, or (args, stream, grid) as the slow road got them."""
        self._stub.set(n_launches=0)
        self._stub.expect(self.contract)
        self.slow.clear()
        assert self.launch(*args, **named) is None
        launched = self._stub.launches()
        assert len(launched) + len(self.slow) <= 1
        return launched[0] if launched else self.slow[0] if self.slow else None


class RoadMaker:
    """Makes roads of one kind: `generated` or `compiled`."""

    def __init__(self, kind: str, stub: StubDriver, torch: SimpleNamespace) -> None:
        self.kind, self.stub, self.torch, self.device_type = kind, stub, torch, CPU
        # There is no CUDA to ask: -1 is what a tensor of the CPU calls its device.
        torch._C = SimpleNamespace(_cuda_getDevice=lambda: -1, _cuda_getCurrentRawStream=lambda device: 0)

    def __call__(self, contract: Contract) -> Road:
        return Road(self, contract)


def kernel_with(*kinds: str, **overrides: Any) -> Contract:
    """A contract with parameters a, b, c, … of those kinds (`*float32` is a pointer), laid out as a compiler would."""
    params, at = [], 0
    for name, kind in zip("abcdefghijklmnopqrstuvwxyz", kinds, strict=False):
        is_pointer = kind.startswith("*")
        size = 8 if is_pointer or kind == "scratch" else 5 if kind == "struct" else DTYPES[SCALARS[kind]].size_bytes
        at = -(-at // size) * size if kind != "struct" else at
        params.append(Param(name, "pointer" if is_pointer else kind, kind[1:] if is_pointer else "", at, size))
        at += size
    return Contract("scale", "cubin", tuple(params), {"size": 8}, ("1",), ("128",))._replace(**overrides)


def with_param(contract: Contract, name: str, **facts: Any) -> Contract:
    """The contract with other facts about one parameter."""
    changed = tuple(param._replace(**facts) if param.name == name else param for param in contract.params)
    return contract._replace(params=changed)
