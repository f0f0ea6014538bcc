"""What others have published of boards, next to the device catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from generate.words import cell, table
from workbench.core.catalogue import device_models
from workbench_studies.boards import Compared, Figure, Source, compared, published

NAMES = {
    "gflops": "GFLOP/s",
    "watts_busy": "W, busy",
    "watts_idle": "W, idle",
    "storage_mb_per_s": "disk, MB/s",
    "bandwidth_mbit_per_s": "network, Mbit/s",
    "memory_gb_per_s": "memory, GB/s",
    "prefill_tokens_per_s": "prompt, tokens/s",
    "decode_tokens_per_s": "written, tokens/s",
}


def published_boards() -> str:
    """Return a section for each board with published figures, the deviations that are explained, and the sources."""
    found = published()
    groups, sections = compared(found), []
    for board in found.board:
        own = [one for one in groups if one.board == board]
        rows = [row for one in own for row in _rows(one, found.source)]
        columns = ("quantity", "figure", "in the catalogue's terms", "catalogue", "deviation", "how it was measured")
        head = f"### `{board}`\n\n*From others:* each figure was measured and published by somebody else.\n"
        sections.append(f"{head}\n{table(columns, rows)}\n{_verdicts(own)}")
    return "\n".join(sections)


def _rows(group: Compared, sources: Mapping[str, Source]) -> Iterable[list[str]]:
    zipped = zip(group.figures, group.converted, group.predicted, group.deviations, strict=True)
    for figure, converted, predicted, deviation in zipped:
        says = "taken from it" if figure.origin else "" if deviation is None else f"{deviation:+.0%}"
        yield [
            NAMES[group.quantity],
            f"{figure.value:,g}",
            "" if converted == figure.value else f"{converted:,.3g}",
            "" if predicted is None else f"{predicted:,.3g}",
            says,
            f"{_how(figure)} ([{cell(sources[figure.source].author)}]({sources[figure.source].address}))",
        ]


def _how(figure: Figure) -> str:
    return cell(f"{figure.model}, {figure.setting}" if figure.model else figure.setting)


def _verdicts(groups: Iterable[Compared]) -> str:
    lines = [
        f"- {NAMES[one.quantity]}: {one.deviation:+.0%} in the median. {cell(one.reason)}"
        for one in groups
        if one.deviation is not None and one.reason
    ]
    return "\n".join(lines) + "\n" if lines else ""


def board_sources() -> str:
    """Return where the published figures come from, and the boards of the catalogue without any."""
    found = published()
    rows = [[f"[{cell(one.title)}]({one.address})", cell(one.author), one.date] for one in found.source.values()]
    without = ", ".join(f"`{model}`" for model in device_models() if model not in found.board)
    return f"{table(('page', 'by', 'date'), rows)}\nThere are no figures of {without}.\n"
