"""The exception tree, its stable codes, and how an error crosses a process border.

KserveError
├── RequestError        the caller asked for something that does not exist or does not fit
│   ├── UnknownKernel
│   ├── InvalidSpec         also a ValueError
│   ├── InvalidDefinition   a kernel.toml that cannot be read; also a ValueError
│   └── UnsupportedTarget
├── BuildError          the request was right, the build was not; also a RuntimeError
│   ├── CompileFailed
│   │   └── DoesNotFit      it compiles, and needs more than a block of its target has
│   ├── BuildTimeout
│   ├── NotBuilt
│   └── ToolchainMissing
├── StoreError
│   └── CorruptArtifact
├── ServiceError
│   ├── DaemonUnreachable
│   ├── DaemonEnding        asked while it goes down: the client asks the next one
│   ├── ForeignPeer         a socket or directory that belongs to somebody else
│   └── ProtocolMismatch
├── LockMismatch        not what the lock file names
├── LoadError           the driver, or the contract, refused the bytes
└── LaunchError         a wrong argument; also a TypeError and a ValueError
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class KserveError(Exception):
    """Base of everything kserve raises.

    Args:
        message: what failed, on what, and why: one sentence.
        facts:   further lines, label -> value, printed below the message.
        hint:    the next step; names only commands that exist.
    """

    code = "internal"

    def __init__(self, message: str, *, facts: Mapping[str, str] | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.facts = dict(facts or {})
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message, *(f"  {label + ':':<10} {value}" for label, value in self.facts.items())]
        if self.hint:
            lines.append(f"  {'hint:':<10} {self.hint}")
        return "\n".join(lines)

    @property
    def http_status(self) -> int:
        return STATUS[self.code][0]

    @property
    def exit_status(self) -> int:
        return STATUS[self.code][1]

    def to_wire(self) -> dict[str, Any]:
        """The one JSON shape of an error: code, message, facts, hint."""
        return {"code": self.code, "message": self.message, "facts": self.facts, "hint": self.hint}


class RequestError(KserveError):
    code = "bad-request"


class UnknownKernel(RequestError):
    code = "unknown-kernel"


class InvalidSpec(RequestError, ValueError):
    code = "invalid-spec"


class InvalidDefinition(RequestError, ValueError):
    code = "invalid-definition"


class UnsupportedTarget(RequestError):
    code = "unsupported-target"


class BuildError(KserveError, RuntimeError):
    code = "build-failed"


class CompileFailed(BuildError):
    code = "compile-failed"


class DoesNotFit(CompileFailed):
    code = "does-not-fit"


class BuildTimeout(BuildError):
    code = "build-timeout"


class NotBuilt(BuildError):
    code = "not-built"


class ToolchainMissing(BuildError):
    code = "toolchain-missing"


class StoreError(KserveError):
    code = "store-unusable"


class CorruptArtifact(StoreError):
    code = "corrupt-artifact"


class ServiceError(KserveError):
    code = "service-failed"


class DaemonUnreachable(ServiceError):
    code = "daemon-unreachable"


class DaemonEnding(ServiceError):
    code = "daemon-ending"


class ForeignPeer(ServiceError):
    code = "foreign-peer"


class ProtocolMismatch(ServiceError):
    code = "protocol-mismatch"


class LockMismatch(KserveError):
    code = "lock-mismatch"


class LoadError(KserveError):
    code = "load-failed"


class LaunchError(KserveError, TypeError, ValueError):
    code = "launch-refused"


# code -> (HTTP status, exit status). Exit statuses: 2 wrong use, 3 unknown, 4 build, 5 store, 6 service, 7 load or launch.
STATUS: dict[str, tuple[int, int]] = {
    "internal": (500, 1),
    "bad-request": (400, 2),
    "unknown-kernel": (404, 3),
    "invalid-spec": (422, 2),
    "invalid-definition": (422, 2),
    "unsupported-target": (422, 2),
    "build-failed": (424, 4),
    "compile-failed": (424, 4),
    "does-not-fit": (424, 4),
    "build-timeout": (504, 4),
    "not-built": (404, 4),
    "toolchain-missing": (424, 4),
    "store-unusable": (507, 5),
    "corrupt-artifact": (410, 5),
    "service-failed": (503, 6),
    "daemon-unreachable": (503, 6),
    "daemon-ending": (503, 6),
    "foreign-peer": (403, 6),
    "protocol-mismatch": (426, 6),
    "lock-mismatch": (409, 5),
    "load-failed": (500, 7),
    "launch-refused": (400, 7),
}


def _tree(root: type[KserveError]) -> dict[str, type[KserveError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_wire(wire: object) -> KserveError:
    """The exception that `to_wire` described; a code or a shape this version does not know becomes a ServiceError."""
    found = wire if isinstance(wire, dict) else {}
    kind = _tree(KserveError).get(str(found.get("code")), ServiceError)
    stated, hint = found.get("facts"), found.get("hint")
    facts = {str(k): str(v) for k, v in stated.items()} if isinstance(stated, dict) else {}
    message = str(found.get("message", f"the service sent an error of another shape: {wire!r}"))
    return kind(message, facts=facts, hint=None if hint is None else str(hint))


def closest(word: str, known: list[str]) -> str:
    """A tail for a message: the known names nearest to `word`, or all of them when few."""
    import difflib

    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known: " + (", ".join(sorted(known)) if known else "none")
