"""Kernels named on a command line: NAME, --set AXIS=VALUE, --target."""

from __future__ import annotations

import argparse

from kserve import catalog
from kserve.client.direct import Wanted
from kserve.config import Settings
from kserve.errors import RequestError


def add_wish(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments that name one kernel for several targets."""
    parser.add_argument("name", nargs=None if required else "?", help="a kernel")
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


def _assignment(text: str) -> tuple[str, str]:
    axis, equals, value = text.partition("=")
    if not equals or not axis:
        raise RequestError(f"--set {text!r} cannot be read", facts={"allowed": "--set AXIS=VALUE"})
    return axis, value
