"""What the notebooks' parameters begin with: small under test, of full size for a person; and texts longer than a sentence."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from workbench.core.serial import write_text
from workbench.fetch import cache_folder
from workbench.tasks import load_task

TINY_VARIABLE = "WORKBENCH_TINY"


def tiny() -> bool:
    """Return whether the environment asks for the smallest settings (WORKBENCH_TINY=1), so that a test runs every cell fast.

    Papermill's own parameters come after the parameters cell and win.
    """
    return os.environ.get(TINY_VARIABLE, "") not in ("", "0")


def output_folder(name: str) -> Path:
    """Return where a notebook writes: figures/NAME beside the notebooks' folder, or a temporary folder at the smallest settings."""
    if tiny():
        return Path(tempfile.gettempdir()) / "workbench-tiny" / name
    return Path("..") / "figures" / name


def passages_folder(folder: Path | str | None = None, *, count: int = 32, sentences: int = 12) -> str:
    """Write `count` passages of so many movie-review sentences each, in SST-2's form, and return the folder for Job(data=...).

    The label is whether most of a passage's sentences praise.  Job(max_length=...) cuts them to as many tokens as are wanted.
    folder: beside the fetched data if not given.
    """
    split = load_task("sentiment", test_samples=count * sentences).test
    texts, labels = split.texts, split.labels
    rows = []
    for first in range(0, len(texts) - sentences + 1, sentences):
        text = " ".join(part.replace("\t", " ").replace("\n", " ") for part in texts[first : first + sentences])
        rows.append(f"{text}\t{int(2 * sum(labels[first : first + sentences]) > sentences)}")
    folder = cache_folder() / f"passages-{count}-{sentences}" if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Nothing is trained, but a task must have samples to train on, and ten of them for each that validates.
    for name, lines in (("train.tsv", rows * -(-20 // len(rows))), ("dev.tsv", rows)):
        write_text(folder / name, "\n".join(["sentence\tlabel", *lines]) + "\n")
    return str(folder)
