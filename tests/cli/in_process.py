"""The command line in this process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from workbench.cli.app import app


def call(*words: object) -> Result:
    """Call `workbench` with these words.  Raises an error that the command lets through."""
    done = CliRunner().invoke(app, list(map(str, words)))
    if isinstance(done.exception, Exception):  # SystemExit is none
        raise done.exception
    return done


def kit(*words: str, code: int = 0) -> str:
    """Call `workbench kit`, which must end with this code; return what it writes."""
    done = call("kit", *words)
    assert done.exit_code == code, done.output
    return done.output
