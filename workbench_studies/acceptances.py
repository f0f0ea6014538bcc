"""Count right guesses for the adviser: `python -m workbench_studies.acceptances` writes data/acceptances.json.

The texts are those of `workbench reproduce compare acceptance`, the drafts those that the adviser compares.
"""

from __future__ import annotations

import sys

from workbench.core.catalogue import data_folder
from workbench.core.serial import write_json
from workbench.methods.common.acceptances import Acceptance, acceptances_in
from workbench.methods.galaxy_plus.serving.draft_advice import draft_names
from workbench.models.sharding import model_layout
from workbench_studies.papers.compare.acceptance import MODEL, PROMPTS, TOKENS, measured


def main() -> None:
    """Count the right guesses of every draft; those that the file has remain."""
    path = data_folder() / "acceptances.json"
    acceptances = list(acceptances_in(path))
    for draft in draft_names(model_layout(MODEL).stacks[-1].num_layers):
        if any((acceptance.model, acceptance.draft) == (MODEL, draft) for acceptance in acceptances):
            continue
        sys.stdout.write(f"{MODEL}: {draft}\n")
        sys.stdout.flush()
        passes = measured(MODEL, draft, TOKENS, ())["greedy"]
        acceptances.append(
            Acceptance(
                model=MODEL,
                draft=draft,
                right=round(passes["right"]),
                wrong=round(passes["wrong"]),
                texts=len(PROMPTS),
                tokens=TOKENS,
                command="python -m workbench_studies.acceptances",
            )
        )
        write_json(path, acceptances)


if __name__ == "__main__":
    main()
