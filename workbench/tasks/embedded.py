"""The embedded tasks.  Texts: sentences with sentiment ratings by people (Hutto and Gilbert, ICWSM 2014), from a
package's data.

The movie reviews are Pang and Lee's sentences.  Other published sets overlap them, so never train on one and test on
another.

Images: handwritten digits (Alpaydin and Kaynak, UCI repository, 1998), as included in scikit-learn.
"""

from __future__ import annotations

import html
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.assets.fetch import asset_path
from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks.task import Split, Task

MOVIE_REVIEWS = "movieReviewSnippets"
SOURCES = (MOVIE_REVIEWS, "tweets", "amazonReviewSnippets", "nytEditorialSnippets")
MOVIE_TRAIN, MOVIE_TEST = 8000, 2000
TEST_SHARE, VALIDATION_SHARE = 0.19, 0.05


def load_sentiment(folder: Path | None = None) -> Task:
    """Return the binary task: is a movie-review sentence's mean rating above zero?  8,000 train, 2,000 test, the rest
    validation.

    Sentences rated exactly zero (37) have no class and are left out.  So are repeated sentences (2).
    """
    path = _path(folder, MOVIE_REVIEWS)
    state = path.stat() if path.is_file() else None
    return _sentiment(folder, path, state and (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _sentiment(folder: Path | None, path: Path, state: tuple[int, int] | None) -> Task:
    """Return the task of a file in this state.  Nearly every job has it: it is read once."""
    parts: dict[str, Any] = {
        name: Split(
            texts=part.texts, labels=tuple(int(rating > 0) for rating in part.labels), sample_ids=part.sample_ids
        )
        for name, part in _movie_split(_read_split(folder, MOVIE_REVIEWS, first_id=0)).items()
    }
    source = "vaderSentiment 3.3.2, movie reviews"
    return Task(
        name="sentiment", kind="classification", num_outputs=2, metrics=("accuracy", "f1"), source=source,
        class_names=("negative", "positive"), **parts,
    )  # fmt: skip


def load_sentiment_rating(folder: Path | None = None) -> Task:
    """Return the regression task: the mean rating (-4 to 4) of sentences from movie reviews, tweets, product reviews
    and editorials.

    The movie reviews are divided exactly as in the binary task, and those left out there join the training split.  The
    other sources are divided in the same proportion.  Each sample has its source.
    """
    parts: dict[str, Any] = {}
    first_id = 0
    for source in SOURCES:
        samples = _read_split(folder, source, first_id=first_id)
        first_id += len(samples)
        if source == MOVIE_REVIEWS:
            divided = _movie_split(samples)
            used_ids = {index for part in divided.values() for index in part.sample_ids}
            parts["train"] = samples.take([index for index in samples.sample_ids if index not in used_ids])
        else:
            test, validation = round(TEST_SHARE * len(samples)), round(VALIDATION_SHARE * len(samples))
            divided = _cut(samples, list(range(len(samples))), source, test, validation)
        parts = {name: parts[name] + part if name in parts else part for name, part in divided.items()}
    source = "vaderSentiment 3.3.2, all four sources"
    return Task(
        name="sentiment-rating",
        kind="regression",
        num_outputs=1,
        metrics=("pearson", "spearman"),
        source=source,
        **parts,
    )


def _path(folder: Path | None, source: str) -> Path:
    return (folder or asset_path("vader-ratings")) / f"{source}_GroundTruth.txt"


def _read_split(folder: Path | None, source: str, *, first_id: int) -> Split:
    path = _path(folder, source)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [line.strip().split("\t", 2) for line in lines if line.strip()]
        ratings = tuple(float(row[1]) for row in rows)
        texts = tuple(html.unescape(row[2]) for row in rows)
    except (OSError, ValueError, IndexError) as error:
        if folder is not None:
            raise MissingDataError(
                f"The ratings in '{folder}' were asked for.",
                f"'{path.name}' in it does not read: {getattr(error, 'strerror', None) or error}.",
                f"Name a folder with {path.name}, or leave --data out.",
            ) from error
        raise MissingDataError(
            f"The ratings '{source}' were asked for.",
            f"'{path}' does not read: {error}.",
            "Delete its folder and run: python -m workbench fetch",
        ) from error
    ids = tuple(range(first_id, first_id + len(rows)))
    return Split(texts=texts, labels=ratings, sample_ids=ids, sources=(source,) * len(rows))


def _movie_split(samples: Split) -> dict[str, Split]:
    first: dict[str, int] = {}
    for index, text in enumerate(samples.texts):
        first.setdefault(text, index)
    usable = [index for index in first.values() if samples.labels[index] != 0]
    if len(usable) <= MOVIE_TRAIN + MOVIE_TEST:
        raise MissingDataError(
            "The movie reviews were asked for.",
            f"Their file has {len(usable)} usable sentences, not over {MOVIE_TRAIN + MOVIE_TEST}.",
            "Leave --data out; if it was, delete the folder vader-ratings from the cache and run: python -m "
            "workbench fetch",
        )
    return _cut(samples, usable, MOVIE_REVIEWS, MOVIE_TEST, len(usable) - MOVIE_TEST - MOVIE_TRAIN)


def _cut(samples: Split, order: list[int], seed: str, test: int, validation: int) -> dict[str, Split]:
    """Return train, validation and test split of the samples at `order`, chosen with a fixed seed."""
    random.Random(seed).shuffle(order)
    cuts = {"train": order[test + validation :], "validation": order[test : test + validation], "test": order[:test]}
    return {name: samples.take(sorted(cut)) for name, cut in cuts.items()}


def load_unlabelled() -> tuple[str, ...]:
    """Return unlabelled texts, each once, in a fixed order.

    They are the training splits of all embedded sources (movie reviews, tweets, product reviews, editorials), without
    texts that also occur in a validation or test split.
    """
    task = load_sentiment_rating()
    held_out = {*task.validation.texts, *task.test.texts}
    return tuple(dict.fromkeys(text for text in task.train.texts if text not in held_out))


TEST, VALIDATION = 360, 180
HIGHEST_GREY = 16


def load_digits(folder: Path | None = None) -> Task:
    """Return the task: which of ten digits is it?  1,797 images of 8 x 8 grey values, 360 test, 180 validation.

    Raises ConfigError if a folder is given, because there is only one source.
    """
    if folder is not None:
        raise ConfigError(
            f"The task 'digits' was asked for from '{folder}'.", "It comes with scikit-learn.", "Leave --data out."
        )
    from sklearn import datasets

    digits = datasets.load_digits()
    grey = (digits.images * (255 / HIGHEST_GREY)).round().astype("uint8")
    samples = Split(
        texts=("",) * len(grey),
        images=tuple(picture.tobytes() for picture in grey),
        labels=tuple(int(label) for label in digits.target),
    )
    parts: dict[str, Any] = _cut(samples, list(range(len(grey))), "digits", TEST, VALIDATION)
    return Task(
        name="digits", kind="classification", num_outputs=10, metrics=("accuracy",),
        source="scikit-learn's copy of the UCI handwritten digits", **parts,
    )  # fmt: skip
