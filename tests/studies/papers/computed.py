"""The computed tables and figures of the papers, each computed once for all tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from workbench_studies.papers import Item, Result, Settings, find_item
from workbench_studies.papers.galaxy_plus import scaling, straggler


@cache
def computed(paper: str, name: str) -> Result:
    """Return a table or figure.  One of its constants is varied instead of all, Galaxy+ schedules fewer models, and its
    scaling ends at 8 devices: the code is the same.
    """
    sensitivity = Item.sensitivity
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Item, "sensitivity", lambda item, *given: sensitivity(replace(item, varied=item.varied[:1]), *given)
        )
        patch.setattr(scaling, "MANY", (1, 2, 3, 4, 8))
        patch.setattr(scaling, "TABLE_V", ("DistilBert", "OPT-L"))
        patch.setattr(straggler, "FACTORS", (straggler.FACTOR,))
        return find_item(paper, name).run(Settings())
