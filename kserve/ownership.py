"""Directories and sockets that are this user's alone, and file systems that are this machine's alone."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from kserve.errors import ForeignPeer, StoreError

# Other machines write to these: their locks and times are not this machine's alone. (9p and virtiofs are a host's own here.)
_NETWORK = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "coda"),
    *("pvfs", "orangefs", "ocfs2", "gfs2", "panfs", "wekafs"),
)
_NETWORK_FUSE = (
    "sshfs",
    "gcsfuse",
    "s3fs",
    "juicefs",
    "glusterfs",
    "ceph",
    "rclone",
    "blobfuse",
    "mountpoint-s3",
    "mfs",
    "nfs",
)
_MOUNTS = Path("/proc/self/mountinfo")


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system the path lies on, or would, when other machines may write to it; else None.

    Args:
        mounts: a file in the form of proc_pid_mountinfo(5).
    """
    try:
        place = os.fsencode(path.resolve())  # first: a look at it may mount it
        table = mounts.read_bytes()
    except OSError:
        return None
    longest, kind = b"", ""
    for line in table.splitlines():
        left, _, right = line.partition(b" - ")
        point = re.sub(rb"\\([0-7]{3})", _character, left.split(b" ")[4])  # a space is written \040
        if (place + b"/").startswith(point.rstrip(b"/") + b"/") and len(point) >= len(longest):
            longest, kind = point, os.fsdecode(right.split(b" ")[0])
    return kind if kind.startswith(_NETWORK) or kind.removeprefix("fuse.").startswith(_NETWORK_FUSE) else None


def _character(octal: re.Match[bytes]) -> bytes:
    return bytes([int(octal[1], 8)])


_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
_UID_MAP = Path("/proc/self/uid_map")
_ALL_UIDS = 2**32 - 1


def identities(uids: Iterable[int] = (), *, uid_map: Path = _UID_MAP) -> frozenset[int]:
    """This process's user and `uids`: who may stand behind a directory or a socket.

    Args:
        uid_map: a file in the form of user_namespaces(7).
    Raises: ForeignPeer when one of them is the id that a user namespace shows for everybody it does not map.
    """
    found = frozenset({os.getuid(), *uids})
    overflow = int(_OVERFLOW.read_text())
    if overflow in found and _ALL_UIDS not in {int(line.split()[2]) for line in uid_map.read_text().splitlines()}:
        raise ForeignPeer(
            f"uid {overflow} cannot be trusted here: it stands for every user that this user namespace does not map",
            hint="map this user into the namespace, and leave that uid out of KSERVE_TRUSTED_UIDS",
        )
    return found


def private_directory(path: Path) -> Path:
    """Make the directory 0700, or check that an existing one is ours and nobody else can write to it.

    Raises: ForeignPeer when it belongs to another user or others can write to it; StoreError when it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StoreError(
            f"directory {path} cannot be made: {error.strerror}",
            hint="set KSERVE_STORE and KSERVE_RUNTIME_DIR to directories this user can write to",
        ) from None
    refuse_foreign(path, found, uids=identities())
    return path


def private_runtime(socket: Path) -> Path:
    """The socket's directory and the two above it, each made and checked: one made by the way would have the umask's mode."""
    for directory in (socket.parent.parent.parent, socket.parent.parent, socket.parent):
        private_directory(directory)
    return socket.parent


def listens(path: Path) -> bool:
    """Whether a process accepts connections on that unix socket."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def refuse_foreign(path: Path, found: os.stat_result, *, uids: frozenset[int]) -> None:
    """Raises ForeignPeer unless `path` belongs to one of `uids`, is a real directory and only its owner can write to it."""
    reason = ""
    if not stat.S_ISDIR(found.st_mode):
        reason = "it is not a directory"
    elif found.st_uid not in uids:
        reason = f"it belongs to uid {found.st_uid}, this process is uid {os.getuid()}"
    elif found.st_mode & 0o022:
        reason = f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    if reason:
        raise ForeignPeer(f"directory {path} is refused: {reason}", facts={"allowed": "owned by this user, mode 0700"})
