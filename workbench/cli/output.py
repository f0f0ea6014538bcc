"""What the commands print: results on stdout (tables, or JSON with --json), everything else on stderr; errors in one
line.

Tables of plans, reports and clusters, and the live progress of a run: its whole state, or a line now and then where
there is no terminal.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from typer.core import TyperGroup

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError, WorkbenchError, installation
from workbench.core.files import FULL_DISK, LIMITS, advice
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.report import Report, all_notes
from workbench.core.serial import plain, shown, to_builtins
from workbench.core.summary import headline, plan_rows, plan_words, summary_rows
from workbench.core.units import are_numbers
from workbench.methods.base import Event
from workbench.runs.progress import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

USER_ERROR, INTERRUPTED = 2, 130
LONG_TEXT = 30
"""Characters from which on a table's column is text that may wrap."""


_UsageError: Any = typer.BadParameter.__base__  # click's, which newer versions of typer bring along
_SYSTEM_REFUSES = (*FULL_DISK, *LIMITS, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EPERM, errno.EROFS)


def _remember_json(context: typer.Context, is_json: bool) -> bool:
    context.find_root().meta["json"] = is_json
    return is_json


Json = Annotated[
    bool,
    typer.Option("--json", help="Print the result (or the error) as JSON.", callback=_remember_json, is_eager=True),
]
Png = Annotated[Literal["auto", "yes", "no"], typer.Option(help="Write PNG files, too; auto: if Chromium is found.")]


class Commands(TyperGroup):
    """A group of commands whose user errors are one line on stderr and exit code 2, and whose Ctrl-C is 130."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options in front of the command."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            report_error(_usage_error(error, words), as_json="--json" in words)
            raise typer.Exit(USER_ERROR) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        words = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `workbench ... | head` is no error; the rest of the output has no reader
            sys.stdout = None
            raise typer.Exit(0) from None
        except (WorkbenchError, _UsageError, OSError, ModuleNotFoundError) as error:
            # The parser stops at the first fault, maybe before it came to --json.
            as_json = "--json" in words if isinstance(error, _UsageError) else bool(ctx.meta.get("json"))
            report_error(_in_our_words(error, words), as_json=as_json)
            raise typer.Exit(USER_ERROR) from None


def _in_our_words(error: Any, words: Sequence[str]) -> WorkbenchError:
    """Return what a user did wrong or lacks; raise the error again if it is our own fault."""
    if isinstance(error, WorkbenchError):
        return error
    if isinstance(error, _UsageError):
        return _usage_error(error, words)
    if isinstance(error, OSError):
        if error.errno not in _SYSTEM_REFUSES:
            raise error
        named = f": '{error.filename}'" if error.filename else ""
        return WorkbenchError("A file was to be read or written.", f"{error.strerror}{named}.", advice(error.errno))
    package = (error.name or "").partition(".")[0]
    if package in ("", "workbench", "workbench_labs", "workbench_studies"):
        raise error
    problem = f"It needs the package '{package}', which is not installed."
    return ConfigError("The command was called.", problem, f"Install everything: {installation('all')}.")


def report_error(error: WorkbenchError, *, as_json: bool) -> None:
    """Print a user error: one line on stderr, or its three parts as JSON on stdout."""
    if as_json:
        print_json({"error": type(error).__name__, "asked": error.asked, "found": error.found, "todo": error.todo})
    else:
        # Some messages carry a grid; the first line says it all, so it comes first and whole.
        say(f"{type(error).__name__}: {error}")


def _usage_error(error: Any, words: Sequence[str]) -> ConfigError:
    """Return the parser's complaint in our words, the value quoted."""
    command = error.ctx.command_path if error.ctx is not None else "workbench"
    complaint = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    names = getattr(getattr(error, "param", None), "opts", ())
    values = [value for name, value in _option_values(words) if name in names]
    if values and not re.search(rf"(?<!\w){re.escape(values[-1])}(?!\w)", complaint):
        complaint = f"'{shown(values[-1])}' is given. {complaint}"
    problem = complaint if complaint.endswith((".", "?")) else f"{complaint}."
    return ConfigError(f"The command `{command}` was called.", problem, f"See {command} --help.")


def _option_values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with the word behind it."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        yield name, value if equals else following


# Text comes from files, results and devices, too: here, where all of it passes, it loses what would command the
# terminal.


def say(line: str) -> None:
    """Print a line on stderr."""
    print(plain(line), file=sys.stderr, flush=True)


def print_text(text: str = "") -> None:
    """Print lines on stdout."""
    print(plain(text), flush=True)


def print_piece(text: str) -> None:
    """Print a piece of a text on stdout; more pieces follow."""
    print(plain(text), end="", flush=True)


def print_entry(head: str, text: str, *, colour: str = "", coloured: int = 0) -> None:
    """Print a head and a text. In a terminal the text wraps next to the head.

    colour: the head's first `coloured` characters get it if stdout is a terminal that may have colours
    (https://no-color.org).
    """
    in_terminal = sys.stdout.isatty()
    width = max(20, shutil.get_terminal_size().columns - len(head) - 2) if in_terminal else 10_000
    lines = textwrap.wrap(plain(text), width, break_on_hyphens=False, break_long_words=False) or [""]
    shown = plain(head)
    if in_terminal and not os.environ.get("NO_COLOR"):
        shown = typer.style(shown[:coloured], fg=colour or None) + shown[coloured:]
    print(f"{shown} {lines[0]}", flush=True)
    for line in lines[1:]:
        print_text(f"{'':<{len(head)}} {line}")


def print_json(value: Any) -> None:
    """Print a dataclass, or dicts and lists of them, as JSON on stdout."""
    print(plain(json.dumps(to_builtins(value), indent=1, ensure_ascii=False), as_json=True))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, keys: int = 0) -> None:
    """Print a table on stdout.  Columns of numbers are flush right.

    Only columns of long texts wrap, between words; names and numbers stay whole, even where the terminal is too narrow
    for that.  keys: the first columns, which name a row; a table that is too wide goes on below, with them repeated.
    Into a file or a pipe nothing wraps.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    print_text(title)
    columns, cells = list(map(plain, columns)), [[plain(str(cell)) for cell in row] for row in rows]
    everything = list(zip(columns, *cells, strict=True))
    longest = [max(len(line) for text in column for line in [*text.splitlines(), ""]) for column in everything]
    right = [are_numbers(column[1:]) for column in everything]
    wraps = [width > LONG_TEXT and not is_right for width, is_right in zip(longest, right, strict=True)]
    least = [(LONG_TEXT if long else width) + 2 for long, width in zip(wraps, longest, strict=True)]
    console = Console(markup=False, highlight=False)
    width = console.width if sys.stdout.isatty() else 10_000
    parts: list[list[int]] = [list(range(keys))]
    for index in range(keys, len(columns)):
        if keys < len(parts[-1]) and keys and sum(least[column] for column in (*parts[-1], index)) > width:
            parts.append(list(range(keys)))
        parts[-1].append(index)
    for part in parts:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for index in part:
            table.add_column(
                columns[index],
                justify="right" if right[index] else "left",
                no_wrap=not wraps[index],
                overflow="fold",
                min_width=0 if wraps[index] else longest[index],
            )
        for row in cells:
            table.add_row(*(row[index] for index in part))
        console.width = max(sum(least[index] for index in part), width)
        print()
        console.print(table)
    print()


def show_cluster(cluster: Cluster) -> None:
    """Print a cluster's devices."""
    print_table(
        f"{cluster.name}: {cluster.description or cluster.in_words}",
        ("rank", "device", "model", "GFLOP/s", "when hot", "of a core", "MB", "Mbit/s", "ms", "watts"),
        (
            (
                rank,
                device.name,
                device.model or "-",
                f"{device.flops_per_s / 1e9:.1f}",
                f"{device.sustained[-1].speed:.0%}" if device.sustained else "-",
                "-" if device.host_share is None else f"{device.host_share:g}",
                f"{device.memory_bytes / 1e6:{'.0f' if device.memory_bytes >= 1e7 else '.3g'}}",
                f"{device.link.mbit_per_s:g}",
                f"{device.link.latency_s * 1e3:g}",
                f"{device.watts_idle:g}-{device.watts_busy:g}" if device.watts_busy else "-",
            )
            for rank, device in enumerate(cluster.devices)
        ),
    )


def show_plan(plan: Plan, cluster: Cluster) -> None:
    """Print where each layer and each sample goes (or heads, columns, tokens), and what the planner expects of it."""
    chosen = plan.inference
    words = f"{plan.method}: {plan.where()}, {plan.cut}" if chosen is None else f"{chosen.method}: {plan_words(chosen)}"
    print_table(f"Plan of {words}", *plan_rows(plan, cluster))
    if chosen is not None and chosen.predicted_s:
        print_text(
            f"The planner's estimate for a sequence of {chosen.length} tokens (computed): "
            f"{chosen.predicted_s * 1e3:.1f} ms"
        )
    elif plan.predicted_s:
        parts = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in plan.predicted_s.items())
        print_text(f"The planner's estimate for a step (computed): {plan.total_s * 1e3:.0f} ms ({parts})")
    for note in plan.notes:
        print_text(note)


def summary(report: Report, *, figures: Path | None = None) -> str:
    """Return a run in a dozen lines: devices, plan, accuracy, epoch times with and without cache, predicted and
    measured step.
    """
    devices = ", ".join(map(_device_words, report.cluster.devices))
    notes = [("" if number else "Notes", note) for number, note in enumerate(all_notes(report))]
    rows = [("Result", sentence)] if (sentence := headline(report)) else []
    rows += [("Devices", devices), *summary_rows(report), *notes]
    if "adapter" in report.artifacts:
        rows.append(("Saved in", report.artifacts["adapter"]))
    if figures is not None:
        rows.append(("Figures", str(figures / "index.html")))
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def _device_words(device: Device) -> str:
    share = "" if device.host_share is None else f"{device.host_share:g} of a core"
    facts = [share, "" if device.framework == "torch" else device.framework]
    return f"{device.name} ({', '.join(filter(None, facts))})" if any(facts) else device.name


def next_steps(report: Report, path: Path | None, *, program: str = "workbench") -> str:
    """Return the commands that can follow a run.  path: where its report is.  program: as which the user calls the
    workbench.
    """
    steps, named = [], path
    if "adapter" in report.artifacts:
        adapter = Path(report.artifacts["adapter"])
        steps.append(f'{program} predict {shlex.quote(str(adapter))} "A text of your own."')
        named = path or adapter.parent  # the run's folder, which holds its report, too
    if named is not None:
        quoted = shlex.quote(str(named))
        steps += [f"{program} draw {quoted}", f"{program} compare {quoted} OTHER"]
    if report.mode == "execute":
        steps.append(f"{program} runs, which lists this run and others")
    return "\n".join(f"{'' if number else 'Next':<12}{step}" for number, step in enumerate(steps))


PLAIN_INTERVAL_S = 5.0
"""Interval between lines about the steps if stderr is not a terminal."""


class RunProgress:
    """A context manager whose `update` takes the run's events.  All goes to stderr: stdout is the result's."""

    def __init__(self, job: Job, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = RunState(job, cluster, clock=clock)
        self._clock = clock
        self._live: Any = None
        self._told_s = float("-inf")
        self._started: set[int] = set()
        self._finished: set[int] = set()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(get_renderable=self.draw, console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.state.finish(kind)
        if self._live is not None:
            self._live.stop()

    def update(self, event: Event) -> None:
        """Take an event of `experiment.run`."""
        self.state.update(event)
        if self._live is None:
            self._tell(event)

    def draw(self) -> RenderableType:
        """Return what the terminal shows now."""
        from rich.text import Text

        width = shutil.get_terminal_size().columns
        return Text(plain(self.state.snapshot().lines(width)))  # a line that is still too long goes on below

    def _tell(self, event: Event) -> None:
        """Print a line for a phase, an epoch's begin and end, and every few seconds for the steps."""
        if event.kind in ("phase", "note") and event.message:
            say(event.message)
        if event.kind != "step":
            return
        now = self.state.snapshot()
        row = now.epochs[event.epoch]
        if event.epoch not in self._started:
            self._started.add(event.epoch)
            self._told_s = self._clock()
            if not row.answers:
                say(f"epoch {event.epoch + 1}: {event.num_steps} steps")
        if row.is_finished and event.epoch not in self._finished:
            self._finished.add(event.epoch)
            name = f"{row.num_steps} requests" if row.answers else f"epoch {event.epoch + 1}"
            loss = "" if row.loss is None else f", loss {row.loss:.4f}"
            say(f"{name} done{loss}, {row.seconds:.1f} s")
        elif self._clock() - self._told_s >= PLAIN_INTERVAL_S:
            self._told_s = self._clock()
            busy = ", ".join(
                f"{device.name} {device.busy_share:.0%}" for device in now.devices if device.busy_share is not None
            )
            where = "request" if row.answers else f"epoch {event.epoch + 1}, step"
            say(f"{where} {event.step + 1} of {event.num_steps}{now.facts}" + (f"; computing: {busy}" if busy else ""))
