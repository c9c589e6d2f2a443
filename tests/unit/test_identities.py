"""Which users may stand behind a directory or a socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kserve.errors import ForeignPeer
from kserve.ownership import identities

OVERFLOW = int(Path("/proc/sys/kernel/overflowuid").read_text())
# uid_map of the machine itself, of one user as root, of a rootless container, of a namespace that maps nobody.
MACHINE, ONE, CONTAINER, NONE = "0 0 4294967295\n", "0 54321 1\n", "0 100000 65536\n", ""


def uid_map(folder: Path, text: str) -> Path:
    path = folder / "uid_map"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [MACHINE, ONE, CONTAINER, NONE])
def test_this_user_and_the_named_ones_are_trusted(tmp_path: Path, text: str):
    assert identities((12345,), uid_map=uid_map(tmp_path, text)) == {os.getuid(), 12345}


def test_where_every_id_is_mapped_the_overflow_id_is_a_user_like_others(tmp_path: Path):
    assert OVERFLOW in identities((OVERFLOW,), uid_map=uid_map(tmp_path, MACHINE))


@pytest.mark.parametrize("text", [ONE, CONTAINER, NONE])
def test_elsewhere_it_may_be_anybody_and_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ForeignPeer, match=str(OVERFLOW)):
        identities((OVERFLOW,), uid_map=uid_map(tmp_path, text))
