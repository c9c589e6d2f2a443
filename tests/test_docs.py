"""The documentation names everything there is: settings, commands, kernels, error codes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kserve import cli, config
from kserve.catalog import definition_of, kernel_folders
from kserve.config import built_in_roots
from kserve.errors import STATUS

ROOT = Path(__file__).resolve().parent.parent


def read(*names: str) -> str:
    paths = [path for name in names for path in sorted(ROOT.glob(name))]
    return "\n".join(path.read_text() for path in paths)


def says(text: str, name: str) -> bool:
    """Whether the text has the name as a word of its own."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def commands(parser: argparse.ArgumentParser, prefix: str) -> Iterator[str]:
    """`kserve up`, `kserve cache ls`, …: every command that can be run."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for name, child in action.choices.items():
            yield from commands(child, f"{prefix} {name}")
    if not inner:
        yield prefix


def built_in_entries() -> list[str]:
    return [name for folder in kernel_folders([*built_in_roots()]) for name in definition_of(folder).entries]


COMMANDS = list(commands(cli._parser(), "kserve"))


def test_there_are_commands_and_kernels_to_document():
    assert {"kserve up", "kserve cache ls"} <= set(COMMANDS)
    assert "fused_norm_residual" in built_in_entries()


@pytest.mark.parametrize("variable", [variable for variable, _, _ in config._VARIABLES.values()])
def test_every_setting_is_in_the_configuration_page(variable):
    assert says(read("docs/configuration.md"), variable)


@pytest.mark.parametrize("field", config._VARIABLES)
def test_every_setting_of_the_file_is_in_the_configuration_page(field):
    assert says(read("docs/configuration.md"), field)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command):
    assert says(read("README.md", "docs/**/*.md"), command)


@pytest.mark.parametrize("name", built_in_entries())
def test_every_built_in_kernel_is_in_the_kernels_page(name):
    assert says(read("docs/kernels.md"), name)


@pytest.mark.parametrize("code", STATUS)
def test_every_error_code_is_in_the_errors_page(code):
    assert says(read("docs/errors.md"), code)


def test_the_documentation_names_no_setting_that_does_not_exist():
    named = set(re.findall(r"\bKSERVE_[A-Z_]*[A-Z]\b", read("docs/configuration.md")))
    assert named <= {variable for variable, _, _ in config._VARIABLES.values()}
