"""Note the frames on the stack of a device's operations, and of the commands that are sent to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from workbench.runtime.context import RankContext
from workbench.runtime.pacing import Pacer
from workbench.runtime.pipe_engine import Engine


def frames_up_to(frame: FrameType | None, first: CodeType) -> list[str]:
    """Return the functions from a frame down to the one that runs `first`, without those of this file; none if it is
    not on the stack."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")
        if frame.f_code is first:
            return names[::-1]
        frame = frame.f_back
    return []


def note_operations(context: RankContext, folder: Path) -> None:
    """From now on write down, for each kind of operation of this device, the functions from the engine to the
    operation, one in a line."""
    paced = Pacer.run

    def run(pacer: Pacer, function: Any, *times: Any) -> Any:
        if not isinstance(function, partial):  # no operation of a program
            return paced(pacer, function, *times)
        [op, _] = function.args

        def noted() -> Any:
            note_first_frame(lambda names: (folder / f"{context.rank} {op.kind}").write_text("\n".join(names)))
            return function()

        return paced(pacer, noted, *times)

    Pacer.run = run  # type: ignore[method-assign]


def note_first_frame(note: Callable[[list[str]], object]) -> None:
    """Note the functions on the stack at the next call in this thread from outside this file."""

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            sys.setprofile(None)
            note(frames_up_to(frame, Engine._answer.__code__))

    sys.setprofile(entered)
