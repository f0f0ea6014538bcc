"""One Transformer layer cut among devices: heads, columns, tokens, each device's memory and traffic (Galaxy+, Fig.
6-7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.units import size_words
from workbench.methods.galaxy_plus.memory import equal_layers
from workbench.plots import style

Cut = Literal["columns", "rows", "copies"]
HEIGHT, SHIFT, GAP, ARROW = 1.0, 0.13, 0.22, 0.95  # sizes in the drawing; unit: width of the hidden state


class Matrix(NamedTuple):
    """A matrix of the drawing.  cut: how devices share it.  counts: heads, columns or tokens by position.  what: the
    unit of `counts`.
    """

    name: str
    cut: Cut
    counts: tuple[int, ...]
    what: str
    width: float
    height: float


class Arrow(NamedTuple):
    """A synchronisation between two matrices.  nbytes: sent by each position for one sequence."""

    name: str
    nbytes: tuple[int, ...]


Part = Matrix | Arrow


def layer_parts(plan: InferencePlan, shape: StackShape, *, length: int, scheme: int = 1) -> tuple[Part, ...]:
    """Return the parts of a layer under a plan, in order: matrices, and the synchronisations between them.

    In a ring all-gather a device sends every tile but its successor's; in a ring reduce-scatter, every tile but its own
    (section III-D).
    Raises ConfigError for a plan that cuts no layer ('pipeline').
    """
    if plan.paradigm == "pipeline":
        raise ConfigError(
            "The cut of one layer was asked for.",
            f"A plan of '{plan.method}' leaves layers whole.",
            "Draw a hybrid plan.",
        )
    size = plan.num_positions
    all_tokens = (length,) * size
    tokens = plan.tokens(length) if plan.shares else all_tokens
    gather = Arrow("AllGather", _gathered(plan, tokens, shape.hidden_bytes))
    scatter = Arrow(
        "ReduceScatter", tuple((length - count) * shape.hidden_bytes if size > 1 else 0 for count in tokens)
    )
    reduced = Arrow("AllReduce", (2 * (size - 1) * length * shape.hidden_bytes // size,) * size)
    before, after = ([gather], scatter) if plan.paradigm == "hybrid" else ([], reduced)
    by_token = plan.paradigm == "sequence"
    wide = min(3.0, max(1.4, shape.columns / shape.hidden_size * 0.6))
    parts: list[Part] = []
    attentions = ("", "cross ") if shape.has_cross_attention else ("",)
    for prefix in attentions:
        if by_token:
            everywhere = (shape.num_units,) * size
            parts += [
                Matrix(f"{prefix}W<sub>QKV</sub>", "copies", everywhere, "all heads", 1.5, HEIGHT),
                Arrow(
                    "AllGather K, V",
                    _gathered(plan, tokens, shape.num_units * shape.kv_unit_bytes or 2 * shape.hidden_bytes),
                ),
                Matrix(f"{prefix}W<sub>O</sub>", "copies", everywhere, "all heads", 1.0, HEIGHT),
            ]
        else:
            parts += [
                *before,
                Matrix(f"{prefix}W<sub>QKV</sub>", "columns", plan.units, "heads", 1.5, HEIGHT),
                Matrix(f"{prefix}W<sub>O</sub>", "rows", plan.units, "heads", 1.0, HEIGHT),
                after,
            ]
        parts.append(_connection(plan, tokens, length))
    if by_token or (plan.paradigm == "hybrid" and scheme == 2):
        everywhere = tuple(shape.columns if count else 0 for count in tokens)
        parts += [
            Matrix("W<sub>up</sub>", "copies", everywhere, "all columns", wide, HEIGHT),
            Matrix("W<sub>down</sub>", "copies", everywhere, "all columns", 1.0, wide),
        ]
    else:
        parts += [
            *before,
            Matrix("W<sub>up</sub>", "columns", plan.columns, "columns", wide, HEIGHT),
            Matrix("W<sub>down</sub>", "rows", plan.columns, "columns", 1.0, wide),
            after,
        ]
    return (*parts, _connection(plan, tokens, length))


def held_bytes(plan: InferencePlan, shape: StackShape, *, scheme: int = 1) -> tuple[dict[str, int], ...]:
    """Return by position the bytes of one layer's weights: attention, feed-forward, norms and biases (Galaxy+ Eq. 8).

    A device without tokens needs no whole feed-forward network in scheme 2; it keeps its columns.
    """
    layers = next(equal_layers(replace(plan, schemes=(scheme,) * shape.num_layers), (shape,)))
    return tuple(
        dict(zip(("attention", "feed-forward", "norms and biases"), weights, strict=True)) for weights in layers.weights
    )


def sent_bytes(plan: InferencePlan, shape: StackShape, *, length: int, scheme: int = 1) -> tuple[int, ...]:
    """Return by position the bytes that leave a device for one layer of one sequence."""
    arrows = [part for part in layer_parts(plan, shape, length=length, scheme=scheme) if isinstance(part, Arrow)]
    return tuple(sum(arrow.nbytes[position] for arrow in arrows) for position in range(plan.num_positions))


def layer_cut(
    plan: InferencePlan, shape: StackShape, names: Sequence[str], *, length: int, scheme: int = 1
) -> go.Figure:
    """Return one layer as matrices coloured by device; below, each device's bytes in memory and sent.

    names: the cluster's devices by rank.  length: tokens of the sequence.  scheme: 1 or 2 (hybrid plans only).
    """
    parts = layer_parts(plan, shape, length=length, scheme=scheme)
    who = [names[rank] for rank in plan.ranks]
    parts_bytes = held_bytes(plan, shape, scheme=scheme)
    sent = sent_bytes(plan, shape, length=length, scheme=scheme)
    figure = make_subplots(
        rows=2,
        cols=3,
        specs=[[{"colspan": 3}, None, None], [{}, {}, {}]],
        row_heights=[0.62, 0.38],
        vertical_spacing=0.17,
        horizontal_spacing=0.07,
        subplot_titles=["", "holds: attention", "holds: feed-forward", "sends"],  # short, for narrow windows
    )
    for annotation in figure.layout.annotations:
        annotation.font = {"size": 12.5, "color": style.BLACK}
    _draw(figure, parts, who)
    columns = (
        [nbytes["attention"] for nbytes in parts_bytes],
        [nbytes["feed-forward"] for nbytes in parts_bytes],
        list(sent),
    )
    for column, sizes in enumerate(columns, start=1):
        _bars(figure, column, sizes, who)
    total = sum(sum(nbytes.values()) for nbytes in parts_bytes)
    copy_bytes = sum(shape.whole)
    moved, weights = size_words(sum(sent)), size_words(total)
    copies = f", {total / copy_bytes:.2g} times one copy" if copy_bytes else ""
    paradigms = {"hybrid": f"scheme {scheme}", "tensor": "tensor parallel", "sequence": "sequence parallel"}
    return style.finish(
        figure,
        title=f"One layer, {paradigms[plan.paradigm]}, {length} tokens on {plan.num_positions} devices",
        label="computed",
        subtitle=f"{weights} of weights on all devices together{copies}; {moved} travel for this layer",
        height=390 + 26 * plan.num_positions + (60 if plan.num_positions > 8 else 0),
        barmode="overlay",
        bargap=0,
        showlegend=False,
    )


def _gathered(plan: InferencePlan, tokens: Sequence[int], token_bytes: int) -> tuple[int, ...]:
    """Return the bytes that each position of a ring sends in an all-gather of its tokens: all tiles but its
    successor's.
    """
    size, length = len(tokens), sum(tokens)
    if size == 1:
        return (0,)
    after = [length - tokens[(position + 1) % size] for position in range(size)]
    if not plan.both_ways:
        return tuple(token_bytes * count for count in after)
    before = [length - tokens[position - 1] for position in range(size)]
    return tuple(token_bytes * (count + other) // 2 for count, other in zip(after, before, strict=True))


def _connection(plan: InferencePlan, tokens: tuple[int, ...], length: int) -> Matrix:
    """Return the connection: cut by tokens, except in Megatron-LM, where every device computes all of it."""
    if plan.paradigm == "tensor":
        return Matrix("norm", "copies", (length,) * plan.num_positions, "all tokens", 0.7, HEIGHT)
    return Matrix("norm", "rows", tokens, "tokens", 0.7, HEIGHT)


class _Box(NamedTuple):
    x: float
    width: float
    bottom: float
    height: float
    position: int
    text: str
    hover: str


def _boxes(matrix: Matrix, left: float, who: Sequence[str]) -> list[_Box]:
    """Return the rectangles of a matrix: a strip for each device that has a part, or a copy for each, drawn behind one
    another.
    """
    bottom, size = -matrix.height / 2, len(matrix.counts)
    boxes = []
    if matrix.cut == "copies":
        shift = SHIFT * min(1.0, 4 / size)
        for position in [position for position in range(size) if matrix.counts[position]]:
            hover = f"{who[position]}: {matrix.name}, {matrix.what}"
            centre = left + shift * position + matrix.width / 2
            boxes.append(
                _Box(
                    centre,
                    matrix.width,
                    bottom + shift * (position - (size - 1) / 2),
                    matrix.height,
                    position,
                    "",
                    hover,
                )
            )
        return boxes
    total, done = sum(matrix.counts), 0
    for position, count in enumerate(matrix.counts):
        if count == 0:
            continue
        along = matrix.width if matrix.cut == "columns" else matrix.height
        start, extent = done / total * along, count / total * along
        hover = f"{who[position]}: {matrix.name}, {count} of {total} {matrix.what}"
        # The space for a number of 11 px, in widths of the hidden state.
        text = str(count) if extent > (0.07 * len(str(count)) + 0.04 if matrix.cut == "columns" else 0.2) else ""
        if matrix.cut == "columns":
            boxes.append(_Box(left + start + extent / 2, extent, bottom, matrix.height, position, text, hover))
        else:
            boxes.append(
                _Box(left + matrix.width / 2, matrix.width, -bottom - start - extent, extent, position, text, hover)
            )
        done += count
    return boxes


def _draw(figure: go.Figure, parts: Sequence[Part], who: Sequence[str]) -> None:
    left, tallest = 0.0, max(part.height for part in parts if isinstance(part, Matrix))
    boxes: list[_Box] = []
    words: list[dict[str, object]] = []
    for part in parts:
        if isinstance(part, Arrow):
            words += _arrow(part, left)
            left += ARROW + GAP
            continue
        boxes += _boxes(part, left, who)
        width = part.width + (
            SHIFT * min(1.0, 4 / len(part.counts)) * (len(part.counts) - 1) if part.cut == "copies" else 0
        )
        edge = part.height / 2 + (SHIFT * 1.5 if part.cut == "copies" else 0)
        words.append(_words(f"<b>{part.name}</b>", left + width / 2, edge, "bottom", style.BLACK))
        how = f"by {part.what}" if part.cut != "copies" else f"{part.what},<br>everywhere"
        words.append(_words(how, left + width / 2, -edge, "top", style.DARK_GREY))
        left += width + GAP
    # The first position's copy is in front, so its boxes are drawn last.
    positions = sorted({box.position for box in boxes}, reverse=True)
    figure.add_traces(
        [_strips(position, [box for box in boxes if box.position == position]) for position in positions],
        rows=1,
        cols=1,
    )
    figure.update_layout(annotations=[*figure.layout.annotations, *words])
    figure.update_xaxes(visible=False, range=[-0.1, left - GAP + 0.1], row=1, col=1)
    figure.update_yaxes(visible=False, range=[-tallest / 2 - 0.55, tallest / 2 + 0.45], row=1, col=1)


def _strips(position: int, boxes: Sequence[_Box]) -> go.Bar:
    """Return the boxes of a position; they never overlap."""
    return go.Bar(
        x=[box.x for box in boxes],
        width=[box.width for box in boxes],
        base=[box.bottom for box in boxes],
        y=[box.height for box in boxes],
        text=[box.text for box in boxes],
        constraintext="none",
        **style.INSIDE,
        textfont={"size": 11, "color": style.text_on(colour_of(position))},
        marker={"color": colour_of(position), "line": {"width": 1, "color": "white"}},
        hovertext=[box.hover for box in boxes],
    )


def _words(text: str, x: float, y: float, anchor: str, colour: str) -> dict[str, object]:
    place = {"x": x, "y": y, "xref": "x", "yref": "y", "yanchor": anchor}
    return {"text": text, "showarrow": False, "font": {"size": 11, "color": colour}, **place}


def _arrow(arrow: Arrow, left: float) -> list[dict[str, object]]:
    """Return the annotations of an arrow: the arrow, its name above and its bytes below."""
    moved, label = sum(arrow.nbytes), style.OPERATIONS["synchronisations"][arrow.name]
    ends = {"x": left + ARROW, "y": 0, "ax": left, "ay": 0, "xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
    name = (
        arrow.name.replace("Reduce", "Reduce<br>")
        .replace("Gather", "<br>Gather")
        .replace("AllReduce<br>", "All<br>Reduce")
    )
    return [
        {
            "text": "",
            "showarrow": True,
            "arrowhead": 2,
            "arrowwidth": 2.5,
            "arrowcolor": style.DARK_GREY,
            "hovertext": label,
            **ends,
        },
        _words(name, left + ARROW / 2, 0.06, "bottom", style.DARK_GREY) | {"hovertext": label},
        _words(size_words(moved), left + ARROW / 2, -0.06, "top", style.DARK_GREY),
    ]


def _bars(figure: go.Figure, column: int, sizes: Sequence[int], who: Sequence[str]) -> None:
    unit, colours = style.byte_unit(max(sizes, default=0)), [colour_of(position) for position in range(len(sizes))]
    hovers = [f"{name}: {size:,} bytes" for name, size in zip(who, sizes, strict=True)]
    style.panel_of_bars(
        figure,
        [size * unit.factor for size in sizes],
        [unit.text(size) for size in sizes],
        colours,
        hovers,
        row=2,
        col=column,
    )
    figure.update_xaxes(title=unit.name, gridcolor=style.LIGHT_GREY, row=2, col=column)
    figure.update_yaxes(showticklabels=column == 1, showgrid=False, row=2, col=column, **style.rows_for(who))


def colour_of(position: int) -> str:
    """Return the colour of a position's parts."""
    return style.CYCLE[position % len(style.CYCLE)]
