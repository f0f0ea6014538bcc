"""`workbench cache`: the activation caches that runs with keep_cache left, and how to be rid of them."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.output import Json, print_json, print_table
from workbench.core.errors import ConfigError
from workbench.core.serial import to_builtins

ACTIONS = ("list", "clear")


def cache(
    action: Annotated[str, typer.Argument(help="list or clear.")] = "list",
    as_json: Json = False,
) -> None:
    """List or clear the activation caches that runs with the option keep_cache left for later runs."""
    if action not in ACTIONS:
        raise ConfigError(f"'workbench cache {action}' was asked for.", f"There are {' and '.join(ACTIONS)}.", "Name one of them.")
    from workbench.runtime.kept_caches import KeptCaches

    kept = KeptCaches()
    if action == "clear":
        freed = kept.clear()
        print_json({"freed_bytes": freed}) if as_json else print(f"{freed / 1e6:.1f} MB freed")
        return
    found = kept.list()
    if as_json:
        print_json([to_builtins(description) for description in found])
    elif not found:
        print("No activation cache is kept. A run with --option keep_cache=true leaves one.")
    else:
        rows = [
            (one.created, one.model, one.task, str(one.num_samples), one.dtype, f"{one.nbytes / 1e6:.1f} MB", str(kept.folder(one.key)))
            for one in found
        ]
        print_table("Kept activation caches", ("created (UTC)", "model", "task", "samples", "type", "size", "folder"), rows)
