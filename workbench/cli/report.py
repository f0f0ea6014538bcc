"""`workbench report`: what one's own boards did, without names, to look at or to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.output import Json, print_json, print_text
from workbench.core.files import require_writable
from workbench.core.serial import write_json


def report(
    name: Annotated[
        str,
        typer.Argument(help="A kit's file, after `kit measure`; or a run on real devices, by name, tag or report."),
    ] = "kit.toml",
    share: Annotated[
        Path | None, typer.Option(help="Write the report to this file. Without this option it is printed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report measurements of real boards, without names, addresses and paths, so that you can publish them."""
    require_writable(share)
    from workbench.runs.board_report import board_report, summary_of

    board = board_report(name)
    if share is not None:
        write_json(share, board)
    if as_json or share is None:
        print_json(board)
    else:
        print_text(f"{share}: {summary_of(board)}.  Read it before you send it.")
