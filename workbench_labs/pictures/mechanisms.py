"""Schematics of what several methods use: a device, backpropagation, an activation cache, a slope, a cut layer."""

from __future__ import annotations

from workbench.plots import svg
from workbench_labs.pictures.shapes import (
    ACTIVATION,
    ARROW,
    BACKWARD,
    BOX,
    CACHE,
    COLLECTIVE,
    DASHED_RIM,
    FORWARD,
    FROZEN,
    MARGIN,
    MESSAGE,
    TRAINED,
    Pictures,
    arrow,
    block,
    card,
    drum,
    frame,
    heading,
    matrix,
    muted,
    words,
)


def backpropagation() -> str:
    """Draw a forward and a backward pass through four layers, and the activations stored between them."""
    wide, pitch, x, y = 112, 156, 112, 34
    parts = [block(28, y + 14, 58, 36, "tokens", svg.TRACK)]
    for number in range(4):
        left = x + number * pitch
        centre = left + wide / 2
        before = 86 if number == 0 else left - 44
        parts += [
            block(left, y, wide, 64, f"layer {number + 1}", TRAINED),
            block(left + 4, y + 110, wide - 8, 34, "activations", ACTIVATION),
            arrow(FORWARD, (before + 4, y + 22), (left - 4, y + 22)),
            arrow(FORWARD, (centre - 16, y + 66), (centre - 16, y + 108)),
            arrow(BACKWARD, (centre + 16, y + 108), (centre + 16, y + 66)),
        ]
        if number:
            parts.append(arrow(BACKWARD, (left - 4, y + 42), (before + 4, y + 42)))
    end = x + 3 * pitch + wide
    parts += [
        block(end + 36, y + 10, 44, 44, "loss", svg.TRACK),
        arrow(FORWARD, (end + 4, y + 22), (end + 34, y + 22)),
        arrow(BACKWARD, (end + 34, y + 42), (end + 4, y + 42)),
    ]
    top, base, bar = 216, 294, 68
    parts.append(heading(MARGIN, top, "Memory over time", "grows in the forward pass, shrinks in the backward pass"))
    for column, layer in enumerate((1, 2, 3, 4, 4, 3, 2, 1)):
        left = x + column * (bar + 6)
        colour = FORWARD if column < 4 else BACKWARD
        parts.append(svg.box(left, base - layer * 14, bar, layer * 14, colour, rx=2))
        parts.append(muted(left + bar / 2, base + 17, f"layer {layer}"))
    return card(
        "Backpropagation",
        "The forward pass goes through the layers from first to last and keeps each layer's activations. The "
        "backward pass goes from the loss to the first layer and needs them again, so memory is largest between the"
        " two.",
        *parts,
        height=base + 72,
        entries=(
            (ARROW, FORWARD, "forward pass"),
            (ARROW, BACKWARD, "backward pass"),
            (BOX, TRAINED, "trained layer"),
            (BOX, ACTIVATION, "kept until the backward pass"),
        ),
    )


def activation_cache() -> str:
    """Draw the first epoch, which fills the cache, and later ones, which read it."""
    parts = []
    for x, name, rest, is_first in (
        (28, "First epoch", "fills the cache", True),
        (414, "Later epochs", "read it", False),
    ):
        parts += [heading(x, 34, name, rest), frame(x, 48, 358, 244, "frozen model" if is_first else "")]
        if not is_first:
            parts.append(words(x + 12, 68, "frozen model: not computed", anchor="start", colour=svg.MUTED))
        for number in range(3):
            left = x + 24 + number * 112
            centre = left + 43
            if is_first:
                parts += [
                    block(left, 82, 86, 40, f"layer {number + 1}", FROZEN),
                    arrow(FORWARD, (centre, 124), (centre, 148)),
                    arrow(FORWARD, (left - (22 if number else 20), 102), (left - 4, 102)),
                ]
            else:
                parts.append(svg.box(left + 0.5, 82.5, 85, 39, "none", rx=3, **DASHED_RIM))
            parts += [
                drum(left, 150, 86, 48, "activations"),
                arrow(FORWARD, (centre, 200), (centre, 222)),
                block(left, 224, 86, 40, f"side {number + 1}", TRAINED),
            ]
            if number:
                parts += [
                    arrow(FORWARD, (left - 23, 236), (left - 4, 236)),
                    arrow(BACKWARD, (left - 4, 252), (left - 23, 252)),
                ]
        parts.append(words(x + 12, 283, "side network, trained", anchor="start", font_weight="bold"))
    return card(
        "Activation cache",
        "In the first epoch the frozen model computes the activations of each sample, which are stored. Because the"
        " model does not change, later epochs read them instead of computing them. Only the side network is "
        "trained.",
        *parts,
        height=344,
        entries=(
            (ARROW, FORWARD, "forward"),
            (ARROW, BACKWARD, "backward"),
            (BOX, FROZEN, "frozen"),
            (BOX, TRAINED, "trained"),
            (BOX, CACHE, "cache"),
        ),
    )


def zeroth_order() -> str:
    """Draw a slope from two forward passes."""
    parts = [heading(MARGIN, 34, "A slope from two losses")]
    left, base, wide = 44.0, 258.0, 250.0

    def loss(x: float) -> float:
        return base - 24 - 170 * (x - 0.18) ** 2

    line = [(left + wide * step / 40, loss(step / 40)) for step in range(41)]
    parts += [
        arrow(svg.MUTED, (left - 8, base), (left + wide + 14, base)),
        arrow(svg.MUTED, (left, base + 8), (left, 62)),
        muted(left + 8, 72, "loss", anchor="start"),
        svg.path(line, FORWARD, stroke_width=2.5),
    ]
    ends = [(left + wide * share, loss(share)) for share in (0.46, 0.86)]
    for (x, y), name, under in zip(ends, ("L_−", "L_+"), ("w − ε z", "w + ε z"), strict=True):
        parts += [
            svg.path([(x, y), (x, base)], svg.MUTED, stroke_width=1.25, stroke_dasharray="3 4"),
            svg.tag("circle", cx=x, cy=y, r=5, fill=BACKWARD),
            words(x - 12, y - 8, name, anchor="end"),
            words(x, base + 20, under),
        ]
    middle = (ends[0][0] + ends[1][0]) / 2
    parts.append(words(middle, base + 20, "w"))
    slope = (ends[1][1] - ends[0][1]) / (ends[1][0] - ends[0][0])
    parts.append(
        svg.path(
            [(x, ends[0][1] + slope * (x - ends[0][0])) for x in (ends[0][0] - 34, ends[1][0] + 20)],
            BACKWARD,
            stroke_width=2,
        )
    )
    parts.append(heading(352, 34, "One step", "forward passes only: no activations are kept"))
    parts += [
        block(352, 112, 84, 56, "weights\nw", TRAINED),
        muted(394, 190, "z: from a seed"),
    ]
    for y, name, result in ((70, "w + ε z", "L_+"), (166, "w − ε z", "L_−")):
        middle_y = y + 22
        parts += [
            arrow(svg.MUTED, (438, 140), (462, 140), (462, middle_y), (482, middle_y)),
            block(486, y, 84, 44, name, TRAINED),
            arrow(FORWARD, (574, middle_y), (604, middle_y)),
            block(608, y, 96, 44, "model", FORWARD),
            arrow(FORWARD, (708, middle_y), (732, middle_y)),
            words(752, middle_y + 5, result, size=15),
        ]
    parts += [
        words(562, 252, "g = (L_+ − L_−) / 2ε", size=16),
        words(562, 282, "w ← w − η g z", size=16),
    ]
    return card(
        "Zeroth-order optimization: two forward passes",
        "The weights are moved by epsilon times z, a random direction drawn from a seed, once forwards and once "
        "backwards. The difference of the two losses is the slope g along z, and the weights go a step down that "
        "slope. There is no backward pass.",
        *parts,
        height=308,
    )


def layer_cut() -> str:
    """Draw one layer on three unequal devices: tensor parallel inside the blocks, sequence parallel between them."""
    x, y, wide, bar, gap, pitch, tall = 112.0, 84.0, 84.0, 34.0, 10.0, 70.0, 56.0
    rows_of = (range(0, 3), range(3, 5), range(5, 6))
    steps = (
        ("norm", "own tokens", True),
        ("attention", "own heads", False),
        ("norm", "own tokens", True),
        ("feed-forward", "own columns", False),
        ("norm", "own tokens", True),
    )
    parts = [words(x - 16, y + rank * pitch + 33, f"device {rank + 1}", anchor="end") for rank in range(3)]
    height = 2 * pitch + tall
    for number, (name, caption, rows) in enumerate(steps):
        left = x + number * (wide + bar + 2 * gap)
        centre = left + wide / 2
        parts += [words(centre, 44, name, font_weight="bold"), muted(centre, 62, caption)]
        for rank in range(3):
            parts.append(
                matrix(
                    left + 4,
                    y + rank * pitch,
                    wide - 8,
                    tall,
                    6,
                    rows_of[rank],
                    ACTIVATION if rows else FORWARD,
                    rows=rows,
                )
            )
        if number < len(steps) - 1:
            edge = left + wide + gap
            called = "all-gather" if rows else "reduce-scatter"
            turned = f"translate({edge + bar / 2 + 4.5:g} {y + height / 2:g}) rotate(-90)"
            parts.append(svg.box(edge, y, bar, height, COLLECTIVE, rx=5))
            parts.append(words(0, 0, called, colour=svg.PAPER, transform=turned))
    return card(
        "A layer cut over three devices",
        "Attention and feed-forward are cut by columns of their weights: each device has some heads and some "
        "neurons, and all tokens. Between them each device has some tokens, whole. An all-gather leads from tokens "
        "to columns, a reduce-scatter back. The shares are unequal, like the devices.",
        *parts,
        height=y + height + 58,
        entries=(
            (BOX, ACTIVATION, "rows: tokens"),
            (BOX, FORWARD, "columns of the weights: heads, or neurons"),
            (BOX, COLLECTIVE, "all devices exchange"),
        ),
    )


def device() -> str:
    """Draw a device as four numbers: two for what it computes, two for what it sends."""
    y, tall, wide = 34, 178, 330
    left, right = MARGIN, 800 - MARGIN - 190
    middle = (left + wide + right) / 2
    parts = [
        frame(left, y, wide, tall, "a device"),
        block(left + 18, y + 42, 138, 76, "arithmetic\nFLOP/s", FORWARD),
        block(left + 174, y + 42, 138, 76, "memory\nbytes/s", CACHE),
        muted(left + wide / 2, y + 146, "at the same time: the longer one counts"),
        frame(right, y, 190, tall, "another device"),
        arrow(MESSAGE, (left + wide + 6, y + 92), (right - 6, y + 92)),
        words(middle, y + 58, "latency", font_weight="bold"),
        muted(middle, y + 76, "s for any message"),
        words(middle, y + 118, "bandwidth", font_weight="bold"),
        muted(middle, y + 136, "bytes/s after that"),
    ]
    return card(
        "A device is four numbers",
        "A device does arithmetic at so many operations a second and moves so many bytes of its memory a second, both "
        "at the same time. A message to another device takes the latency, whatever its size, and its bytes over the "
        "bandwidth.",
        *parts,
        height=y + tall + 56,
        entries=(
            (BOX, FORWARD, "what it computes"),
            (BOX, CACHE, "what it reads and writes"),
            (ARROW, MESSAGE, "a message"),
        ),
    )


MECHANISMS: Pictures = {
    "device": device,
    "backpropagation": backpropagation,
    "activation_cache": activation_cache,
    "zeroth_order": zeroth_order,
    "layer_cut": layer_cut,
}
