"""What others have published of boards, next to the device catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from generate.words import cell, table
from workbench.core.catalogue import data_folder, device_models, load_device
from workbench.runs.board_report import BoardReport, read_board_report
from workbench_studies.boards import Compared, Figure, Source, compared, published

NAMES = {
    "gflops": "GFLOP/s",
    "watts_busy": "W, busy",
    "watts_idle": "W, idle",
    "storage_mb_per_s": "disk, MB/s",
    "storage_write_mb_per_s": "disk written, MB/s",
    "bandwidth_mbit_per_s": "network, Mbit/s",
    "memory_gb_per_s": "memory, GB/s",
    "prefill_tokens_per_s": "prompt, tokens/s",
    "decode_tokens_per_s": "written, tokens/s",
}


def published_boards() -> str:
    """Return a section for each board with published figures, the deviations that are explained, and the sources."""
    reports = published()
    groups, sections = compared(reports), []
    for board in reports.board:
        groups_of_board = [one for one in groups if one.board == board]
        rows = [row for one in groups_of_board for row in _rows(one, reports.source)]
        columns = ("quantity", "figure", "in the catalogue's terms", "catalogue", "deviation", "how it was measured")
        head = f"### `{board}`\n\n*From others:* each figure was measured and published by somebody else.\n"
        sections.append(f"{head}\n{table(columns, rows)}\n{_verdicts(groups_of_board)}")
    return "\n".join(sections)


def _rows(group: Compared, sources: Mapping[str, Source]) -> Iterable[list[str]]:
    zipped = zip(group.figures, group.converted, group.predicted, group.deviations, strict=True)
    for figure, converted, predicted, deviation in zipped:
        says = "taken from it" if figure.origin else "" if deviation is None else f"{round(deviation, 2) + 0.0:+.0%}"
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
    reports = published()
    rows = [[f"[{cell(one.title)}]({one.address})", cell(one.author), one.date] for one in reports.source.values()]
    without = ", ".join(f"`{model}`" for model in device_models() if model not in reports.board)
    return f"{table(('page', 'by', 'date'), rows)}\nThere are no figures of {without}.\n"


def sent_reports(folder: Path | None = None) -> str:
    """Return what `workbench report --share` wrote for others' boards: the files of a folder, or of data/boards."""
    files = sorted((folder or data_folder() / "boards").glob("*.json"))
    if not files:
        return "No report has been sent yet: what stands above is all *from others*.\n"
    return "\n".join(_report_section(number, read_board_report(file)) for number, file in enumerate(files, 1))


def _report_section(number: int, report: BoardReport) -> str:
    rows = []
    for board in report.boards:
        described = load_device(board.model) if board.model in device_models() else None
        rows.append(
            [
                f"`{board.model}`",
                *_against(board.gflops, described and described.flops_per_s / 1e9),
                *_against(board.memory_gb_per_s, described and (described.memory_bytes_per_s or 0) / 1e9),
                *_against(board.storage_mb_per_s, described and described.storage_bytes_per_s / 1e6),
                *_against(board.storage_write_mb_per_s, described and (described.storage_write_bytes_per_s or 0) / 1e6),
            ]
        )
    columns = (
        "board",
        *(
            word
            for kind in ("GFLOP/s", "memory, GB/s", "disk, MB/s", "disk written, MB/s")
            for word in (kind, "catalogue", "off")
        ),
    )
    rates = [link.mbit_per_s for link in report.links]
    hot = [
        f"Board {rank} has {board.sustained[-1][1]:.0%} of its speed after {board.sustained[-1][0]:g} s of computing."
        for rank, board in enumerate(report.boards)
        if board.sustained
    ]
    words = [f"Measured in {report.month} with workbench {report.workbench}."]
    words += [f"{len(rates)} links of {min(rates):g} to {max(rates):g} Mbit/s, {report.medium}."] if rates else []
    if (run := report.run) is not None:
        seconds = (
            f": {run.predicted_s:.3g} s predicted, {run.measured_s:.3g} s measured"
            if run.predicted_s and run.measured_s
            else ""
        )
        words.append(f"{run.num_steps} steps of {run.method} with {run.model}{seconds}.")
    return f"### Report {number}\n\n{' '.join((*words, *hot))}\n\n{table(columns, rows)}"


def _against(measured: float | None, catalogue: float | None) -> list[str]:
    """Return a measured rate, the catalogue's, and how far off the measured one is."""
    if measured is None:
        return ["", "", ""]
    return [f"{measured:.3g}", *([f"{catalogue:.3g}", f"{measured / catalogue - 1:+.0%}"] if catalogue else ["", ""])]
