"""Settings: where a value comes from, what is refused, and the directories and environments made from them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kserve import config
from kserve.config import (
    Settings,
    daemon_environment,
    environment_of_process,
    load_settings,
    python_command,
    usable_cores,
    worker_environment,
)
from kserve.errors import ForeignPeer, RequestError, StoreError
from kserve.ownership import network_file_system, private_directory, refuse_foreign


@pytest.fixture
def home(own_place):
    """A home directory with a configuration file to write."""
    (own_place / "home" / ".config" / "kserve").mkdir(parents=True)
    return own_place / "home"


def with_file(home: Path, text: str) -> dict[str, str]:
    (home / ".config" / "kserve" / "config.toml").write_text(text)
    return {"HOME": str(home)}


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("KSERVE_STORE", "/some/store", "store", Path("/some/store")),
        ("KSERVE_STORE", "/some/../store/", "store", Path("/store")),
        ("KSERVE_STORE", "/some/store:/baked:/other/", "store", Path("/some/store")),
        ("KSERVE_STORE", "/some/store:/baked:/other/", "layers", (Path("/baked"), Path("/other"))),
        ("KSERVE_STORE", "/some/store::/baked:", "layers", (Path("/baked"),)),
        ("KSERVE_STORE", ":/baked", "layers", (Path("/baked"),)),
        ("KSERVE_STORE", "/some/store", "layers", ()),
        ("KSERVE_MAX_BYTES", "1000000", "max_bytes", 1_000_000),
        ("KSERVE_MAX_FILES", "1000", "max_files", 1000),
        ("KSERVE_RUNTIME_DIR", "/run/me", "runtime_dir", Path("/run/me")),
        ("KSERVE_PATH", "/a:/b", "kernel_path", (Path("/a"), Path("/b"))),
        ("KSERVE_PATH", "/a::", "kernel_path", (Path("/a"),)),
        ("KSERVE_AUTOSTART", "0", "autostart", False),
        ("KSERVE_AUTOSTART", "ON", "autostart", True),
        ("KSERVE_NO_BUILD", "1", "no_build", True),
        ("KSERVE_NO_BUILD", "false", "no_build", False),
        ("KSERVE_JOBS", "3", "jobs", 3),
        ("KSERVE_IDLE_S", "0.5", "idle_s", 0.5),
        ("KSERVE_BUILD_TIMEOUT_S", "90", "build_timeout_s", 90.0),
        ("KSERVE_CLIENT_TIMEOUT_S", "90", "client_timeout_s", 90.0),
        ("KSERVE_FAILURE_MEMORY_S", "5", "failure_memory_s", 5.0),
        ("KSERVE_JOB_MEMORY_BYTES", "1073741824", "job_memory_bytes", 1 << 30),
        ("KSERVE_TRUSTED_UIDS", "0, 1000 7", "trusted_uids", (0, 1000, 7)),
        ("KSERVE_LAUNCHER", "Python", "launcher", "python"),
        ("KSERVE_LOG", "WARNING", "log", "warning"),
    ],
)
def test_a_variable_sets_its_field(variable, text, field, value):
    found = getattr(load_settings(environ={variable: text}), field)
    assert found == value
    assert type(found) is type(value)


def test_every_field_has_a_variable():
    assert {*config._VARIABLES, "layers"} == set(Settings._fields)  # KSERVE_STORE names the layers too


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KSERVE_AUTOSTART", "maybe"),
        ("KSERVE_NO_BUILD", "2"),
        ("KSERVE_JOBS", "0"),
        ("KSERVE_JOBS", "-1"),
        ("KSERVE_JOBS", "2.5"),
        ("KSERVE_JOBS", "many"),
        ("KSERVE_IDLE_S", "0"),
        ("KSERVE_IDLE_S", "-1"),
        ("KSERVE_IDLE_S", "nan"),
        ("KSERVE_IDLE_S", "inf"),
        ("KSERVE_BUILD_TIMEOUT_S", "soon"),
        ("KSERVE_JOB_MEMORY_BYTES", "16G"),
        ("KSERVE_TRUSTED_UIDS", "root"),
        ("KSERVE_LAUNCHER", "fast"),
        ("KSERVE_LOG", "loud"),
        ("KSERVE_MAX_BYTES", "0"),
        ("KSERVE_MAX_BYTES", "20 GiB"),
        ("KSERVE_MAX_FILES", "-5"),
        ("KSERVE_STORE", "/store:~no_such_user_here/baked"),
        ("KSERVE_STORE", "~no_such_user_here/store"),
        ("KSERVE_PATH", "/a:~no_such_user_here/kernels"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_with_what_is_allowed(variable, text):
    with pytest.raises(RequestError) as caught:
        load_settings(environ={variable: text})
    assert variable in caught.value.message
    assert text in caught.value.message
    assert caught.value.facts["allowed"]


def test_an_empty_variable_counts_as_not_set():
    assert load_settings(environ={name: "" for name, _, _ in config._VARIABLES.values()}) == load_settings(environ={})


def test_later_sources_win(home):
    environ = with_file(home, 'jobs = 2\nidle_s = 20\nlog = "debug"')
    found = load_settings({"idle_s": 40.0, "log": None}, {**environ, "KSERVE_IDLE_S": "30", "KSERVE_JOBS": "3"})
    assert (found.jobs, found.idle_s, found.log, found.build_timeout_s) == (3, 40.0, "debug", 600.0)


def test_the_configuration_file_is_found_under_xdg_config_home(home):
    with_file(home, "jobs = 2")
    assert load_settings(environ={"XDG_CONFIG_HOME": str(home / ".config"), "HOME": "/nonexistent"}).jobs == 2


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ('store = "/some/store"', "store", Path("/some/store")),
        ('kernel_path = ["/a", "/b"]', "kernel_path", (Path("/a"), Path("/b"))),
        ('kernel_path = "/a"', "kernel_path", (Path("/a"),)),
        ("autostart = false", "autostart", False),
        ("no_build = 1", "no_build", True),
        ("idle_s = 5", "idle_s", 5.0),
        ('trusted_uids = "0 7"', "trusted_uids", (0, 7)),
        ("trusted_uids = [0, 7]", "trusted_uids", (0, 7)),
        ("trusted_uids = 7", "trusted_uids", (7,)),
    ],
)
def test_a_file_sets_its_field(home, text, field, value):
    assert getattr(load_settings(environ=with_file(home, text)), field) == value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("jobs = 0", "jobs"),
        ("jobs = true", "jobs"),
        ("jobs = [1]", "jobs"),
        ("cores = 4", "cores"),
        ("[daemon]\njobs = 4", "daemon"),
        ("jobs = ", "config.toml"),
        ('store = ""', "store"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(home, text, named):
    with pytest.raises(RequestError) as caught:
        load_settings(environ=with_file(home, text))
    assert str(home) in caught.value.message
    assert named in caught.value.message


@pytest.mark.parametrize("variable", ["CI", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_no_daemon_is_left_behind_where_something_else_owns_processes(variable):
    assert load_settings(environ={}).autostart is True
    assert load_settings(environ={variable: "1"}).autostart is False
    assert load_settings(environ={variable: "1", "KSERVE_AUTOSTART": "1"}).autostart is True


@pytest.mark.parametrize(
    ("extra", "expected"), [({}, "checkout/cache/store"), ({"XDG_CACHE_HOME": "/x"}, "checkout/cache/store")]
)
def test_the_store_of_a_checkout_lies_in_it(own_place, monkeypatch, extra, expected):
    (own_place / "checkout" / "cuda_src").mkdir(parents=True)
    (own_place / "checkout" / "pyproject.toml").touch()
    monkeypatch.setattr(config, "_PACKAGE", own_place / "checkout" / "kserve")
    assert load_settings(environ=extra).store == own_place / expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "{root}/xdg", "HOME": "{root}/home"}, "{root}/xdg/kserve"),
        ({"HOME": "{root}/home"}, "{root}/home/.cache/kserve"),
        ({"HOME": "{root}/file", "SLURM_TMPDIR": "{root}/slurm", "TMPDIR": "{root}/tmp"}, "{root}/slurm/kserve-{uid}"),
        ({"TMPDIR": "{root}/tmp"}, "{root}/tmp/kserve-{uid}"),
        ({}, "/var/tmp/kserve-{uid}"),
    ],
)
def test_the_store_of_an_installed_package_lies_in_the_users_cache(own_place, monkeypatch, environ, expected):
    def filled(text):
        return text.format(root=own_place, uid=os.getuid())

    (own_place / "file").touch()  # a home that holds no directory
    monkeypatch.setattr(config, "_PACKAGE", own_place / "site-packages" / "kserve")
    found = load_settings(environ={name: filled(value) for name, value in environ.items()})
    assert str(found.store) == filled(expected)


def test_an_empty_first_store_is_the_default_one():
    assert load_settings(environ={"KSERVE_STORE": ":/baked"}).store == load_settings(environ={}).store


MOUNTS = """
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / {root}/home rw,relatime - nfs4 server:/home rw,vers=4.2
31 22 0:41 / {root}/scratch rw - ext4 /dev/sdb1 rw
32 22 0:42 / {root}/shared rw - fuse.sshfs user@host: rw
"""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "{root}/home/me", "TMPDIR": "{root}/scratch"}, "{root}/scratch/kserve-{uid}"),
        ({"HOME": "{root}/home/me", "XDG_CACHE_HOME": "{root}/scratch/cache"}, "{root}/scratch/cache/kserve"),
        (
            {"HOME": "{root}/home/me", "SLURM_TMPDIR": "{root}/shared", "TMPDIR": "{root}/scratch/"},
            "{root}/scratch/kserve-{uid}",
        ),
        ({"HOME": "{root}/home/me", "TMPDIR": "{root}/shared"}, "/var/tmp/kserve-{uid}"),
        ({"HOME": "{root}/home/me"}, "/var/tmp/kserve-{uid}"),
    ],
)
@pytest.mark.parametrize("package", ["site-packages", "home/checkout"])
def test_the_default_store_is_on_a_local_disk(own_place, monkeypatch, environ, expected, package):
    """HOME on a network file system, and the checkout with it."""

    def filled(text):
        return text.format(root=own_place, uid=os.getuid())

    (own_place / "mounts").write_text(filled(MOUNTS).lstrip())
    for directory in ("home/me", "home/checkout/cuda_src", "scratch", "shared"):
        (own_place / directory).mkdir(parents=True)
    (own_place / "home" / "checkout" / "pyproject.toml").touch()
    monkeypatch.setattr(config, "network_file_system", partial(network_file_system, mounts=own_place / "mounts"))
    monkeypatch.setattr(config, "_PACKAGE", own_place / package / "kserve")
    found = load_settings(environ={name: filled(value) for name, value in environ.items()})
    assert str(found.store) == filled(expected)


def test_the_runtime_directory_is_the_sessions_or_one_of_this_user():
    assert load_settings(environ={"XDG_RUNTIME_DIR": "/run/user/7"}).runtime_dir == Path("/run/user/7")
    assert load_settings(environ={}).runtime_dir == Path(f"/tmp/kserve-{os.getuid()}")


def test_a_socket_belongs_to_one_store():
    sockets = {Settings(store=Path(name), runtime_dir=Path("/run/me")).socket for name in ("/a", "/b", "/a/b")}
    assert len(sockets) == 3
    assert all(path.is_relative_to("/run/me/kserve") and path.name == "kserve.sock" for path in sockets)


def test_one_store_has_one_socket_however_it_is_named(own_place):
    (own_place / "real").mkdir()
    (own_place / "link").symlink_to("real")
    names = [own_place / "real", own_place / "link", own_place / "real" / ".." / "real"]
    assert len({load_settings(environ={"KSERVE_STORE": str(name)}).socket for name in names}) == 1


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_a_socket_path_that_does_not_fit_is_refused(length, fits):
    rest = len("/kserve/0123456789ab/kserve.sock")
    settings = Settings(runtime_dir=Path("/" + "d" * (length - rest - 1)))
    if fits:
        assert len(str(settings.socket)) == length
    else:
        with pytest.raises(StoreError):
            _ = settings.socket


def test_cores_are_at_least_one_and_at_most_the_affinity():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    assert load_settings(environ={}).jobs == usable_cores()


def test_a_private_directory_is_made_for_its_owner_alone(own_place):
    made = private_directory(own_place / "a" / "b")
    assert (made.stat().st_mode & 0o777, made.stat().st_uid) == (0o700, os.getuid())
    assert private_directory(made) == made


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_directory_others_can_write_to_is_refused(own_place, mode):
    path = own_place / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ForeignPeer):
        private_directory(path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_directory_others_can_only_read_is_accepted(own_place, mode):
    path = own_place / "readable"
    path.mkdir()
    path.chmod(mode)
    assert private_directory(path) == path


def test_a_link_in_place_of_the_directory_is_refused(own_place):
    (own_place / "real").mkdir(mode=0o700)
    (own_place / "link").symlink_to("real")
    with pytest.raises(ForeignPeer):
        private_directory(own_place / "link")


def test_a_directory_of_another_user_is_refused(own_place):
    with pytest.raises(ForeignPeer) as caught:
        refuse_foreign(own_place, own_place.lstat(), uids=frozenset({os.getuid() + 1}))
    assert str(own_place) in caught.value.message


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nowhere/store"])
def test_a_directory_that_cannot_be_made_is_a_store_error(own_place, path):
    (own_place / "file").touch()
    with pytest.raises(StoreError) as caught:
        private_directory(own_place / path)
    assert path in caught.value.message


def test_a_worker_sees_nothing_of_the_callers_environment(monkeypatch):
    for name in ("NVCC_APPEND_FLAGS", "CPATH", "CUDA_HOME", "TRITON_PTXAS_PATH", "LD_PRELOAD", "PYTHONSTARTUP", "HTTP_PROXY"):
        monkeypatch.setenv(name, "/callers")
    found = worker_environment(["/a", "/b"], Path("/scratch"))
    assert "/callers" not in found.values()
    assert found["PYTHONPATH"] == "/a:/b"
    assert {found["HOME"], found["TMPDIR"]} == {"/scratch"}
    assert found["TRITON_CACHE_DIR"].startswith("/scratch/")
    assert (found["CUDA_CACHE_DISABLE"], found["TRITON_DISABLE_LINE_INFO"], found["PYTHONHASHSEED"]) == ("1", "1", "0")


def test_a_daemon_keeps_its_settings_and_nothing_of_a_job(monkeypatch):
    for name in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "AWS_SECRET_ACCESS_KEY", "MASTER_ADDR"):
        monkeypatch.setenv(name, "callers")
    monkeypatch.setenv("KSERVE_JOBS", "7")
    monkeypatch.setenv("PYTHONPATH", "/some/path")
    found = daemon_environment()
    assert "callers" not in found.values()
    assert (found["KSERVE_JOBS"], found["PYTHONPATH"], found["PATH"]) == ("7", "/some/path", os.environ["PATH"])


def test_the_environment_of_a_process_names_interpreter_search_path_and_loaded_versions(own_place, monkeypatch):
    class Loaded:
        __version__ = "9.9.9+test"

    (own_place / "one").mkdir()
    (own_place / "link").symlink_to("one")
    monkeypatch.setenv("PYTHONPATH", f"{own_place / 'link'}:{own_place / 'missing'}:")
    monkeypatch.setitem(sys.modules, "torch", Loaded)
    monkeypatch.setitem(sys.modules, "triton", None)
    found = environment_of_process()
    assert found["python"] == sys.executable
    assert found["python_path"][0] == str(own_place / "one")
    assert str(own_place / "missing") not in found["python_path"]
    assert found["loaded"] == {"torch": "9.9.9+test"}


def test_a_child_runs_this_package_and_takes_nothing_from_its_working_directory(own_place):
    (own_place / "kserve.py").write_text("raise RuntimeError('the wrong package')")
    (own_place / "json.py").write_text("raise RuntimeError('the wrong json')")
    command = python_command(sys.executable, "kserve.cli", "--version")
    child = subprocess.run(command, cwd=own_place, env={}, capture_output=True, text=True, check=False, timeout=60)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.startswith("kserve ")
