"""Remembers what each environment's compilers are, so that a hit needs no worker.

A fingerprint costs a second: the compiler is loaded and its files are hashed. It is kept in one JSON file of the store with
the stamp of every file it was made of, and holds while all of those are unchanged. The file has its own digest inside: a
flipped bit would make keys of a compiler that never was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from kserve.alias import is_as_it_was
from kserve.build.pool import Pool
from kserve.build.worker_handle import Environment
from kserve.config import Settings, environment_of_process
from kserve.errors import ProtocolMismatch
from kserve.key import canonical_json, digest_of
from kserve.toolchain.base import Fingerprint

# The files are looked at once in this time, not at every request: a compiler that is replaced is noticed this much later.
_TRUSTED_S = 1.0
_QUIET_S = 0.5  # after which a new daemon was not started for a request that is on its way


class Fingerprints:
    """Fingerprints by language and environment.

    Args:
        path: the JSON file; one that is missing or damaged only costs the time to make it again.
    """

    def __init__(self, path: Path, pool: Pool) -> None:
        self._path = path
        self._pool = pool
        self._known = _read(path)
        self._trusted_until: dict[str, float] = {}
        self._loading: dict[str, asyncio.Task[Fingerprint]] = {}

    async def of(self, language: str, environment: Environment, *, look_again: bool = False) -> Fingerprint:
        """The fingerprint of that compiler as it is installed now.

        Args:
            look_again: look at the files even if that was done a moment ago.
        Raises: ToolchainMissing, BuildTimeout; ProtocolMismatch when the caller has imported another version.
        """
        place = json.dumps(environment.place(language))
        if look_again:
            self._trusted_until.pop(place, None)
        found = self._remembered(place) or await self._loaded(place, language, environment)
        imported = dict(environment.loaded).get(language)
        if imported is not None and imported.partition("+")[0] != found.version.partition("+")[0]:
            raise ProtocolMismatch(
                f"this process has imported {language} {imported}, but {environment.python} would compile with {found.version}",
                hint="restart the process: the package was changed under it",
            )
        return found

    def environments(self, language: str, files: str) -> list[Environment]:
        """Where a compiler of these files was last seen."""
        places = []
        for place, found in self._known.items():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a damaged file only costs the memory
                spoken, environment = _environment(place)
                if spoken == language and found["files"] == files:
                    places.append(environment)
        return places

    def last_used(self) -> list[tuple[str, Environment]]:
        """The environment in which each language was last loaded, while its compiler is the same."""
        found: dict[str, Environment] = {}
        for place in self._known:
            with contextlib.suppress(TypeError, ValueError):
                language, environment = _environment(place)
                if self._remembered(place) is not None:
                    found[language] = environment
        return list(found.items())

    async def expected(self, settings: Settings) -> list[tuple[str, Environment]]:
        """What a daemon that has just started should load: what was last used.

        For a store without kernels it is NVRTC, which takes a tenth of a second and little memory, unless whoever started the
        daemon asks for a compiler at once: then that one is not to wait for processor time.
        """
        known = self.last_used()
        if known:
            return known
        await asyncio.sleep(_QUIET_S)
        return [] if self._pool.to_json() else [("cuda", own_environment(settings))]

    async def _loaded(self, place: str, language: str, environment: Environment) -> Fingerprint:
        """One load a place, however many ask: a second one would retire the worker of the first."""
        task = self._loading.get(place)
        if task is None:
            task = self._loading[place] = asyncio.create_task(self._load(place, language, environment))
            task.add_done_callback(lambda done: (self._loading.pop(place, None), done.cancelled() or done.exception()))
        return await asyncio.shield(task)

    async def _load(self, place: str, language: str, environment: Environment) -> Fingerprint:
        if place in self._known:
            self._pool.retire(language, environment)
        worker = await self._pool.worker(language, environment)
        found = worker.fingerprint.result()
        self._known.pop(place, None)  # the last one loaded stands last
        self._known[place] = found._asdict()
        self._trusted_until[place] = time.monotonic() + _TRUSTED_S
        self._save()
        return found

    def _remembered(self, place: str) -> Fingerprint | None:
        with contextlib.suppress(KeyError, TypeError, OSError, AttributeError):
            found = Fingerprint(**self._known[place])
            if time.monotonic() < self._trusted_until.get(place, 0.0):
                return found
            if all(is_as_it_was(path, stated) for path, stated in found.stamps.items()):
                self._trusted_until[place] = time.monotonic() + _TRUSTED_S
                return found
        return None

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # the memory of this process serves on
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps({"digest": _digest(self._known), "toolchains": self._known}))
            temporary.rename(self._path)


def _environment(place: str) -> tuple[str, Environment]:
    language, python, python_path, *cuda_home = json.loads(place)
    return language, Environment(python, tuple(python_path), cuda_home="".join(cuda_home))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(path.read_bytes())
        known: dict[str, dict[str, Any]] = found["toolchains"]
        if _digest(known) == found["digest"]:
            return known
    return {}


def _digest(known: dict[str, dict[str, Any]]) -> str:
    return digest_of(canonical_json(known).encode())


def own_environment(settings: Settings) -> Environment:
    """That of this process."""
    own = environment_of_process(settings)
    return Environment(own["python"], tuple(own["python_path"]), cuda_home=own["cuda_home"])
