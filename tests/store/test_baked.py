"""Read-only layers below a store, and stores that were moved, copied, mounted elsewhere or given to somebody else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import catalog, client, get_kernel, protocol
from kserve.config import load_settings
from kserve.errors import NotBuilt
from kserve.store.artifacts import Artifacts
from kserve.store.collect import Bounds
from kserve.store.files import FileStore
from kserve.store.layers import Layers
from kserve.store.upkeep import Upkeep
from tests.support.daemon import ask, daemon, place
from tests.support.definitions import write_cuda
from tests.support.entries import key_of, manifest_of, payload_of, put_entry
from tests.support.processes import kserve, mounted, python

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, or act as another user")
OURS = frozenset({os.getuid()})
STRANGER = 54321


def every_file(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below: mode, owner, modification time, content. A use of a layer leaves no trace in it."""
    found = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (facts.st_mode, facts.st_uid, facts.st_mtime_ns, content)
    return found


def damage(path: Path) -> None:
    """Flip one bit."""
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- the records of several stores ---------------------------------------------------------------------------------


@pytest.fixture
def baked(own_place: Path) -> FileStore:
    return FileStore(own_place / "baked", writable=True)


@pytest.fixture
def over(own_place: Path, baked: FileStore) -> Iterator[Artifacts]:
    """An empty store over the baked one."""
    upkeep = Upkeep(FileStore(own_place / "store", writable=True), Bounds(1 << 40, 1 << 30), in_use=tuple)
    upkeep.start()
    yield Artifacts(upkeep, Layers((baked.root,), uids=OURS))
    upkeep.close()


def test_a_record_of_a_layer_is_served_and_not_copied(baked: FileStore, over: Artifacts):
    made = put_entry(baked, 1, attached=(b"log",))
    before = every_file(baked.root)
    assert over.manifest(key_of(1)) == made
    assert over.is_sound(made)
    assert over.is_sound(made)
    assert over.payload(made) == payload_of(1)
    assert over.attachment(made, "text0") == "log"
    assert over.keys() == [key_of(1)]
    over.upkeep.tend()
    assert over.upkeep.index.usage() == (0, 0, 0)
    assert every_file(baked.root) == before


def test_the_payload_of_a_layer_is_hashed_once(baked: FileStore, over: Artifacts, monkeypatch: pytest.MonkeyPatch):
    made = put_entry(baked, 1)
    assert over.is_sound(made)
    monkeypatch.setattr(over, "payload", lambda manifest: pytest.fail("it was read again"))
    assert over.is_sound(made)


@pytest.mark.parametrize("kind", ["payload", "manifest"])
def test_a_damaged_layer_is_a_miss_and_stays_as_it_is(
    baked: FileStore, over: Artifacts, kind: str, caplog: pytest.LogCaptureFixture
):
    made = put_entry(baked, 1)
    damage(baked.path(f"{kind}/{made.digest if kind == 'payload' else made.key}"))
    before = every_file(baked.root)
    known = over.manifest(key_of(1))
    assert known is None or not over.is_sound(known)
    assert caplog.text == "", "nothing of ours was damaged or dropped"
    over.publish(made, [payload_of(1)])
    assert over.manifest(key_of(1)) == made
    assert over.payload(made) == payload_of(1)
    assert over.files.get(f"payload/{made.digest}") == payload_of(1)
    assert every_file(baked.root) == before


def test_a_second_layer_has_what_the_first_one_lost(own_place: Path, baked: FileStore, over: Artifacts):
    second = FileStore(own_place / "second", writable=True)
    for store in (baked, second):
        made = put_entry(store, 1)
    damage(baked.path(f"manifest/{key_of(1)}"))
    damage(baked.path(f"payload/{made.digest}"))
    both = Artifacts(over.upkeep, Layers((baked.root, second.root), uids=OURS))
    assert both.manifest(key_of(1)) == made
    assert both.payload(made) == payload_of(1)


def test_a_damaged_record_of_the_store_is_found_in_a_layer(baked: FileStore, over: Artifacts):
    made = put_entry(baked, 1)
    over.publish(made, [payload_of(1)])
    damage(over.files.path(f"manifest/{key_of(1)}"))
    damage(over.files.path(f"payload/{made.digest}"))
    assert over.manifest(key_of(1)) == made
    assert over.payload(made) == payload_of(1)
    assert over.files.n_quarantined == 2


def test_an_entry_that_was_built_again_meanwhile_is_not_dropped(over: Artifacts, monkeypatch: pytest.MonkeyPatch):
    """One request finds the payload gone; before it acts, another one's build has published the entry anew."""
    old = put_entry(over.files, 1)
    over.files.path(f"payload/{old.digest}").unlink()
    new = old._replace(created_at=old.created_at + 1.0)
    stamp = over.files.stamp

    def stamp_and_publish(name: str) -> tuple[int, ...]:
        monkeypatch.undo()
        over.publish(new, [payload_of(1)])
        return stamp(name)

    monkeypatch.setattr(over.files, "stamp", stamp_and_publish)
    assert over.payload(old) is None, "as it was seen"
    assert over.manifest(new.key) == new
    assert over.payload(new) == payload_of(1)


def test_an_eviction_never_touches_a_layer(baked: FileStore, over: Artifacts):
    made = put_entry(baked, 1)
    over.publish(manifest_of(2, payload_of(2)), [payload_of(2)])
    before = every_file(baked.root)
    assert over.upkeep.prune([key_of(1), key_of(2)]).keys == [key_of(2)]
    over.upkeep.drop(made)
    assert over.manifest(key_of(1)) == made
    assert every_file(baked.root) == before


# ---- whose layer it is ---------------------------------------------------------------------------------------------

SPOILT: dict[str, Callable[[Path], object]] = {
    "open to the group": lambda root: root.chmod(0o775),
    "open to everybody": lambda root: root.chmod(0o777),
    "a kind open to everybody": lambda root: (root / "manifest").chmod(0o777),
    "a directory of records open to everybody": lambda root: next((root / "manifest").iterdir()).chmod(0o777),
    "a file": lambda root: (shutil.rmtree(root), root.write_text("")),
    "not there": shutil.rmtree,
}
if os.getuid() == 0:
    SPOILT["of another user"] = lambda root: os.chown(root, STRANGER, STRANGER)
    SPOILT["a directory of another user in it"] = lambda root: os.chown(root / "manifest", STRANGER, STRANGER)


@pytest.mark.parametrize("how", SPOILT)
def test_a_layer_that_others_may_write_to_is_refused_by_name(baked: FileStore, how: str):
    put_entry(baked, 1)
    SPOILT[how](baked.root)
    layers = Layers((baked.root,), uids=OURS)
    assert layers.stores == []
    assert str(baked.root) in layers.refused[baked.root]
    assert layers.get(f"manifest/{key_of(1)}") is None


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_manifest_that_others_may_write_to_is_passed_over(baked: FileStore, mode: int):
    """It says which bytes are launched; a payload is known by its digest, whoever may write to it."""
    made = put_entry(baked, 1)
    baked.path(f"manifest/{key_of(1)}").chmod(mode)
    baked.path(f"payload/{made.digest}").chmod(mode)
    layers = Layers((baked.root,), uids=OURS)
    assert layers.get(f"manifest/{key_of(1)}") is None
    assert layers.get(f"payload/{made.digest}") == payload_of(1)


@needs_root
def test_a_trusted_users_layer_is_read(baked: FileStore):
    put_entry(baked, 1)
    for path in (baked.root, *baked.root.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    assert Layers((baked.root,), uids=OURS).stores == []
    trusting = Layers((baked.root,), uids=frozenset({os.getuid(), STRANGER}))
    assert trusting.get(f"manifest/{key_of(1)}") is not None


# ---- a daemon over a layer -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Path, str]]:
    """A store with one kernel, its daemon gone, and the kernel's digest."""
    with place() as root:
        write_cuda(root / "kernels" / "scale")
        with daemon(root) as found, contextlib.closing(found.connection()) as connection:
            digest = ask(connection, found.settings, "scale")["variants"][0]["manifest"]["digest"]
        yield root / "store", digest


@pytest.fixture
def image(kernels: Path, own_place: Path, made: tuple[Path, str]) -> tuple[Path, str]:
    """A store as an image is baked: a faithful copy of one that has the kernel, and the kernel's digest."""
    write_cuda(kernels / "scale")
    subprocess.run(["cp", "-a", str(made[0]), str(own_place / "image")], check=True)
    return own_place / "image", made[1]


@contextlib.contextmanager
def asking(store: str, **more: str) -> Iterator[pytest.MonkeyPatch]:
    """This process as a client with these stores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KSERVE_STORE", store)
        for name, value in more.items():
            patch.setenv(name, value)
        client.forget()
        yield patch
    client.forget()


@pytest.mark.toolchain
def test_a_baked_layer_serves_and_the_store_over_it_stays_empty(own_place: Path, image: tuple[Path, str]):
    baked, digest = image
    before = every_file(baked)
    stores = f"{own_place / 'store'}:{baked}"
    with daemon(own_place, KSERVE_STORE=stores) as found, asking(stores, KSERVE_NO_BUILD="1"):
        for _ in range(2):
            client.forget()
            kernel = get_kernel("scale", target="sm_90")
            assert (kernel.origin, kernel.digest) == ("disk", digest)
        status = found.call("GET", protocol.STATUS)["store"]
        assert (status["layers"], status["refused_layers"]) == ([str(baked)], {})
        assert (status["n_artifacts"], status["degraded"]) == (0, "")
        assert len(found.call("GET", protocol.ARTIFACTS)["artifacts"]) == 2
        shown = kserve("cache", "prune", "--all", "--json", KSERVE_STORE=stores)
        assert json.loads(shown.stdout)["keys"] == []
        assert str(baked) in kserve("status", KSERVE_STORE=stores).stdout
    assert [*(own_place / "store" / "payload").glob("??/*")] == []
    assert every_file(baked) == before


@pytest.mark.toolchain
def test_a_damaged_layer_is_built_around(own_place: Path, image: tuple[Path, str]):
    baked, digest = image
    damage(baked / "payload" / digest[:2] / digest)
    before = every_file(baked)
    stores = f"{own_place / 'store'}:{baked}"
    with daemon(own_place, KSERVE_STORE=stores) as found:
        with asking(stores, KSERVE_NO_BUILD="1"), pytest.raises(NotBuilt):
            get_kernel("scale", target="sm_90")
        with asking(stores):
            kernel = get_kernel("scale", target="sm_90")
            assert (kernel.origin, kernel.digest) == ("built", digest)
            client.forget()
            assert get_kernel("scale", target="sm_90").origin == "disk"
        assert "traceback" not in found.log.lower()
    assert (own_place / "store" / "payload" / digest[:2] / digest).is_file()
    assert every_file(baked) == before


@pytest.mark.toolchain
def test_a_refused_layer_is_shown(own_place: Path, image: tuple[Path, str]):
    baked, _ = image
    baked.chmod(0o777)
    stores = f"{own_place / 'store'}:{baked}"
    with daemon(own_place, KSERVE_STORE=stores) as found, asking(stores, KSERVE_NO_BUILD="1"):
        with pytest.raises(NotBuilt):
            get_kernel("scale", target="sm_90")
        status = found.call("GET", protocol.STATUS)["store"]
        assert status["layers"] == []
        assert "0777" in status["refused_layers"][str(baked)]
        assert "0777" in kserve("status", KSERVE_STORE=stores).stdout


@pytest.mark.toolchain
def test_the_default_store_may_have_a_layer(own_place: Path, image: tuple[Path, str]):
    """KSERVE_STORE=:/baked, seen from a package that is not in a checkout: the store is below XDG_CACHE_HOME."""
    baked, digest = image
    code = (
        "import sys; from kserve import config; from pathlib import Path\n"
        "config._PACKAGE = Path('/nonexistent/kserve')\n"
        "settings = config.load_settings()\nprint(settings.store, *settings.layers, settings.stores)"
    )
    home = own_place / "home"
    said = python(code, KSERVE_STORE=f":{baked}", XDG_CACHE_HOME=str(home)).stdout.split()
    assert said == [f"{home}/kserve", str(baked), f"{home}/kserve:{baked}"]
    with asking(said[2], KSERVE_NO_BUILD="1"):
        kernel = get_kernel("scale", target="sm_90")  # by a daemon that this process starts
        assert (kernel.origin, kernel.digest) == ("disk", digest)
        assert kserve("down").returncode == 0


AS_STRANGER = """
import json, os, sys
import kserve.client.resolve, kserve.client.start, kserve.server.daemon, kserve.cli, tomllib, http.client
from pathlib import Path
from kserve.store.files import FileStore
from kserve.store.layers import Layers
baked, key, digest = sys.argv[1:]
os.setgid(54321); os.setuid(54321)
layers = Layers((Path(baked),), uids=frozenset({54321}))
found = {name: layers.get(name + "/" + hex) is not None for name, hex in (("manifest", key), ("payload", digest))}
print(json.dumps({**found, "refused": {str(root): why for root, why in layers.refused.items()}}))
"""


@needs_root
def test_root_bakes_and_another_user_reads(tmp_path_factory: pytest.TempPathFactory, own_place: Path, baked: FileStore):
    """0755 and readable for all: `chmod -R a+rX`, as docs/configuration.md says. As it was made it is refused with a reason."""
    made = put_entry(baked, 1)
    own_place.chmod(0o755)
    argument = (str(baked.root), made.key, made.digest)
    closed = json.loads(python(AS_STRANGER, *argument).stdout)
    assert (closed["manifest"], closed["payload"]) == (False, False)
    assert "cannot be read" in closed["refused"][str(baked.root)]
    subprocess.run(["chmod", "-R", "a+rX", str(baked.root)], check=True)
    assert stat.S_IMODE(baked.root.stat().st_mode) == 0o755
    assert json.loads(python(AS_STRANGER, *argument).stdout) == {"refused": {}, "manifest": True, "payload": True}


# ---- the same store in another place -------------------------------------------------------------------------------

GET = """
from kserve.client.direct import Wanted, resolve
from kserve.key import digest_of
(kernel,) = resolve([Wanted("scale", "sm_90", {})], load=False)
print(kernel.origin, digest_of(kernel._roads.artifacts[0].payload))
"""


def got(store: Path, **environment: str) -> list[str]:
    """Origin and digest from a fresh process and a fresh daemon that may not build."""
    try:
        done = python(GET, check=False, KSERVE_STORE=str(store), KSERVE_NO_BUILD="1", **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()
    finally:
        kserve("down", KSERVE_STORE=str(store), **environment)


def _moved(root: Path, to: Path) -> Path:
    return Path(shutil.move(root, to))


def _copied(root: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(root), str(to)], check=True)
    return to


@pytest.mark.toolchain
@pytest.mark.parametrize("how", [_moved, _copied], ids=["moved", "cp -r"])
def test_every_hit_is_kept_in_another_place(own_place: Path, image: tuple[Path, str], how: Any):
    root, digest = image
    assert got(how(root, own_place / "other")) == ["disk", digest]


@pytest.mark.toolchain
def test_every_hit_is_kept_under_another_home(own_place: Path, image: tuple[Path, str]):
    root, digest = image
    assert got(root, HOME=str(own_place), XDG_CACHE_HOME=str(own_place / "cache")) == ["disk", digest]


@needs_root
@pytest.mark.toolchain
def test_every_hit_is_kept_when_mounted_elsewhere(own_place: Path, image: tuple[Path, str]):
    root, digest = image
    with mounted(own_place / "mounted", "--bind", str(root), kind="bind") as there:
        assert got(there) == ["disk", digest]


@needs_root
@pytest.mark.toolchain
def test_a_file_system_without_execution_will_do(own_place: Path, image: tuple[Path, str]):
    root, digest = image
    with mounted(own_place / "noexec", "-o", "noexec,nosuid,nodev,mode=0700") as there:
        shutil.copytree(root, there / "store")
        assert got(there / "store") == ["disk", digest]
        built = python(GET.replace('"sm_90", {}', '"sm_90", {"size": 9}'), KSERVE_STORE=str(there / "store"))
        assert built.stdout.split()[0] == "built"
        kserve("down", KSERVE_STORE=str(there / "store"))


# Everything is imported before the user changes: the package may lie where he cannot read.
AS_USER = """
import asyncio, json, os, sys
import kserve.server.daemon, kserve.client.resolve, kserve.cli, kserve.kernel_toml, tomllib, http.client
from kserve.config import load_settings
os.setgid(54321); os.setuid(54321)
from kserve.config import environment_of_process
from kserve.service import KernelService
from kserve.store.files import FileStore
from kserve.build.planner import KernelRequest
from kserve.build.worker_handle import Environment
settings = load_settings()
async def main():
    service = KernelService(settings, FileStore(settings.store, writable=True))
    here = environment_of_process()
    place = Environment(here["python"], tuple(here["python_path"]))
    wish = KernelRequest("scale", json.loads(sys.argv[1]), {}, "sm_90", place, build=False)
    answer = await service.resolve(wish, client="x", wait_s=10)
    print(os.getuid(), answer[0].origin, answer[0].manifest.digest)
    await service.close()
asyncio.run(main())
"""


@needs_root
@pytest.mark.toolchain
def test_every_hit_is_kept_under_another_user(own_place: Path, kernels: Path, image: tuple[Path, str]):
    """chown -R, and the daemon's own code over it under that uid."""
    root, digest = image
    with asking(str(root)):
        files = catalog.find("scale", load_settings()).digests
    subprocess.run(["chown", "-R", f"{STRANGER}:{STRANGER}", str(root)], check=True)
    own_place.chmod(0o755)
    done = python(AS_USER, json.dumps(files), check=False, KSERVE_STORE=str(root), HOME="/nonexistent")
    assert done.stdout.split() == [str(STRANGER), "disk", digest], done.stderr
