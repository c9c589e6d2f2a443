"""The closed world of a build: a job reads its declared files and its compiler, writes into its own directory, and no more.

Landlock does it, which needs no privilege. A restriction is for life, so each job's child takes it for itself and for what it
starts. Only opening is restricted: whether a file exists, and its size, can still be asked.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

# include/uapi/linux/landlock.h; these system calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG, _REFER, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (7, 8, 13, 14, 15))
_BIND_AND_CONNECT_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_PR_SET_NO_NEW_PRIVS = 38  # include/uapi/linux/prctl.h
# Version 1 refuses every rename into another directory: Triton's own cache makes some.
_OLDEST = 2

_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Neither links nor programs: the daemon, which is not restricted, reads what a job leaves.
_OWN = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER
_SYSTEM = {
    os.devnull: _READ_FILE | _WRITE_FILE | _TRUNCATE,
    "/dev/urandom": _READ_FILE,
    "/etc/ld.so.cache": _READ_FILE,
}
_RULE = "=Qi"  # struct landlock_path_beneath_attr: rights, descriptor
_PACKAGES = ("site-packages", "dist-packages")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = (ctypes.c_long, *[ctypes.c_void_p] * 4)  # a pointer or a number of its size
_libc.syscall.restype = ctypes.c_long


class World:
    """What all jobs of this process may read, opened once, so that a job pays for the rules alone.

    Args:
        roots:   files and folders of the compiler.
        version: the Landlock interface to use; None for the kernel's.
    """

    def __init__(self, roots: Iterable[Path], *, version: int | None = None) -> None:
        self._version = landlock_version() if version is None else version
        self._rules: list[bytes] = []
        self._missing: OSError | None = None
        try:
            self._open({**dict.fromkeys(_readable(roots), _READ), **_SYSTEM})
        except OSError as error:
            self._missing = error
            for rule in self._rules:
                os.close(struct.unpack(_RULE, rule)[1])

    def _open(self, rights: dict[str, int]) -> None:
        if self._version < _OLDEST:
            raise OSError(errno.ENOSYS, f"version {_OLDEST} is needed, the kernel has {self._version or 'none'}")
        for path, right in rights.items():
            if rule := self._rule(path, right):
                self._rules.append(rule)

    def enter(self, own: Path, sources: Path, roots: Iterable[str] = ()) -> bool:
        """Restrict this process and what it starts, for life: read and run what lies in the world, read and write in `own`.

        What lies in `sources` may be read, and so may what lies under `roots`, which is not run.

        TCP, signals to other processes and abstract sockets are refused too, by kernels that can.

        Returns: False when the kernel cannot, or refuses: nothing is restricted then, and standard output says why.
        """
        try:
            self._restrict(own, sources, roots)
        except OSError as error:
            print(f"this build's world is open: Landlock: {error.strerror}", flush=True)  # noqa: T201 - the build's log
            return False
        return True

    def _restrict(self, own: Path, sources: Path, roots: Iterable[str]) -> None:
        if self._missing is not None:
            raise self._missing
        attributes = struct.pack("=3Q", self._handled, _BIND_AND_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
        # A kernel refuses fields it does not know.
        size = 24 if self._version >= 6 else 16 if self._version >= 4 else 8
        ruleset = _call(_CREATE_RULESET, attributes, size)
        try:
            more = [self._rule(root, _READ & ~_EXECUTE) for root in roots]
            rules = [rule for rule in (self._rule(str(sources), _READ), *more) if rule]
            for rule in (*self._rules, self._rule(str(own), _OWN), *rules):
                _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule)
            if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
                raise _error()
            _call(_RESTRICT_SELF, ruleset, 0)
        finally:
            os.close(ruleset)

    @property
    def _handled(self) -> int:
        """Every right over files that this version knows: what is not handled is allowed."""
        later = {3: _TRUNCATE, 5: _IOCTL_DEV}
        return (_REFER << 1) - 1 | sum(right for since, right in later.items() if self._version >= since)

    def _rule(self, path: str, right: int) -> bytes:
        """A rule as the kernel takes it, around a descriptor that stays open; empty where there is no such file."""
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return b""
        known = self._handled if stat.S_ISDIR(os.fstat(place).st_mode) else self._handled & _OF_FILES
        return struct.pack(_RULE, right & known, place)


def is_available() -> bool:
    """Whether jobs can be held to their closed world here."""
    return landlock_version() >= _OLDEST


def landlock_version() -> int:
    """The kernel's Landlock interface; 0 where it has none, or it is switched off."""
    try:
        return _call(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def _readable(roots: Iterable[Path]) -> set[str]:
    """Paths of what a compile reads besides the job's own directory.

    The compiler, and where the links in it lead; the standard library without the packages that lie in it; the files this
    process has mapped; the directory of the C library, for the programs a compiler starts.
    """
    found = {str(path) for path in Path(os.__file__).parent.iterdir() if path.name not in _PACKAGES}
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps if "/" in line}
    found |= {str(path) for path in mapped}
    found |= {str(path.parent) for path in mapped if path.name.startswith(("libc.so.", "libc-2."))}
    for root in roots:
        found |= {str(root), *_links(root)}
    return found


def _links(root: Path) -> Iterator[str]:
    """Where the links under the root lead, out of it."""
    folders = [str(root)] if root.is_dir() else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if not target.startswith(f"{root}/"):
                        yield target
                elif entry.is_dir():
                    folders.append(entry.path)


def _call(number: int, first: int | bytes | None, second: int, third: int | bytes = 0) -> int:
    answer: int = _libc.syscall(number, first, second, third, 0)
    if answer < 0:
        raise _error()
    return answer


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
