"""Divide a device's layers among its processors, and compute how long each part takes (Confidant, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.core.profile import LayerProfile

PARTS: dict[str, str] = {"ATTN": "H", "COLS": "C"}
"""Operations on a part of a layer, and the profile's kinds of them: H heads, C feed-forward columns.

LayerProfile.times has HF and HB, the seconds of all of a layer's heads forward and back, HF1 and HB1, those of one
group alone; CF, CB, CF1 and CB1 likewise.  A real device also measures them on its further processors: HF@1, HF1@1 ...
on processor 1.
"""
Direction = Literal["F", "B"]


def measured_at(processor: int, layer: LayerProfile, kind: str) -> str:
    """Return the suffix of the kinds that were measured on this processor; '' if it was not measured separately."""
    return f"@{processor}" if f"{kind}@{processor}" in layer.times else ""


def part_s(
    layer: LayerProfile, kind: str, groups: int, of: int, samples: int, length: int, *, processor: int = 0
) -> float:
    """Return the seconds of `groups` out of `of` groups on the device's profile: linear between one group and all,
    never decreasing.

    kind: HF, HB, CF or CB.  Without a measured time of one group, the time is proportional to the groups.
    processor: number of the processor; if it was not measured separately, it is as fast as the device's profile.
    """
    if not groups:
        return 0.0
    suffix = measured_at(processor, layer, kind)
    full_s = layer.seconds(f"{kind}{suffix}", samples, length)
    if of == 1 or f"{kind}1{suffix}" not in layer.times:
        return full_s * groups / of
    one_group_s = layer.seconds(f"{kind}1{suffix}", samples, length)
    return one_group_s + max(0.0, full_s - one_group_s) * (groups - 1) / (of - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a device's processors share each of its layers.  The first processor is the fastest one, or a real device's
    fastest group of cores, and computes everything that is not divided.

    heads[j], columns[j]: groups of heads, and of feed-forward columns, of processor j; no columns: the first computes
    all of them.
    slower[j]: the time of processor j relative to the device's profile (1 if the profile has its own).  names[j]: the
    processor's name.
    """

    heads: tuple[int, ...]
    columns: tuple[int, ...]
    slower: tuple[float, ...]
    names: tuple[str, ...]

    def processors(self, kind: str) -> tuple[int, ...]:
        """Return the processors that compute a part of an operation of PARTS."""
        return tuple(place for place, groups in enumerate(self.groups(kind)) if groups)

    def groups(self, kind: str) -> tuple[int, ...]:
        """Return each processor's groups in an operation of PARTS."""
        return self.heads if kind == "ATTN" else self.columns

    def part_s(
        self, layer: LayerProfile, kind: str, direction: Direction, processor: int, samples: int, length: int
    ) -> float:
        """Return the seconds of a processor's part of an operation of PARTS."""
        groups = self.groups(kind)
        own_s = part_s(
            layer, PARTS[kind] + direction, groups[processor], sum(groups), samples, length, processor=processor
        )
        return self.slower[processor] * own_s

    def rest_s(self, layer: LayerProfile, direction: Direction, samples: int, length: int) -> float:
        """Return the seconds of the operations that are not divided: the layer's seconds minus those of the divided
        operations.
        """
        divided = ["H", *(["C"] if self.columns else [])]
        return max(
            0.0,
            layer.seconds(direction, samples, length)
            - sum(layer.seconds(part + direction, samples, length) for part in divided),
        )

    def layer_s(self, layer: LayerProfile, direction: Direction, samples: int, length: int) -> float:
        """Return the seconds of the whole layer."""
        slowest = [
            max(self.part_s(layer, kind, direction, place, samples, length) for place in self.processors(kind))
            for kind in PARTS
            if self.groups(kind)
        ]
        return self.rest_s(layer, direction, samples, length) + sum(slowest)

    def described(self) -> str:
        """Describe the work of each processor: 'heads 8 on cpu, 4 on gpu'."""
        counted = (("heads", self.heads), ("columns", self.columns))
        shown = ((kind, zip(counts, self.names, strict=True)) for kind, counts in counted if counts)
        return "; ".join(
            f"{kind} " + ", ".join(f"{count} on {name}" for count, name in pairs if count) for kind, pairs in shown
        )
