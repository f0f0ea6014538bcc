"""The embedded task of pictures: handwritten digits (Alpaydin and Kaynak, UCI repository, 1998), as scikit-learn ships them."""

from __future__ import annotations

import random
from pathlib import Path

from workbench.core.errors import ConfigError
from workbench.tasks.task import Split, Task

TEST, VALIDATION = 360, 180
HIGHEST_GREY = 16


def load_digits(folder: Path | None = None) -> Task:
    """Return the task: which of ten digits is it?  1,797 pictures of 8 x 8 grey values, 360 test, 180 validation.

    Raises ConfigError if a folder is given: there is one source only.
    """
    if folder is not None:
        raise ConfigError(f"The task 'digits' was asked for from '{folder}'.", "It comes with scikit-learn.", "Leave --data out.")
    from sklearn import datasets

    found = datasets.load_digits()
    grey = (found.images * (255 / HIGHEST_GREY)).round().astype("uint8")
    samples = Split(
        texts=("",) * len(grey),
        images=tuple(picture.tobytes() for picture in grey),
        labels=tuple(int(label) for label in found.target),
        sample_ids=tuple(range(len(grey))),
    )
    order = list(range(len(grey)))
    random.Random("digits").shuffle(order)
    test, validation, train = order[:TEST], order[TEST : TEST + VALIDATION], order[TEST + VALIDATION :]
    return Task(
        name="digits",
        kind="classification",
        num_outputs=10,
        metrics=("accuracy",),
        source="scikit-learn's copy of the UCI handwritten digits",
        train=samples.take(sorted(train)),
        validation=samples.take(sorted(validation)),
        test=samples.take(sorted(test)),
    )
