"""The ways to get a kernel, one function each: import what it takes and return `obtain`.

`obtain(wish)` returns what launches that kernel when it is called with the wish's arguments. What a provider can do before the
first launch it does there, as a program would. Without a GPU it goes as far as the bytes.

Imports nothing: a child of the cold-start benchmark loads it before the clock starts.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Obtain = Callable[[Any], Callable[..., object]]

ALIGNED = {f"KSERVE_ALIGN_{name}": 16 for name in ("X", "RESIDUAL", "GAMMA", "BETA", "OUT")}
TRITON_BLOCK = {"realspace_fwd": 512, "realspace_bwd": 256}  # as in triton_src/realspace/kernel.toml
TRITON_WARPS = 4


class Unavailable(Exception):
    """This machine cannot run the arm, and why: no failure, and no number."""


def kserve(job: Any) -> Obtain:
    """get_kernel, by whatever road the environment leaves it."""
    from kserve import get_kernel

    return lambda wish: get_kernel(wish.name, **wish.spec, **job.named_target)


def triton(job: Any) -> Obtain:
    """Triton's own launcher and cache."""
    from importlib import util

    spec = util.spec_from_file_location("realspace", f"{job.repository}/triton_src/realspace/realspace.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def obtain(wish: Any) -> Callable[..., object]:
        function, block = getattr(module, wish.name), TRITON_BLOCK[wish.name]
        constants = {"N_ANG": wish.spec.get("n_ang", 3), "N_GRID": wish.points, "BLOCK": block}
        if not job.gpu:
            return _compiled_ahead(job, function, constants)

        def launch(*arguments: Any) -> None:
            function[(-(-arguments[-1] // block),)](*arguments, **constants, num_warps=TRITON_WARPS)

        return launch

    return obtain


def _compiled_ahead(job: Any, function: Any, constants: dict[str, int]) -> Callable[..., object]:
    """The bytes through Triton's cache for a named target, as its launcher would ask for them."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    types = dict.fromkeys(names, "*fp32") | {"rows": "i64"} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name] == "*fp32"}
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
    gpu = GPUTarget("cuda", int(job.target.partition("sm_")[2]), 32)
    compiled = triton_compile(source, target=gpu, options={"num_warps": TRITON_WARPS})
    return lambda *_: compiled.asm["cubin"]


def cupy(job: Any) -> Obtain:
    """CuPy's RawModule and its cache."""
    import cupy as library
    import numpy

    def obtain(wish: Any) -> Callable[..., object]:
        fact, kernel = job.fact(wish), cupy_kernel(job, wish)

        def launch(*arguments: Any) -> None:
            arrays = [library.asarray(tensor) for tensor in arguments[:5]]
            kernel(tuple(fact["grid"]), tuple(fact["block"]), (*arrays, numpy.int64(arguments[5]), numpy.float32(arguments[6])))

        return launch

    return obtain


def cupy_kernel(job: Any, wish: Any) -> Any:
    """The wish as a cupy.RawKernel."""
    import cupy as library

    if not job.gpu:
        raise Unavailable("CuPy compiles only where there is a GPU")
    # The compiler's own hidden cache stays out of it, warm or cold: CuPy's cache is what is measured.
    options = ("--std=c++17", "--no-cache", *(f"-D{name}={value}" for name, value in ALIGNED.items()))
    expression = _expression(job, wish)
    return library.RawModule(code=job.norm_source, options=options, name_expressions=[expression]).get_function(expression)


def cuda_core(job: Any) -> Obtain:
    """cuda.core with its program cache, the way its documentation gives for templates: the key by hand, the symbol known."""
    from ctypes import c_float

    from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch
    from cuda.core.utils import FileStreamProgramCache, make_program_cache_key

    arch = job.arch
    macros = [(name, str(value)) for name, value in ALIGNED.items()]
    options = ProgramOptions(arch=arch, std="c++17", define_macro=macros)
    cache, code = FileStreamProgramCache(job.cache), job.norm_source
    if job.gpu:
        device = Device()
        device.set_current()

    def code_of(wish: Any) -> tuple[Any, str]:
        expression = _expression(job, wish)
        key = make_program_cache_key(
            code=code, code_type="c++", options=options, target_type="cubin", name_expressions=[expression]
        )
        found = cache.get(key)
        if found is not None:
            return ObjectCode.from_cubin(found), job.fact(wish)["symbol"]
        built = Program(code, "c++", options=options).compile("cubin", name_expressions=[expression])
        cache[key] = built
        return built, expression

    def obtain(wish: Any) -> Callable[..., object]:
        fact, (built, name) = job.fact(wish), code_of(wish)
        if not job.gpu:
            return lambda *_: built.code
        kernel = built.get_kernel(name)
        config = LaunchConfig(grid=tuple(fact["grid"]), block=tuple(fact["block"]))

        def start(*arguments: Any) -> None:
            pointers = [tensor.data_ptr() for tensor in arguments[:5]]
            launch(device.default_stream, config, kernel, *pointers, arguments[5], c_float(arguments[6]))

        return start

    return obtain


def _expression(job: Any, wish: Any) -> str:
    """The template instance that kserve builds for the wish."""
    c = job.fact(wish)["constants"]
    return f"norm_residual<float, {c['hidden']}, false, {c['lanes']}, {c['groups']}, {c['rows']}>"


def extension(job: Any) -> Obtain:
    """torch.utils.cpp_extension.load: binding in C++, kernel in CUDA."""
    from torch.utils.cpp_extension import load

    def obtain(_: Any) -> Callable[..., object]:
        module = load(
            name="norm_extension",
            sources=[f"{job.place}/extension/{name}" for name in ("binding.cpp", "kernel.cu")],
            extra_include_paths=[f"{job.repository}/cuda_src/include", f"{job.repository}/cuda_src/norm_residual"],
            extra_cuda_cflags=["-std=c++17", *(f"-D{name}={value}" for name, value in ALIGNED.items())],
        )
        return module.norm_residual  # type: ignore[no-any-return]

    return obtain


def hugging_face(job: Any) -> Obtain:
    """Hugging Face `kernels`, from a local directory that holds the extension's library."""
    from pathlib import Path

    from kernels import get_local_kernel

    return lambda _: get_local_kernel(Path(job.place, "hub")).norm_residual


def driver(job: Any) -> Obtain:
    """The driver alone, through ctypes: the file, its library, the function resident."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Unavailable("there is no NVIDIA driver on this machine") from None

    def obtain(wish: Any) -> Callable[..., object]:
        fact = job.fact(wish)
        function = loaded(cuda, fact)
        return lambda *arguments: prepared(cuda, function, fact, arguments)()

    return obtain


def loaded(cuda: Any, fact: Any) -> Any:
    """The function in the binary of that fact, resident on the current device."""
    from ctypes import byref, c_void_p

    with open(fact["payload"], "rb") as file:  # noqa: PTH123 - pathlib is not what is measured
        image = file.read()
    library, kernel, function = c_void_p(), c_void_p(), c_void_p()
    called(cuda.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0))
    called(cuda.cuLibraryGetKernel(byref(kernel), library, fact["symbol"].encode()))
    called(cuda.cuKernelGetFunction(byref(function), kernel))
    called(cuda.cuFuncLoad(function))
    return function


def prepared(cuda: Any, function: Any, fact: Any, arguments: Any) -> Callable[[], None]:
    """The driver's launch call on the default stream, its parameters packed once."""
    import ctypes

    kinds = {"i64": ctypes.c_int64, "f32": ctypes.c_float}
    given = iter(arguments)
    values: list[Any] = []
    for kind in fact["kinds"]:
        if kind == "scratch":
            values.append(ctypes.c_void_p(None))
        else:
            argument = next(given)
            values.append(ctypes.c_void_p(argument.data_ptr()) if kind == "pointer" else kinds[kind](argument))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    sizes = [ctypes.c_uint(extent) for extent in (*fact["grid"], *fact["block"], fact["shared_bytes"])]

    def launch(_values: Any = values) -> None:  # the parameters live as long as the call
        called(cuda.cuLaunchKernel(function, *sizes, None, pointers, None))

    return launch


def called(status: int) -> None:
    """Raises RuntimeError for any status of a driver call but 0."""
    if status:
        raise RuntimeError(f"driver status {status}")


PROVIDERS = {
    "kserve": kserve,
    "triton": triton,
    "cupy": cupy,
    "cuda-core": cuda_core,
    "extension": extension,
    "hugging-face": hugging_face,
    "driver": driver,
}
