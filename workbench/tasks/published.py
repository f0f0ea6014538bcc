"""Read published data sets: from the hub, saved ones, and lines of JSON.  Never waits minutes for an unreachable hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, MissingDataError
from workbench.network import hub_endpoint, hub_is_reachable

PARQUET = "refs/convert/parquet"
"""The hub's own copy of a data set published with a loading script, which the library no longer runs."""


def hub_dataset(task: str, repository: str, configuration: str | None, official: str) -> dict[str, Any]:
    """Return the tables of a data set on the hub (or in its local cache) by split.

    official: the required contents of a folder, for the error message.  Raises MissingDataError if the data set is unavailable.
    """
    asked, todo = f"The task '{task}' was asked for.", f"Connect to the network, or pass --data FOLDER with {official}."
    import datasets

    reachable = hub_is_reachable()
    if not reachable:
        # The library's own offline mode only searches its cache and answers at once.
        offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        try:
            return dict(datasets.load_dataset(repository, configuration))
        except RuntimeError:  # the data set has a loading script
            return dict(datasets.load_dataset(repository, data_dir=configuration, revision=PARQUET))
    except (OSError, ValueError, RuntimeError) as error:
        found = (
            f"The hub said: {error}." if reachable else f"'{repository}' is not in the local cache, and {hub_endpoint()} cannot be reached."
        )
        raise MissingDataError(asked, found, todo) from error
    finally:
        if not reachable:
            datasets.config.HF_HUB_OFFLINE = offline


def saved_dataset(folder: Path) -> dict[str, Any]:
    """Return the tables of a data set saved in a folder.  Raises MissingDataError if it does not load."""
    from datasets import load_from_disk

    try:
        saved: Any = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise MissingDataError(f"The dataset '{folder}' was asked for.", f"It does not load: {error}.", "Save it again.") from error
    return dict(saved) if isinstance(saved, dict) else {"train": saved}


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location and the object of each line in a file.  Empty lines are skipped.

    Raises MissingDataError if the file cannot be read, ConfigError naming a line that is not a JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"'{path}', line {number},"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"'{path}' was to be read.", f"Line {number} is no JSON: {error}.", "Mend the line.") from None
        if not isinstance(row, dict):
            raise ConfigError(f"'{path}' was to be read.", f"Line {number} is no JSON object.", "Use the official files.")
        yield place, row


def read_text(path: Path) -> str:
    """Return a file's text, without a byte-order mark.  Raises MissingDataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingDataError(f"'{path}' was to be read.", f"{error}.", "Check the file.") from error
