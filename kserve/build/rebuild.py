"""Builds stored artifacts again, with fresh workers in another place, and compares the bytes. Nothing of it is kept."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kserve.artifact import Manifest
from kserve.build.includes import LABEL
from kserve.build.plan import job_of
from kserve.build.pool import Pool
from kserve.build.scratch import Scratch
from kserve.build.staging import Staging
from kserve.build.worker_handle import Environment
from kserve.config import Settings
from kserve.errors import BuildError, KserveError
from kserve.key import build_key, digest_of
from kserve.ownership import private_directory
from kserve.toolchain.base import Job

_TOOLCHAIN = ("name", "version", "files", "options")
_FACT = "fact."


class Rebuilt(NamedTuple):
    """What came of it: each artifact in one of the four.

    Fields:
        equal:     keys whose bytes came out again.
        differing: key, name, target, variant, the stored digest and the one that was `rebuilt`.
        failed:    key, name, target, variant and the reason; the build did not succeed this time.
        skipped:   the same; nothing here can build it.
    """

    equal: list[str]
    differing: list[dict[str, str]]
    failed: list[dict[str, str]]
    skipped: list[dict[str, str]]

    def to_json(self) -> dict[str, Any]:
        return {
            "n_rebuilt": len(self.equal) + len(self.differing),
            "differing": self.differing,
            "failed": self.failed,
            "skipped": self.skipped,
        }


class _SkippedError(Exception):
    """Nothing here can build it; the text says why."""


async def rebuild(
    manifests: Iterable[Manifest],
    settings: Settings,
    scratch: Path,
    *,
    source: Callable[[str], bytes | None],
    environments: Callable[[str, str], list[Environment]],
) -> Rebuilt:
    """Build each of them again, as many at once as there are jobs.

    Args:
        scratch:      a directory for this alone, with workers and staging in it: made here and removed at the end.
        source:       the bytes of a digest, None where the store has them no more.
        environments: for a language and the digest of a compiler's files, where that compiler may be, the best place first.
    Raises: StoreError when the directory cannot be made.
    """
    pool = Pool(settings, Scratch(private_directory(scratch)))
    comparison = _Comparison(pool, scratch, source, environments)
    waiting = iter(manifests)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(settings.jobs):
                group.create_task(comparison.work(waiting))
    finally:
        await pool.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return comparison.found


class _Comparison:
    """What the tasks of one rebuild share: `found` is filled by all of them."""

    def __init__(
        self,
        pool: Pool,
        scratch: Path,
        source: Callable[[str], bytes | None],
        environments: Callable[[str, str], list[Environment]],
    ) -> None:
        self.found = Rebuilt([], [], [], [])
        self._pool = pool
        self._scratch = scratch
        self._source = source
        self._environments = environments
        self._known: dict[tuple[str, ...], Environment | str] = {}

    async def work(self, waiting: Iterator[Manifest]) -> None:
        """Take one after another until none is left."""
        for manifest in waiting:
            entry = {"key": manifest.key, "name": manifest.name, "target": manifest.target, "variant": manifest.variant}
            try:
                digest = await self._digest(manifest)
            except _SkippedError as why:
                self.found.skipped.append({**entry, "reason": str(why)})
            except KserveError as error:
                self.found.failed.append({**entry, "reason": error.message})
            else:
                if digest == manifest.digest:
                    self.found.equal.append(manifest.key)
                else:
                    self.found.differing.append({**entry, "digest": manifest.digest, "rebuilt": digest})

    async def _digest(self, manifest: Manifest) -> str:
        """The digest of the payload as it is built now."""
        if any(label.startswith(LABEL) for label in manifest.components):
            raise _SkippedError("it has read files outside of the store, through a door")
        job, files = _job(manifest)
        if job.debug:
            raise _SkippedError("it is a debug variant: its bytes name the place it was built in")
        environment = await self._environment(manifest)
        staging = Staging(self._scratch, {name: self._content(name, digest) for name, digest in files.items()})
        try:
            await self._pool.run(job, environment, staging, on_start=lambda: None)
            return digest_of(staging.output("payload"))
        finally:
            staging.remove()

    def _content(self, name: str, digest: str) -> bytes:
        content = self._source(digest)
        if content is None:
            raise _SkippedError(f"its source {name} is not in the store any more")
        return content

    async def _environment(self, manifest: Manifest) -> Environment:
        """One whose compiler, as a fresh worker has loaded it, is the one of the artifact."""
        wanted = tuple(manifest.components.get(f"toolchain.{field}", "") for field in _TOOLCHAIN)
        facts = {label: text for label, text in manifest.components.items() if label.startswith(_FACT)}
        place = (manifest.language, *wanted, *facts.values())
        if place not in self._known:
            self._known[place] = await self._look_for(manifest.language, wanted, facts)
        found = self._known[place]
        if isinstance(found, str):
            raise _SkippedError(found)
        return found

    async def _look_for(self, language: str, wanted: tuple[str, ...], facts: dict[str, str]) -> Environment | str:
        name, version, files, _ = wanted
        seen = []
        for environment in self._environments(language, files):
            try:
                worker = await self._pool.worker(language, environment)
            except BuildError as error:
                seen.append(f"{environment.python}: {error.message}")
                continue
            has = worker.fingerprint.result()
            others = [
                label.removeprefix(_FACT) for label, text in facts.items() if has.facts[label.removeprefix(_FACT)] != text
            ]
            if tuple(getattr(has, field) for field in _TOOLCHAIN) == wanted and not others:
                return environment
            other = "".join(f", another {label}" for label in others)
            seen.append(f"{environment.python} has {has.name} {has.version}, files {has.files[:12]}{other}")
        return f"it was built by {name} {version}, files {files[:12]}; {'; '.join(seen)}"


def _job(manifest: Manifest) -> tuple[Job, dict[str, str]]:
    if build_key(manifest.components) != manifest.key:
        raise BuildError("its key is not the one of its components")
    try:
        return job_of(manifest.components)
    except (KeyError, ValueError, TypeError) as error:
        raise BuildError(f"its key components describe no build: {error!r}") from None
