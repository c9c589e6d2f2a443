"""Extensions: a library from the store, checked against this process, loaded from memory.

The bytes that were verified are the ones that run: they are given to the loader as a sealed file in memory, which no mount
option forbids and nobody can change.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kserve.artifact import Artifact, Manifest
from kserve.client.direct import Wanted, resolve
from kserve.client.loader import driver
from kserve.errors import InvalidSpec, LoadError, UnsupportedTarget
from kserve.target import host, parse_target

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# By key: what is loaded stays loaded, and its file in memory open, so that no other one gets its name.
_loaded: dict[str, ModuleType | None] = {}
_paths: dict[str, str] = {}
_loading = threading.RLock()  # what a library runs when it is loaded may load another


def get_extension(name: str, *, target: str | None = None, timeout_s: float | None = None, **spec: Any) -> ModuleType | None:
    """The extension of that name for that spec, built once on this node, loaded into this process.

    Args:
        name:      an entry of the catalog whose language is `torch-extension`.
        target:    such as `cuda:sm_90`; left out, the current device's, or the processor where there is none.
        timeout_s: how long to wait for a build; the build itself goes on.
        spec:      a value for each axis without a default.
    Returns:
        Its Python module; None for one that registers operators, which `torch.ops` has from then on.
    Raises: as `get_kernel`; LoadError where the library does not fit this process.
    """
    if not isinstance(name, str) or not isinstance(target, str | None):
        raise InvalidSpec(f"an extension's name and target are texts, not {name!r} and {target!r}")
    return load(resolve([Wanted(name, target or current_target(), spec)], timeout_s=timeout_s, load=False)[0].artifact)


def current_target() -> str:
    """The current device's target; the processor's where there is no device."""
    try:
        return str(driver().target_of(driver().current_device()))
    except LoadError:
        return str(host())


def load(artifact: Artifact) -> ModuleType | None:
    """Load a library that was verified; once in a process. Raises: LoadError."""
    manifest = artifact.manifest
    with _loading:
        if manifest.key not in _loaded:
            check(manifest)
            path = _paths[manifest.key] = _in_memory(artifact)
            if "python" in manifest.contract.needs:
                _loaded[manifest.key] = _module(path, manifest)
            else:
                _operators(path, manifest)
                _loaded[manifest.key] = None
        return _loaded[manifest.key]


def path_of(key: str) -> str:
    """Where the library of that key, which was loaded, can be opened in this process."""
    return _paths[key]


def _in_memory(artifact: Artifact) -> str:
    """The path of a sealed file with the library in it; its descriptor stays open."""
    descriptor = os.memfd_create(artifact.manifest.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(artifact.payload)
    while view:
        view = view[os.write(descriptor, view) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return f"/proc/self/fd/{descriptor}"


def _module(path: str, manifest: Manifest) -> ModuleType:
    name = manifest.contract.symbol
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise LoadError(f"{manifest.name} cannot be loaded: {error}") from error
    return module


def _operators(path: str, manifest: Manifest) -> None:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        raise LoadError(f"{manifest.name} cannot be loaded: {error}") from None


def check(manifest: Manifest) -> None:
    """Hold the contract of a library against this process.

    Raises: LoadError naming what it was built for and what is here.
    """
    needs = manifest.contract.needs
    if manifest.contract.format != "so":
        raise LoadError(f"{manifest.name} is a {manifest.contract.format}, no library", hint="get_kernel loads kernels")
    torch = sys.modules.get("torch")
    if torch is None:
        raise LoadError(f"{manifest.name} needs torch in the process", hint="import torch first")
    here = {
        "torch": _torch_of(needs["torch"], torch),
        "python": sys.implementation.cache_tag if "python" in needs else needs.get("python"),
        "cxx": str(int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))),  # noqa: SLF001 - torch tells it nowhere else
        "glibc": _at_least(needs.get("glibc", "0"), (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[-1]),
    }
    for label, found in here.items():
        wanted = needs.get(label)
        if wanted is not None and found != wanted:
            raise LoadError(f"{manifest.name} was built for {label} {wanted}, this process has {found}")
    _check_codes(manifest, needs)


def _torch_of(wanted: str, torch: Any) -> str:
    """The version of the torch in this process; what is wanted where that is a stable ABI which it has."""
    version = str(torch.__version__)
    kind, _, abi = wanted.partition(" ")
    return (wanted if _at_least(abi, version) == abi else version) if kind == "stable" else version


def _at_least(wanted: str, found: str) -> str:
    """What is wanted where the version that was found is no older, else that."""
    return wanted if _numbers(found) >= _numbers(wanted) else found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:3] if part.isdecimal())


def _check_codes(manifest: Manifest, needs: Mapping[str, str]) -> None:
    """Raises LoadError where there is a device and no code for it; without a device the host's part can be used."""
    codes = needs.get("codes", "").split()
    try:
        here = driver().target_of(driver().current_device()).capability if codes else 0
    except LoadError:
        return
    if codes and not any(_runs_on(code, here) for code in codes):
        raise LoadError(
            f"{manifest.name} has device code for {', '.join(codes)}, the current device is sm_{here}",
            hint=f"build it for sm_{here}: a target, or TORCH_CUDA_ARCH_LIST",
        )


def _runs_on(code: str, capability: int) -> bool:
    """Whether a device runs that code: binary code by the rules of its target, PTX on anything newer."""
    try:
        target = parse_target(code.replace("compute_", "sm_"))
    except UnsupportedTarget:
        return False
    return target.runs_on(capability) or (code.startswith("compute_") and not target.suffix and target.capability <= capability)
