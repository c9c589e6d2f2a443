"""Why a key was not in the store: every build has a reason, in its log line, its record and its manifest."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from kserve.artifact import Manifest
from kserve.key import differences

FIRST = "first build"
_REMEMBERED = 64
_MOST_LOST = 20_000
_MOST_NAMED = 8
_READ = "include."


class Reasons:
    """Remembers what was built, and what was lost, to say how a new key differs from the nearest known one."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], deque[tuple[str, Mapping[str, str]]]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self._lost: dict[str, str] = {}

    def learn(self, manifest: Manifest) -> None:
        """Remember an artifact that was built, later than those before it."""
        self._known[manifest.name, manifest.variant].append((manifest.key, manifest.components))

    def lose(self, key: str, why: str) -> None:
        """An entry is gone: the next build of its key says so."""
        while len(self._lost) >= _MOST_LOST:
            self._lost.pop(next(iter(self._lost)), None)
        self._lost[key] = why

    def of(self, key: str, name: str, variant: str, components: Mapping[str, str]) -> str:
        """Why that key has to be built: it was lost, or how it differs from the nearest one, or it is the first."""
        if key in self._lost:
            return self._lost.pop(key)
        nearest = self.nearest(key, name, variant, components)
        if nearest is None:
            return FIRST
        more = [f"and {len(nearest[1]) - _MOST_NAMED} more"] if len(nearest[1]) > _MOST_NAMED else []
        return "; ".join([*nearest[1][:_MOST_NAMED], *more])

    def nearest(self, key: str, name: str, variant: str, components: Mapping[str, str]) -> tuple[str, list[str]] | None:
        """The known key of that kernel and variant with the fewest differences, and what they are."""
        known = tuple(self._known[name, variant])  # a copy: a build that ends in another thread adds to it
        others = [(other, differences(_seen(old, components), components)) for other, old in reversed(known) if other != key]
        return min(others, key=lambda found: len(found[1]), default=None)


def _seen(old: Mapping[str, str], new: Mapping[str, str]) -> Mapping[str, str]:
    """The old components without what its build has read outside, where nobody knows yet what the new one will read."""
    if any(label.startswith(_READ) for label in new):
        return old
    return {label: text for label, text in old.items() if not label.startswith(_READ)}
