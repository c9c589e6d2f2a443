"""Takes the flags of `torch.utils.cpp_extension` apart: what a definition holds, what names a place, what names device code."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kserve.client.given import Root
from kserve.definition import CODE, REFUSED_COMPILER_FLAG
from kserve.errors import RequestError

# `TORCH_CUDA_ARCH_LIST` as torch reads it.
_NAMED = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
_ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)(\+PTX)?")
_PLACES = {"-I": "include", "-isystem": "system", "-iquote": "include", "-L": "library"}
_DEVICE = ("-gencode", "--generate-code", "-arch", "--gpu-architecture")


class Flags(NamedTuple):
    """What one argument says: flags without a path, places, device code."""

    plain: tuple[str, ...]
    roots: tuple[Root, ...]
    codes: tuple[str, ...]


def split(argument: str, given: Iterable[str] | None) -> Flags:
    """One list of flags, each of which a shell may split further, as torch's ninja file has it.

    Raises: RequestError for a flag that reads or writes a file in another way.
    """
    words = [word for flag in given or () for word in shlex.split(flag)]
    plain: list[str] = []
    roots: list[Root] = []
    codes: list[str] = []
    waiting = iter(words)
    for word in waiting:
        place = next((prefix for prefix in _PLACES if word.startswith(prefix)), None)
        device = next((prefix for prefix in _DEVICE if word == prefix or word.startswith(f"{prefix}=")), None)
        if place is not None:
            path = word.removeprefix(place) or next(waiting, "")
            roots.append(Root(os.path.abspath(path), _PLACES[place]))  # noqa: PTH100 - a text that may be empty
        elif device is not None:
            codes += _codes(argument, word.removeprefix(device).lstrip("=") or next(waiting, ""))
        elif argument == "extra_ldflags" and not word.startswith(("-", "@")):
            roots.append(Root(os.path.abspath(word), "read"))  # noqa: PTH100 - the same
            plain.append(f"{{root{len(roots) - 1}}}")
        elif REFUSED_COMPILER_FLAG.match(word):
            raise RequestError(
                f"{argument}: {word!r} is not supported",
                facts={"allowed": "options that read or write no file; -I, -isystem and -L with a directory; -gencode, -arch"},
            )
        else:
            plain.append(word)
    return Flags(tuple(plain), tuple(roots), tuple(dict.fromkeys(codes)))


def _codes(argument: str, text: str) -> list[str]:
    """What `arch=compute_80,code=[sm_80,compute_80]`, or plain `sm_80`, makes."""
    listed = text.partition("code=")[2] if "code=" in text else text
    found = [code for code in listed.strip("[]").split(",") if code]
    if "code=" not in text:
        found += [code.replace("sm_", "compute_") for code in found if code.startswith("sm_")]
    if not found or not all(CODE.fullmatch(code) for code in found):
        raise RequestError(f"{argument}: device code {text!r} cannot be read", facts={"allowed": "arch=compute_NN,code=sm_NN"})
    return found


def codes_of_list(text: str) -> tuple[str, ...]:
    """The device code that a list such as `8.0;9.0+PTX` names, or `Ampere`. Raises: RequestError."""
    for name, meaning in _NAMED.items():
        text = text.replace(name, meaning)
    found: list[str] = []
    for part in text.replace(" ", ";").split(";"):
        match = _ARCH.fullmatch(part)
        if match is None:
            allowed = {"allowed": "releases such as 8.0, 9.0a, 9.0+PTX, or " + ", ".join(_NAMED)}
            raise RequestError(f"TORCH_CUDA_ARCH_LIST cannot hold {part!r}", facts=allowed)
        number = "".join(match.group(1, 2, 3))
        found += [f"sm_{number}", *([f"compute_{number}"] if match[4] else [])]
    return tuple(sorted(set(found)))


def codes_of_devices(capabilities: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Binary code for each device, PTX of the newest: what torch makes where no list says otherwise."""
    found = sorted(set(capabilities))
    newest = [f"compute_{major}{minor}" for major, minor in found[-1:]]
    return tuple(sorted({*(f"sm_{major}{minor}" for major, minor in found), *newest}))
