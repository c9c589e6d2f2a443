"""The direct road: hits from the store's files without a daemon, and every doubt that must lead to one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from kserve import client, get_kernel
from kserve.alias import Alias, alias_from_bytes, alias_to_bytes, changed_since, request_digest, survey
from kserve.artifact import from_compact, manifest_from_bytes
from kserve.client.launch import Kernel
from kserve.client.local import local
from kserve.errors import CorruptArtifact, DaemonUnreachable, InvalidDefinition, InvalidSpec, LoadError, ProtocolMismatch
from kserve.key import digest_of
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import kserve, python, wait_for

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"
HEADER_TOML = CUDA_TOML.replace("headers = []", 'headers = ["*.cuh"]')
HEADER_SOURCE = '#include "factor.cuh"\n' + CUDA_SOURCE


@pytest.fixture
def folder(kernels: Path) -> Path:
    return write_cuda(kernels / "scale", toml=HEADER_TOML, source=HEADER_SOURCE, factor__cuh="// one\n")


@pytest.fixture
def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel is in the store with its alias; no daemon runs and none may be started."""
    settle(folder)
    get_kernel("scale", target=TARGET)
    down()
    monkeypatch.setattr("kserve.client.connection.start_daemon", no_daemon)
    return folder


def no_daemon(*_: object, **__: object) -> None:
    raise DaemonUnreachable("the daemon was asked")


def down() -> None:
    client.forget()
    assert kserve("down").returncode == 0


def settle(folder: Path) -> None:
    """Wait until the files are old enough to be told from later ones by their stamps."""
    client.forget()
    wait_for(lambda: survey(local().roots, str(folder)))


def again(**spec: object):
    client.forget()
    return get_kernel("scale", target=TARGET, **spec)


def aliases(root: Path) -> list[Path]:
    return sorted((root / "store" / "alias").glob("??/*"))


def test_a_hit_needs_no_daemon(alone: Path):
    found = again()
    assert (found.origin, found.name) == ("disk", "scale")
    assert found.generic is not None


def test_a_hit_imports_neither_http_nor_toml(alone: Path):
    code = (
        "import sys\nfrom kserve import get_kernel\n"
        f"kernel = get_kernel('scale', target='{TARGET}')\n"
        "print(kernel.origin, *sorted({'http.client', 'tomllib', 'kserve.catalog', 'subprocess'} & set(sys.modules)))"
    )
    assert python(code, KSERVE_AUTOSTART="0").stdout.split() == ["disk"]


@pytest.mark.parametrize("wish", [{"size": 16}, {"target": "cuda:sm_80"}])
def test_another_wish_is_asked_for(alone: Path, wish):
    with pytest.raises(DaemonUnreachable):
        get_kernel("scale", **{"target": TARGET, **wish})


@pytest.mark.parametrize("wish", [{"size": True}, {"width": 8}])
def test_a_wrong_wish_is_refused_without_a_daemon(alone: Path, wish):
    with pytest.raises(InvalidSpec):
        again(**wish)


def edited(folder: Path) -> None:
    (folder / "kernel.cu").write_text(HEADER_SOURCE.replace("factor * x", "x * factor"))


def edited_header(folder: Path) -> None:
    (folder / "factor.cuh").write_text("// two\n")


def edited_with_its_time_put_back(folder: Path) -> None:
    before = (folder / "factor.cuh").stat()
    edited_header(folder)
    os.utime(folder / "factor.cuh", ns=(before.st_atime_ns, before.st_mtime_ns))


def added(folder: Path) -> None:
    (folder / "more.cuh").write_text("// matched by the pattern\n")


def removed(folder: Path) -> None:
    (folder / "factor.cuh").unlink()


def replaced(folder: Path) -> None:
    (folder / "other").write_text("// one\n")
    (folder / "other").rename(folder / "factor.cuh")


def touched(folder: Path) -> None:
    (folder / "factor.cuh").touch()


def redefined(folder: Path) -> None:
    (folder / "kernel.toml").write_text(HEADER_TOML.replace("[128]", "[64]"))


def another_folder(folder: Path) -> None:
    write_cuda(folder.parent / "another", toml=CUDA_TOML)


CHANGES = [edited, edited_header, edited_with_its_time_put_back, added, removed, replaced, touched, redefined, another_folder]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changed_the_daemon_is_asked(alone: Path, change):
    change(alone)
    with pytest.raises((DaemonUnreachable, InvalidDefinition)):
        again()


def test_a_program_that_loads_many_kernels_looks_at_their_files_once_a_second(folder: Path, monkeypatch: pytest.MonkeyPatch):
    settle(folder)
    sizes = (4, 8, 16)
    for size in sizes:
        get_kernel("scale", target=TARGET, size=size)
    down()
    monkeypatch.setattr("kserve.client.connection.start_daemon", no_daemon)
    began = time.monotonic()
    assert again(size=4).origin == "disk"
    edited(folder)
    assert get_kernel("scale", target=TARGET, size=8).origin == "disk"
    time.sleep(max(0.0, began + 1.1 - time.monotonic()))
    with pytest.raises(DaemonUnreachable):
        get_kernel("scale", target=TARGET, size=16)


def without_its_second_variant(own_place: Path) -> Kernel:
    """A kernel from disk whose variant for no facts is evicted before anybody needed it."""
    found = again()
    later = found._roads.artifacts[1]
    assert found.origin == "disk"
    (own_place / "store" / "payload" / later.digest[:2] / later.digest).unlink()
    return found


def test_a_second_variant_that_is_gone_when_it_is_needed_is_built_again(folder: Path, own_place: Path):
    settle(folder)
    first = get_kernel("scale", target=TARGET)
    found = without_its_second_variant(own_place)
    assert (found.generic.key, found.generic.digest) == (first.generic.key, first.generic.digest)
    assert digest_of(found._roads.artifacts[1].payload) == first.generic.digest


def test_a_second_variant_that_nobody_can_build_any_more_says_so(folder: Path, own_place: Path):
    settle(folder)
    get_kernel("scale", target=TARGET)
    found = without_its_second_variant(own_place)
    edited_header(folder)
    with pytest.raises(LoadError, match="it cannot be built again") as raised:
        _ = found.generic
    assert "forget" in raised.value.hint
    assert found.manifest.key, "the first variant is as good as ever"


def test_a_folder_that_becomes_a_kernels_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder.parent / "another").mkdir()
    settle(folder)
    get_kernel("scale", target=TARGET)
    write_cuda(folder.parent / "another", toml=CUDA_TOML)
    with pytest.raises(InvalidDefinition):
        again()


def test_bytecode_beside_a_source_is_no_change(alone: Path):
    for place in (alone, alone.parent):
        (place / "__pycache__").mkdir()
        (place / "__pycache__" / "kernel.cpython-312.pyc").touch()
    assert again().origin == "disk"


def test_an_edit_and_its_revert(folder: Path):
    settle(folder)
    first = again()
    edited_header(folder)
    settle(folder)
    second = again()
    (folder / "factor.cuh").write_text("// one\n")
    settle(folder)
    third = again()
    assert (first.key != second.key, third.key, third.origin) == (True, first.key, "disk")
    down()
    assert again().key == first.key


def test_a_file_that_was_written_a_moment_ago_makes_no_alias(folder: Path, own_place: Path):
    edited_header(folder)
    again()
    assert aliases(own_place) == []
    settle(folder)
    again()
    assert len(aliases(own_place)) == 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\xff\x00", b'{"schema": 99}'])
def test_a_damaged_alias_is_as_good_as_none(alone: Path, own_place: Path, damage):
    (path,) = aliases(own_place)
    path.chmod(0o600)
    path.write_bytes(damage)
    with pytest.raises(DaemonUnreachable):
        again()


def test_a_damaged_alias_is_written_again(folder: Path, own_place: Path):
    settle(folder)
    again()
    (path,) = aliases(own_place)
    path.chmod(0o600)
    path.write_bytes(b"")
    again()
    down()
    assert again().origin == "disk"


def spoil(own_place: Path, kind: str, how: str) -> None:
    for path in (own_place / "store" / kind).glob("??/*"):
        content = path.read_bytes()
        path.unlink()
        if how != "removed":
            path.write_bytes(content[: len(content) // 2] if how == "cut" else bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize(
    ("kind", "how"), [("manifest", "removed"), *(("payload", how) for how in ("removed", "cut", "flipped"))]
)
def test_a_damaged_entry_is_left_to_the_daemon(alone: Path, own_place: Path, kind, how):
    spoil(own_place, kind, how)
    with pytest.raises(DaemonUnreachable):
        again()


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_manifest_costs_what_only_it_holds(alone: Path, own_place: Path, how):
    """The alias holds what a launch needs, under a seal of its own."""
    digest = again().digest
    spoil(own_place, "manifest", how)
    found = again()
    assert (found.origin, found.digest) == ("disk", digest)
    with pytest.raises(CorruptArtifact):
        dict(found.manifest.components)


def test_a_store_that_others_can_write_to_is_not_read(alone: Path, own_place: Path):
    (own_place / "store").chmod(0o777)
    with pytest.raises(DaemonUnreachable):
        again()


def test_a_compiler_whose_files_changed_is_noticed(alone: Path, own_place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kserve.client.local.is_as_it_was", lambda path, stated: False)
    with pytest.raises(DaemonUnreachable):
        again()


def test_a_compiler_that_this_process_imported_in_another_version_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.support.definitions import write_triton

    settle(write_triton(kernels / "tscale"))
    get_kernel("tscale", target=TARGET)
    monkeypatch.setattr("triton.__version__", "0.0.1")
    client.forget()
    with pytest.raises(ProtocolMismatch):
        get_kernel("tscale", target=TARGET)


def test_the_last_use_is_noted(alone: Path, own_place: Path):
    paths = list((own_place / "store" / "manifest").glob("??/*"))
    for path in paths:
        os.utime(path, (1, 1))
    again()
    assert all(time.time() - path.stat().st_mtime < 60 for path in paths)


def test_only_the_missing_kernels_of_a_batch_are_asked_for(folder: Path):
    settle(folder)
    again(size=8)
    client.forget()
    found = client.get_kernels([("scale", {"size": 8}), ("scale", {"size": 16}), ("scale", {"size": 8})], target=TARGET)
    assert [kernel.origin for kernel in found] == ["disk", "built", "disk"]
    assert found[0].key == found[2].key != found[1].key


def test_an_alias_says_when_it_was_changed():
    alias = Alias([["a" * 64]], "cuda", "13.0", "b" * 64, '{"0/k":[1,2,3,4]}')
    content = alias_to_bytes(alias)
    assert alias_from_bytes(content) == alias
    assert alias_from_bytes(content.replace(b"aaaa", b"aaab", 1)) is None


def test_stamps_of_roots_that_do_not_exist_do_not_hold(own_place: Path):
    assert changed_since('{"1/k": []}', [str(own_place)], {}) == "1/k"
    assert changed_since('{"x": []}', [str(own_place)], {}) == "x"
    assert changed_since('{"0/k": []}', [str(own_place)], {}) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"spec": {"n": 2}},
        {"spec": {"n": True}},
        {"target": "sm_80"},
        {"roots": ["/b"]},
        {"environment": {"python": "/q", "python_path": []}},
        {"environment": {"python": "/p", "python_path": ["/x"]}},
    ],
    ids=str,
)
def test_a_request_digest_differs_on_everything_but_files(change):
    base = {
        "name": "k",
        "spec": {"n": 1},
        "target": "sm_90",
        "roots": ["/a"],
        "environment": {"python": "/p", "python_path": []},
    }

    def digest(wish):
        return request_digest(wish.pop("name"), wish.pop("spec"), wish.pop("target"), **wish)

    assert digest({**base, **change}) != digest(dict(base))


def test_what_was_built_on_the_command_line_is_found_from_python(folder: Path):
    settle(folder)
    assert kserve("build", "scale", "--target", TARGET, "--set", "size=16").returncode == 0
    down()
    assert again(size=16).origin == "disk"
    client.forget()
    assert get_kernel("scale", target=TARGET, size=np.int64(16)).origin == "disk"


def test_what_an_alias_does_not_hold_is_read_when_it_is_looked_at(alone: Path, own_place: Path):
    found = again().manifest
    assert found.components["entry"] == "scale"
    assert set(found.attachments) == {"log", "ptx"}
    whole = manifest_from_bytes(
        (own_place / "store" / "manifest" / found.key[:2] / f"{found.key}.json").read_bytes(), key=found.key
    )
    assert found == whole
    assert found.to_bytes() == whole.to_bytes()


@pytest.mark.parametrize("found", [[], [1] * 16, ["x"] * 16, [None] * 16, "text", {}])
def test_a_compact_manifest_of_another_form_is_refused(found):
    with pytest.raises(CorruptArtifact):
        from_compact(found, lambda key: None)
