"""Kernels named on a command line: NAME, --set AXIS=VALUE, --target."""

from __future__ import annotations

import argparse
import contextlib

from kserve import catalog
from kserve.client.direct import Wanted
from kserve.config import Settings
from kserve.definition import EXTENSION
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
    texts = dict(_assignment(text) for text in arguments.set)
    axes = catalog.definition_of(catalog.find(arguments.name, settings).folder).axes
    spec = {name: axes[name].normalise(text) if name in axes else text for name, text in texts.items()}
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


def _assignment(text: str) -> tuple[str, str]:
    axis, equals, value = text.partition("=")
    if not equals or not axis:
        raise RequestError(f"--set {text!r} cannot be read", facts={"allowed": "--set AXIS=VALUE"})
    return axis, value
