"""Parts of the road of an extension on their own: flags as torch's users write them, dependency lists, shared libraries."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kserve.doors.flags import codes_of_devices, codes_of_list, split
from kserve.errors import BuildError, CompileFailed, RequestError
from kserve.toolchain.depfile import Roots, listed, read_from_roots
from kserve.toolchain.library import needs_of
from tests.support.mutations import damaged

FLAGS = {
    "one word each": (["-O3", "-DX=1"], ("-O3", "-DX=1"), (), ()),
    "several in one": (["-O3 -DX=1"], ("-O3", "-DX=1"), (), ()),
    "quoted for a shell": (["-DX='a b'"], ("-DX=a b",), (), ()),
    "an include directory": (["-I/a", "-O2"], ("-O2",), (("/a", "include"),), ()),
    "in two words": (["-I", "/a", "-isystem", "/b"], (), (("/a", "include"), ("/b", "system")), ()),
    "device code": (["-gencode=arch=compute_90a,code=sm_90a"], (), (), ("sm_90a",)),
    "device code in two words": (["-gencode", "arch=compute_80,code=[sm_80,compute_80]"], (), (), ("sm_80", "compute_80")),
    "an arch": (["-arch=sm_90"], (), (), ("sm_90", "compute_90")),
    "options for the host": (
        ["-Xcompiler", "-fopenmp", "--use_fast_math"],
        ("-Xcompiler", "-fopenmp", "--use_fast_math"),
        (),
        (),
    ),
}


@pytest.mark.parametrize(("given_flags", "plain", "roots", "codes"), FLAGS.values(), ids=FLAGS.keys())
def test_flags_are_taken_apart(given_flags: list[str], plain: tuple, roots: tuple, codes: tuple):
    assert split("extra_cuda_cflags", given_flags) == (plain, roots, codes)


def test_a_library_by_its_path_becomes_a_place():
    found = split("extra_ldflags", ["-L/far -lfar", "/near/libnear.a", "-Wl,--no-as-needed"])
    assert found.plain == ("-lfar", "{root1}", "-Wl,--no-as-needed")
    assert found.roots == (("/far", "library"), ("/near/libnear.a", "read"))


@pytest.mark.parametrize(
    "flag", ["-o x", "-include x.h", "@args", "-fplugin=p.so", "-x c", "-save-temps", "-MD", "-gencode=what"]
)
def test_a_flag_that_reads_or_writes_in_another_way_is_named(flag: str):
    with pytest.raises(RequestError, match="extra_cflags"):
        split("extra_cflags", [flag])


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="'\"\\"), max_size=12), max_size=4))
def test_any_flags_are_taken_or_refused(flags: list[str]):
    try:
        found = split("extra_cflags", flags)
    except RequestError:
        return
    assert not any(flag.startswith(("-I", "-L", "@")) for flag in found.plain)


def test_torchs_list_of_arches():
    assert codes_of_list("8.0;9.0a+PTX 12.0") == ("compute_90a", "sm_120", "sm_80", "sm_90a")
    assert codes_of_list("Ampere") == ("compute_86", "sm_80", "sm_86")
    assert codes_of_devices([(9, 0), (8, 0), (9, 0)]) == ("compute_90", "sm_80", "sm_90")
    with pytest.raises(RequestError, match="Kepler"):
        codes_of_list("Kepler")


def test_a_dependency_list_with_all_that_make_escapes(tmp_path: Path):
    deps = tmp_path / "unit.d"
    deps.write_text("unit.o: /a/one.h \\\n  /a/two\\ words.h /a/cash$$.h \\\n /a/b/../three.h\n/a/one.h:\n")
    assert listed(deps) == ["/a/one.h", "/a/two words.h", "/a/cash$.h", "/a/three.h"]


def roots_of(*paths: Path, identified: tuple[str, ...] = ()) -> Roots:
    return Roots([*map(str, paths)], [*identified, *[""] * (len(paths) - len(identified))], [*range(len(paths))])


def test_what_was_read_is_named_by_the_place_it_lies_in_and_what_would_hide_it_by_its_absence(tmp_path: Path):
    for name in ("first/a.h", "second/deep/b.h", "pack/c.h", "known/d.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    roots = roots_of(tmp_path / "first", tmp_path / "second", tmp_path / "pack", identified=("", "", "pack-1"))
    paths = [str(tmp_path / name) for name in ("first/a.h", "second/deep/b.h", "pack/c.h", "known/d.h")]
    found = read_from_roots(paths, roots, known=[str(tmp_path / "known")], since_ns=time.time_ns())
    assert found.keys() == {"0/a.h", "1/deep/b.h", "0/deep", "0/c.h", "1/c.h"}
    assert found["0/deep"] == found["0/c.h"] == ""
    assert len(found["1/deep/b.h"]) == 64


def test_a_file_that_changed_since_and_one_that_hides_its_reads_are_refused(tmp_path: Path):
    began = time.time_ns()
    header = tmp_path / "a.h"
    header.write_text('asm(".incbin \\"x\\"");')
    with pytest.raises(BuildError, match=r"a\.h was changed while it was compiled"):
        read_from_roots([str(header)], roots_of(tmp_path), known=[], since_ns=began - 10**9)
    with pytest.raises(CompileFailed, match="incbin"):
        read_from_roots([str(header)], roots_of(tmp_path), known=[], since_ns=time.time_ns() + 10**9)


def interpreter() -> bytes:
    return Path(os.path.realpath(sys.executable)).read_bytes()


def test_what_a_library_needs_is_in_its_own_tables():
    found = needs_of(interpreter())
    assert any(name.startswith("libc.so") for name in found["libraries"].split())
    assert found["glibc"].startswith("2.")


@given(damaged(interpreter()[:20_000]))
def test_a_damaged_library_is_a_sentence(content: bytes):
    try:
        needs_of(content)
    except CompileFailed as error:
        assert "output" in error.message
