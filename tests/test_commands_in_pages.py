"""Every command that a page shows exists, with its options, and the settings that it gives are those of its method."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from workbench.cli.app import app
from workbench.core.methods import declaration_of, registered

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/a-new-method.md"})
"""That of a new method is tried by a test of its own."""
COMMANDS = typer.main.get_command(app)
CONTEXT = typer.Context(COMMANDS, info_name="workbench")


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each `workbench ...` line in a page's blocks of shell commands."""
    blocks = re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"\s*(?:\w+=\S+ )*workbench ", line)]
    return [line[line.index("workbench") + 1 :] for line in words]


def fault_of(words: list[str]) -> str:
    """Return what is wrong with a command, '' if nothing."""
    name, *rest = words
    command = COMMANDS.get_command(CONTEXT, name)
    if command is None:
        return f"there is no command {name}"
    context = typer.Context(command, info_name=name, parent=CONTEXT)
    if hasattr(command, "list_commands"):
        name, *rest = rest
        command = command.get_command(context, name)
        if command is None:
            return f"there is no command {' '.join(words[:2])}"
        context = typer.Context(command, info_name=name, parent=context)
    known = {option for parameter in command.get_params(context) for option in parameter.opts}
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if unknown := [option for option in given if option not in known]:
        return f"{name} has no {unknown[0]}"
    pairs = dict(pairwise(rest))
    method = pairs.get("--method", "pac_plus")
    if "," not in method and method in registered():
        settings = declaration_of(method).defaults
        keys = [value.partition("=")[0] for option, value in pairwise(rest) if option == "--option"]
        if name != "sweep" and (wrong := [key for key in keys if key not in settings]):
            return f"{method} has no option {wrong[0]}"
    elif name in ("run", "plan", "simulate"):
        return f"there is no method {method}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists(page: Path) -> None:
    faults = [(" ".join(words), fault) for words in commands_of(page.read_text("utf-8")) if (fault := fault_of(words))]
    assert faults == []


def test_the_rule_sees_commands_and_can_fail() -> None:
    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert len(commands_of(text)) > 30
    typo, unknown = (
        "WORKBENCH_TINY=1 workbench run --method p_rge --option querys=4   # a typo",
        "workbench kit init --fast",
    )
    wrong = f"```sh\n{typo}\n{unknown}\n```\n"
    assert [fault_of(words) for words in commands_of(wrong)] == ["p_rge has no option querys", "kit has no --fast"]
    assert fault_of(["fly"]) == "there is no command fly"
