"""Compare the device catalogue with what others have published of the same boards (data/boards/published.toml).

The prediction comes from the functions that planning uses: `load_device`; for the tokens of a prompt `analytic_profile`
of the frozen model on this device alone; for written tokens Galaxy+'s computed costs of a token's pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.catalogue import data_folder, load_device
from workbench.core.cluster import Cluster, Device
from workbench.core.names import FP32_BYTES
from workbench.core.serial import from_builtins, read_toml
from workbench.methods.galaxy_plus.costs import analytic_inference
from workbench.methods.galaxy_plus.planners.terms import LayerTimes, ends_s
from workbench.profiler.analytic import analytic_profile
from workbench.profiler.descriptions import describe

Quantity = Literal[
    "gflops",
    "watts_busy",
    "watts_idle",
    "storage_mb_per_s",
    "storage_write_mb_per_s",
    "bandwidth_mbit_per_s",
    "memory_gb_per_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
]
Positive = Annotated[float, Meta(gt=0)]
FAR_OFF = 0.3
"""A deviation above it is mended in the catalogue, or has a reason."""
PROMPT_TOKENS = 512
"""The length of a prompt whose source does not state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The publication of figures.  date: of the measurement or of the page, or 'undated'."""

    title: str
    author: str
    address: Annotated[str, Meta(pattern="^https://")]
    date: Annotated[str, Meta(pattern=r"^(\d{4}(-\d\d){0,2}|undated)$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure, in the unit that its quantity's name ends with.

    source: name of a Source.  setting: how it was measured.  clock_ghz: the board's clock, if it is not that of the
    catalogue.
    fp64: it was measured in double precision.  counted_once: a copy's bytes were counted once, though each is read and
    written.  origin: the catalogue's number was taken from it.
    model, tokens: for tokens per second, the model's name in data/models.toml and the prompt's tokens if stated.
    weight_bytes: for written tokens, bytes of a stored weight.
    """

    board: str
    quantity: Quantity
    value: Positive
    setting: str
    source: str
    clock_ghz: Positive | None = None
    fp64: bool = False
    counted_once: bool = False
    origin: bool = False
    model: str = ""
    tokens: Annotated[int, Meta(ge=1)] = PROMPT_TOKENS
    weight_bytes: Positive = FP32_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A model of the catalogue.  clock_ghz: its clock, to which speeds are converted."""

    clock_ghz: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why the catalogue is far off the published figures of a quantity, and stays as it is."""

    board: str
    quantity: Quantity
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The file: boards and sources by name, figures, reasons."""

    board: dict[str, Board]
    source: dict[str, Source]
    figure: tuple[Figure, ...]
    reason: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """All figures of a board's quantity.

    converted: the figures in the catalogue's terms, at its clock and in fp32.  predicted: what the catalogue says of
    each; None if it has no such number.
    """

    board: str
    quantity: Quantity
    figures: tuple[Figure, ...]
    converted: tuple[float, ...]
    predicted: tuple[float | None, ...]
    reason: str = ""

    @property
    def deviations(self) -> tuple[float | None, ...]:
        """Return prediction over figure, minus 1, of each figure."""
        pairs = zip(self.predicted, self.converted, strict=True)
        return tuple(None if predicted is None else predicted / value - 1 for predicted, value in pairs)

    @property
    def deviation(self) -> float | None:
        """Return the median deviation, without figures that the catalogue's number was taken from; None if there is
        none.
        """
        pairs = zip(self.deviations, self.figures, strict=True)
        deviations = [deviation for deviation, figure in pairs if deviation is not None and not figure.origin]
        return median(deviations) if deviations else None


def published(path: Path | None = None) -> Published:
    """Return the published figures.  Raises ConfigError if the file is malformed."""
    path = path or data_folder() / "boards/published.toml"
    return from_builtins(read_toml(path, "the published figures"), Published, source=f"'{path}'")


def compared(published: Published) -> tuple[Compared, ...]:
    """Return each board's quantities, compared with the catalogue, in the order of the file."""
    reasons = {(reason.board, reason.quantity): reason.text for reason in published.reason}
    groups: dict[tuple[str, Quantity], list[Figure]] = {}
    for figure in published.figure:
        groups.setdefault((figure.board, figure.quantity), []).append(figure)
    return tuple(
        Compared(
            board=board,
            quantity=quantity,
            figures=tuple(figures),
            converted=tuple(_converted(figure, published.board[board]) for figure in figures),
            predicted=tuple(_predicted(figure) for figure in figures),
            reason=reasons.get((board, quantity), ""),
        )
        for (board, quantity), figures in groups.items()
    )


def _converted(figure: Figure, board: Board) -> float:
    """Return a figure at the catalogue's clock and in fp32."""
    if figure.quantity not in ("gflops", "prefill_tokens_per_s"):
        return figure.value * (2 if figure.counted_once else 1)
    return figure.value * (2 if figure.fp64 else 1) * board.clock_ghz / (figure.clock_ghz or board.clock_ghz)


def _predicted(figure: Figure) -> float | None:
    device = load_device(figure.board)
    match figure.quantity:
        case "gflops":
            return device.flops_per_s / 1e9
        case "watts_busy":
            return device.watts_busy
        case "watts_idle":
            return device.watts_idle
        case "storage_mb_per_s":
            return device.storage_bytes_per_s / 1e6
        case "storage_write_mb_per_s":
            return None if device.storage_write_bytes_per_s is None else device.storage_write_bytes_per_s / 1e6
        case "bandwidth_mbit_per_s":
            return device.link.mbit_per_s
        case "memory_gb_per_s":
            return None if device.memory_bytes_per_s is None else device.memory_bytes_per_s / 1e9
        case "prefill_tokens_per_s":
            return figure.tokens / _prompt_s(device, figure.model, figure.tokens)
        case "decode_tokens_per_s":
            return 1 / _token_s(device, figure.model, figure.weight_bytes)


@cache
def _prompt_s(device: Device, model: str, tokens: int) -> float:
    """Return the seconds of a forward pass over one text."""
    cluster = Cluster(name="one", devices=(device,))
    profile = analytic_profile(model, cluster, technique="frozen", batch_sizes=(1,), sequence_lengths=(tokens,))
    return sum(layer.times["F"].seconds[0][0] for layer in profile.layers[0])


@cache
def _token_s(device: Device, model: str, weight_bytes: float) -> float:
    """Return the seconds of one more token: smaller weights are read in less time."""
    rate = device.memory_bytes_per_s
    rates = {} if rate is None else {"weight_bytes_per_s": rate * FP32_BYTES / weight_bytes}
    cluster = Cluster(name="one", devices=(device,))
    profile = analytic_inference(model, cluster, vocabulary=describe(model).vocab, **rates)
    layers = sum(
        shape.num_layers * LayerTimes(profile, 0, stack, (1,)).whole_s() for stack, shape in enumerate(profile.stacks)
    )
    return layers + ends_s(profile, 0, (1,))
