"""What help names can be given: options exist, values are accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from workbench.cli.app import app

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OF_ANOTHER = re.compile(r"`(?:workbench )?(\w+)( [^`]*)?`")


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, other in getattr(command, "commands", {}).items():
        yield from commands(other, below)


COMMANDS = dict(commands(typer.main.get_command(app)))
TEXTS = {
    name: [command.help or "", *(getattr(param, "help", None) or "" for param in command.params)]
    for name, command in COMMANDS.items()
}


def options(name: str) -> set[str]:
    return {word for param in COMMANDS[name].params for word in (*param.opts, *param.secondary_opts)} | {
        "--help",
        "--version",
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_help_names_exists(name: str) -> None:
    for text in TEXTS[name]:
        for other, words in OF_ANOTHER.findall(text):
            assert set(OPTION.findall(words)) <= options(other), text
        assert set(OPTION.findall(OF_ANOTHER.sub("", text))) - options(name) <= set(), text
