"""A map of a cluster on which a person drags a link to another rate, and a device to another speed or memory.

Python draws each device's card, so the last picture can stay in a notebook without a kernel; the page adds the knobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anywidget
import traitlets
from markupsafe import Markup

from workbench.plots import svg
from workbench.plots.cluster_map import TRACKS, Dial, card

HERE = Path(__file__)
STYLE = "".join(HERE.with_name(name).read_text(encoding="utf-8") for name in ("live.css", "cluster_map.css"))


class MapDevice(NamedTuple):
    """A device on the map: see plots.cluster_map.card."""

    name: str
    more: str
    dials: Sequence[Dial]
    hot: str = ""


class ClusterMap(anywidget.AnyWidget):
    """Cards of devices with knobs; a moved knob is reported to `moved(device, what, stop)`: its device's number, the
    dial, and the number of the stop.
    """

    cards: traitlets.List[Any] = traitlets.List().tag(sync=True)  # what changes with a value
    dials: traitlets.List[Any] = traitlets.List().tag(sync=True)  # and what does not, because it is longer
    tracks = traitlets.Dict({name: track._asdict() for name, track in TRACKS.items()}).tag(sync=True)
    _esm = HERE.with_suffix(".js")
    _css = STYLE

    def __init__(self, moved: Callable[[int, str, int], None]) -> None:
        super().__init__()
        self.on_msg(lambda _, message, __: moved(message["device"], message["what"], message["stop"]))

    def show(self, devices: Sequence[MapDevice], *, ticks: Sequence[float], is_shared: bool = False) -> None:
        """Show these devices.  ticks, is_shared: see plots.cluster_map.card."""
        with self.hold_sync():
            self.dials = [
                [
                    {"what": dial.what, "label": dial.label, "stops": list(map(list, dial.stops))}
                    for dial in device.dials
                ]
                for device in devices
            ]
            self.cards = [
                {
                    "name": device.name,
                    "drawing": card(
                        device.name, device.more, device.dials, hot=device.hot, ticks=ticks, is_shared=is_shared
                    ),
                    "values": [[dial.share, dial.text] for dial in device.dials],
                }
                for device in devices
            ]

    @property
    def still(self) -> Markup:
        """Return the present picture as HTML that needs no kernel and no script."""
        cards = "".join(svg.tag("div", card["drawing"], class_="workbench-card") for card in self.cards)
        many = f"--workbench-devices:{len(self.cards)}"
        board = svg.tag("div", svg.tag("div", cards, class_="workbench-cards", style=many), class_="workbench-live")
        return Markup(f"<style>{STYLE}</style>{svg.as_images(board)}") if self.cards else Markup()
