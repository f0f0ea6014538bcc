"""Every command that a page or a notebook shows exists, with its options, and the settings that it gives are those of
its method.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer

from workbench.cli.app import app
from workbench.cli.kit import kit
from workbench.cli.runs import runs
from workbench.core.errors import ConfigError
from workbench.core.methods import declaration_of, registered
from workbench_labs.course.command import labs
from workbench_studies.bench.command import BENCHES
from workbench_studies.papers import COMPARE, PAPERS, find_item

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/a-new-method.md"})
"""That of a new method is tried by a test of its own."""
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
ACTIONS = {command.__name__: get_args(get_type_hints(command)["action"]) for command in (kit, labs, runs)}
COMMANDS = typer.main.get_command(app)
CONTEXT = typer.Context(COMMANDS, info_name="workbench")


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each `workbench ...` line in a page's blocks of shell commands, and of those within its
    sentences.  `workbench COMMAND` and `workbench --help` are none.
    """
    blocks = [block for language, block in BLOCK.findall(text) if language in ("sh", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"\s*(?:\w+=\S+ )*workbench ", line)]
    commands = [line[line.index("workbench") + 1 :] for line in words]
    return [command for command in commands if not re.fullmatch(r"[A-Z]+|\.\.\.|--.*", command[0])]


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
    names = [word for word in takewhile(lambda word: not word.startswith("--"), rest) if not word.isupper()]
    if name in ACTIONS and names and names[0] not in ACTIONS[name]:
        return f"{name} does not know {names[0]}"
    known = {option for parameter in command.get_params(context) for option in parameter.opts}
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if unknown := [option for option in given if option not in known]:
        return f"{name} has no {unknown[0]}"
    if name == "bench" and names and names[0] not in (*BENCHES, "all"):
        return f"there is no benchmark {names[0]}"
    if name == "reproduce" and names:
        paper, *items = names
        try:
            [find_item(paper, item) for item in items]
        except ConfigError as error:
            return str(error)
        return "" if paper in (*PAPERS, COMPARE) else f"there is no paper {paper}"
    pairs = dict(pairwise(rest))
    method = pairs.get("--method", "pac_plus")
    if "," not in method and method in registered():
        settings = declaration_of(method).defaults
        keys = [value.partition("=")[0] for option, value in pairwise(rest) if option == "--option"]
        if name != "sweep" and (wrong := [key for key in keys if key not in settings and not key.isupper()]):
            return f"{method} has no option {wrong[0]}"
    elif name in ("run", "plan", "simulate") and method not in ("METHOD", "NAME", "..."):
        return f"there is no method {method}"
    return ""


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    faults = [(" ".join(words), fault) for words in commands_of(text) if (fault := fault_of(words))]
    assert faults == []


def test_the_rule_sees_commands_and_can_fail() -> None:
    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert len(commands_of(text)) > 30
    typo, unknown = (
        "WORKBENCH_TINY=1 workbench run --method p_rge --option querys=4   # a typo",
        "workbench kit init --fast",
    )
    wrong = f"```sh\n{typo}\n{unknown}\n```\nThen `workbench\nlabs judge x`, or `workbench COMMAND --help`.\n"
    faults = ["p_rge has no option querys", "kit has no --fast", "labs does not know judge"]
    assert [fault_of(words) for words in commands_of(wrong)] == faults
    assert fault_of(["fly"]) == "there is no command fly"


def test_options_that_few_need_are_named_where_the_page_says() -> None:
    page = ROOT / "docs/reference/options.md"
    _, listed = page.read_text(encoding="utf-8").split("## Options that few need")
    declared = {field.name for method in registered() for field in fields(declaration_of(method).options)}
    rows = re.findall(r"^\| (`.*?`) \| .* \| (?:\[.*\]\((.*)\)|`(.*)`) \|$", listed, re.MULTILINE)
    assert len(rows) == listed.count("\n| ") - 2  # all but the table's head
    for names, link, path in rows:
        user = (page.parent / link if link else ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert name in declared and re.search(rf"\b{name}\b", user), name
