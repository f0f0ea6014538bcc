"""Every command with its arguments and options, from the application that runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from generate.words import cell, table
from workbench.cli.app import app


def commands() -> str:
    """Return a section for each command, a subsection for each of a group's."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="workbench")
    return "\n".join(_sections(root, context, 2))


def _sections(group: Any, context: Any, level: int) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inside = typer.Context(command, info_name=name, parent=context)
        yield f"{'#' * level} {inside.command_path}\n"
        yield _prose(command.help or "")
        parameters = [one for one in command.get_params(inside) if one.name != "help"]
        records = [record for one in parameters if (record := one.get_help_record(inside))]
        if records:
            usage = " ".join(command.collect_usage_pieces(inside))
            yield f"```\n{inside.command_path} {usage}\n```\n"
            yield table(("argument or option", "default", "meaning"), (_row(*one) for one in records))
        if hasattr(command, "list_commands"):
            yield from _sections(command, inside, level + 1)


def _row(names: str, help_text: str) -> tuple[str, str, str]:
    """Return the cells of a record of the help, whose text ends with '[default: X]' or '[required]'."""
    text, _, default = re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", help_text).partition("  [default: ")
    return f"`{names}`".replace("|", "\\|"), cell(default.removesuffix("]").strip("()")), cell(text)


def _prose(text: str) -> str:
    """Return a command's help: paragraphs, with `code` as it is."""
    return re.sub(r"\n(?!\n)", " ", text.replace("\b", "").strip()).replace("<", "\\<") + "\n"
