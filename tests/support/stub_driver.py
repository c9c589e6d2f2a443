"""libcuda for a machine without a GPU, the one part that cannot be real there: launches are written down, nothing runs."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_int, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

from kserve.artifact import Contract

MOST_BYTES, MOST_LAUNCHES = 1024, 4096
SOURCE = """
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned sizes[7]; void *stream, *attributes; unsigned n_attributes; } Config;
typedef struct { void *function, *stream; unsigned sizes[7]; unsigned char block[1024]; } Launch;

int stub_device, stub_context_status, stub_launch_status, stub_n_launches, stub_n_params;
int stub_gate = -1, stub_at_gate, stub_shut;
int stub_offsets[64], stub_bytes[64];
uint64_t stub_memory, stub_memory_bytes;
Launch stub_launches[4096];

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int status, const char **text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "said by the stub"; return 0; }
int cuCtxGetDevice(int *device) { *device = stub_device; return stub_context_status; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int stub_capture_mode;
int cuThreadExchangeStreamCaptureMode(int *mode) {
  const int before = stub_capture_mode;
  stub_capture_mode = *mode;
  *mode = before;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0xC0; return 0; }
char stub_name[256] = "Stub GPU";
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, stub_name, length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 232448;
  return 0;
}
int cuPointerGetAttribute(int *value, int attribute, uint64_t pointer) {
  *value = stub_device;
  return pointer - stub_memory < stub_memory_bytes ? 0 : 1;
}
int cuLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
  static uintptr_t handle;
  *library = (void *)++handle;
  return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = library; return 0; }
int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return 0; }
int cuFuncLoad(void *function) { return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }

static int note(void *function, const unsigned *sizes, void *stream, void **params) {
  if (stub_gate >= 0) {  /* a full queue: wait for a byte */
    char byte;
    struct pollfd gate = {stub_gate, POLLIN, 0};
    stub_at_gate = 1;
    if (poll(&gate, 1, 20000) != 1 || read(stub_gate, &byte, 1) != 1) stub_shut = 1;
  }
  if (stub_launch_status) return stub_launch_status;
  Launch *launch = &stub_launches[__sync_fetch_and_add(&stub_n_launches, 1) % 4096];
  memset(launch, 0, sizeof *launch);
  launch->function = function;
  launch->stream = stream;
  memcpy(launch->sizes, sizes, sizeof launch->sizes);
  for (int i = 0; i < stub_n_params; i++) memcpy(launch->block + stub_offsets[i], params[i], stub_bytes[i]);
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
  const unsigned sizes[7] = {x, y, z, bx, by, bz, shared};
  return note(function, sizes, stream, params);
}
int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  if (config->attributes || config->n_attributes) return 1;
  return note(function, config->sizes, config->stream, params);
}
"""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", c_void_p),
        ("stream", c_void_p),
        ("sizes", c_uint * 7),
        ("block", c_ubyte * MOST_BYTES),
    )


class Launched(NamedTuple):
    """One launch as the driver saw it; `params` are the bytes at each parameter's pointer, in order."""

    function: int
    sizes: tuple[int, ...]
    stream: int
    params: tuple[bytes, ...]


def build_stub(folder: Path) -> Path:
    """Compile the library."""
    source, target = folder / "stub.c", folder / "libstubcuda.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return target


class StubDriver:
    """The library's knobs and notes. `reset` before each use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._launches = (_Launch * MOST_LAUNCHES).in_dll(self._library, "stub_launches")
        self._bytes: list[tuple[int, int]] = []

    def reset(self) -> None:
        self.set(device=0, context_status=0, launch_status=0, n_launches=0, n_params=0, gate=-1, at_gate=0, shut=0)
        self.own(0, 0)
        self.name("Stub GPU")

    def name(self, text: str) -> None:
        """What the driver calls its device."""
        (ctypes.c_char * 256).in_dll(self._library, "stub_name").value = text.encode()

    def set(self, **knobs: int) -> None:
        """device, context_status, launch_status; gate: a descriptor that a launch reads a byte from first."""
        for name, value in knobs.items():
            c_int.in_dll(self._library, f"stub_{name}").value = value

    def get(self, knob: str) -> int:
        return c_int.in_dll(self._library, f"stub_{knob}").value

    def own(self, address: int, n_bytes: int) -> None:
        """Say that this memory is a device's."""
        c_uint64.in_dll(self._library, "stub_memory").value = address
        c_uint64.in_dll(self._library, "stub_memory_bytes").value = n_bytes

    def expect(self, contract: Contract) -> None:
        """Note the parameters of such a kernel."""
        self._bytes = [(param.offset, param.size_bytes) for param in contract.params]
        offsets, sizes = ((c_int * 64).in_dll(self._library, f"stub_{name}") for name in ("offsets", "bytes"))
        for place, (offset, size) in enumerate(self._bytes):
            offsets[place], sizes[place] = offset, size
        self.set(n_params=len(self._bytes))

    def launches(self) -> list[Launched]:
        """What was launched since the reset."""
        n = self.get("n_launches")
        assert n <= MOST_LAUNCHES
        return [self._launched(self._launches[place]) for place in range(n)]

    def _launched(self, found: _Launch) -> Launched:
        block = bytes(found.block)
        params = tuple(block[offset : offset + size] for offset, size in self._bytes)
        return Launched(found.function or 0, tuple(found.sizes), found.stream or 0, params)
