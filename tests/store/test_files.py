"""FileStore under what happens to files: crowds, kills, damage, foreign hands, full and read-only disks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from kserve.artifact import Contract, Manifest, manifest_from_bytes
from kserve.errors import CorruptArtifact, ForeignPeer, StoreError
from kserve.key import digest_of
from kserve.store import files
from kserve.store.base import KINDS
from kserve.store.files import FileStore
from tests.support.processes import REPOSITORY, python, wait_for

KEY = "0a" * 32

# What child processes share: records whose content says whether it is whole.
RECORDS = """
import os, sys
from pathlib import Path
from kserve.key import digest_of
from kserve.store.files import FileStore
root = Path(sys.argv[1])
contents = [bytes([i]) * (200_000 + i) for i in range(8)]
"""


@pytest.fixture
def root(own_place):
    return own_place / "store"


@pytest.fixture
def store(root):
    return FileStore(root, writable=True)


def put(store: FileStore, content: bytes = b"payload" * 1000) -> str:
    name = f"payload/{digest_of(content)}"
    store.put(name, content)
    return name


def every_file(root) -> dict[str, tuple[int, int, bytes]]:
    """Relative name -> mode, mtime and content of everything below; directories with no content."""
    found = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (facts.st_mode, facts.st_mtime_ns, content)
    return found


def overwrite(path, content: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(content)


def flip_a_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    overwrite(path, bytes(content))


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "zeroed": lambda path: overwrite(path, bytes(path.stat().st_size)),
    "extended": lambda path: overwrite(path, path.read_bytes() + b"\0"),
    "bit flipped": flip_a_bit,
    "swapped": lambda path: overwrite(path, b"the bytes of some other record"),
}


def test_the_layout_is_the_documented_one(root, store):
    payload = put(store, b"payload")
    store.put(f"manifest/{KEY}", b"{}")
    digest = digest_of(b"payload")
    assert (root / "payload" / digest[:2] / digest).read_bytes() == b"payload"
    assert (root / "manifest" / "0a" / f"{KEY}.json").read_bytes() == b"{}"
    assert store.path(payload) == root / "payload" / digest[:2] / digest


OPENS = """
import os, sys
from pathlib import Path
from kserve.store.files import FileStore
print("up", flush=True)
sys.stdin.readline()
for number in range(200):
    FileStore(Path(sys.argv[1]) / str(number), writable=True)
"""


def test_many_may_open_a_new_directory_at_once(root):
    command = [sys.executable, "-c", OPENS, str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes) for _ in range(3)]
    assert [child.stdout.readline() for child in children] == ["up\n"] * 3
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.communicate(timeout=60)[1] for child in children] == [""] * 3


def test_directories_are_the_owners_alone_and_records_are_read_only(root, store):
    before = os.umask(0)
    try:
        put(store)
        store.put(f"manifest/{KEY}", b"{}")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o400}


def test_nothing_unfinished_is_left_after_a_put(root, store):
    put(store)
    assert list((root / "tmp").iterdir()) == []


def test_a_store_can_be_moved(root, store):
    name = put(store)
    moved = root.with_name("moved")
    root.rename(moved)
    assert FileStore(moved, writable=True).get(name) is not None


def test_a_store_can_be_copied(root, store):
    name = put(store)
    shutil.copytree(root, root.with_name("copy"))
    assert FileStore(root.with_name("copy"), writable=False).get(name) is not None


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_payload_is_put_aside_and_is_a_miss(root, store, damage):
    name = put(store)
    DAMAGE[damage](store.path(name))
    damaged = store.path(name).read_bytes()
    assert store.get(name) is None
    assert store.n_quarantined == 1
    assert [path.read_bytes() for path in (root / "quarantine").iterdir()] == [damaged]
    assert list(store.keys("payload")) == []
    put(store)
    assert store.get(name) is not None


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_says_so_and_can_be_put_aside(root, store, damage):
    contract = Contract("scale", "cubin", (), {}, ("1",), ("128",))
    facts = (KEY, "cd" * 32, 7, "scale", "cuda", "cuda:sm_90", {}, "declared", contract)
    manifest = Manifest(*facts, {}, {}, {}, closed_world=False, seconds=1.0, created_at=1.0)
    name = f"manifest/{KEY}"
    store.put(name, manifest.to_bytes())
    DAMAGE[damage](store.path(name))
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(store.get(name), key=KEY)
    store.quarantine(name)
    assert store.get(name) is None
    assert len(list((root / "quarantine").iterdir())) == 1


def test_a_record_that_was_written_again_meanwhile_is_not_put_aside(store, monkeypatch):
    """The reader found damage; before it acts, a build puts the whole record in that place."""
    name = put(store)
    flip_a_bit(store.path(name))

    def matches_and_heal(name: str, content: bytes) -> bool:
        monkeypatch.undo()
        put(store)
        return files.matches(name, content)

    monkeypatch.setattr(files, "matches", matches_and_heal)
    assert store.get(name) == b"payload" * 1000
    assert store.n_quarantined == 1, "by the one who wrote it again"


def test_a_record_is_deleted_only_while_it_is_what_was_seen(store):
    name = f"manifest/{KEY}"
    store.put(name, b"old")
    store.delete(name, was=b"new")
    assert store.get(name) == b"old"
    store.delete(name, was=b"old")
    assert store.get(name) is None
    store.delete(name, was=b"old")


def test_two_swapped_payloads_are_both_misses(store):
    names = [put(store, b"one"), put(store, b"two")]
    one, two = (store.path(name) for name in names)
    one.rename(one.with_name("spare"))
    two.rename(one)
    one.with_name("spare").rename(two)
    assert [store.get(name) for name in names] == [None, None]
    assert store.n_quarantined == 2


def test_a_removed_payload_is_a_miss_and_is_not_counted_as_damage(store):
    name = put(store)
    store.path(name).unlink()
    assert store.get(name) is None
    assert store.n_quarantined == 0


def test_the_same_record_can_be_put_aside_again(root, store):
    for _ in range(3):
        name = put(store)
        flip_a_bit(store.path(name))
        assert store.get(name) is None
    assert len(list((root / "quarantine").iterdir())) == 3


def test_a_removed_store_is_a_miss_to_read_and_an_error_to_write(root, store):
    name = put(store)
    shutil.rmtree(root)
    assert store.get(name) is None
    with pytest.raises(StoreError):
        put(store)


def test_a_record_that_cannot_be_written_or_deleted_is_a_store_error(store):
    store.path(f"manifest/{KEY}").mkdir(parents=True)  # what even root cannot do: a directory in a record's place
    for call in (store.delete, lambda name: store.put(name, b"{}")):
        with pytest.raises(StoreError):
            call(f"manifest/{KEY}")


def test_a_directory_in_a_records_place_is_put_aside(root, store):
    store.path(f"manifest/{KEY}").mkdir(parents=True)
    assert store.get(f"manifest/{KEY}") is None
    assert store.n_quarantined == 1
    store.put(f"manifest/{KEY}", b"{}")
    assert store.get(f"manifest/{KEY}") == b"{}"


def test_files_that_are_no_records_are_not_listed(root, store):
    store.put(f"manifest/{KEY}", b"{}")
    (root / "manifest" / "0a" / f"{KEY}.json~").touch()
    (root / "manifest" / "0a" / ".DS_Store").touch()
    (root / "manifest" / "0a" / "note.json").touch()
    (root / "manifest" / "0b").touch()
    assert list(store.keys("manifest")) == [KEY]


def test_the_size_is_what_the_disk_gave(store):
    assert sum(found.st_blocks for _, found in store.stats("payload")) == 0
    put(store, b"x" * 100_000)
    assert 100_000 <= sum(found.st_blocks * 512 for _, found in store.stats("payload")) < 200_000


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("place", [".", *KINDS, "tmp", "quarantine"])
def test_a_directory_others_can_write_to_is_refused(root, store, place, mode):
    (root / place).chmod(mode)
    with pytest.raises(ForeignPeer):
        FileStore(root, writable=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(root, store):
    os.chown(root, 12345, 12345)
    with pytest.raises(ForeignPeer) as caught:
        FileStore(root, writable=True)
    assert "12345" in caught.value.message


def test_a_link_in_place_of_the_store_is_refused(root, store):
    root.with_name("link").symlink_to(root)
    with pytest.raises(ForeignPeer):
        FileStore(root.with_name("link"), writable=True)


def test_a_reader_makes_no_directory(root):
    reader = FileStore(root, writable=False)
    assert reader.get(f"payload/{KEY}") is None
    assert list(reader.keys("payload")) == []
    assert not root.exists()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_reader_never_writes(root, store, damage):
    sound, damaged = put(store, b"sound"), put(store)
    DAMAGE[damage](store.path(damaged))
    before = every_file(root)
    reader = FileStore(root, writable=False)
    assert reader.get(sound) == b"sound"
    assert reader.get(damaged) is None
    reader.quarantine(damaged)
    assert every_file(root) == before


def test_a_reader_refuses_to_put_and_to_delete(root, store):
    name = put(store)
    before = every_file(root)
    reader = FileStore(root, writable=False)
    with pytest.raises(StoreError):
        put(reader, b"other")
    with pytest.raises(StoreError):
        reader.delete(name)
    assert every_file(root) == before


def test_a_full_disk_is_a_store_error_and_leaves_nothing(root, store):
    kept = put(store, b"kept")
    child = python(
        RECORDS
        + """
import resource, signal
from kserve.errors import StoreError
store = FileStore(root, writable=True)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    store.put("payload/" + digest_of(contents[0]), contents[0])
except StoreError:
    print("refused", store.get("payload/" + digest_of(contents[0])))
""",
        str(root),
    )
    assert child.stdout.split() == ["refused", "None"]
    assert list((root / "tmp").iterdir()) == []
    assert store.get(kept) == b"kept"


@pytest.fixture
def start(root):
    """Runs code after RECORDS in a child; whatever still runs at the end of the test is killed."""
    children = []

    def run(code: str) -> subprocess.Popen:
        command = [sys.executable, "-c", RECORDS + code, str(root)]
        children.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate()


CROWD = """
store = FileStore(root, writable=True)
for round in range(6):
    for i, content in enumerate(contents):
        store.put("payload/" + digest_of(content), content)
        store.put("manifest/" + "%064x" % i, content)
        for name in ("payload/" + digest_of(content), "manifest/" + "%064x" % i):
            found = store.get(name)
            assert found == content, (name, found and len(found))
assert store.n_quarantined == 0, store.n_quarantined
"""


def test_many_processes_write_and_read_the_same_records(root, store, start):
    children = [start(CROWD) for _ in range(6)]
    ended = [child.communicate(timeout=120) for child in children]
    assert [(child.returncode, error) for child, (_, error) in zip(children, ended, strict=True)] == [(0, "")] * 6
    assert len(list(store.keys("payload"))) == len(list(store.keys("manifest"))) == 8
    assert list((root / "tmp").iterdir()) == list((root / "quarantine").iterdir()) == []


CHURN = """
store = FileStore(root, writable=True)
print("up", flush=True)
while True:
    for i, content in enumerate(contents):
        store.delete("payload/" + digest_of(content))
        store.put("payload/" + digest_of(content), content)
        store.put("manifest/" + "%064x" % i, content)
"""

WATCH = """
store = FileStore(root, writable=False)
n = 0
while n < 5000:
    for i, content in enumerate(contents):
        for name in ("payload/" + digest_of(content), "manifest/" + "%064x" % i):
            found = store.get(name)
            assert found in (None, content), name
            n += found is not None
"""


def test_a_reader_beside_writers_sees_whole_records_or_none(start):
    writers = [start(CHURN) for _ in range(2)]
    _, error = (reader := start(WATCH)).communicate(timeout=120)
    assert (reader.returncode, error) == (0, "")
    assert [writer.poll() for writer in writers] == [None, None]


def stopped_while_writing(writer: subprocess.Popen, root) -> bool:
    """Stop the process; let it run on unless an unfinished file of its own lies in tmp/."""
    os.kill(writer.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
    if any((root / "tmp").iterdir()):
        return True
    os.kill(writer.pid, signal.SIGCONT)
    return False


@pytest.mark.parametrize("round_number", range(4))
def test_a_writer_killed_in_the_middle_of_a_put_leaves_whole_records_and_blocks_nobody(root, store, start, round_number):
    writer = start(CHURN)
    assert writer.stdout.readline() == "up\n"
    wait_for(lambda: stopped_while_writing(writer, root), what="an unfinished write")
    writer.kill()
    writer.communicate()
    assert list((root / "tmp").iterdir()) != []
    contents = [bytes([i]) * (200_000 + i) for i in range(8)]
    for i, content in enumerate(contents):
        assert store.get(f"payload/{digest_of(content)}") in (None, content)
        assert store.get(f"manifest/{i:064x}") in (None, content)
    assert store.n_quarantined == 0
    for content in contents:
        assert store.get(put(store, content)) == content
