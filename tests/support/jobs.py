"""Jobs for a worker without a daemon around it: a valid baseline and what a case changes in it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kserve.build.pool import Pool
from kserve.build.scratch import Scratch
from kserve.build.staging import Staging
from kserve.build.worker_handle import Environment
from kserve.config import Settings
from kserve.toolchain.base import Job, JobArgument
from tests.support import slow_kernel
from tests.support.definitions import CUDA_SOURCE

HERE = Environment(sys.executable, ())
CUDA_FILES = {"kernel.cu": CUDA_SOURCE.encode()}
SLOW_FILES = {"kernel.cu": slow_kernel.SOURCE.encode()}


def cuda_job(**changes: Any) -> Job:
    """The kernel of `definitions.CUDA_SOURCE`, size 8, for sm_90."""
    arguments = (
        JobArgument("x", "pointer", "float32", align=16),
        JobArgument("out", "pointer", "float32", align=16),
        JobArgument("n", "i32", "int32", size_bytes=4),
        JobArgument("factor", "f32", "float32", size_bytes=4),
    )
    return Job("cuda", "cuda:sm_90", "kernel.cu", "scale<8>", arguments, {})._replace(**changes)


def slow_job() -> Job:
    """A compile that takes far longer than any test."""
    arguments = (JobArgument("out", "pointer", "float32"), JobArgument("x", "f32", "float32", size_bytes=4))
    return cuda_job(function="slow<0, 10>", arguments=arguments)


@contextlib.asynccontextmanager
async def pool(root: Path, **settings: Any) -> AsyncIterator[Pool]:
    """A pool that works under `root`/store/tmp, closed with the block."""
    scratch = root / "store" / "tmp"
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = Pool(Settings(**settings), Scratch(scratch))
    try:
        yield found
    finally:
        await found.close()


def staging(root: Path, files: dict[str, bytes]) -> Staging:
    return Staging(root / "store" / "tmp", files)
