"""`kserve ncu` and `kserve sanitize`: NVIDIA's tools over one launch of a kernel."""

from __future__ import annotations

import argparse

from kserve.cli.wishes import wishes
from kserve.config import load_settings
from kserve.measure.launch_once import place_of
from kserve.measure.tools import NCU, SANITIZER, SANITIZER_TOOLS, Tool, find_tool, run, target_here

COMMANDS = ("ncu", "sanitize")


def split_options(argv: list[str]) -> tuple[list[str], list[str]]:
    """A command line, and what follows `--` in one of these commands: the tool's own options."""
    if argv[:1] and argv[0] in COMMANDS and "--" in argv:
        at = argv.index("--")
        return argv[:at], argv[at + 1 :]
    return argv, []


def add_commands(ncu: argparse.ArgumentParser, sanitize: argparse.ArgumentParser) -> None:
    """Add the arguments of both."""
    for parser, tool in ((ncu, NCU.name), (sanitize, SANITIZER.name)):
        parser.usage = f"{parser.prog} NAME [options] [-- options of {tool}]"
        parser.add_argument("name", help="a kernel")
        parser.add_argument(
            "--set", action="append", default=[], metavar="AXIS=VALUE", help="a value for an axis; may be repeated"
        )
        parser.add_argument(
            "--inputs",
            metavar="FILE.py:FUNCTION",
            help="what makes the arguments of one launch; without it, the inputs of its op's benchmark",
        )
    sanitize.add_argument("--tool", choices=SANITIZER_TOOLS, default=SANITIZER_TOOLS[0], help="what is checked")


def profile(arguments: argparse.Namespace) -> int:
    """Run `kserve ncu`."""
    return _run(NCU, arguments, arguments.tool_options)


def sanitize(arguments: argparse.Namespace) -> int:
    """Run `kserve sanitize`."""
    return _run(SANITIZER, arguments, ["--tool", arguments.tool, *arguments.tool_options])


def _run(tool: Tool, arguments: argparse.Namespace, options: list[str]) -> int:
    find_tool(tool)  # what is missing is said before anything is built
    arguments.target = [target_here(tool)]
    (wish,) = wishes(arguments, load_settings(), debug=tool.debug)
    return run(tool, wish, inputs=place_of(arguments.name, arguments.inputs), options=options)
