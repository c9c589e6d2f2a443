"""Kernels named on a command line: NAME, --set AXIS=VALUE, --target."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from kserve import catalog
from kserve.client.direct import Wanted
from kserve.config import Settings
from kserve.definition import EXTENSION, KernelDef
from kserve.errors import RequestError, UnsupportedTarget
from kserve.target import parse_target


def add_wish(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments that name one kernel for several targets."""
    parser.add_argument("name", nargs="?", help="a kernel")
    parser.add_argument("--target", action="append", required=required, default=[], help="such as cuda:sm_90; may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="AXIS=VALUE", help="a value for an axis; may be repeated")


def wishes(arguments: argparse.Namespace, settings: Settings, *, debug: str = "") -> list[Wanted]:
    """One wish a target, its values of the axes' own types: the same request as from Python.

    Raises: RequestError for an assignment that is none, UnknownKernel, InvalidSpec.
    """
    spec = spec_of(arguments, catalog.definition_of(catalog.find(arguments.name, settings).folder))
    return [Wanted(arguments.name, target, spec, debug) for target in arguments.target]


def every_wish(arguments: argparse.Namespace, settings: Settings, *, debug: str = "") -> list[Wanted]:
    """Every kernel of the catalog, with the defaults of its axes, for each target that it is made for.

    Raises: RequestError where a kernel is named besides.
    """
    if arguments.name or arguments.set:
        raise RequestError(
            "--all means every kernel with its defaults", facts={"allowed": "--all without a name and without --set"}
        )
    found = []
    for _, definition, entry in catalog.every_entry(settings):
        if (debug and definition.language == EXTENSION) or any(axis.default is None for axis in definition.axes.values()):
            continue
        for target in arguments.target:
            with contextlib.suppress(UnsupportedTarget):
                definition.resolve_target(entry, parse_target(target))
                found.append(Wanted(entry.name, target, {}, debug))
    return found


def spec_of(arguments: argparse.Namespace, definition: KernelDef) -> dict[str, Any]:
    """The values of `--set`, each of its axis's own type. Raises: RequestError for one that is none, InvalidSpec."""
    texts = dict(assignment("--set", text, "AXIS=VALUE") for text in arguments.set)
    axes = definition.axes
    return {name: axes[name].normalise(text) if name in axes else text for name, text in texts.items()}


def assignment(flag: str, text: str, form: str) -> tuple[str, str]:
    """Both sides of what stands behind a flag, and has that form. Raises: RequestError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RequestError(f"{flag} {text!r} cannot be read", facts={"allowed": f"{flag} {form}"})
    return name, value
