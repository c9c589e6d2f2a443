"""kserve.lock: which bytes a kernel is, by name, spec and target. Under a lock nothing else is loaded.

A lock is read without definitions, compilers or a daemon: it holds the whole spec and the defaults that a caller may leave out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kserve.errors import InvalidSpec, LockMismatch, RequestError
from kserve.spec import Spec, is_same_value
from kserve.target import Target, parse_target

LOCK_SCHEMA = 2
_READABLE = (1, LOCK_SCHEMA)  # the first had no knobs


class LockedArtifact(NamedTuple):
    """One variant of a locked kernel."""

    variant: str
    key: str
    digest: str


class Locked(NamedTuple):
    """One locked kernel.

    Fields:
        target:   as it is asked for; `exact` is the one it is compiled for, such as cuda:sm_90a.
        spec:     every axis with its value.
        defaults: what an axis that the caller leaves out stands for.
        knobs:    every knob with its value; `variables` are those of the environment that would override it.
    """

    name: str
    target: str
    exact: str
    spec: Spec
    defaults: Spec
    artifacts: tuple[LockedArtifact, ...]
    knobs: Mapping[str, int] = {}
    variables: Mapping[str, list[str]] = {}

    @property
    def place(self) -> tuple[str, ...]:
        """What makes an entry the same entry, and orders a file."""
        return (self.name, self.target, json.dumps(self.spec, sort_keys=True))

    def answers(self, name: str, spec: Mapping[str, object], target: str) -> bool:
        """Whether this is the kernel of that wish."""
        if name != self.name or not self._is_for(parse_target(target)) or not set(spec) <= set(self.spec):
            return False
        wished = {**self.defaults, **spec}
        return all(axis in wished and is_same_value(value, wished[axis]) for axis, value in self.spec.items())

    def _is_for(self, target: Target) -> bool:
        """A bare sm_90 stands for whatever exact target the kernel has for it."""
        if str(target) in (self.target, self.exact):
            return True
        exact = parse_target(self.exact)
        return target.backend == exact.backend == "cuda" and not target.suffix and target.capability == exact.capability


class Lock(NamedTuple):
    """A lock file, read."""

    path: Path
    kernels: tuple[Locked, ...]

    def find(self, name: str, spec: Mapping[str, object], target: str) -> Locked:
        """The entry of that wish. Raises: LockMismatch when there is none, with the entries of that name."""
        for locked in self.kernels:
            if locked.answers(name, spec, target):
                return locked
        known = [f"{one.target} {_shown(one.spec)}" for one in self.kernels if one.name == name]
        raise LockMismatch(
            f"{name} for {target} with {_shown(spec) or 'its defaults'} is not in {self.path}, and nothing else may be loaded",
            facts={"locked": "; ".join(known) or f"no kernel called {name}"},
            hint=f"kserve lock {name} --target {target} adds it",
        )

    def check(self, locked: Locked, found: list[tuple[str, str]]) -> None:
        """Hold (key, digest) of each variant against the lock. Raises: LockMismatch naming the first that differs."""
        stated = [(artifact.key, artifact.digest) for artifact in locked.artifacts]
        if found == stated:
            return
        pairs = zip([*stated, ("none", "none")], [*found, ("none", "none")], strict=False)
        wanted, came = next((pair for pair in pairs if pair[0] != pair[1]), (stated[-1], found[-1]))
        what = "other bytes" if wanted[0] == came[0] else "another key"
        raise LockMismatch(
            f"{locked.name} for {locked.target} has {what} than {self.path} names",
            facts={
                side: f"key {key[:12]}, digest {digest[:12]}" for side, (key, digest) in (("locked", wanted), ("found", came))
            },
            hint=f"kserve cache why {wanted[0][:12]} {came[0][:12]} says what changed; kserve lock --update accepts it",
        )

    def check_knobs(self, locked: Locked, values: Mapping[str, object], chosen_by: str) -> None:
        """Raises: LockMismatch when values that somebody chose are not the locked ones."""
        if any(value != locked.knobs.get(knob) for knob, value in values.items()):
            raise LockMismatch(
                f"{_shown(values)} ({chosen_by}) is another {locked.name} than {self.path} names",
                facts={"locked": _shown(locked.knobs)},
                hint="leave it out, or lock the kernel with the tuning you want",
            )

    @property
    def keys(self) -> frozenset[str]:
        """Every key it names."""
        return frozenset(artifact.key for locked in self.kernels for artifact in locked.artifacts)

    def with_kernels(self, kernels: list[Locked]) -> Lock:
        """The same file with these entries added, in place of those they replace."""
        merged = {locked.place: locked for locked in (*self.kernels, *kernels)}
        return self._replace(kernels=tuple(merged[place] for place in sorted(merged)))

    def write(self) -> None:
        """Write the file in one step. Raises: RequestError when it cannot be written."""
        plain = [{**one._asdict(), "artifacts": [part._asdict() for part in one.artifacts]} for one in self.kernels]
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps({"schema": LOCK_SCHEMA, "kernels": plain}, indent=1) + "\n")
            temporary.replace(self.path)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from None


def read_lock(path: Path) -> Lock:
    """Read a lock file. Raises: RequestError when it is missing, damaged or of another schema."""
    try:
        plain = json.loads(path.read_text())
        if plain["schema"] not in _READABLE:
            raise RequestError(f"{path} has schema {plain['schema']!r}, this version reads {LOCK_SCHEMA}")
        return Lock(path, tuple(_locked(one) for one in plain["kernels"]))
    except OSError as error:
        raise RequestError(f"lock file {path} cannot be read: {error.strerror}", hint="kserve lock NAME writes one") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidSpec) as error:
        raise RequestError(f"lock file {path} is damaged: {error!r}") from None


def _locked(plain: dict[str, Any]) -> Locked:
    artifacts = tuple(LockedArtifact(**part) for part in plain["artifacts"])
    locked = Locked(**{**plain, "artifacts": artifacts})
    texts = (locked.name, locked.target, locked.exact, *(text for artifact in artifacts for text in artifact))
    if not artifacts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"entry {locked.name!r} is incomplete")
    if not all(isinstance(one, dict) for one in (locked.spec, locked.defaults, locked.knobs, locked.variables)):
        raise TypeError(f"entry {locked.name!r} has no spec")
    return locked


def _shown(spec: Mapping[str, object]) -> str:
    return " ".join(f"{axis}={value}" for axis, value in spec.items())
