"""The catalog: names, folders, and the files a build may read."""

from __future__ import annotations

import sys
from hashlib import sha256

import pytest

from kserve import catalog
from kserve.catalog import every_entry, find, kernel_folders
from kserve.config import Settings, built_in_roots
from kserve.errors import InvalidDefinition, UnknownKernel
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda


@pytest.fixture
def settings(kernels):
    return Settings(kernel_path=(kernels,))


def renamed(name: str) -> str:
    return CUDA_TOML.replace('name = "scale"', f'name = "{name}"')


def test_an_entry_is_found_with_its_files(settings, kernels):
    folder = write_cuda(kernels / "mine")
    found = find("scale", settings)
    assert (found.folder, found.name) == (folder, "scale")
    assert found.files == {"kernel.cu": CUDA_SOURCE.encode(), "kernel.toml": CUDA_TOML.encode()}
    assert found.digests == {name: sha256(content).hexdigest() for name, content in found.files.items()}


@pytest.mark.parametrize("name", ["fused_norm_residual", "realspace_fwd", "realspace_bwd"])
def test_the_built_in_kernels_are_found_without_any_setting(name):
    assert find(name, Settings()).name == name


def test_every_built_in_definition_is_sound():
    names = [entry.name for _, _, entry in every_entry(Settings())]
    assert names == sorted(names)
    assert all(find(name, Settings()).files for name in names)


def test_a_root_may_be_a_kernel_folder_itself(kernels):
    folder = write_cuda(kernels / "mine")
    assert find("scale", Settings(kernel_path=(folder,))).folder == folder


def test_a_folder_without_a_definition_and_a_root_that_is_not_there_hold_nothing(kernels):
    (kernels / "empty").mkdir()
    assert kernel_folders([kernels, kernels / "missing"]) == []


def test_a_root_named_twice_is_searched_once(kernels):
    write_cuda(kernels / "mine")
    (kernels.parent / "link").symlink_to(kernels)
    settings = Settings(kernel_path=(kernels, kernels, kernels.parent / "link", kernels / "mine"))
    assert find("scale", settings).folder == kernels / "mine"


def test_an_entry_is_found_by_its_own_name_and_not_by_its_folders(settings, kernels):
    write_cuda(kernels / "mine", toml=renamed("first"))
    with pytest.raises(UnknownKernel):
        find("mine", settings)


@pytest.mark.parametrize("quoted", ["'scale'", '"""scale"""'])
def test_a_name_may_be_written_any_way_toml_allows(settings, kernels, quoted):
    write_cuda(kernels / "mine", toml=CUDA_TOML.replace('"scale"', quoted, 1))
    assert find("scale", settings).name == "scale"


def test_an_unknown_name_is_answered_with_the_nearest(settings, kernels):
    write_cuda(kernels / "mine")
    with pytest.raises(UnknownKernel) as caught:
        find("scle", settings)
    assert "scale" in caught.value.message


def test_a_name_defined_twice_is_refused_with_both_folders(settings, kernels):
    folders = [write_cuda(kernels / "one"), write_cuda(kernels / "two")]
    with pytest.raises(InvalidDefinition) as caught:
        find("scale", settings)
    assert all(str(folder) in caught.value.message for folder in folders)


def test_a_users_kernel_cannot_take_a_built_in_name(settings, kernels):
    write_cuda(kernels / "mine", toml=renamed("fused_norm_residual"))
    with pytest.raises(InvalidDefinition):
        find("fused_norm_residual", settings)


@pytest.mark.parametrize("content", [b"schema = 1 oops", b"\xff\xfe", b""], ids=["not TOML", "not UTF-8", "empty"])
def test_a_broken_folder_does_not_hide_the_others(settings, kernels, content):
    write_cuda(kernels / "mine")
    (kernels / "broken").mkdir()
    (kernels / "broken" / "kernel.toml").write_bytes(content)
    assert find("scale", settings).folder == kernels / "mine"


def test_a_broken_definition_is_named_by_its_file(settings, kernels):
    write_cuda(kernels / "mine", toml=CUDA_TOML.replace("schema = 1", "schema = 7"))
    with pytest.raises(InvalidDefinition) as caught:
        find("scale", settings).check({}, "sm_90")
    assert str(kernels / "mine" / "kernel.toml") in caught.value.message


def test_an_edit_is_seen_by_the_next_call(settings, kernels):
    folder = write_cuda(kernels / "mine")
    before = find("scale", settings).digests
    (folder / "kernel.cu").write_text(CUDA_SOURCE + "// more\n")
    after = find("scale", settings).digests
    assert after["kernel.toml"] == before["kernel.toml"]
    assert after["kernel.cu"] != before["kernel.cu"]


def with_headers(*patterns: str, field: str = "headers") -> str:
    listed = ", ".join(f'"{pattern}"' for pattern in patterns)
    return CUDA_TOML.replace("headers = []", f"{field} = [{listed}]")


def test_globs_collect_files_by_relative_name_in_one_order(settings, kernels):
    folder = write_cuda(kernels / "mine", toml=with_headers("*.cuh", "deep/**/*.h"), b__cuh="b", a__cuh="a", other__txt="no")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "x.h").write_text("x")
    assert list(find("scale", settings).files) == ["a.cuh", "b.cuh", "deep/er/x.h", "kernel.cu", "kernel.toml"]


def test_shared_headers_come_from_the_include_folder_beside_it(settings, kernels):
    write_cuda(kernels / "mine", toml=with_headers("lib/*.cuh", field="shared_headers"))
    (kernels / "include" / "lib").mkdir(parents=True)
    (kernels / "include" / "lib" / "x.cuh").write_text("x")
    assert find("scale", settings).files["include/lib/x.cuh"] == b"x"


@pytest.mark.parametrize(
    "pattern", ["missing.cuh", "*.cuh", "deep", ".", "**x.cuh", "[", "a/**b", "x" * 300, "a/" * 3000 + "b"]
)
def test_a_pattern_that_gives_no_file_is_refused(settings, kernels, pattern):
    folder = write_cuda(kernels / "mine", toml=with_headers(pattern))
    (folder / "deep").mkdir()
    with pytest.raises(InvalidDefinition) as caught:
        find("scale", settings)
    assert pattern in caught.value.message


@pytest.mark.parametrize("target", ["../outside.cuh", "/etc/hostname"])
def test_a_link_that_leads_outside_is_refused(settings, kernels, target):
    folder = write_cuda(kernels / "mine", toml=with_headers("link.cuh"))
    (kernels / "outside.cuh").write_text("secret")
    (folder / "link.cuh").symlink_to(target)
    with pytest.raises(InvalidDefinition) as caught:
        find("scale", settings)
    assert "link.cuh" in caught.value.message


def test_a_link_that_stays_inside_is_followed(settings, kernels):
    folder = write_cuda(kernels / "mine", toml=with_headers("link.cuh"), real__txt="real")
    (folder / "link.cuh").symlink_to("real.txt")
    assert find("scale", settings).files["link.cuh"] == b"real"


def test_a_file_that_is_too_large_is_refused(settings, kernels):
    folder = write_cuda(kernels / "mine")
    with (folder / "kernel.cu").open("wb") as file:
        file.truncate((4 << 20) + 1)
    with pytest.raises(InvalidDefinition) as caught:
        find("scale", settings)
    assert "kernel.cu" in caught.value.message


@pytest.mark.parametrize("value", ["offering", "offering.kernels", "offering:kernels"])
def test_an_installed_package_offers_kernels_and_is_not_imported(own_place, monkeypatch, value):
    site = own_place / "site"
    package = site / "offering"
    write_cuda((package / "kernels" if value != "offering" else package) / "mine")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    metadata = site / "offering-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{catalog.ENTRY_POINT_GROUP}]\nmine = {value}\n")
    monkeypatch.syspath_prepend(str(site))
    assert find("scale", Settings()).folder.is_relative_to(package)
    assert "offering" not in sys.modules


def test_an_entry_point_whose_package_is_gone_offers_nothing(own_place, monkeypatch):
    metadata = own_place / "site" / "gone-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{catalog.ENTRY_POINT_GROUP}]\nmine = gone_package\n")
    monkeypatch.syspath_prepend(str(own_place / "site"))
    with pytest.raises(UnknownKernel):
        find("no_such_kernel", Settings())


def test_the_built_in_roots_hold_kernels():
    assert all(root.is_dir() for root in built_in_roots())
    assert kernel_folders([*built_in_roots()])
