"""Read pipeline schedules in torch's text format: a CSV with one row per rank and one operation per cell, such as 0F0,
2B1, 1I3, 1W3.

`torch.distributed.pipelining` writes and reads this format (`_dump_csv`, `_load_csv`).  A cell is STAGE KIND
MICRO-BATCH.  Kinds: F forward, B backward, I the part of B that computes the gradient with respect to the stage's
input, W the part that computes the gradients of its weights (zero bubble; Qi et al., 2024).  An empty cell is a bubble.
(0F4;3B1)OVERLAP_F_B stands for its operations in this order.
The rows decide which rank has which stage, so interleaved and V placements need no option.  The cells of the lowered
format (SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD) are ignored: `insert_transfers` adds transfers by
its own rule.
Values: as in pipeline, and wctx:s.m.r, the part of the context that W still needs after I.
"""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

from workbench.core.errors import ScheduleError
from workbench.core.schedule import NONE, STEP, Op, RankList, Schedule, Value
from workbench.schedules.lowering import insert_transfers

_COMPUTE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_LOWERED = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


class _Cell(NamedTuple):
    stage: int
    kind: str
    microbatch: int


_Place = tuple[int, int]  # (row, column), both from 1


def read_torch_csv(text: str) -> Schedule:
    """Return the schedule of a mini-batch, complete with its transfers; each stage ends with a STEP if it has a
    backward.

    With 1F1B's or GPipe's rows it equals backpropagation's.  Raises ScheduleError naming row and column of a
    malformed cell, of a repeated operation, and of one whose counterpart is missing.  `check` decides whether the order
    can run.
    """
    rows: list[list[_Cell]] = []
    places: dict[_Cell, _Place] = {}
    rank_of: dict[int, int] = {}
    for row, line in enumerate(_table(text), start=1):
        rows.append([])
        for column, word in enumerate(line, start=1):
            for cell in _cells(word.strip(), (row, column)):
                if cell in places:
                    raise _wrong(
                        (row, column),
                        cell,
                        f"It is also in row {places[cell][0]}, column {places[cell][1]}.",
                        "Write it once.",
                    )
                if rank_of.setdefault(cell.stage, row - 1) != row - 1:
                    problem = f"Stage {cell.stage} is in row {rank_of[cell.stage] + 1} too."
                    raise _wrong((row, column), cell, problem, "Keep a stage's operations in one row.")
                places[cell] = (row, column)
                rows[-1].append(cell)
    if not places:
        raise ScheduleError(
            "A pipeline schedule was read from CSV.",
            "It has no operation.",
            "Write one row a rank, with cells such as 0F0.",
        )
    _require_counterparts(places)
    return _schedule(rows, rank_of)


def _table(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(text.strip().splitlines()))
    except csv.Error as error:
        raise ScheduleError(
            "A pipeline schedule was read from CSV.", f"It is not CSV: {error}.", "Write one row a rank."
        ) from None


def _cells(word: str, place: _Place) -> list[_Cell]:
    """Return the computations in one cell of the table."""
    overlapped = _OVERLAP.fullmatch(word)
    cells = []
    for part in overlapped.group(1).split(";") if overlapped else [word]:
        match = _COMPUTE.fullmatch(part.strip())
        if match is not None:
            cells.append(_Cell(int(match.group(1)), match.group(2), int(match.group(3))))
        elif part and not _LOWERED.fullmatch(part):
            raise _wrong(
                place, part[:40], "It is malformed.", "Write STAGE, one of F, B, I and W, and MICRO-BATCH, such as 2F0."
            )
    return cells


def _require_counterparts(places: dict[_Cell, _Place]) -> None:
    """Raise ScheduleError for an operation that waits for an operation missing from all rows."""
    last = max(cell.stage for cell in places)
    trains = any(cell.kind != "F" for cell in places)
    for cell, place in places.items():
        stage, kind, m = cell
        alternatives: list[tuple[str, ...]] = []
        if kind == "F":
            alternatives += [(f"{stage - 1}F{m}",)] if stage else []
            alternatives += [(f"{stage}B{m}", f"{stage}I{m}")] if trains else []
        elif kind == "W":
            alternatives.append((f"{stage}I{m}",))
        else:
            alternatives.append((f"{stage}F{m}",))
            alternatives += [(f"{stage + 1}B{m}", f"{stage + 1}I{m}")] if stage < last else []
            alternatives += [(f"{stage}W{m}",)] if kind == "I" else []
            if kind == "B" and _Cell(stage, "I", m) in places:
                raise _wrong(place, cell, f"{stage}I{m} computes the same gradient.", "Keep B, or I and W.")
        for names in alternatives:
            if not any(_cells(name, place)[0] in places for name in names):
                raise _wrong(place, cell, f"{' or '.join(names)} is in no row.", "Add it.")


def _schedule(rows: list[list[_Cell]], rank_of: dict[int, int]) -> Schedule:
    last = max(rank_of)
    trains = any(cell.kind != "F" for cells in rows for cell in cells)
    lists: list[RankList] = []
    for rank, cells in enumerate(rows):
        listed = [_op(cell, rank, last, trains=trains) for cell in cells]
        gradients = sorted(value for op in listed for value in op.writes if value.name == "gacc")
        for stage in sorted({value.stage for value in gradients}):
            reads = tuple(value for value in gradients if value.stage == stage)
            listed.append(Op(STEP, stage, NONE, NONE, reads, (Value("weight", stage, NONE, rank),)))
        inputs = [Value("tokens", NONE, m) for m in sorted({cell.microbatch for cell in cells})]
        ends = sorted({value for op in listed for value in op.writes if value.name in ("loss", "weight")})
        lists.append(RankList(listed, inputs, ends))
    return insert_transfers(Schedule.of(lists))


def _op(cell: _Cell, rank: int, last: int, *, trains: bool) -> Op:
    """Return a cell's operation, with the values of pipeline.backpropagation."""
    stage, kind, m = cell
    context, weight_context = Value("ctx", stage, m, rank), Value("wctx", stage, m, rank)
    onward = (Value("grad", stage, m, 0),) if stage else ()
    gradient = (Value("grad", stage + 1, m, 0),) if stage < last else ()
    accumulated = (Value("gacc", stage, m, rank),)
    if kind == "F":
        source = (Value("act", stage - 1, m, 0),) if stage else ()
        end = Value("act", stage, m, 0) if stage < last else Value("loss", stage, m, rank)
        reads, writes = (Value("tokens", NONE, m), *source), (end, context) if trains else (end,)
    elif kind == "B":
        reads, writes = (context, *gradient), (*onward, *accumulated)
    elif kind == "I":
        reads, writes = (context, *gradient), (*onward, weight_context)
    else:
        reads, writes = (weight_context,), accumulated
    return Op(kind, stage, m, NONE, reads, writes)


def _wrong(place: _Place, cell: _Cell | str, problem: str, todo: str) -> ScheduleError:
    name = cell if isinstance(cell, str) else f"{cell.stage}{cell.kind}{cell.microbatch}"
    return ScheduleError(f"The cell '{name}' was read in row {place[0]}, column {place[1]}.", problem, todo)
