"""Builds the units of an extension, or finds them in the store: an edit of one compiles one, and all compile at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from kserve.artifact import Manifest
from kserve.build.includes import LABEL, Includes
from kserve.build.lease import Lease, Leases
from kserve.build.plan import Plan
from kserve.build.unit_plan import unit_plans
from kserve.errors import BuildError
from kserve.protocol import Resolved
from kserve.store.artifacts import Artifacts

_TRIES = 3
Files = dict[str, bytes]
Build = Callable[[Lease, Plan, Files], Awaitable[Manifest]]


class Units:
    """The units of every extension of a service.

    Args:
        lookup: what the store has of a plan, for a client.
    """

    def __init__(
        self,
        artifacts: Artifacts,
        leases: Leases,
        includes: Includes,
        *,
        lookup: Callable[[Plan, str, Lease | None], Resolved | None],
    ) -> None:
        self._artifacts = artifacts
        self._leases = leases
        self._includes = includes
        self._lookup = lookup

    async def objects(self, lease: Lease, plan: Plan, files: Files, build: Build) -> tuple[Files, dict[str, str], str]:
        """What a build is staged with, what its units have read outside, and their logs: for an extension, its objects.

        Args:
            build: builds one unit.
        Raises: the first error of any unit; BuildError when two have read another content of one file.
        """
        units = unit_plans(plan)
        if not units:
            return files, {}, ""
        found = await asyncio.gather(*(self._unit(lease, unit, files, build) for unit in units))
        objects = {f"{unit.job.main}.o": content for unit, (_, content) in zip(units, found, strict=True)}
        manifests = [manifest for manifest, _ in found]
        logs = [self._artifacts.attachment(manifest, "log") or "" for manifest in manifests]
        return objects, _read_by_all(manifests, plan.name), "\n".join(log.strip() for log in logs)

    async def _unit(self, lease: Lease, plan: Plan, files: Files, build: Build) -> tuple[Manifest, bytes]:
        plan = self._includes.settle_unit(plan)
        for _ in range(_TRIES):
            found = self._lookup(plan, lease.starter, None)
            manifest = found.manifest if found else await asyncio.shield(self._running(lease, plan, files, build))
            content = self._artifacts.payload(manifest)
            if content is not None:
                return manifest, content
        raise BuildError(
            f"{plan.variant} of {plan.name} was lost as often as it was built", hint="kserve status shows the store"
        )

    def _running(self, lease: Lease, plan: Plan, files: Files, build: Build) -> asyncio.Task[Manifest]:
        """The build of the unit: one that runs already, or a new one."""
        running = self._leases.join(plan.key, lease.starter)
        if running is None:
            reason = self._artifacts.reason_for(plan.key, plan.name, plan.variant, plan.components)
            running = self._leases.new(
                key=plan.key,
                name=plan.name,
                target=str(plan.target),
                variant=plan.variant,
                starter=lease.starter,
                reason=reason,
            )
            running.remembers = plan.outside is None
            own = {name: files[name] for name in plan.files}
            self._leases.start(running, lambda held: build(held, plan, own))
        assert running.task is not None
        return running.task


def _read_by_all(manifests: Iterable[Manifest], name: str) -> dict[str, str]:
    """Digests by name of what the units have read."""
    read: dict[str, str] = {}
    for manifest in manifests:
        for label, digest in manifest.components.items():
            if label.startswith(LABEL) and read.setdefault(label.removeprefix(LABEL), digest) != digest:
                raise BuildError(f"{label.removeprefix(LABEL)} was changed while {name} was built", hint="call again")
    return read
