"""Loading and launching on a real device: every road, every guard."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from kserve import client, get_kernel, get_kernels
from kserve.client import arguments
from kserve.errors import LaunchError, LoadError
from tests.support.definitions import CUDA_TOML, write_cuda
from tests.support.place import shared_place
from tests.support.processes import REPOSITORY, python

pytestmark = [pytest.mark.gpu, pytest.mark.toolchain, pytest.mark.usefixtures("gpu")]


@pytest.fixture(scope="module")
def own_place():
    """One store and one daemon for all cases here: they share kernels, not state."""
    with shared_place() as root:
        yield root


@pytest.fixture
def data():
    import torch

    x = torch.randn(1000, device="cuda")
    return x, torch.full_like(x, float("nan"))


@pytest.fixture(params=["first call", "generated", "compiled"])
def scale(kernels, data, request, monkeypatch):
    """out = factor * x, with alignment facts on both pointers: about to be called first, or on one of its quick roads."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")
    monkeypatch.setenv("KSERVE_LAUNCHER", "compiled" if request.param == "compiled" else "python")
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale")
    if request.param != "first call":
        settle(kernel, data)
        assert ("builtin" in type(kernel.__call__).__name__) is (request.param == "compiled")
    return kernel


def settle(kernel, data):
    """Call it until its road is its last one."""
    import torch

    x, out = data
    for _ in range(3):
        kernel(x, torch.empty_like(out), 1000, 1.0)
    assert kernel._roads.settled
    torch.cuda.synchronize()


def test_a_call_launches_on_torch_tensors(scale, data):
    x, out = data
    scale(x, out, 1000, 2.0)
    assert (out == 2 * x).all()


def test_a_launch_with_the_callers_grid(scale, data):
    import torch

    x, out = data
    scale[(4,)](x, out, 1000, 3.0)
    assert (out[:512] == 3 * x[:512]).all()
    assert out[512:].isnan().all()
    scale[lambda meta: (-(-meta["n"] // 128),)](x, out, 1000, 3.0)
    assert torch.equal(out, 3 * x)


def test_zero_elements_launch_nothing(scale, data):
    x, out = data
    scale(x, out, 0, 2.0)
    assert out.isnan().all()


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_misaligned_view_takes_the_generic_variant(scale, data, shift, monkeypatch):
    import torch

    monkeypatch.setenv("KSERVE_NO_BUILD", "1")
    x, out = data
    for _ in range(2):  # the first call chooses the road, the second is the generated one
        out.fill_(float("nan"))
        scale(x[shift:], out[shift:], 1000 - shift, 2.0)
        torch.cuda.synchronize()
        assert (out[shift:] == 2 * x[shift:]).all()
    assert scale.generic is not None


def test_a_capture_may_be_the_first_to_need_the_generic_variant(scale, data):
    import torch

    x, out = data
    client.forget()
    fresh = get_kernel("scale")  # the driver has not seen its second variant
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh(x[1:], out[1:], 999, 2.0)
    for factor in (1.0, 3.0):
        x.mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert (out[1:] == 2 * x[1:]).all()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda a: a[:3], "4 arguments"),
        (lambda a: [*a, 1], "4 arguments"),
        (lambda a: [a[0].double(), *a[1:]], "argument x"),
        (lambda a: [a[0].half(), *a[1:]], "argument x"),
        (lambda a: [a[0].cpu(), *a[1:]], "argument x"),
        (lambda a: [a[0], a[1].cpu(), *a[2:]], "argument out"),
        (lambda a: [a[0][::2], *a[1:]], "argument x"),
        (lambda a: [None, *a[1:]], "argument x"),
        (lambda a: [a[0].cpu().data_ptr(), *a[1:]], "argument x"),
        (lambda a: [a[0].data_ptr() + 1, *a[1:]], "argument x"),
        (lambda a: [-a[0].data_ptr(), *a[1:]], "argument x"),
        (lambda a: [2**64 + a[0].data_ptr(), *a[1:]], "argument x"),
        (lambda a: [True, *a[1:]], "argument x"),
        (lambda a: [a[0].view(10, 100).to_sparse(), *a[1:]], "argument x"),
        (lambda a: [a[0].to("meta"), *a[1:]], "argument x"),
        (lambda a: [*a[:2], 2**31, a[3]], "argument n"),
        (lambda a: [*a[:2], -(2**31) - 1, a[3]], "argument n"),
        (lambda a: [*a[:2], 1.0, a[3]], "argument n"),
        (lambda a: [*a[:2], True, a[3]], "argument n"),
        (lambda a: [*a[:2], a[0], a[3]], "argument n"),
        (lambda a: [*a[:3], "2"], "argument factor"),
        (lambda a: [*a[:3], a[0]], "argument factor"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_launch(scale, data, change, names):
    x, out = data
    good = [x, out, 1000, 2.0]
    with pytest.raises(LaunchError, match=names):
        scale(*change(good))
    assert out.isnan().all()


def test_numpy_scalars_and_integers_for_floats_are_taken(scale, data):
    np = pytest.importorskip("numpy")
    x, out = data
    for n, factor in ((np.int64(1000), np.float32(2)), (np.int32(1000), 2), (1000, np.float64(2.0))):
        out.fill_(float("nan"))
        scale(x, out, n, factor)
        assert (out == 2 * x).all()


def test_a_fake_tensor_is_refused(scale, data):
    from torch._subclasses import FakeTensorMode

    x, out = data
    with FakeTensorMode() as mode, pytest.raises(LaunchError, match="memory"):
        scale(mode.from_tensor(x), out, 1000, 2.0)
    assert out.isnan().all()


def test_the_address_of_a_tensor_runs_on_the_stream_of_another_argument(scale, data):
    x, out = data
    for _ in range(2):
        out.fill_(float("nan"))
        scale(x.data_ptr(), out, 1000, 2.0)
        assert (out == 2 * x).all()
    with pytest.raises(LaunchError, match="stream"):
        scale(x.data_ptr(), out.data_ptr(), 1000, 2.0)


def test_a_launch_that_the_driver_refuses_names_its_sizes(kernels, data, scale, monkeypatch):
    import torch

    toml = CUDA_TOML.replace("block = [128] }", "block = [128], shared_bytes = 'n * 8' }")
    write_cuda(kernels / "scale", toml=toml)
    client.forget()
    kernel = get_kernel("scale")
    x, out = data
    for _ in range(3):
        with pytest.raises(LaunchError, match="launch") as caught:
            kernel(x, out, 2**20, 1.0)
        assert "8388608" in caught.value.facts["shared"]
        kernel(x, out, 1000, 2.0)
        torch.cuda.synchronize()
        assert (out == 2 * x).all()


def test_a_launch_that_waits_for_a_full_queue_lets_other_threads_go_on(scale, data):
    import threading
    import time

    import torch

    x, out = data

    def work() -> None:
        torch.cuda._sleep(4_000_000_000)  # two seconds
        for _ in range(3000):
            scale(x, out, 1000, 2.0)

    thread = threading.Thread(target=work)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    torch.cuda.synchronize()
    assert longest < 0.5
    assert (out == 2 * x).all()


def test_cupy_arrays_run_on_cupys_stream(scale):
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(1000, dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.full_like(x, cupy.nan)
        scale(x, out, 1000, 2.0)
        stream.synchronize()
    assert bool((out == 2 * x).all())


def test_any_cuda_array_interface_needs_a_stream(scale, data):
    class Foreign:
        def __init__(self, tensor):
            self.tensor = tensor

        @property
        def __cuda_array_interface__(self):
            return {**self.tensor.__cuda_array_interface__, "stream": None}

    x, out = data
    with pytest.raises(LaunchError, match="stream"):
        scale(Foreign(x), Foreign(out), 1000, 2.0)
    import torch

    scale(Foreign(x), Foreign(out), 1000, 2.0, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert (out == 2 * x).all()


def test_two_libraries_with_different_streams_need_a_stream(scale, data):
    import torch

    cupy = pytest.importorskip("cupy")
    x, out = data
    mirror = cupy.asarray(out)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        with pytest.raises(LaunchError, match="stream"):
            scale(x, mirror, 1000, 2.0)
        scale(x, mirror, 1000, 2.0, stream=side)
    side.synchronize()
    assert (out == 2 * x).all()


def test_the_launch_is_on_torchs_current_stream(scale, data):
    import torch

    x, out = data
    scale(x, out, 1000, 1.0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        scale(x, out, 1000, 5.0)
    assert not torch.equal(out, 5 * x), "the launch did not wait for its stream"
    side.synchronize()
    assert torch.equal(out, 5 * x)


def test_a_first_launch_inside_graph_capture(scale, data):
    import torch

    x, out = data
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, out, 1000, 2.0)
    assert out.isnan().all()
    x.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 14.0).all()


def test_several_threads_launch_at_once(scale):
    import threading

    import torch

    failures = []

    def work(factor: float) -> None:
        x = torch.randn(1000, device="cuda")
        for _ in range(200):
            out = torch.empty_like(x)
            scale(x, out, 1000, factor)
            if not torch.equal(out, factor * x):
                failures.append(factor)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_child_forked_after_cuda_is_told_to_spawn(scale):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        try:
            get_kernel("fused_norm_residual")
            queue.put("no error")
        except Exception as error:
            queue.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    said = queue.get()
    process.join(60)
    assert said.startswith("LoadError")
    assert "spawn" in said


def test_a_spawned_child_without_main_guard(scale, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text("""
import multiprocessing, torch
from kserve import get_kernel
def work(results):
    x = torch.ones(8, device="cuda")
    out = torch.zeros_like(x)
    get_kernel("scale")(x, out, 8, 3.0)
    results.put(float(out.sum()))
if multiprocessing.current_process().name == "MainProcess":
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results,))
    process.start()
    print(results.get())
    process.join()
""")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.strip() == "24.0", done.stderr


def test_another_archs_binary_is_refused_with_its_name(kernels):
    write_cuda(kernels / "scale")
    kernel = get_kernel("scale", target="sm_120")
    with pytest.raises(LoadError, match="sm_120"):
        kernel(1, 2, 3, 4)


def test_as_cupy_runs_the_same_bytes(scale):
    cupy = pytest.importorskip("cupy")
    numpy = pytest.importorskip("numpy")
    x = cupy.arange(1000, dtype=cupy.float32)
    out = cupy.zeros_like(x)
    scale.as_cupy()((8,), (128,), (x, out, numpy.int32(1000), numpy.float32(2)))
    assert bool((out == 2 * x).all())


def test_two_kernels_in_one_round_trip(kernels, data):
    write_cuda(kernels / "scale")
    first, second = get_kernels([("scale", {"size": 1}), ("scale", {"size": 2})])
    assert first.key != second.key
    x, out = data
    second(x, out, 1000, 4.0)
    assert (out == 4 * x).all()


def test_shared_memory_above_48_kib_is_raised(kernels):
    import torch

    source = """
template <int SIZE>
__global__ void scale(const float* x, float* out, int n, float factor) {
  extern __shared__ float buffer[];
  for (int i = threadIdx.x; i < 20000; i += blockDim.x) buffer[i] = factor;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = buffer[19999 - threadIdx.x] * x[i];
}
"""
    write_cuda(
        kernels / "scale", toml=CUDA_TOML.replace("block = [128] }", "block = [128], shared_bytes = 80000 }"), source=source
    )
    x = torch.randn(300, device="cuda")
    out = torch.empty_like(x)
    get_kernel("scale")(x, out, 300, 2.0)
    assert torch.equal(out, 2 * x)


def test_a_second_device(scale):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    x = torch.randn(1000, device="cuda:1")
    out = torch.full_like(x, float("nan"))
    for _ in range(2):
        scale(x, out, 1000, 2.0)  # the current device is 0
        assert torch.equal(out, 2 * x)
    with pytest.raises(LaunchError, match="different devices"):
        scale(x, torch.empty(1000, device="cuda:0"), 1000, 2.0)
    with torch.cuda.device(1):
        other = get_kernel("scale")
        other(x, out, 1000, 4.0)
    assert torch.equal(out, 4 * x)


def test_without_torch_in_the_process():
    pytest.importorskip("cupy")
    done = python(
        """
import sys, cupy
from kserve import get_kernel
x = cupy.random.standard_normal((64, 128), dtype=cupy.float32); out = cupy.empty_like(x)
ones, zeros = cupy.ones(128, cupy.float32), cupy.zeros(128, cupy.float32)
get_kernel("fused_norm_residual")(x, cupy.zeros_like(x), ones, zeros, out, 64, 1e-5)
assert abs(float(out.mean())) < 1e-5 and "torch" not in sys.modules
print("fine")
"""
    )
    assert "fine" in done.stdout, done.stderr


def test_addresses_in_a_process_without_torch(kernels):
    write_cuda(kernels / "scale")
    done = python(
        """
import ctypes, sys, threading
from kserve import get_kernel
from kserve.errors import LaunchError

scale = get_kernel("scale")  # makes a context where there is none
cuda = ctypes.CDLL("libcuda.so.1")
def done(status): assert status == 0, status
def allocated():
    address = ctypes.c_uint64()
    done(cuda.cuMemAlloc_v2(ctypes.byref(address), 4096))
    return address.value
x, out = allocated(), allocated()
host = (ctypes.c_float * 1000)(*range(1000))
done(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(x), host, ctypes.c_size_t(4000)))
def check(shift, factor):
    result = (ctypes.c_float * 1000)()
    done(cuda.cuCtxSynchronize())
    done(cuda.cuMemcpyDtoH_v2(result, ctypes.c_uint64(out), ctypes.c_size_t(4000)))
    assert list(result)[shift:] == [factor * number for number in range(shift, 1000)]
for shift in (0, 0, 1, 2, 4):  # some of these are not 16-byte aligned
    factor = 2.0 + shift
    scale(x + 4 * shift, out + 4 * shift, 1000 - shift, factor, stream=0)
    check(shift, factor)
thread = threading.Thread(target=scale, args=(x, out, 1000, 9.0), kwargs={"stream": 0})
thread.start(); thread.join()
check(0, 9.0)
for wrong in (-x, 2**64 + x, ctypes.addressof(host), x + 2, 0, True, 10**40):
    try: scale(wrong, out, 1000, 2.0, stream=0)
    except LaunchError as error: assert "argument x" in str(error), error
    else: raise AssertionError(wrong)
try: scale(x, out, 1000, 2.0)
except LaunchError as error: assert "stream" in str(error)
else: raise AssertionError("no stream was named")
assert not {"torch", "cupy", "numpy"} & set(sys.modules)
print("fine")
"""
    )
    assert "fine" in done.stdout, done.stderr


def test_addresses_of_cupys_memory_without_torch(kernels):
    pytest.importorskip("cupy")
    write_cuda(kernels / "scale")
    done = python(
        """
import sys, cupy
from kserve import get_kernel
x = cupy.arange(1000, dtype=cupy.float32); out = cupy.full_like(x, cupy.nan)
scale = get_kernel("scale")
scale(x.data.ptr, out.data.ptr, 1000, 3.0, stream=cupy.cuda.get_current_stream())
assert bool((out == 3 * x).all())
scale(x, out.data.ptr, 1000, 4.0)  # on the stream of x
assert bool((out == 4 * x).all()) and "torch" not in sys.modules
print("fine")
"""
    )
    assert "fine" in done.stdout, done.stderr


def test_a_thread_without_a_context_launches(scale, data):
    import threading

    x, out = data
    scale(x, out, 1000, 1.0)
    failures = []

    def work() -> None:
        try:
            for factor in (2.0, 3.0):
                scale(x, out, 1000, factor)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    assert (out == 3 * x).all()


def test_the_slow_road_reads_what_the_quick_one_packs(scale, data):
    x, out = data
    read = [arguments.read("scale", p, a) for p, a in zip(scale.manifest.contract.params, (x, out, 1000, 2.0), strict=True)]
    assert [item.value for item in read] == [x.data_ptr(), out.data_ptr(), 1000, 2.0]
