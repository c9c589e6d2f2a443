"""`torch.utils.cpp_extension.load` and `load_inline`, served from the store.

    from kserve.doors.cpp_extension import load, load_inline

The arguments are torch's. What is not supported is refused; what the build reads is part of its key; a daemon that cannot be
reached leaves the build to torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple

from kserve.client import extension
from kserve.client.direct import Wanted, resolve
from kserve.client.given import Given, Root
from kserve.client.launch import Kernel
from kserve.client.loader import driver
from kserve.client.local import local
from kserve.config import foreign_variable
from kserve.definition import EXTENSION, MODULE_NAME
from kserve.doors.flags import Flags, codes_of_devices, codes_of_list, split
from kserve.errors import LoadError, RequestError, ServiceError, StoreError, UnsupportedTarget
from kserve.key import canonical_json
from kserve.outline import FILE_NAME
from kserve.target import host

_CUDA_SUFFIXES = (".cu", ".cuh")
_SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".cu")
# A directory with one of these is a project: what its sources include by `../` lies in it.
_PROJECT = (".git", ".hg", "pyproject.toml", "setup.py")
_UNFIT = re.compile(r"[^A-Za-z0-9_.+-]")
Texts = str | Sequence[str] | None
# The keys a name had in this process, in order: a further one makes a module of a new name.
_versions: dict[str, list[str]] = {}


class _Wish(NamedTuple):
    """What one call asks for, taken apart."""

    name: str
    texts: dict[str, bytes]
    paths: dict[str, Path]
    cflags: Flags
    cuda_cflags: Flags
    ldflags: Flags
    include_paths: tuple[str, ...]
    with_cuda: bool
    is_module: bool


def load(
    name: str,
    sources: str | Sequence[str],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
) -> ModuleType | str:
    """Build an extension from source files, or find it in the store, and load it.

    Args:
        build_directory:    gets a copy of the library; nothing is read from it.
        verbose:            prints the build's log; the key is the same.
        keep_intermediates: objects are kept in the store in any case.
        The others are torch's. SYCL and standalone programs are refused.
    Returns: the module; the library's path where `is_python_module` is false.
    Raises: RequestError for an argument; CompileFailed, which is a RuntimeError; LoadError.
    """
    given = dict(locals())
    _refuse(given, extra_sycl_cflags=None, with_sycl=(None, False), is_standalone=False)
    given["sources"] = [os.fspath(source) for source in ([sources] if isinstance(sources, str | os.PathLike) else sources)]
    paths = _names([Path(os.path.abspath(source)) for source in given["sources"]])  # noqa: PTH100 - links stay as they were named
    wish = _wish(given, texts={}, paths=paths)
    return _served(wish, given, "load", build_directory=build_directory, verbose=verbose)


def load_inline(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: Texts = None,
    sycl_sources: Texts = None,
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
) -> ModuleType | str:
    """The same from source texts.

    Args:
        functions: names, or names with docstrings, for which the module's bindings are written.
        The others are torch's and `load`'s. SYCL and precompiled headers are refused.
    Returns, Raises: as `load`.
    """
    given = dict(locals())
    _refuse(given, sycl_sources=None, extra_sycl_cflags=None, with_sycl=(None, False), use_pch=False)
    cpp, cuda = _listed(cpp_sources), _listed(cuda_sources)
    if not no_implicit_headers:
        cpp = ["#include <torch/extension.h>", *cpp]
        cuda = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>", *cuda] if cuda else []
    if functions is not None:
        cpp.append(_bindings(functions, guarded=with_pytorch_error_handling))
    texts = {"main.cpp": "\n".join(cpp).encode()} | ({"cuda.cu": "\n".join(cuda).encode()} if cuda else {})
    return _served(_wish(given, texts=texts, paths={}), given, "load_inline", build_directory=build_directory, verbose=verbose)


def _wish(given: Mapping[str, Any], *, texts: dict[str, bytes], paths: dict[str, Path]) -> _Wish:
    """The arguments of either function, taken apart. Raises: RequestError."""
    with_cuda, is_module = given["with_cuda"], bool(given["is_python_module"])
    return _Wish(
        name=_module_name(given["name"], is_module=is_module),
        texts=texts,
        paths=paths,
        cflags=split("extra_cflags", given["extra_cflags"]),
        cuda_cflags=split("extra_cuda_cflags", given["extra_cuda_cflags"]),
        ldflags=split("extra_ldflags", given["extra_ldflags"]),
        include_paths=tuple(os.path.abspath(path) for path in given["extra_include_paths"] or ()),  # noqa: PTH100 - as above
        with_cuda=any(map(_is_cuda, (*texts, *paths))) if with_cuda is None else bool(with_cuda),
        is_module=is_module,
    )


def _served(
    wish: _Wish, given: dict[str, Any], function: str, *, build_directory: str | None, verbose: bool
) -> ModuleType | str:
    if local().settings.disable:
        return _natively(function, given)
    codes = _codes(wish) if wish.with_cuda else ()
    target = f"cuda:sm_{_oldest(codes)}" if codes else str(host())
    try:
        kernel = resolve([Wanted(wish.name, target, {}, given=_given(wish, codes))], load=False, locked=False)[0]
    except (ServiceError, StoreError) as error:
        warnings.warn(f"kserve cannot serve {wish.name}, torch builds it: {error.message}", RuntimeWarning, stacklevel=3)
        return _natively(function, given)
    if verbose:
        _print_log(kernel)
    return _loaded(wish, kernel, build_directory)


def _natively(function: str, given: dict[str, Any]) -> ModuleType | str:
    """What torch's own function gives."""
    import torch.utils.cpp_extension as native

    found: ModuleType | str = getattr(native, function)(**given)
    return found


def _loaded(wish: _Wish, kernel: Kernel, build_directory: str | None) -> ModuleType | str:
    import torch  # noqa: F401 - a library is loaded beside torch's own

    module = extension.load(kernel.artifact)
    path = _copied(kernel, build_directory, wish.name) if build_directory else extension.path_of(kernel.key)
    if module is None:
        return path
    known = _versions.setdefault(wish.name, [])
    if kernel.key not in known:
        known.append(kernel.key)
        module.__name__ = wish.name if len(known) == 1 else f"{wish.name}_v{len(known) - 1}"
        module.__file__ = path
    return module


def _copied(kernel: Kernel, build_directory: str, name: str) -> str:
    """A copy of the library where the caller wants one: whole or not at all."""
    folder = Path(build_directory)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as file:
        file.write(kernel.artifact.payload)
    target = folder / f"{name}.so"
    Path(file.name).chmod(0o755)
    Path(file.name).replace(target)
    return str(target)


def _print_log(kernel: Kernel) -> None:
    digest = kernel.manifest.attachments.get("log")
    content = local().read(f"payload/{digest}") if digest else None
    log = "" if content is None else content.decode(errors="replace").strip()
    print(f"{log}\nkserve: {kernel.name} {kernel.origin} in {kernel.seconds:.3f} s, key {kernel.key[:12]}", file=sys.stderr)  # noqa: T201 - asked for


def _given(wish: _Wish, codes: tuple[str, ...]) -> Given:
    """The wish as the service takes it: a definition, the sources, the places outside."""
    roots = [*_source_roots(wish.paths), *(Root(path, "include") for path in wish.include_paths)]
    roots += [*wish.cflags.roots, *wish.cuda_cflags.roots]
    ldflags = [_shifted(flag, len(roots)) for flag in wish.ldflags.plain]
    roots += [*wish.ldflags.roots, *_projects(wish.paths)]
    units = [*wish.texts, *wish.paths]
    toml = _definition(wish, units, ldflags, codes)
    places = [str(path) for path in wish.paths.values()]
    texts = {name: text.decode() for name, text in wish.texts.items()}
    identity = canonical_json([toml, places, texts, [tuple(root) for root in roots]])
    return Given(wish.name, identity, texts={FILE_NAME: toml.encode(), **wish.texts}, paths=wish.paths, roots=roots)


def _shifted(flag: str, by: int) -> str:
    """A flag that names a root among all of them."""
    return re.sub(r"\{root(\d+)\}", lambda match: f"{{root{int(match[1]) + by}}}", flag)


def _definition(wish: _Wish, units: list[str], ldflags: list[str], codes: tuple[str, ...]) -> str:
    options: dict[str, Any] = {
        "cflags": list(wish.cflags.plain),
        "cuda_cflags": list(wish.cuda_cflags.plain) if wish.with_cuda else [],
        "ldflags": ldflags,
        "arches": list(codes),
    }
    lines = ["schema = 1", f'language = "{EXTENSION}"', f"sources = {json.dumps(units)}"]
    if codes:
        lines += ["[target]", f'cuda = "sm_{_oldest(codes)}"']
    lines += ["[options]", *(f"{name} = {json.dumps(values)}" for name, values in options.items() if values)]
    lines += [] if wish.is_module else ['binding = "operators"']
    lines += ["[[entry]]", f"name = {json.dumps(wish.name)}", 'summary = "built through kserve.doors.cpp_extension"']
    return "\n".join(lines) + "\n"


def _oldest(codes: tuple[str, ...]) -> int:
    return min(int(re.sub(r"\D", "", code)) for code in codes)


def _source_roots(paths: Mapping[str, Path]) -> list[Root]:
    """The folder of each source, for `#include "…"`."""
    return list(dict.fromkeys(Root(str(path.parent), f"quote {PurePosixPath(name).parent}") for name, path in paths.items()))


def _projects(paths: Mapping[str, Path]) -> list[Root]:
    """The projects the sources lie in, for what is included by `../`: the last of all roots, since they are in no key."""
    found: dict[Root, None] = {}
    for path in paths.values():
        project = next((parent for parent in path.parents if any((parent / mark).exists() for mark in _PROJECT)), None)
        if project is not None and project not in (Path.home(), Path("/")):
            found[Root(str(project), "project")] = None
    return list(found)


def _names(paths: list[Path]) -> dict[str, Path]:
    """Relative names of the sources, below the folder that all of them lie in: equal for every checkout."""
    if not paths:
        raise RequestError("an extension needs at least one source")
    base = Path(os.path.commonpath([path.parent for path in paths]))
    found: dict[str, Path] = {}
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise RequestError(f"source {path} is of no known kind", facts={"allowed": ", ".join(_SUFFIXES)})
        parts = [_UNFIT.sub("_", part) for part in path.relative_to(base).parts]
        name = "/".join(part if part[0].isalnum() or part[0] == "_" else f"_{part}" for part in parts)
        while name in found:
            name = f"_{name}"
        found[name] = path
    return found


def _is_cuda(path: str) -> bool:
    return path.endswith(_CUDA_SUFFIXES)


def _module_name(name: str, *, is_module: bool) -> str:
    if not is_module:
        name = re.sub(r"\W", "_", name)
    if not isinstance(name, str) or not MODULE_NAME.fullmatch(name):
        raise RequestError(f"an extension cannot be called {name!r}", facts={"allowed": "a Python identifier"})
    return name


def _codes(wish: _Wish) -> tuple[str, ...]:
    """Device code in torch's order of preference: the flags, `TORCH_CUDA_ARCH_LIST`, the devices. Raises: UnsupportedTarget."""
    if wish.cuda_cflags.codes:
        return wish.cuda_cflags.codes
    listed = foreign_variable("TORCH_CUDA_ARCH_LIST")
    if listed and listed != "native":
        return codes_of_list(listed)
    try:
        here = driver()
        targets = [here.target_of(device) for device in range(here.device_count())]
    except LoadError as error:
        raise UnsupportedTarget(
            f"{wish.name} has device code and no target: {error.message}", hint="set TORCH_CUDA_ARCH_LIST, such as 9.0"
        ) from None
    return codes_of_devices([divmod(target.capability, 10) for target in targets])


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())


def _bindings(functions: str | Sequence[str] | Mapping[str, str], *, guarded: bool) -> str:
    """The module's definition: each function under its own name, with its docstring."""
    if isinstance(functions, str):
        functions = [functions]
    documented = functions if isinstance(functions, Mapping) else {name: name for name in functions}
    lines = ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    for name, text in documented.items():
        called = f"torch::wrap_pybind_function({name})" if guarded else name
        lines.append(f'm.def("{name}", {called}, {json.dumps(text, ensure_ascii=False)});')
    return "\n".join([*lines, "}"])


def _refuse(given: Mapping[str, Any], **allowed: Any) -> None:
    """Raises RequestError for an argument that has any other value than the allowed one, or none of several."""
    for name, value in allowed.items():
        values = value if isinstance(value, tuple) else (value,)
        if given[name] and given[name] not in values:
            raise RequestError(
                f"{name}={given[name]!r} is not supported by kserve.doors.cpp_extension",
                facts={"allowed": " or ".join(map(repr, values))},
                hint="torch.utils.cpp_extension has it",
            )
