"""From a request to plans: the definition it sent, the compiler it means, and what was made of the same bytes before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kserve.alias import Alias, Signpost, Stamps, alias_from_bytes, answer_digest
from kserve.artifact import Manifest, compact
from kserve.build.extension_job import Outside
from kserve.build.fingerprints import Fingerprints
from kserve.build.plan import Debug, Plan, plan_builds, plan_extension
from kserve.build.tuned import NO_WISH, KnobWish, Tunings, base_of
from kserve.build.worker_handle import Environment
from kserve.definition import KernelDef
from kserve.errors import BuildError, InvalidDefinition, StoreError, UnknownKernel, closest
from kserve.kernel_toml import read_definition
from kserve.key import canonical_json, digest_of
from kserve.knobs import shown
from kserve.outline import FILE_NAME
from kserve.store.artifacts import Artifacts, remember
from kserve.target import parse_target


class AliasWish(NamedTuple):
    """The digest of a client's request, the stamps of the files it read, the variables that override each knob."""

    request: str
    stamps: Stamps
    variables: dict[str, list[str]]


class KernelRequest(NamedTuple):
    """One wanted kernel, as a client sent it (`protocol.kernel_request`).

    Fields:
        build:   False makes a miss an error.
        generic: False leaves out the variant without argument facts.
        debug:   which debug variant; empty for none.
    """

    name: str
    files: dict[str, str]
    spec: dict[str, Any]
    target: str
    environment: Environment
    build: bool = True
    alias: AliasWish | None = None
    knobs: KnobWish = NO_WISH
    generic: bool = True
    outside: Outside | None = None
    debug: str = ""


class MissingSources(NamedTuple):
    """Digests of files the service has never seen: the client sends the bytes and asks again."""

    digests: list[str]


class Planner:
    """Plans requests over one store's sources."""

    def __init__(self, artifacts: Artifacts, fingerprints: Fingerprints) -> None:
        self._artifacts = artifacts
        self._fingerprints = fingerprints
        self.tunings = Tunings(artifacts)
        # Definitions by digest, plans by wish, aliases by request with the stamp of their file.
        self._definitions: dict[str, KernelDef] = {}
        self._plans: dict[tuple[object, ...], list[Plan]] = {}
        self._aliases: dict[str, tuple[Alias, tuple[int, ...]]] = {}

    async def plan(self, request: KernelRequest) -> list[Plan]:
        """The builds of a request whose definition is known, declared facts first.

        Raises: UnknownKernel, InvalidSpec, UnsupportedTarget, InvalidDefinition; what a toolchain says that cannot be loaded.
        """
        definition = self.definition(request)
        assert definition is not None
        entry = definition.entries.get(request.name)
        if entry is None:
            raise UnknownKernel(f"{FILE_NAME} defines no {request.name!r}: {closest(request.name, [*definition.entries])}")
        target = parse_target(request.target)
        definition.resolve_target(entry, target)  # before the toolchain is asked: the cheaper answer first
        fingerprint = await self._fingerprints.of(definition.language, request.environment)
        made_of: Any = {"spec": request.spec, "target": target, "fingerprint": fingerprint, "files": request.files}
        base = base_of(definition, entry, **made_of) if entry.knobs else ""
        choice = self.tunings.choose(definition, entry, spec=request.spec, wish=request.knobs, base=base)
        values = canonical_json([request.spec, choice, request.debug, dict(fingerprint.facts)])
        roots = request.outside.roots if request.outside else ()
        wish = (request.name, target, fingerprint.files, *sorted(request.files.items()), values, roots)
        plans = self._plans.get(wish)
        if plans is None:
            debug = Debug(request.debug, self._artifacts.files.debug_root) if request.debug else None
            if request.outside:
                plans = [plan_extension(definition, entry, **made_of, outside=request.outside)]
            else:
                plans = plan_builds(definition, entry, **made_of, choice=choice, debug=debug)
            remember(self._plans, wish, plans)
        if request.outside:  # what the caller has looked at is another each time
            return [plan._replace(outside=request.outside) for plan in plans]
        return plans if request.generic else plans[:1]

    def definition(self, request: KernelRequest) -> KernelDef | None:
        """The request's definition; None when its bytes were never sent."""
        digest = request.files.get(FILE_NAME)
        if digest is None:
            raise InvalidDefinition(f"a request for {request.name} names no {FILE_NAME}")
        if digest not in self._definitions:
            content = self._artifacts.get(f"source/{digest}")
            if content is None:
                return None
            remember(self._definitions, digest, read_definition(content, origin=FILE_NAME))
        return self._definitions[digest]

    def sources(self, request: KernelRequest) -> dict[str, bytes | None]:
        """The request's files by digest, None for one that has to be sent; those that are here are in use from now on."""
        found = {}
        for digest in sorted({*request.files.values()}):
            self._artifacts.files.touch(f"source/{digest}")
            found[digest] = self._artifacts.get(f"source/{digest}")
        return found

    async def keep_alias(self, request: KernelRequest, plan: Plan, variants: list[Manifest]) -> None:
        """Keep the answer for the next client, which then needs no daemon."""
        definition = self.definition(request)
        if request.alias is None or definition is None or request.debug or not request.generic:
            return
        found = await self._fingerprints.of(definition.language, request.environment)
        toolchain = canonical_json(found.stamps).encode()
        answer = Alias([], definition.language, found.version, digest_of(toolchain), canonical_json(request.alias.stamps))
        name, records = request.alias.request, {}
        if plan.knobs:
            signpost = Signpost(plan.choice.base, request.alias.variables, plan.entry.size_names)
            here = answer._replace(signpost=signpost)
            if plan.choice.values:
                records[name] = self._known(name, like=here) or here
                answer, name = answer._replace(behind=name), answer_digest(name, plan.choice.values)
            else:
                answer = here
        records[name] = answer._replace(variants=[compact(manifest) for manifest in variants])
        for one, alias in records.items():
            await self._keep(one, alias, toolchain)

    def _known(self, name: str, *, like: Alias) -> Alias | None:
        """The signpost that lies there, which says the same and has the answer for the defaults besides."""
        content = None
        with contextlib.suppress(StoreError):  # a bad record there is written anew
            content = self._artifacts.files.get(f"alias/{name}")
        found = None if content is None else alias_from_bytes(content)
        return found if found is not None and found._replace(variants=[]) == like else None

    async def _keep(self, name: str, alias: Alias, toolchain: bytes) -> None:
        """Write an alias, unless it lies there as it is."""
        files = self._artifacts.files
        if self._aliases.get(name) != (alias, files.stamp(f"alias/{name}")):
            await asyncio.to_thread(self._artifacts.keep_alias, name, alias, toolchain)
            remember(self._aliases, name, (alias, files.stamp(f"alias/{name}")))


def missing_of(sources: Mapping[str, bytes | None]) -> MissingSources:
    """The files that have to be sent."""
    return MissingSources([digest for digest, content in sources.items() if content is None])


def named(error: BuildError, plan: Plan) -> BuildError:
    """The same error with the kernel, its target and spec in it: a caller may have asked for many."""
    knobs = {"knobs": shown(plan.knobs)} if plan.knobs else {}
    facts = {"spec": canonical_json(plan.spec), **knobs, "key": plan.key, **error.facts}
    return type(error)(f"cannot build {plan.name} for {plan.target}: {error.message}", facts=facts, hint=error.hint)
