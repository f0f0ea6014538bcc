"""What the site's reference pages take from the code: a page has `<!-- generated: NAME -->`, GENERATORS says what it
becomes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from generate.boards import board_sources, published_boards, sent_reports
from generate.command_line import commands
from generate.comparisons import advise_check, comparison
from generate.families import families, shapes
from generate.files import cluster_keys, clusters, device_models, report_schema, report_tables
from generate.options import method_options
from generate.python_api import module
from generate.texts import TEXTS

GENERATORS: dict[str, Callable[..., str]] = {
    "advise-check": advise_check,
    "board-sources": board_sources,
    "clusters": clusters,
    "cluster-keys": cluster_keys,
    "commands": commands,
    "comparison": comparison,
    "device-models": device_models,
    "families": families,
    "method-options": method_options,
    "published-boards": published_boards,
    "python": module,
    "report": report_tables,
    "sent-reports": sent_reports,
    "shapes": shapes,
    **TEXTS,
}
MARKER = re.compile(r"^<!-- generated: ([\w-]+)((?: \S+)*) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """Return a page with every marker replaced; its further words are the generator's arguments."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](*match[2].split()), page)
