"""Measured acceptances: how many guesses of a draft were right in some texts.

Which guesses are right depends on the texts and the draft, not on the devices.  data/acceptances.json has them, each
with the command that counted; there is none for what nobody has counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.core.catalogue import data_folder
from workbench.core.serial import read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The guesses of a draft in texts that a model wrote greedily.

    draft: as --draft takes it.  right, wrong: as text_batch.Passes counts them.  texts: how many, each of at most
    `tokens` new tokens.  command: what counted.
    """

    model: str
    draft: str
    right: int
    wrong: int
    texts: int
    tokens: int
    command: str

    @property
    def share(self) -> float:
        """Return the share of right guesses."""
        return self.right / (self.right + self.wrong)


def acceptances_in(path: Path) -> tuple[Acceptance, ...]:
    """Return the acceptances of a file; none if there is no such file."""
    return read_records(path, Acceptance, "the acceptances")


def acceptance_of(model: str, draft: str) -> Acceptance | None:
    """Return the acceptance of a draft; None if nobody has counted."""
    pairs = (
        known
        for known in acceptances_in(data_folder() / "acceptances.json")
        if (known.model, known.draft) == (model, draft)
    )
    return next(pairs, None)
