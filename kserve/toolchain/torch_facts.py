"""What torch an interpreter has, read from its files: importing it costs a worker two seconds and 600 MB."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kserve.errors import ToolchainMissing

_VERSION = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)
_CUDA = re.compile(r"^cuda(?:: Optional\[str\])? = '([^']+)'", re.MULTILINE)
_GIT = re.compile(r"^git_version = '([^']+)'", re.MULTILINE)
_STANDARD = re.compile(r"cflags = common_cflags \+ \['-fPIC', '(-std=c\+\+\d+)'\]")
# The headers that the stable ABI is made of: a build that reads no others loads under any later torch.
STABLE_HEADERS = (
    "torch/csrc/stable",
    "torch/headeronly",
    "torch/csrc/inductor/aoti_torch/c",
    "torch/csrc/inductor/aoti_torch/generated",
)


class Torch(NamedTuple):
    """An installed torch.

    Fields:
        cuda:     the release it was built with, `13.0`; empty for a build without CUDA.
        build:    the commit it was built from.
        standard: the flag for the C++ standard that its own builder of extensions asks for.
    """

    root: Path
    version: str
    cuda: str
    build: str
    standard: str

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def libraries(self) -> Path:
        return self.root / "lib"

    @property
    def stable_headers(self) -> list[Path]:
        """What a stable-ABI build may read."""
        return [path for name in STABLE_HEADERS if (path := self.include / name).exists()]

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "root": str(self.root)}


def find_torch(path: Sequence[str]) -> Torch | None:
    """The torch that an import would find on that path; None where there is none.

    Raises: ToolchainMissing for one whose files are not those of a supported release.
    """
    roots = (Path(entry) / "torch" for entry in path if entry)
    root = next((root for root in roots if (root / "version.py").is_file()), None)
    if root is None:
        return None
    facts = (root / "version.py").read_text()
    builder = (root / "utils" / "cpp_extension.py").read_text()
    version, cuda, build, standard = (
        match[1] if (match := pattern.search(text)) else ""
        for pattern, text in ((_VERSION, facts), (_CUDA, facts), (_GIT, facts), (_STANDARD, builder))
    )
    if not version or not standard:
        raise ToolchainMissing(
            f"torch in {root} is of a release that extensions cannot be built for", facts={"allowed": "torch 2.11 and newer"}
        )
    return Torch(root, version, cuda, build, standard)
