"""Text without labels, for distilling initial weights (PAC+, section IV-C): the embedded sources, or any folder of text files."""

from __future__ import annotations

from pathlib import Path

from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks.embedded import load_sentiment_rating

MIN_CHARACTERS = 8


def load_unlabelled(folder: Path | str | None = None) -> tuple[str, ...]:
    """Return texts, each once, in a fixed order.

    folder: every line of its *.txt files (below it too) that has some characters; None takes the training splits of all embedded sources
    (movie reviews, tweets, product reviews, editorials), less whatever also stands in a validation or test split.
    Raises MissingDataError if there is no such folder or file, ConfigError if they hold fewer than two texts.
    """
    texts = _embedded() if folder is None else _lines(Path(folder).expanduser())
    unique = tuple(dict.fromkeys(texts))
    if len(unique) < 2:
        raise ConfigError(f"Text to distill on was asked for from '{folder}'.", f"It holds {len(unique)} texts.", "Give more text.")
    return unique


def _embedded() -> list[str]:
    task = load_sentiment_rating()
    held_out = {*task.validation.texts, *task.test.texts}
    return [text for text in task.train.texts if text not in held_out]


def _lines(folder: Path) -> list[str]:
    files = sorted(folder.rglob("*.txt")) if folder.is_dir() else []
    if not files:
        raise MissingDataError(f"Text to distill on was asked for from '{folder}'.", "It holds no *.txt file.", "Check the folder.")
    texts = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MissingDataError(f"'{file}' was to be read.", f"{error}.", "Save it as UTF-8, or take it out.") from error
        texts += [line.strip() for line in lines if len(line.strip()) >= MIN_CHARACTERS]
    return texts
