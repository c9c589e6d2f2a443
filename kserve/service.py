"""KernelService: a request in, artifacts out. The road of one request as code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping

from kserve.artifact import Manifest
from kserve.build import sandbox
from kserve.build.fingerprints import Fingerprints, own_environment
from kserve.build.includes import Includes, MissingIncludes, as_built, is_made_of
from kserve.build.lease import Lease, Leases
from kserve.build.plan import Plan, contract_of
from kserve.build.planner import KernelRequest, MissingSources, Planner, missing_of, named
from kserve.build.pool import Pool
from kserve.build.rebuild import Rebuilt, rebuild
from kserve.build.scratch import Scratch
from kserve.build.staging import Staging
from kserve.build.units import Units
from kserve.build.worker_handle import Environment
from kserve.config import Settings
from kserve.definition import EXTENSION, INERT
from kserve.errors import BuildError, DaemonEnding, KserveError, NotBuilt, StoreError
from kserve.key import canonical_json, differences, digest_of
from kserve.knobs import shown
from kserve.lockfile import read_lock
from kserve.ownership import identities
from kserve.protocol import Pending, Resolved
from kserve.store.artifacts import Artifacts
from kserve.store.collect import Bounds
from kserve.store.debug_sources import DebugSources
from kserve.store.files import FileStore
from kserve.store.layers import Layers
from kserve.store.upkeep import Upkeep
from kserve.toolchain.base import Built, built_from_json, without_times

logger = logging.getLogger("kserve")
# A plan with a known toolchain takes a millisecond; only one that has to be loaded takes longer.
_PLANNING_S = 0.1


Answer = list[Resolved] | Pending | MissingSources | MissingIncludes


class KernelService:
    """Looks kernels up, builds what is missing, one build per key.

    Args:
        store: the writable store; its lock is held by the caller.
    """

    def __init__(self, settings: Settings, store: FileStore) -> None:
        self.settings = settings
        self.scratch = Scratch(store.root / "tmp")
        self.pool = Pool(settings, self.scratch)
        bounds = Bounds(settings.max_bytes, settings.max_files)
        locked = read_lock(settings.lock).keys if settings.lock and settings.lock.is_file() else frozenset()
        self.debug_sources = DebugSources(store)
        self.debug_sources.sweep()
        self.upkeep = Upkeep(store, bounds, in_use=lambda: (*self.leases.running, *locked))
        layers = Layers(settings.layers, uids=identities(settings.trusted_uids))
        self.upkeep.on_evicted(self.debug_sources.remove)
        self.artifacts = Artifacts(self.upkeep, layers)
        self.leases = Leases(failure_memory_s=settings.failure_memory_s, failures=self.upkeep.index)
        self.fingerprints = Fingerprints(store.root / "toolchains.json", self.pool)
        self.planner = Planner(self.artifacts, self.fingerprints)
        self.includes = Includes(self.artifacts)
        self.units = Units(self.artifacts, self.leases, self.includes, lookup=self._lookup)
        self.counters: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._closing = False
        self._rebuilds: set[asyncio.Task[Rebuilt]] = set()

    async def resolve(self, request: KernelRequest, *, client: str, wait_s: float) -> Answer:
        """All variants of one kernel: found, built, or still being built after `wait_s`.

        Raises: KserveError of any kind; a failed build raises the same error for everybody who waits.
        """
        self.counters["requests"] += 1
        while self.planner.definition(request) is None:
            if (missing := missing_of(self.planner.sources(request))).digests:  # else it was sent this moment
                return missing
        planning = asyncio.create_task(self.planner.plan(request))
        planning.add_done_callback(lambda task: task.cancelled() or task.exception())
        began = time.monotonic()
        await asyncio.wait({planning}, timeout=max(wait_s, _PLANNING_S))
        if not planning.done():  # a toolchain is being loaded: it goes on
            return Pending("toolchain", time.monotonic() - began, 0)
        plans: list[Plan] = []
        for plan in planning.result():
            if isinstance(settled := self.includes.settle(plan), MissingIncludes):
                return settled
            plans.append(settled)
        return await self._answer(request, plans, client=client, wait_s=wait_s)

    async def _answer(self, request: KernelRequest, plans: list[Plan], *, client: str, wait_s: float) -> Answer:
        if not self.artifacts.knows_reasons and any(self.artifacts.manifest(plan.key) is None for plan in plans):
            await asyncio.to_thread(self.artifacts.learn_reasons)  # before the first build, which needs one
        owed = {key: self.leases.collect(key, client) for key in {plan.key for plan in plans}}
        for plan in plans:
            self.leases.check(plan.key)
        hits = [self._lookup(plan, client, owed[plan.key]) for plan in plans]
        looked_up = {} if all(hits) else self.planner.sources(request)
        if (missing := missing_of(looked_up)).digests:
            return missing
        sources = {digest: content for digest, content in looked_up.items() if content is not None}
        found = [hit or self._lease(plan, request, sources, client=client) for hit, plan in zip(hits, plans, strict=True)]
        leases = [item for item in found if isinstance(item, Lease)]
        tasks = {lease.id: lease.task for lease in leases if lease.task is not None}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=wait_s)
        if not all(task.done() for task in tasks.values()):
            for lease in (*leases, *filter(None, owed.values())):  # a result that was collected is not told yet
                lease.owed.add(client)
            return Pending(leases[0].id, leases[0].elapsed_s, self.leases.n_ahead(leases[0]))
        answer = [
            _outcome(item, tasks[item.id], plan, client) if isinstance(item, Lease) else item
            for item, plan in zip(found, plans, strict=True)
        ]
        await self.planner.keep_alias(request, plans[0], [resolved.manifest for resolved in answer])
        return answer

    def _lookup(self, plan: Plan, client: str, owed: Lease | None) -> Resolved | None:
        """What the store has. A client that was told "pending" gets the result it is `owed`, a failure too."""
        if owed is not None and owed.error is not None:
            raise owed.error.with_traceback(None)
        began = time.monotonic()
        manifest = self.artifacts.manifest(plan.key)
        if manifest is None or not self._is_of(plan, manifest) or not self.artifacts.is_sound(manifest):
            return None
        if plan.job.debug and not self.debug_sources.holds(plan.key, plan.files):
            self.artifacts.reasons.lose(plan.key, "its sources were removed")
            return None
        self.counters["hits"] += 1
        self.upkeep.touch(plan.key)
        origin, seconds = ("disk", time.monotonic() - began) if owed is None else (owed.origin_for(client), owed.elapsed_s)
        logger.debug("hit key=%s name=%s target=%s", plan.key[:12], plan.name, plan.target)
        return Resolved(manifest, origin, seconds, plan.choice.is_tuned, plan.choice.base)

    def _is_of(self, plan: Plan, manifest: Manifest) -> bool:
        """Whether the entry under the plan's key was made of the plan's components: a key is a hash, they are the proof."""
        if manifest.components == plan.components:
            return True
        changed = "; ".join(differences(manifest.components, plan.components))
        logger.error('collided key=%s name=%s with=%s differences="%s"', plan.key[:12], plan.name, manifest.name, changed)
        self.artifacts.reasons.lose(plan.key, f"collided: {changed}")
        return False

    def _lease(self, plan: Plan, request: KernelRequest, sources: Mapping[str, bytes], *, client: str) -> Lease:
        running = self.leases.join(plan.key, client)
        if running is not None:
            self.counters["joined"] += 1
            return running
        if self._closing:
            raise DaemonEnding(f"{plan.name} is not built: the daemon is going down", hint="call again")
        if not request.build:
            raise NotBuilt(
                f"{plan.name} for {plan.target} is not in the store and the caller forbids builds (KSERVE_NO_BUILD)",
                facts={"key": plan.key, "spec": canonical_json(plan.spec)},
            )
        reason = self.artifacts.reason_for(plan.key, plan.name, plan.variant, plan.components)
        lease = self.leases.new(
            key=plan.key, name=plan.name, target=str(plan.target), variant=plan.variant, starter=client, reason=reason
        )
        lease.remembers = plan.outside is None
        files = {name: sources[digest] for name, digest in plan.files.items()}  # what was looked at, whatever comes after
        return self.leases.start(lease, lambda held: self._build(held, plan, files, request.environment))

    async def _build(self, lease: Lease, plan: Plan, files: dict[str, bytes], environment: Environment) -> Manifest:
        """Stage, compile, publish."""
        files, read, log = await self.units.objects(
            lease, plan, files, lambda held, unit, own: self._build(held, unit, own, environment)
        )
        sources = self.debug_sources.write(plan.key, files) if plan.job.debug else None
        # A unit's own files may be large, and no two builds have the same ones.
        is_shared = plan.job.language != EXTENSION and sandbox.is_available()
        staging = self.scratch.stage(files, sources=sources, is_shared=is_shared)
        staging.begin_log(log)
        files.clear()  # they lie in the staging directory now, for as long as the build waits its turn
        lease.log = staging.log
        try:
            built = await self.pool.run(plan.job, environment, staging, on_start=lambda: _begin(lease, staging))
            await self._check_compiler(plan, environment)
            lease.cpu_s = built["cpu_s"]
            plan = as_built(plan, {**read, **built["includes"]})
            manifest = await asyncio.to_thread(self._publish, plan, built_from_json(built), staging, lease)
            staging.is_reusable = built["closed_world"] and plan.job.language in INERT
            self.includes.note(plan, manifest)
            lease.result_key = manifest.key
            self.counters["built"] += 1
            logger.info(
                'built key=%s name=%s target=%s variant=%s knobs="%s" seconds=%.2f size_bytes=%d reason="%s"',
                *(plan.key[:12], plan.name, plan.target, plan.variant, shown(plan.knobs)),
                *(lease.elapsed_s, manifest.size_bytes, lease.reason),
            )
            return manifest
        except BuildError as error:
            self.counters["failed"] += 1
            if type(error) is BuildError:
                await self._refuse_full_disk(plan)
            logger.warning("failed key=%s name=%s target=%s error=%s", plan.key[:12], plan.name, plan.target, error.message)
            raise named(error, plan) from error
        finally:
            log = staging.log()
            lease.log = lambda: log
            staging.remove()
            if sources is not None and self.artifacts.manifest(plan.key) is None:
                self.debug_sources.remove(plan.key)

    async def _refuse_full_disk(self, plan: Plan) -> None:
        """A compiler that cannot write its result dies without a word. Raises: StoreError when the disk is why."""
        try:
            await asyncio.to_thread(self.artifacts.files.probe)
        except StoreError as error:
            logger.warning("failed key=%s name=%s error=%s", plan.key[:12], plan.name, error.message)
            raise StoreError(f"cannot build {plan.name} for {plan.target}: {error.message}") from None

    async def _check_compiler(self, plan: Plan, environment: Environment) -> None:
        """The job may have waited for minutes. Raises: BuildError when the key's compiler is not the installed one any more."""
        now = await self.fingerprints.of(plan.job.language, environment, look_again=True)
        if now.files != plan.components["toolchain.files"]:
            raise BuildError(f"{plan.name} is not kept: its compiler was replaced during the build", hint="call again")

    def _publish(self, plan: Plan, built: Built, staging: Staging, lease: Lease) -> Manifest:
        contract = contract_of(plan, built)
        payload = staging.output("payload")
        attachments = {kind: staging.output(kind) for kind in built.attachments}
        attachments["log"] = without_times(staging.log()).encode()
        manifest = Manifest(
            key=plan.key,
            digest=digest_of(payload),
            size_bytes=len(payload),
            name=plan.name,
            language=plan.job.language,
            target=str(plan.target),
            spec=dict(plan.spec),
            variant=plan.variant,
            contract=contract,
            resources=built.resources,
            components=plan.components,
            attachments={kind: digest_of(content) for kind, content in attachments.items()},
            closed_world=built.closed_world,
            seconds=lease.elapsed_s,
            created_at=time.time(),
            reason=lease.reason,
        )
        self.artifacts.publish(manifest, [payload, *attachments.values()])
        return manifest

    def lifetime(self) -> dict[str, int]:
        """The counters since the store was made."""
        return dict(Counter(self.upkeep.index.counters()) + (self.counters - self._counted))

    async def prewarm(self) -> None:
        """Load the compilers that will be needed before one is: Triton takes 2 s."""
        if not self.settings.prewarm:
            return
        for language, environment in await self.fingerprints.expected(self.settings):
            with contextlib.suppress(KserveError):  # whoever needs it is told
                await self.pool.worker(language, environment)

    async def tend(self) -> None:
        """What has to be done now and then: a disk that works again gets what memory kept, the index the counters."""
        new, self._counted = self.counters - self._counted, self.counters.copy()
        if not await asyncio.to_thread(self._tend, new):
            self._counted -= new  # the index was closed: another time

    def _tend(self, new: Counter[str]) -> bool:
        try:
            self.artifacts.restore()
            self.upkeep.tend()
        except (StoreError, OSError) as error:
            logger.warning("upkeep failed error=%s", error)
        return not new or self.upkeep.index.count(new)

    async def rebuild(self, *, sample: int | None = None) -> Rebuilt:
        """Build stored artifacts again with fresh workers, and compare the bytes. What comes out is not published.

        Args:
            sample: at most this many, drawn at random; None for all.
        Raises: DaemonEnding when the daemon goes down meanwhile.
        """
        if self._closing:
            raise _ending()
        keys = self.artifacts.keys()
        drawn = keys if sample is None or sample >= len(keys) else random.sample(keys, sample)
        manifests = (manifest for key in drawn if (manifest := self.artifacts.manifest(key)) is not None)
        task = asyncio.create_task(
            rebuild(
                manifests,
                self.settings,
                self.scratch.home / f"rebuild-{time.monotonic_ns()}",
                source=lambda digest: self.artifacts.get(f"source/{digest}"),
                environments=self._environments,
            )
        )
        self._rebuilds.add(task)
        task.add_done_callback(self._rebuilds.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closing:
                raise _ending() from None
            raise

    def _environments(self, language: str, files: str) -> list[Environment]:
        return [*dict.fromkeys([own_environment(self.settings), *self.fingerprints.environments(language, files)])]

    async def close(self) -> None:
        """End every build and every worker; start none any more."""
        self._closing = True
        for task in self._rebuilds:
            task.cancel()
        await asyncio.gather(*self._rebuilds, return_exceptions=True)
        await self.leases.cancel()
        await self.pool.close()
        await self.tend()
        self.upkeep.close()
        self.scratch.leave()


def _outcome(lease: Lease, task: asyncio.Task[Manifest], plan: Plan, client: str) -> Resolved:
    """The result of a build that has ended. Raises: its error; BuildError when it was a build of something else."""
    if lease.error is not None:
        raise lease.error.with_traceback(None)
    manifest = task.result()
    if not is_made_of(manifest, plan):
        raise BuildError(
            f"{plan.name} is not built: a build of {manifest.name} with the same key was running",
            facts={"key": plan.key},
            hint="call again",
        )
    return Resolved(manifest, lease.origin_for(client), lease.seconds, plan.choice.is_tuned, plan.choice.base)


def _ending() -> DaemonEnding:
    return DaemonEnding("artifacts are not built again: the daemon is going down", hint="call again")


def _begin(lease: Lease, staging: Staging) -> None:
    staging.enter()
    lease.state = "running"
