"""Compare many Reports: a pandas DataFrame with one row per Report, and means with their spread over seeds and
repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.report import Report, median_s
from workbench.core.run_files import PLAN, TAGS
from workbench.core.serial import shown, to_builtins
from workbench.core.timeline import INVALID_MARK

if TYPE_CHECKING:
    import pandas

NOT_COMPARED = ("file", "seed", "valid")
"""Columns in which the runs of one row of a comparison may differ."""
QUANTITIES = {
    "samples_per_s": ("training samples a second", 1, "1/s"),
    "step_s": ("time of a step", 1e3, "ms"),
    "cached_step_s": ("time of a step from the cache", 1e3, "ms"),
    "memory_bytes": ("largest memory of a device", 1e-6, "MB"),
    "sent_bytes": ("bytes sent in a step", 1e-6, "MB"),
    "loss": ("training loss, last epoch", 1, ""),
}
"""The result columns of reports_frame, each with its meaning, and the factor and unit to show it in.  All later columns
are metrics."""


class Mean(NamedTuple):
    """Mean and sample standard deviation (0 for a single value) over several runs, and the number of runs."""

    mean: float
    deviation: float
    num_runs: int


class Side(NamedTuple):
    """Runs with the same settings.  settings: those that differ between the sides.  label: where their numbers come
    from.
    """

    settings: dict[str, Any]
    files: tuple[str, ...]
    label: str
    is_valid: bool
    results: dict[str, Mean]

    @property
    def name(self) -> str:
        """Return the settings in words: 'METHOD, bandwidth 100'."""
        return words_of(self.settings) or "all runs"

    def without(self, name: str) -> Side:
        """Return the side without one of its settings."""
        return self._replace(settings={key: value for key, value in self.settings.items() if key != name})


def report_files(paths: Iterable[Path | str]) -> list[Path]:
    """Return the paths of Reports; a folder stands for all its .json files.  Raises ConfigError for a folder without
    any.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        inside = [path]
        if path.is_dir():  # a run's folder also holds others
            inside = [file for file in sorted(path.glob("*.json")) if file.name not in (PLAN, TAGS)]
        if not inside:
            raise ConfigError(
                f"The reports in '{path}' were asked for.",
                "It holds no .json file.",
                "Name a folder of Reports, or files.",
            )
        files += inside
    return list(dict.fromkeys(files))


def reports_frame(folder: Path | str | Sequence[Path | str]) -> pandas.DataFrame:
    """Return one row for each Report of a folder (or for some files): its settings, then its results.

    Settings are the job's fields (options as 'option.NAME'), cluster, bandwidth (Mbit/s of the slowest link), and label
    (simulated, emulated or real).  Results are in seconds and bytes (see QUANTITIES).  Times are medians over the
    steps, measured if the run was executed and simulated otherwise.  Bytes are those of the report's first step.  The
    last columns are the metrics on the test split.
    A missing value is NaN.  Raises ConfigError for a file that is not a Report.
    """
    import pandas

    paths = [folder] if isinstance(folder, Path | str) else folder
    if not paths:
        raise ConfigError(
            f"The reports in {paths} were asked for.", "There are none.", "Name a folder of Reports, or files."
        )
    rows = [(path, Report.read(path)) for path in report_files(paths)]
    frame = pandas.DataFrame(
        [{"file": str(path)} | settings_of(report) | {"valid": report.valid} for path, report in rows]
    )
    frame.insert(
        len(frame.columns) - 1, "valid", frame.pop("valid")
    )  # put 'valid' after options that the first report lacks
    results = pandas.DataFrame([results_of(report) for _, report in rows])
    order = [name for name in QUANTITIES if name in results] + [name for name in results if name not in QUANTITIES]
    return pandas.concat([frame, results[order]], axis=1)


def settings_of(report: Report) -> dict[str, Any]:
    """Return the settings of a run as one flat dictionary."""
    job = to_builtins(report.job)
    options = {
        f"option.{name}": value if isinstance(value, str | int | float) else str(value)
        for name, value in job.pop("options").items()
    }
    slowest = min(
        link.mbit_per_s
        for link in (*(device.link for device in report.cluster.devices), *report.cluster.pairs.values())
    )
    label = report.source + (f", {report.fidelity} links" if report.fidelity else "")
    return job | options | {"cluster": report.cluster.name, "bandwidth": slowest, "label": label}


def results_of(report: Report) -> dict[str, float]:
    """Return a run's results, keyed by the names of QUANTITIES, and its metrics."""
    results: dict[str, float] = {}
    steps = [(step.samples, step.seconds) for step in report.steps]
    if steps and all(taken_s for _, taken_s in steps):
        results["samples_per_s"] = sum(samples for samples, _ in steps) / sum(taken_s or 0.0 for _, taken_s in steps)
    for cached, name in ((False, "step_s"), (True, "cached_step_s")):
        seconds = median_s((step for step in report.steps if step.cached == cached), "seconds")
        if seconds is not None:
            results[name] = seconds
    timelines = [timeline for timeline in report.timelines.values() if timeline.source == report.source] or list(
        report.timelines.values()
    )
    if timelines:
        results["memory_bytes"] = max(timeline.highest_peak_bytes for timeline in timelines)
        results["sent_bytes"] = timelines[0].all_sent_bytes
    last = [step.loss for step in report.steps if step.loss is not None and step.epoch == report.steps[-1].epoch]
    if last:
        results["loss"] = sum(last) / len(last)
    return results | report.metrics


def words_of(settings: Mapping[str, Any]) -> str:
    """Return settings as one line of text: 'METHOD, bandwidth 100'."""
    return ", ".join(
        str(value)
        if name in ("method", "label")
        else f"{quantity_words(name)} {value:g}"
        if isinstance(value, float)
        else f"{quantity_words(name)} {shown(value, 40)}"
        for name, value in settings.items()
    )


def results_in_words(results: Mapping[str, float]) -> str:
    """Return results as one line of text: 'step 12.3 ms, accuracy 0.8'."""
    words = []
    for name, value in results.items():
        _, factor, unit = quantity(name)
        words.append(f"{quantity_words(name)} {plain_number(value * factor)} {unit}".strip())
    return ", ".join(words)


def sides(frame: pandas.DataFrame) -> list[Side]:
    """Group the runs of a reports_frame by equal settings; return each group with the settings that differ between
    groups.
    """
    end = list(frame.columns).index("valid")
    settings = [name for name in frame.columns[:end] if name not in NOT_COMPARED]
    differing = [name for name in settings if frame[name].astype(str).nunique(dropna=False) > 1]
    groups = (
        frame.groupby([frame[name].astype(str) for name in differing], sort=False, dropna=False)
        if differing
        else [((), frame)]
    )
    compared = []
    for _, part in groups:
        first, results = part.iloc[0], part.iloc[:, end + 1 :]
        counts, spread = results.count(), results.std().fillna(0.0)  # of a single value there is none
        spreads = {
            name: Mean(float(mean), float(spread[name]), int(counts[name]))
            for name, mean in results.mean().items()
            if counts[name]
        }
        values = {
            name: value for name, value in first[differing].items() if value == value
        }  # a setting that a method lacks is NaN
        side_settings = {
            name: value.item() if hasattr(value, "item") else value for name, value in values.items()
        }  # no numpy numbers
        compared.append(
            Side(side_settings, tuple(part["file"]), str(first["label"]), bool(part["valid"].all()), spreads)
        )
    return sorted(compared, key=lambda side: [_order(side.settings.get(name)) for name in differing])


def _order(value: Any) -> tuple[bool, float, str]:
    return (True, float(value), "") if isinstance(value, Real) else (False, 0.0, str(value))


def table(compared: Sequence[Side], *, most_metrics: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a comparison: settings, number of runs, and mean ± standard deviation of the
    results.

    most_metrics: show at most this many metrics.  Times measured while the host was too busy are marked.
    """
    settings = list(dict.fromkeys(name for side in compared for name in side.settings))
    names = dict.fromkeys(name for side in compared for name in side.results)
    results = [name for name in QUANTITIES if name in names] + [name for name in names if name not in QUANTITIES][
        :most_metrics
    ]
    words = [f"{quantity_words(name)} {quantity(name)[2]}".strip() for name in results]
    heads = [*map(quantity_words, settings), "runs", *words]
    rows = []
    for side in compared:
        count = max((spread.num_runs for spread in side.results.values()), default=len(side.files))
        cells = [
            f"{value:g}" if isinstance(value := side.settings.get(name, "-"), float) else str(value)
            for name in settings
        ]
        rows.append([*cells, str(count), *(_cell(side, name) for name in results)])
    return heads, rows


def quantity(name: str) -> tuple[str, float, str]:
    """Return a result's meaning, and the factor and unit to show it in (see QUANTITIES)."""
    return QUANTITIES.get(name, (name, 1, ""))


def quantity_words(name: str) -> str:
    """Return a quantity's or setting's name in words, without its unit."""
    short = name.removeprefix("option.").removesuffix("_per_s").removesuffix("_s").removesuffix("_bytes")
    return short.replace("_", " ")


def _cell(side: Side, name: str) -> str:
    if name not in side.results:
        return "-"
    mean, deviation, count = side.results[name]
    factor = quantity(name)[1]
    spread = f" ± {deviation * factor if deviation > 1e-9 * abs(mean) else 0:.2g}" if count > 1 else ""
    mark = f" {INVALID_MARK}" if not side.is_valid and name.endswith(("_s", " s")) else ""
    return f"{plain_number(mean * factor)}{spread}{mark}"


def plain_number(value: float) -> str:
    """Format a number with at least four figures and without a power of ten: '12,710', '4.516', '0.00004'."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.4g}"
        if abs(value) >= 1e-3 or value == 0
        else f"{value:.6f}".rstrip("0")
    )
