"""Write docs/pictures/*.svg: `python -m workbench_labs.pictures`."""

from __future__ import annotations

from pathlib import Path

from workbench_labs.pictures.mechanisms import MECHANISMS
from workbench_labs.pictures.methods import METHODS
from workbench_labs.pictures.schedules import SCHEDULES

PICTURES = {**SCHEDULES, **MECHANISMS, **METHODS}
"""The function that draws each picture, by the picture's name."""
FOLDER = Path(__file__).resolve().parents[2] / "docs/pictures"


def main() -> None:
    """Write every picture."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
