"""A KernelService in this process, over the store of the test's own place: what it plans and answers can be looked into."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping

from kserve.build.planner import KernelRequest
from kserve.build.worker_handle import Environment
from kserve.config import load_settings
from kserve.service import KernelService
from kserve.store.files import FileStore
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML

HERE = Environment(sys.executable, ())
CUDA_FILES = {"kernel.toml": CUDA_TOML.encode(), "kernel.cu": CUDA_SOURCE.encode()}


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[KernelService]:
    """A service of the settings' store, closed with the block: a second one finds what the first left."""
    settings = load_settings()
    found = KernelService(settings, FileStore(settings.store, writable=True))
    try:
        yield found
    finally:
        await found.close()


def wanted(
    service: KernelService, files: Mapping[str, bytes] = CUDA_FILES, *, name: str = "scale", **spec: object
) -> KernelRequest:
    """A request for one kernel, whose files are uploaded."""
    digests = {file: service.artifacts.add_source(content) for file, content in files.items()}
    return KernelRequest(name, digests, spec, "cuda:sm_90", HERE)
