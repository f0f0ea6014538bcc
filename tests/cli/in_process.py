"""The command line in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from workbench.cli.app import app


def call(*words: object, columns: int | None = None) -> Result:
    """Call `workbench` with these words, in a terminal of so many columns.  Raises an error that the command lets
    through."""
    done = CliRunner(env={"COLUMNS": str(columns)} if columns else {}).invoke(app, list(map(str, words)))
    if isinstance(done.exception, Exception):  # SystemExit is none
        raise done.exception
    return done


def answer(*words: object) -> Any:
    """Call `workbench` with these words, which must end well; return what it answers to --json."""
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def kit(*words: str, code: int = 0) -> str:
    """Call `workbench kit`, which must end with this code; return what it writes."""
    done = call("kit", *words)
    assert done.exit_code == code, done.output
    return done.output
