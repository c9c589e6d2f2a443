"""The error for a process that the system does not start, with the limits that may be the reason."""

from __future__ import annotations

import contextlib
import errno
import resource
from pathlib import Path

from kserve.errors import BuildError

_GROUPS = Path("/sys/fs/cgroup")


def is_limit(error: BaseException) -> bool:
    """Whether the system refused a process or a thread for want of room: it may take one a moment later."""
    return isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)


def no_process(what: str, error: BaseException) -> BuildError:
    """`what` could not be started: the error, with this process's limits."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [] if most == resource.RLIM_INFINITY else [f"RLIMIT_NPROC {most}"]
    group = _of_control_group()
    limits += [] if group is None else [f"pids.max {group}"]
    return BuildError(
        f"{what} could not be started: {error}",
        facts={"limits": ", ".join(limits) or "memory"},
        hint="raise the limit on processes (ulimit -u, the container's pids limit, TasksMax), or lower KSERVE_JOBS",
    )


def _of_control_group() -> int | None:
    """The least `pids.max` of this process's control group and those above it."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "pids"):
                group = _GROUPS / controllers / path.lstrip("/")
                found += [text for folder in (group, *group.parents) if (text := _text(folder / "pids.max")).isdecimal()]
    return min(map(int, found), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
