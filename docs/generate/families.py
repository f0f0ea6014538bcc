"""The families of models that load, from their table."""

from __future__ import annotations

from generate.words import table
from workbench.models.families import FAMILIES


def families() -> str:
    """Return a table of the families: their names, kinds and published examples."""
    rows = []
    for name, family in FAMILIES.items():
        kind = "encoder-decoder" if family.decoder else "decoder" if family.is_causal else "encoder"
        rows.append(
            [family.title, f"`{name}`", f"{kind} of pictures" if family.reads_images else kind, family.examples]
        )
    return table(("family", "`model_type`", "kind", "for example"), rows)
