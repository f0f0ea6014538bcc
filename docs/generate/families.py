"""The families of models that load, from their table."""

from __future__ import annotations

from generate.words import table
from workbench.models.configuration import model_facts
from workbench.models.families import FAMILIES
from workbench.models.hub import SHAPE, known_shapes


def shapes() -> str:
    """Return a table of the named configurations without weights."""
    rows = []
    for name in known_shapes():
        facts = model_facts(f"{SHAPE}{name}")
        sizes = (facts.num_layers, facts.hidden_size, facts.num_heads, facts.feed_forward_size)
        rows.append([f"`{SHAPE}{name}`", f"`{facts.family}`", *(f"{size:,}" for size in sizes)])
    return table(("`--model`", "family", "layers", "width", "heads", "feed-forward width"), rows)


def families() -> str:
    """Return a table of the families: their names, kinds and published examples."""
    rows = []
    for name, family in FAMILIES.items():
        kind = "encoder-decoder" if family.decoder else "decoder" if family.is_causal else "encoder"
        rows.append(
            [family.title, f"`{name}`", f"{kind} of pictures" if family.reads_images else kind, family.examples]
        )
    return table(("family", "`model_type`", "kind", "for example"), rows)
