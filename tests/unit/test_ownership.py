"""File systems that other machines write to: by the mount table, for a store in a daemon of every node."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kserve.errors import StoreError
from kserve.ownership import network_file_system
from kserve.store import files
from kserve.store.layers import Layers
from tests.support.processes import REPOSITORY

HEAD = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def table(path: Path, *lines: str) -> Path:
    path.write_text(HEAD + "".join(f"{line}\n" for line in lines))
    return path


FUSE = ["sshfs", "s3fs", "gcsfuse", "juicefs", "glusterfs", "ceph-fuse", "rclone", "mountpoint-s3"]
NETWORK = ["nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "panfs", "wekafs"]
NETWORK += [f"fuse.{name}" for name in FUSE]
LOCAL = ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "9p", "virtiofs", "fuse.fuse-overlayfs", "fuseblk", "autofs"]


@pytest.mark.parametrize(("kind", "is_network"), [(kind, True) for kind in NETWORK] + [(kind, False) for kind in LOCAL])
def test_a_type_is_known(own_place: Path, kind: str, is_network: bool):
    mounts = table(own_place / "mounts", f"30 22 0:40 / /data rw - {kind} server:/data rw")
    assert network_file_system(Path("/data/store"), mounts) == (kind if is_network else None)
    assert network_file_system(Path("/database/store"), mounts) is None


@pytest.mark.parametrize(
    ("lines", "path", "kind"),
    [
        (["30 22 0:40 / /a rw - nfs s:/ rw", "31 30 8:2 / /a/b rw - ext4 /dev/b rw"], "/a/b/store", None),
        (["31 22 8:2 / /a/b rw - ext4 /dev/b rw", "30 22 0:40 / /a rw - nfs s:/ rw"], "/a/b/store", None),
        (["30 22 0:40 / /a rw - ext4 /dev/a rw", "31 30 0:41 / /a/b rw - nfs4 s:/ rw"], "/a/b/store", "nfs4"),
        (["30 22 0:40 / /a rw - autofs systemd-1 rw", "31 30 0:41 / /a rw - nfs4 s:/ rw"], "/a/store", "nfs4"),
        (["30 22 0:40 / /a rw - nfs4 s:/ rw", "31 30 0:41 / /a rw - ext4 /dev/a rw"], "/a/store", None),
        (["30 22 0:40 / /my\\040data rw - nfs s:/ rw"], "/my data/store", "nfs"),
        (["30 22 0:40 / /back\\134slash rw - nfs s:/ rw"], "/back\\slash/store", "nfs"),
        (["30 22 0:40 / /données rw - nfs s:/ rw"], "/données/store", "nfs"),
        (["30 22 0:40 / /a rw shared:1 master:2 - nfs s:/ rw"], "/a", "nfs"),
        (["30 22 0:40 / / rw - nfs s:/ rw"], "/anything", "nfs"),
    ],
)
def test_the_innermost_and_last_mount_counts(own_place: Path, lines: list[str], path: str, kind: str | None):
    assert network_file_system(Path(path), table(own_place / "mounts", *lines)) == kind


def test_a_link_into_a_network_file_system_is_seen(own_place: Path):
    (own_place / "net").mkdir()
    (own_place / "store").symlink_to(own_place / "net")
    mounts = table(own_place / "mounts", f"30 22 0:40 / {own_place}/net rw - nfs s:/ rw")
    assert network_file_system(own_place / "store", mounts) == "nfs"
    assert network_file_system(own_place / "store" / "not" / "there", mounts) == "nfs"


def test_a_name_that_is_no_text_disturbs_nobody(own_place: Path):
    (own_place / "mounts").write_bytes(HEAD.encode() + b"30 22 0:40 / /\xff\xfe rw - nfs s:/ rw\n")
    assert network_file_system(Path("/data"), own_place / "mounts") is None
    assert network_file_system(Path("/\udcff\udcfe/store"), own_place / "mounts") == "nfs"


def test_a_table_that_cannot_be_read_refuses_nothing(own_place: Path):
    assert network_file_system(Path("/data"), own_place / "none") is None


NODE = """
import functools, sys
from pathlib import Path
from kserve.errors import StoreError
from kserve.ownership import network_file_system
from kserve.store import files
files.network_file_system = functools.partial(network_file_system, mounts=Path(sys.argv[2]))
try:
    files.FileStore(Path(sys.argv[1]), writable=True)
except StoreError as error:
    print(error)
"""


def test_eight_nodes_on_one_network_file_system_are_all_refused(own_place: Path):
    """With a sentence that says what to do instead; and nothing is written there."""
    store = own_place / "shared" / "store"
    mounts = table(own_place / "mounts", f"30 22 0:40 / {own_place}/shared rw - nfs4 server:/ rw")
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(store), str(mounts)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * 8
    assert all(str(store) in text and "nfs4" in text and "KSERVE_STORE=/local:/shared" in text for text in said), said
    assert not store.exists()


def test_a_network_file_system_may_be_a_layer(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is locked there: the refusal is for the writable store."""
    (own_place / "shared").mkdir(mode=0o755)
    mounts = table(own_place / "mounts", f"30 22 0:40 / {own_place}/shared rw - nfs4 server:/ rw")
    monkeypatch.setattr(files, "network_file_system", partial(network_file_system, mounts=mounts))
    with pytest.raises(StoreError, match="nfs4"):
        files.FileStore(own_place / "shared", writable=True)
    assert Layers((own_place / "shared",), uids=frozenset({os.getuid()})).refused == {}
