"""The folder into which a notebook writes, and longer texts that it reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from workbench.assets.fetch import cache_folder
from workbench.core.files import make_folder
from workbench.core.serial import write_text
from workbench.profiler.timing import tiny
from workbench.tasks import load_task


def output_folder(name: str) -> Path:
    """Return a notebook's output folder: figures/NAME next to the notebooks' folder, or a temporary folder at the
    smallest settings.
    """
    if tiny():
        return Path(tempfile.gettempdir()) / "workbench-tiny" / name
    return Path("..") / "figures" / name


def passages_folder(folder: Path | str | None = None, *, count: int = 32, sentences: int = 12) -> str:
    """Write `count` passages of several movie-review sentences each, in SST-2's form, and return the folder for
    Job(data=...).

    The label is whether most sentences of a passage praise the movie.  Job(max_length=...) cuts passages to a number of
    tokens.
    folder: next to the fetched data if not given.
    """
    split = load_task("sentiment", test_samples=count * sentences).test
    texts, labels = split.texts, split.labels
    rows = []
    for first in range(0, len(texts) - sentences + 1, sentences):
        text = " ".join(part.replace("\t", " ").replace("\n", " ") for part in texts[first : first + sentences])
        rows.append(f"{text}\t{int(2 * sum(labels[first : first + sentences]) > sentences)}")
    folder = cache_folder() / f"passages-{count}-{sentences}" if folder is None else Path(folder)
    make_folder(folder)
    # Nothing is trained, but a task must have training samples, ten for each validation sample.
    for name, lines in (("train.tsv", rows * -(-20 // len(rows))), ("dev.tsv", rows)):
        write_text(folder / name, "\n".join(["sentence\tlabel", *lines]) + "\n")
    return str(folder)
