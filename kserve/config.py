"""Settings: defaults < /etc/kserve/config.toml < ~/.config/kserve/config.toml < environment < flags.

The only file that reads the environment. `docs/configuration.md` lists every setting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kserve import setting_values
from kserve.errors import RequestError, StoreError
from kserve.ownership import network_file_system

_PACKAGE = Path(__file__).resolve().parent
# Runs a module of this very package in another interpreter, without putting the directory it lies in on that one's path.
_BOOTSTRAP = """
import importlib, importlib.util as util, sys
root, module = sys.argv[1:3]
spec = util.spec_from_file_location("kserve", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["kserve"] = package = util.module_from_spec(spec)
spec.loader.exec_module(package)
del sys.argv[1:3]
sys.exit(importlib.import_module(module).main())
"""
# sun_path holds 108 bytes, one of them the terminating zero.
_LONGEST_SOCKET_PATH = 107
# A batch system or a container owns its processes: a daemon left behind there surprises people.
_NO_AUTOSTART = ("CI", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")


class Settings(NamedTuple):
    """Everything that can be set, with its default. A field's environment variable is in `_VARIABLES`."""

    store: Path = Path("cache/store")
    layers: tuple[Path, ...] = ()
    max_bytes: int = 20 << 30
    max_files: int = 500_000
    lock: Path | None = None
    runtime_dir: Path = Path("/tmp")  # noqa: S108 - always replaced by load_settings
    kernel_path: tuple[Path, ...] = ()
    autostart: bool = True
    no_build: bool = False
    prewarm: bool = True
    jobs: int = 1
    idle_s: float = 600.0
    build_timeout_s: float = 600.0
    client_timeout_s: float = 600.0
    failure_memory_s: float = 30.0
    job_memory_bytes: int = 16 << 30
    trusted_uids: tuple[int, ...] = ()
    cuda_home: Path | None = None
    launcher: str = "auto"
    backend: str = "cuda"
    strict: bool = False
    disable: bool = False
    native: bool | None = None
    tuned_only: bool = False
    log: str = "info"

    @property
    def stores(self) -> str:
        """Writable store and layers as KSERVE_STORE names them."""
        return os.pathsep.join(map(str, (self.store, *self.layers)))

    @property
    def socket(self) -> Path:
        """Where the daemon of this store listens: one name per real path of the store."""
        path = self.runtime_dir / "kserve" / sha256(str(self.store).encode()).hexdigest()[:12] / "kserve.sock"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            raise StoreError(
                f"socket path {path} is longer than {_LONGEST_SOCKET_PATH} bytes",
                hint="set KSERVE_RUNTIME_DIR to a shorter directory",
            )
        return path


# field -> (environment variable, reader, what is allowed)
_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "store": ("KSERVE_STORE", setting_values.stores, "a directory, then read-only ones below it, separated by colons"),
    "max_bytes": ("KSERVE_MAX_BYTES", setting_values.count, "a whole number of bytes"),
    "max_files": ("KSERVE_MAX_FILES", setting_values.count, "a whole number from 1"),
    "lock": ("KSERVE_LOCK", setting_values.path, "a file"),
    "runtime_dir": ("KSERVE_RUNTIME_DIR", setting_values.path, "a directory"),
    "kernel_path": ("KSERVE_PATH", setting_values.paths, "directories, separated by colons"),
    "autostart": ("KSERVE_AUTOSTART", setting_values.flag, "0 or 1"),
    "no_build": ("KSERVE_NO_BUILD", setting_values.flag, "0 or 1"),
    "prewarm": ("KSERVE_PREWARM", setting_values.flag, "0 or 1"),
    "jobs": ("KSERVE_JOBS", setting_values.count, "a whole number from 1"),
    "idle_s": ("KSERVE_IDLE_S", setting_values.positive, "seconds above 0"),
    "build_timeout_s": ("KSERVE_BUILD_TIMEOUT_S", setting_values.positive, "seconds above 0"),
    "client_timeout_s": ("KSERVE_CLIENT_TIMEOUT_S", setting_values.positive, "seconds above 0"),
    "failure_memory_s": ("KSERVE_FAILURE_MEMORY_S", setting_values.positive, "seconds above 0"),
    "job_memory_bytes": ("KSERVE_JOB_MEMORY_BYTES", setting_values.count, "a whole number of bytes"),
    "trusted_uids": ("KSERVE_TRUSTED_UIDS", setting_values.uids, "user ids, separated by commas"),
    "cuda_home": ("KSERVE_CUDA_HOME", setting_values.path, "a directory with a CUDA toolkit"),
    "launcher": ("KSERVE_LAUNCHER", setting_values.launcher, "auto, python, compiled"),
    "backend": ("KSERVE_BACKEND", setting_values.backend, "pytorch, compiled, cuda"),
    "strict": ("KSERVE_STRICT", setting_values.flag, "0 or 1"),
    "native": ("KSERVE_NATIVE", setting_values.flag, "0 or 1"),
    "tuned_only": ("KSERVE_TUNED_ONLY", setting_values.flag, "0 or 1"),
    "disable": ("KSERVE_DISABLE", setting_values.flag, "0 or 1"),
    "log": ("KSERVE_LOG", setting_values.level, "debug, info, warning, error"),
}


# Names that code written for the kernels' first home uses.
_ALIASES = {"KSERVE_BACKEND": "QECDEC_BACKEND"}


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force.

    Args:
        flags:   values from a command line, under the fields' names; None means not given.
        environ: in place of the process's environment.
    Raises:
        RequestError: a value that cannot be read, with its source, the value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = _defaults(environ)
    for path in _config_files(environ):
        values.update(_from_file(path))
    for field, (variable, reader, allowed) in _VARIABLES.items():
        for name in (variable, _ALIASES.get(variable, "")):
            if text := environ.get(name, ""):
                values[field] = _read(name, text, reader=reader, allowed=allowed)
                break
    values.update({field: value for field, value in (flags or {}).items() if value is not None})
    first, *layers = values.pop("store")
    return Settings(store=first or _default_store(environ), layers=tuple(layers), **values)


def _read(source: str, text: str, *, reader: Callable[[str], Any], allowed: str) -> Any:
    try:
        return reader(text)
    except (ValueError, KeyError, OSError, RuntimeError):  # RuntimeError: no such user in ~user
        raise RequestError(f"{source} cannot be {text!r}", facts={"allowed": allowed}) from None


def _config_files(environ: Mapping[str, str]) -> list[Path]:
    home = environ.get("XDG_CONFIG_HOME") or (environ["HOME"] + "/.config" if environ.get("HOME") else "")
    candidates = [Path("/etc/kserve/config.toml"), *([Path(home) / "kserve/config.toml"] if home else [])]
    return [path for path in candidates if _is_file(path)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:  # a home of somebody else's
        return False


def _from_file(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    unknown = sorted(set(table) - set(_VARIABLES))
    if unknown:
        raise RequestError(f"{path} has unknown settings {', '.join(unknown)}", facts={"allowed": ", ".join(_VARIABLES)})
    found = {}
    for field, value in table.items():
        separator = {"kernel_path": os.pathsep, "trusted_uids": ","}.get(field)
        text = separator.join(map(str, value)) if separator and isinstance(value, list) else str(value)
        found[field] = _read(f"{path}: {field}", text, reader=_VARIABLES[field][1], allowed=_VARIABLES[field][2])
    return found


def _defaults(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        "store": (None,),
        "runtime_dir": Path(environ.get("XDG_RUNTIME_DIR") or f"/tmp/kserve-{os.getuid()}"),  # noqa: S108 - verified
        "autostart": not any(environ.get(name) for name in _NO_AUTOSTART),
        "jobs": usable_cores(),
        # Ranks that fall back one by one would compute different things in silence.
        "strict": _is_many(environ.get("WORLD_SIZE", "")),
    }


def _is_many(world_size: str) -> bool:
    return world_size.isdigit() and int(world_size) > 1


def _default_store(environ: Mapping[str, str]) -> Path:
    """The first place that is on a local disk: the checkout's own, the user's cache, scratch."""
    checkout = _PACKAGE.parent
    is_checkout = (checkout / "pyproject.toml").is_file() and (checkout / "cuda_src").is_dir()
    if is_checkout and not network_file_system(checkout):
        return checkout / "cache" / "store"
    cache = environ.get("XDG_CACHE_HOME") or (environ["HOME"] + "/.cache" if environ.get("HOME") else "")
    if cache and _makeable(Path(cache)) and not network_file_system(Path(cache)):
        return Path(cache).resolve() / "kserve"
    places = [Path(environ[name]).resolve() for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)]
    scratch = next((place for place in places if not network_file_system(place)), Path("/var/tmp"))  # noqa: S108 - verified
    return scratch / f"kserve-{os.getuid()}"


def _makeable(path: Path) -> bool:
    """Whether the directory is there and writable, or its nearest existing parent is."""
    try:
        while not path.exists():
            if path == path.parent:
                return False
            path = path.parent
        return path.is_dir() and os.access(path, os.W_OK)
    except PermissionError:  # a parent that may not be entered
        return False


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the cgroup's CPU quota (rounded up)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cores


def environment_variables() -> dict[str, str]:
    """The environment as it is now: a kernel's definition says which variables override its knobs."""
    return dict(os.environ)


def is_setting(variable: str) -> bool:
    """Whether a setting has that environment variable: it is nothing else's then."""
    return any(variable == name for name, _, _ in _VARIABLES.values())


def built_in_roots() -> tuple[Path, ...]:
    """The folders of the built-in kernels: beside the package in a checkout, inside it in a wheel."""
    for base in (_PACKAGE.parent, _PACKAGE / "_kernels"):
        if (base / "cuda_src").is_dir():
            return (base / "cuda_src", base / "triton_src")
    return ()


def environment_of_process(settings: Settings | None = None) -> dict[str, Any]:
    """What decides which compilers this process would use: interpreter, PYTHONPATH, toolkit, versions already imported."""
    loaded = {name: imported_version(name) for name in ("torch", "triton")}
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    site = sys.modules.get("site")  # a worker has another HOME: name the user's own packages
    if site is not None and getattr(site, "ENABLE_USER_SITE", False):
        parts.append(str(getattr(site, "USER_SITE", "")))
    python_path = [str(Path(part).resolve()) for part in parts if os.path.isdir(part)]  # noqa: PTH112 - False where it is hidden
    return {
        "python": sys.executable,
        "python_path": python_path,
        "loaded": {k: v for k, v in loaded.items() if v},
        "cuda_home": next((str(home) for _, home in named_toolkits(settings or Settings())), ""),
    }


def named_toolkits(settings: Settings) -> list[tuple[str, Path]]:
    """The CUDA toolkits that somebody asked for, with where it was said; the first is the one that is meant."""
    said = [("configured", settings.cuda_home)]
    said += [(name, Path(os.environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [(origin, home) for origin, home in said if home is not None]


def foreign_variable(name: Literal["CUDA_HOME", "TORCH_CUDA_ARCH_LIST"]) -> str:
    """A variable that others have named: of a worker the toolkit its client asked for, of a caller torch's list of arches."""
    return os.environ.get(name, "")


def imported_version(package: str) -> str:
    """The version of a package that this process has imported; empty where it has not."""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def python_command(python: str, module: str, *arguments: str) -> list[str]:
    """The command line that calls `module.main()` of this package under that interpreter."""
    return [python, "-P", "-c", _BOOTSTRAP, str(_PACKAGE), module, *arguments]


def daemon_environment() -> dict[str, str]:
    """The environment of a daemon that a client starts: kserve's own settings and what finds a user's packages."""
    kept = ("PATH", "HOME", "LANG", "PYTHONPATH", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
    return {name: value for name, value in os.environ.items() if name in kept or name.startswith("KSERVE_")}


# The part of a worker's environment that is the same everywhere; Triton's options among it are part of its fingerprint.
WORKER_CONSTANTS = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "CUDA_CACHE_DISABLE": "1",
    "TRITON_DISABLE_LINE_INFO": "1",
    "TRITON_DUMP_PTXAS_LOG": "1",
}


def worker_environment(python_path: list[str], scratch: Path, *, cuda_home: str = "") -> dict[str, str]:
    """The whole environment of a worker process: nothing of the daemon's or a caller's leaks into a build.

    Vendors' hidden caches are off; Triton writes no line table, which would hold paths, and prints the assembler's report.
    """
    places = {"HOME": scratch, "TMPDIR": scratch, "TRITON_CACHE_DIR": scratch / "triton"}
    return {
        **WORKER_CONSTANTS,
        **{name: str(place) for name, place in places.items()},
        "PYTHONPATH": os.pathsep.join(python_path),
        **({"CUDA_HOME": cuda_home} if cuda_home else {}),
    }


def environment_with(**more: str) -> dict[str, str]:
    """This process's environment and these variables, for a program that a person runs through it."""
    return {**os.environ, **more}


def enter_scratch(scratch: Path) -> None:
    """Make this process keep its temporary files and the compilers' own caches under `scratch`."""
    import tempfile

    tempfile.tempdir = None
    os.environ.update(HOME=str(scratch), TMPDIR=str(scratch), TRITON_CACHE_DIR=str(scratch / "triton"))
