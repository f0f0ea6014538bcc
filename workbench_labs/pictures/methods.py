"""One schematic for each of the five methods."""

from __future__ import annotations

from workbench.plots import svg
from workbench.schedules.published import build_published
from workbench_labs.pictures.schedules import counted_from_1, devices, timeline_of
from workbench_labs.pictures.shapes import (
    ARROW,
    BACKWARD,
    BOX,
    CACHE,
    COLLECTIVE,
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
    lanes,
    muted,
    words,
)


def pac_plus() -> str:
    """Draw PAC+: a pipeline of device groups that fills the caches, then data parallel training from them."""
    parts = [heading(MARGIN, 34, "First epoch", "a pipeline of device groups"), heading(532, 34, "Later epochs")]
    parts += [frame(28, 48, 230, 266, "group 1", "layers 1–4"), frame(332, 48, 160, 266, "group 2", "layers 5–6")]
    columns = ((54, "device 1", "3 of 4"), (164, "device 2", "1 of 4"), (370, "device 3", "4 of 4"))
    for x, name, samples in columns:
        parts += [
            words(x + 43, 94, name),
            muted(x + 43, 111, f"{samples} samples", size=11.5),
            block(x, 124, 86, 42, "frozen", FROZEN),
            arrow(FORWARD, (x + 43, 168), (x + 43, 188)),
            block(x, 190, 86, 42, "side", TRAINED),
            drum(x, 252, 86, 46, "cache"),
            arrow(FORWARD, (x - 2, 145), (x - 14, 145), (x - 14, 276), (x - 3, 276)),
        ]
    for y, name, colour, is_back in (
        (140, "activations", FORWARD, False),
        (204, "", FORWARD, False),
        (220, "gradients", BACKWARD, True),
    ):
        ends = [(261, y), (329, y)]
        parts.append(arrow(colour, *(ends[::-1] if is_back else ends)))
        parts.append(muted(295, y + (16 if is_back else -8), name, size=11))
    for number in range(3):
        y = 48 + number * 92
        parts += [
            frame(532, y, 180, 82, f"device {number + 1}"),
            drum(544, y + 28, 62, 44, "cache"),
            arrow(FORWARD, (609, y + 51), (626, y + 51)),
            block(629, y + 30, 72, 42, "side", TRAINED),
        ]
    turned = "translate(752.5 181) rotate(-90)"
    parts += [
        svg.box(732, 48, 32, 266, COLLECTIVE, rx=5),
        words(0, 0, "all-reduce", colour=svg.PAPER, transform=turned),
    ]
    return card(
        "PAC+",
        "First epoch: groups of devices form a pipeline. Each device has its group's layers of the frozen model and"
        " of the side network, computes its share of each micro-batch, and stores the activations. Later epochs: "
        "every device trains the whole side network on cached activations, and an all-reduce adds up the gradients.",
        *parts,
        height=364,
        entries=(
            (ARROW, FORWARD, "forward"),
            (ARROW, BACKWARD, "backward"),
            (BOX, FROZEN, "frozen model"),
            (BOX, TRAINED, "side network, trained"),
            (BOX, CACHE, "cache"),
        ),
    )


def p_rge() -> str:
    """Draw P-RGE (MobiZO): a step's queries over the devices; only seeds and numbers travel."""
    parts = []
    queries = ((1, 2), (3,), (4,))
    for number, device_queries in enumerate(queries):
        x = 28 + number * 256
        parts += [
            frame(x, 28, 232, 176, f"device {number + 1}", f"{len(device_queries)} of 4 queries"),
            block(x + 14, 62, 142, 32, "frozen model", FROZEN),
            block(x + 162, 62, 56, 32, "w", TRAINED),
        ]
        for row, query in enumerate(device_queries):
            y = 106 + row * 46
            parts += [
                block(x + 14, y, 68, 36, f"w + ε z_{query}", FORWARD, size=12),
                block(x + 88, y, 68, 36, f"w − ε z_{query}", FORWARD, size=12),
                arrow(FORWARD, (x + 160, y + 18), (x + 184, y + 18)),
                words(x + 202, y + 23, f"g_{query}", size=15),
            ]
        parts += [
            arrow(MESSAGE, (x + 116, 206), (x + 116, 228)),
            arrow(MESSAGE, (x + 116, 264), (x + 116, 286)),
            block(x, 288, 232, 40, "w ← w − (η/4) Σ g_i z_i", TRAINED, size=14),
        ]
    parts.append(block(28, 230, 744, 32, "", COLLECTIVE))
    parts.append(words(400, 251, "all devices exchange g_1 … g_4: four numbers, no gradient", colour=svg.PAPER))
    parts.append(muted(400, 350, "Each device draws every z_i again from its seed, so all get the same weights."))
    return card(
        "P-RGE, published as MobiZO",
        "The four queries of a step are divided over three devices, each of which has the whole model. A query is "
        "two forward passes, with the weights moved along a random direction to both sides, and gives one number. "
        "The devices exchange these numbers, draw all directions again from their seeds, and all make the same "
        "update.",
        *parts,
        height=402,
        entries=(
            (BOX, FORWARD, "forward pass"),
            (BOX, FROZEN, "frozen"),
            (ARROW, MESSAGE, "a few bytes"),
            (BOX, TRAINED, "trained: few weights"),
        ),
    )


def galaxy_plus() -> str:
    """Draw Galaxy+: unequal shares of a layer, and tiles that travel while the devices multiply."""
    parts = [heading(MARGIN, 34, "Shares by speed")]
    for number, (heads, note) in enumerate(((6, "fast"), (4, "medium"), (2, "slow"))):
        y = 48 + number * 74
        parts.append(frame(28, y, 226, 64, f"device {number + 1}", note))
        parts += [svg.box(40 + head * 27, y + 32, 21, 20, FORWARD, rx=3) for head in range(heads)]
    parts.append(muted(141, 292, "12 attention heads of every layer"))
    timelines = [
        timeline_of(build_published("ring_allgather_gemm", {"ranks": 3, "overlapped": overlapped}), SEND=0.8)
        for overlapped in (0, 1)
    ]
    whole_s = max(timeline.makespan_s for timeline in timelines)
    top = 34.0
    for timeline, name, rest in zip(
        timelines,
        ("Exchange, then multiply", "Multiply tile by tile"),
        ("", "the next tile is on its way meanwhile"),
        strict=True,
    ):
        parts.append(heading(292, top, name, rest))
        parts.append(
            lanes(
                timeline,
                372,
                top + 14,
                400,
                names=devices(3),
                whole_s=whole_s,
                height=22,
                gap=6,
                network=True,
                label=_tile,
            )
        )
        top += 148
    return card(
        "Galaxy+",
        "Left: each device has as many attention heads of every layer as its speed and memory allow. Right: tiles "
        "of the sequence travel around a ring. If each device multiplies one tile while the next one is on its way,"
        " the exchange is hidden behind the products.",
        *parts,
        height=354,
        entries=(
            (BOX, FORWARD, "head; product of a tile"),
            (BOX, MESSAGE, "a tile travels"),
            (BOX, svg.TRACK, "waiting"),
        ),
    )


def _tile(op: object) -> str:
    return f"tile {getattr(op, 'part', 0) + 1}"


def ringada() -> str:
    """Draw RingAda: forward once around the ring, back to the terminator, then the head moves on."""
    wide, tall, left, right, top, bottom = 250, 104, 40, 510, 28, 216
    parts = []
    for number, (x, y, note, is_trained) in enumerate(
        (
            (left, top, "initiator", False),
            (right, top, "", False),
            (right, bottom, "terminator", True),
            (left, bottom, "", True),
        )
    ):
        layers = f"layers {number * 3 + 1}–{number * 3 + 3}"
        parts += [
            frame(x, y, wide, tall, f"device {number + 1}", note),
            drum(x + 14, y + 36, 62, 54, "own\ndata"),
            block(x + 90, y + 36, 146, 30, layers, FROZEN),
            block(x + 90, y + 70, 146, 20, "adapters", TRAINED if is_trained else FROZEN, size=12),
        ]
    middle = (top + tall / 2, bottom + tall / 2)
    parts += [
        arrow(FORWARD, (left + wide + 4, middle[0]), (right - 4, middle[0])),
        arrow(FORWARD, (right + 150, top + tall + 4), (right + 150, bottom - 4)),
        arrow(FORWARD, (right - 4, middle[1] - 12), (left + wide + 4, middle[1] - 12)),
        arrow(FORWARD, (left + 90, bottom - 4), (left + 90, top + tall + 4)),
        arrow(BACKWARD, (left + 150, top + tall + 4), (left + 150, bottom - 4)),
        arrow(BACKWARD, (left + wide + 4, middle[1] + 14), (right - 4, middle[1] + 14)),
        words(400, middle[0] - 10, "hidden states"),
        words(400, middle[1] + 34, "gradients"),
        muted(444, 150, "once around, back to where the labels are;", size=12.5),
        muted(444, 168, "the gradient stops at the terminator;", size=12.5),
        muted(444, 186, "then device 2 is the initiator", size=12.5),
        muted(left + 78, 178, "forward", anchor="end"),
        muted(left + 162, 178, "backward", anchor="start"),
    ]
    return card(
        "RingAda",
        "Four devices on a ring each have a block of layers and their own data, which stay there. Device 1, the "
        "initiator, embeds its samples; hidden states go once around the ring and come back to it, because it has "
        "the labels. The gradient goes back as far as the lowest adapter that is trained. Then the next device "
        "becomes the initiator.",
        *parts,
        height=374,
        entries=(
            (ARROW, FORWARD, "forward"),
            (ARROW, BACKWARD, "backward"),
            (BOX, FROZEN, "frozen"),
            (BOX, TRAINED, "trained so far"),
            (BOX, CACHE, "data that stay"),
        ),
    )


def confidant() -> str:
    """Draw Confidant: layers by memory, heads over processors, a device in reserve, and a pipeline without a drain."""
    parts = [heading(MARGIN, 34, "Layers by speed and memory", "heads by processor; an idle device stands in")]
    for number, (name, note, layers) in enumerate(
        (("device 1", "8 GB", "layers 1–6"), ("device 2", "4 GB", "layers 7–9"), ("device 3", "4 GB", "layers 10–12"))
    ):
        x = 28 + number * 190
        parts.append(frame(x, 48, 160, 92, name, note))
        if number == 1:
            parts.append(muted(x + 80, 86, layers))
            parts.append(block(x + 12, 96, 86, 32, "CPU: 8 heads", TRAINED, size=11))
            parts.append(block(x + 102, 96, 46, 32, "GPU: 4", TRAINED, size=11))
        else:
            parts.append(block(x + 12, 78, 136, 50, layers, TRAINED))
        if number:
            parts.append(arrow(FORWARD, (x - 28, 86), (x - 3, 86)))
            parts.append(arrow(BACKWARD, (x - 3, 104), (x - 28, 104)))
    parts += [frame(612, 48, 160, 92, "device 4", "idle", dashed=True), words(692, 108, "stands by", colour=svg.MUTED)]
    parts.append(heading(MARGIN, 182, "A pipeline that never drains", "weights change after every mini-batch"))
    timeline = timeline_of(build_published("asynchronous_1f1b", {"ranks": 3, "micro_batches": 10}))
    parts.append(lanes(timeline, 112, 196, 660, names=devices(3), label=counted_from_1))
    return card(
        "Confidant",
        "Three devices have as many layers as their speed and memory allow. The processors of one device divide the"
        " attention heads of its layers. A fourth device stands by and takes over when one leaves. Below: mini-"
        "batches follow each other through the pipeline without a pause.",
        *parts,
        height=340,
        entries=(
            (BOX, FORWARD, "forward pass"),
            (BOX, BACKWARD, "backward pass"),
            (BOX, TRAINED, "trained"),
            (BOX, svg.TRACK, "idle"),
        ),
    )


METHODS: Pictures = {
    "pac_plus": pac_plus,
    "p_rge": p_rge,
    "galaxy_plus": galaxy_plus,
    "ringada": ringada,
    "confidant": confidant,
}
