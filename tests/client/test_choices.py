"""Knobs on every road: overrides, tunings and locks choose values, and nobody gets a binary that others chose."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import kserve
from kserve import client, get_kernel
from kserve.alias import survey
from kserve.client import loader
from kserve.client.choice import device_for
from kserve.client.direct import Wanted
from kserve.client.local import local
from kserve.client.resolve import ask_each
from kserve.errors import DaemonUnreachable, InvalidSpec, LaunchError, LockMismatch, NotBuilt
from kserve.store.files import FileStore
from kserve.tuning import Tuning, bucket_of
from tests.support import processes
from tests.support.daemon import Daemon, answers
from tests.support.definitions import CUDA_TOML, KNOB_SOURCE, KNOB_TOML, write_cuda
from tests.support.processes import python, wait_for
from tests.support.stub_driver import StubDriver, build_stub

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"
MEMORY = 0x10_0000


@pytest.fixture
def folder(kernels: Path) -> Path:
    """A kernel with knobs, old enough for its stamps to be certain."""
    found = write_cuda(kernels / "things", toml=KNOB_TOML, source=KNOB_SOURCE)
    client.forget()
    wait_for(lambda: survey(local().roots, str(found)))
    return found


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory) -> StubDriver:
    return StubDriver(build_stub(tmp_path_factory.mktemp("stub")))


@pytest.fixture
def device(stub_library: StubDriver, monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    """A device that loads anything and runs nothing."""
    stub_library.reset()
    stub_library.own(MEMORY, 1 << 20)
    monkeypatch.setattr(loader, "_driver", loader.Driver(str(stub_library.path)))
    return stub_library


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From here on nobody may be asked."""

    def refuse(*_: object, **__: object) -> None:
        raise DaemonUnreachable("the daemon was asked")

    def end() -> None:
        client.forget()
        assert processes.kserve("down").returncode == 0
        monkeypatch.setattr("kserve.client.connection.start_daemon", refuse)

    return end


def again(**wish: object) -> client.Kernel:
    client.forget()
    return get_kernel("scale", target=TARGET, **wish)


def tune(knobs: dict[str, int], **sizes: int) -> Tuning:
    """Store a tuning for the current device, as `kserve tune` does."""
    (answer,) = ask_each([Wanted("scale", TARGET, {})], deadline=float("inf"))
    found = Tuning(
        base=answer.base,
        kernel="scale",
        spec={"size": 8},
        target=TARGET,
        device=device_for(TARGET),
        sizes=bucket_of(sizes),
        knobs=knobs,
        rows=[],
        toolchain="",
        version="",
        created_at=0.0,
    )
    settings = local().settings
    answered = Daemon(Path(), settings, None).call("POST", "/v1/tunings", found.to_json())
    assert answered == {"name": found.name}
    return found


def test_every_choice_is_a_build_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch):
    default = again()
    assert default.knobs == {"BLOCK": 128, "UNROLL": 1}
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "64")
    overridden = again()
    assert overridden.knobs == {"BLOCK": 64, "UNROLL": 1}
    assert overridden.manifest.components["knob.BLOCK"] == "64"
    assert overridden.manifest.reason == "BLOCK 128 -> 64"
    monkeypatch.delenv("KSERVE_SCALE_BLOCK")
    assert again().key == default.key != overridden.key


def test_without_a_daemon_each_client_gets_its_own_choice(folder: Path, no_daemon, monkeypatch: pytest.MonkeyPatch):
    keys = {}
    for text in ("", "64", "256"):
        monkeypatch.setenv("KSERVE_SCALE_BLOCK", text)
        keys[text] = again().key
    no_daemon()
    for text in ("256", "", "64"):
        monkeypatch.setenv("KSERVE_SCALE_BLOCK", text)
        assert (again().key, again().origin) == (keys[text], "disk")
    monkeypatch.setenv("KSERVE_SCALE_UNROLL", "2")
    with pytest.raises(DaemonUnreachable):
        again()


def test_the_defaults_are_one_alias_whoever_asked_first(folder: Path, no_daemon, monkeypatch, own_place: Path):
    """What nobody has chosen is read in one look, and a choice made later keeps it."""
    aliases = own_place / "store" / "alias"
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "64")
    chosen = again().key
    assert len([*aliases.glob("??/*")]) == 2, "the signpost, which has no defaults yet, and the choice"
    monkeypatch.delenv("KSERVE_SCALE_BLOCK")
    default = again().key
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "256")
    assert again().origin == "built" and len([*aliases.glob("??/*")]) == 3
    no_daemon()
    monkeypatch.delenv("KSERVE_SCALE_BLOCK")
    assert (again().key, again().origin) == (default, "disk")
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "64")
    assert (again().key, again().origin) == (chosen, "disk")


def test_the_variables_of_the_folder_and_the_alias_count_too(folder: Path, no_daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_BLOCK", "256")
    assert again().knobs["BLOCK"] == 256
    monkeypatch.setenv("KSERVE_THINGS_BLOCK", "64")
    assert again().knobs["BLOCK"] == 64
    no_daemon()
    assert (again().knobs["BLOCK"], again().origin) == (64, "disk")
    monkeypatch.delenv("KSERVE_THINGS_BLOCK")
    assert (again().knobs["BLOCK"], again().origin) == (256, "disk")


def test_a_second_process_does_not_inherit_a_choice(folder: Path):
    code = "from kserve import get_kernel\nk = get_kernel('scale', target='cuda:sm_90')\nprint(k.knobs['BLOCK'], k.origin)"
    found = [python(code, KSERVE_SCALE_BLOCK=text).stdout.split() for text in ("64", "", "64", "")]
    assert found == [["64", "built"], ["128", "built"], ["64", "disk"], ["128", "disk"]]


@pytest.mark.parametrize("text", ["96", "x", "-64", "64.5"])
def test_a_wrong_override_is_refused_before_anybody_is_asked(folder: Path, own_place: Path, monkeypatch, text):
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", text)
    with pytest.raises(InvalidSpec, match="KSERVE_SCALE_BLOCK cannot be") as refused:
        again()
    assert refused.value.facts["allowed"] == "64, 128, 256"
    assert not answers(local().settings)


def test_an_override_that_breaks_a_constraint_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    again()
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "256")
    monkeypatch.setenv("KSERVE_SCALE_UNROLL", "2")
    with pytest.raises(InvalidSpec, match="BLOCK=256 UNROLL=2"):
        again()


def test_the_report_says_who_chose_what(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "64")
    again()
    assert "BLOCK=64 UNROLL=1 (KSERVE_SCALE_BLOCK)" in str(kserve.report())
    again()
    assert kserve.report().calls[-1].kernels[0].knobs == "BLOCK=64 UNROLL=1 (KSERVE_SCALE_BLOCK)"


def test_a_tuning_for_this_device_is_used_by_everybody_on_it(folder: Path, device: StubDriver, no_daemon):
    default = again()
    tune({"BLOCK": 256, "UNROLL": 1})
    tuned = again()
    assert (tuned.knobs["BLOCK"], tuned.origin) == (256, "built")
    assert kserve.report().calls[-1].kernels[0].knobs == "BLOCK=256 UNROLL=1 (tuned)"
    no_daemon()
    assert (again().key, again().origin) == (tuned.key, "disk")
    device.name("another GPU")
    loader._driver = loader.Driver(str(device.path))
    assert (again().key, again().origin) == (default.key, "disk")


def test_tuning_again_changes_the_answer_without_an_edit(folder: Path, device: StubDriver):
    for block in (256, 64, 256):
        tune({"BLOCK": block, "UNROLL": 1})
        assert again().knobs["BLOCK"] == block


def test_an_edited_source_has_no_tuning_yet(folder: Path, device: StubDriver):
    tune({"BLOCK": 256, "UNROLL": 1})
    assert again().knobs["BLOCK"] == 256
    (folder / "kernel.cu").write_text(KNOB_SOURCE + "// edited\n")
    assert again().knobs["BLOCK"] == 128
    (folder / "kernel.cu").write_text(KNOB_SOURCE)
    (folder / "kernel.toml").write_text(KNOB_TOML.replace("[64, 128, 256]", "[32, 64, 128, 256]"))
    assert again().knobs["BLOCK"] == 256, "another configuration to try does not make the winner a loser"


def test_a_tuning_serves_its_bucket_and_one_without_sizes_every_size(folder: Path, device: StubDriver, no_daemon):
    tune({"BLOCK": 64, "UNROLL": 1}, n=1000)
    wishes = {1000: 64, 600: 64, 1025: 128, 512: 128}
    assert {n: again(sizes={"n": n}).knobs["BLOCK"] for n in wishes} == wishes
    assert again().knobs["BLOCK"] == 128
    tune({"BLOCK": 256, "UNROLL": 1})
    assert {n: again(sizes={"n": n}).knobs["BLOCK"] for n in wishes} == {1000: 64, 600: 64, 1025: 256, 512: 256}
    assert again().knobs["BLOCK"] == 256
    no_daemon()
    assert (again(sizes={"n": 700}).knobs["BLOCK"], again(sizes={"n": 9}).knobs["BLOCK"]) == (64, 256)


def test_one_process_may_have_kernels_for_several_buckets(folder: Path, device: StubDriver):
    tune({"BLOCK": 64, "UNROLL": 1}, n=1000)
    client.forget()
    found = [get_kernel("scale", target=TARGET, sizes={"n": n}) for n in (1000, 9, 900, 15)]
    assert [kernel.knobs["BLOCK"] for kernel in found] == [64, 128, 64, 128]
    assert [kernel.origin for kernel in found[2:]] == ["memo", "memo"]


@pytest.mark.parametrize("warm", [False, True])
def test_a_size_that_the_kernel_does_not_have_is_refused(folder: Path, warm):
    if warm:
        again()
    with pytest.raises(InvalidSpec, match="no size 'm'"):
        again(sizes={"m": 8})
    with pytest.raises(InvalidSpec, match="sizes cannot be"):
        again(sizes={"n": 0})


def test_an_override_counts_more_than_a_tuning_and_leaves_the_rest_at_its_default(
    folder: Path, device: StubDriver, monkeypatch
):
    tune({"BLOCK": 64, "UNROLL": 2})
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "256")
    assert again().knobs == {"BLOCK": 256, "UNROLL": 1}


def test_a_tuning_that_the_definition_does_not_allow_is_passed_over(folder: Path, device: StubDriver):
    tune({"BLOCK": 999, "UNROLL": 1})
    assert again().knobs["BLOCK"] == 128


def test_a_damaged_tuning_is_put_aside_and_forgotten(folder: Path, device: StubDriver, own_place: Path):
    found = tune({"BLOCK": 64, "UNROLL": 1})
    assert again().knobs["BLOCK"] == 64
    path = FileStore(own_place / "store", writable=False).path(f"tuning/{found.name}")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-10])
    assert again().knobs["BLOCK"] == 128
    assert not path.exists()
    with pytest.raises(NotBuilt):
        Daemon(Path(), local().settings, None).call("GET", f"/v1/tunings/{found.name}")


def test_tunings_are_verified_listed_and_removed(folder: Path, device: StubDriver, own_place: Path):
    first, second = tune({"BLOCK": 64, "UNROLL": 1}, n=8), tune({"BLOCK": 256, "UNROLL": 1})
    daemon = Daemon(Path(), local().settings, None)
    assert {one["name"] for one in daemon.call("GET", "/v1/tunings?name=scale")["tunings"]} == {first.name, second.name}
    assert daemon.call("GET", "/v1/tunings?name=other") == {"tunings": []}
    path = FileStore(own_place / "store", writable=False).path(f"tuning/{first.name}")
    path.chmod(0o600)
    path.write_bytes(b"{}")
    assert daemon.call("POST", "/v1/verify")["damaged"] == [f"tuning/{first.name}"]
    daemon.call("POST", f"/v1/tunings/{second.name}/remove")
    assert daemon.call("GET", "/v1/tunings") == {"tunings": []}
    assert again().knobs["BLOCK"] == 128


def test_a_bare_grid_is_refused_where_a_knob_decides_it(folder: Path, device: StubDriver):
    kernel = again()
    arguments = (MEMORY, MEMORY + 4096, 1000, 2.0)
    for grid in ((8,), [8], 8):
        with pytest.raises(LaunchError, match="does not follow BLOCK"):
            kernel[grid](*arguments, stream=0)
    kernel(*arguments, stream=0)
    kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](*arguments, stream=0)
    assert [launch.sizes[0] for launch in device.launches()] == [8, 8]


def test_a_bare_grid_is_fine_where_no_knob_decides_it(folder: Path, device: StubDriver):
    (folder / "kernel.toml").write_text(KNOB_TOML.replace('"cdiv(n, BLOCK)"', '"cdiv(n, 64)"'))
    again()[(3,)](MEMORY, MEMORY + 4096, 100, 2.0, stream=0)
    assert device.launches()[0].sizes[0] == 3


def test_a_kernel_without_knobs_has_no_signpost(kernels: Path, own_place: Path):
    found = write_cuda(kernels / "scale", toml=CUDA_TOML)
    client.forget()
    wait_for(lambda: survey(local().roots, str(found)))
    assert again().knobs == {}
    assert len(list((own_place / "store" / "alias").glob("??/*"))) == 1
    assert again(sizes={"n": 8}).origin == "disk"


def lock(own_place: Path, *more: str, **environment: str):
    path = str(own_place / "kserve.lock")
    return processes.kserve("lock", *more, "--file", path, **environment)


def test_a_lock_keeps_the_values_it_was_made_with(folder: Path, device: StubDriver, own_place: Path, monkeypatch):
    tune({"BLOCK": 64, "UNROLL": 1})
    tuned = again()
    monkeypatch.setattr("kserve.cli.lock.load_settings", lambda: local().settings)
    from kserve.cli import main

    path = own_place / "kserve.lock"
    assert main(["lock", "scale", "--target", TARGET, "--file", str(path)]) == 0
    tune({"BLOCK": 256, "UNROLL": 1})
    monkeypatch.setenv("KSERVE_LOCK", str(path))
    assert (again().key, again().knobs["BLOCK"]) == (tuned.key, 64)
    assert main(["lock", "--check", "--file", str(path)]) == 0
    monkeypatch.setenv("KSERVE_SCALE_BLOCK", "64")
    assert again().key == tuned.key
    for value in ("128", "x"):
        monkeypatch.setenv("KSERVE_SCALE_BLOCK", value)
        with pytest.raises(LockMismatch, match="KSERVE_SCALE_BLOCK"):
            again()


def test_what_a_shell_overrides_is_not_locked_for_everybody(folder: Path, own_place: Path):
    refused = lock(own_place, "scale", "--target", TARGET, KSERVE_SCALE_BLOCK="64")
    assert refused.returncode == 2 and "KSERVE_SCALE_BLOCK=64" in refused.stderr
    assert not (own_place / "kserve.lock").exists()
    python(f"from kserve import get_kernel\nget_kernel('scale', target='{TARGET}')", KSERVE_SCALE_BLOCK="64")
    assert lock(own_place, "--all").returncode == 0
    assert '"BLOCK": 128' in (own_place / "kserve.lock").read_text()


def test_the_list_of_kernels_has_the_knobs_and_names_misspelled_variables(folder: Path):
    done = processes.kserve("kernels", "--json", KSERVE_SCALE_BLOK="64", KSERVE_SCALE_BLOCK="64", THE_BLOK="1")
    assert done.returncode == 0
    assert done.stderr == "kserve: KSERVE_SCALE_BLOK is no setting, and overrides no knob\n"
    (scale,) = [row for row in json.loads(done.stdout)["kernels"] if row["name"] == "scale"]
    assert scale["knobs"]["BLOCK"] == {
        "allowed": "64, 128, 256",
        "default": "128 + 128 * (size > 8)",
        "variables": ["KSERVE_SCALE_BLOCK", "KSERVE_THINGS_BLOCK", "THE_BLOCK"],
    }


def test_choices_are_kept_apart_while_they_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KSERVE_SCALE_UNROLL", "")
    found = {}
    for block, unroll in [*itertools.product(("", "64", "128"), ("", "1", "2"))] * 2:
        monkeypatch.setenv("KSERVE_SCALE_BLOCK", block)
        monkeypatch.setenv("KSERVE_SCALE_UNROLL", unroll)
        kernel = again()
        assert kernel.knobs == {"BLOCK": int(block or 128), "UNROLL": int(unroll or 1)}
        assert found.setdefault(tuple(kernel.knobs.values()), kernel.key) == kernel.key
    assert len(set(found.values())) == 4
