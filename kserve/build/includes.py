"""What builds have read outside of their declared files: found by compiling, remembered by name, compared by digest.

The key of such a build holds the digest of every file that it read. Which files those are is known only afterwards, so the
names are remembered under the key without them; the caller says what is in the files now. The daemon opens none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from kserve.alias import Alias, alias_from_bytes
from kserve.artifact import Manifest
from kserve.build.plan import Plan
from kserve.build.unit_plan import unit_plans
from kserve.errors import StoreError
from kserve.key import build_key, digest_of
from kserve.store.artifacts import Artifacts, remember

LABEL = "include."
_MOST_OUTCOMES = 16
_NOTHING = b"{}"


class MissingIncludes(NamedTuple):
    """Files outside whose digests decide: the caller looks at them and asks again."""

    names: list[str]


class Includes:
    """The outcomes of builds that read outside, by the key they had before."""

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts
        self._known: dict[str, list[tuple[str, list[str]]]] = {}

    def settle(self, plan: Plan) -> Plan | MissingIncludes:
        """The plan with what is in the files it reads: one that was built before, else the next build.

        For anything that reads nothing outside, the plan itself.
        """
        if plan.outside is None:
            return plan
        digests = plan.outside.digests
        outcomes = self._outcomes(plan.key)
        names = {name for part in (plan, *unit_plans(plan)) for _, names in self._outcomes(part.key) for name in names}
        if missing := sorted(names - digests.keys()):
            return MissingIncludes(missing)
        for _, some in reversed(outcomes):
            found = with_includes(plan, {name: digests[name] for name in some})
            if self._artifacts.manifest(found.key) is not None:
                return found
        return with_includes(plan, {name: digests[name] for name in sorted(names)})

    def settle_unit(self, plan: Plan) -> Plan:
        """The same for a unit: a file of it that the caller did not look at leaves it to be compiled."""
        found = self.settle(plan)
        return plan if isinstance(found, MissingIncludes) else found

    def note(self, plan: Plan, manifest: Manifest) -> None:
        """Remember what a build has read. The memory is a help: a disk that refuses it costs a build."""
        if plan.outside is None:
            return
        base = build_key(_declared(manifest.components))
        names = [label.removeprefix(LABEL) for label in manifest.components if label.startswith(LABEL)]
        outcomes = [outcome for outcome in self._outcomes(base) if outcome[0] != manifest.key]
        outcomes = [*outcomes, (manifest.key, names)][-_MOST_OUTCOMES:]
        remember(self._known, base, outcomes)
        alias = Alias([list(outcome) for outcome in outcomes], "", "", digest_of(_NOTHING), "{}")
        self._artifacts.keep_alias(_record(base), alias, _NOTHING)

    def _outcomes(self, base: str) -> list[tuple[str, list[str]]]:
        if base not in self._known:
            alias = None
            with contextlib.suppress(StoreError):
                alias = alias_from_bytes(self._artifacts.files.get(f"alias/{_record(base)}") or b"")
            remember(self._known, base, [(key, names) for key, names in alias.variants] if alias else [])
        return self._known[base]


def with_includes(plan: Plan, digests: Mapping[str, str]) -> Plan:
    """The plan whose key holds those digests and no others."""
    components = {**_declared(plan.components), **{f"{LABEL}{name}": digest for name, digest in digests.items()}}
    return plan._replace(components=components, key=build_key(components))


def as_built(plan: Plan, read: Mapping[str, str]) -> Plan:
    """The plan with what its build has read, for a build that may read outside."""
    return plan if plan.outside is None else with_includes(plan, read)


def is_made_of(manifest: Manifest, plan: Plan) -> bool:
    """Whether the artifact is of that plan: its components are, whatever it has read outside."""
    if plan.outside is None:
        return dict(manifest.components) == plan.components
    return _declared(manifest.components) == _declared(plan.components)


def _declared(components: Mapping[str, str]) -> dict[str, str]:
    """The components that are known before a build."""
    return {label: text for label, text in components.items() if not label.startswith(LABEL)}


def _record(base: str) -> str:
    return digest_of(f"includes {base}".encode())
