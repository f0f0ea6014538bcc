"""The labs with their outputs: executed once for each text of a lab, and kept in build/labs.

`python docs/generate/labs.py` executes what is not kept.  LABS=real does it at the labs' real size, otherwise they take
the smallest settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from workbench.runs.notebooks import run_notebook

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ROOT / "build/labs"
SETTINGS = {"tiny": {"WORKBENCH_TINY": "1", "WORKBENCH_DILATION": "1", "OMP_NUM_THREADS": "1"}, "real": {}}


def labs() -> list[Path]:
    """Return the notebooks of the labs, and the comparison's."""
    return sorted(set((ROOT / "notebooks").glob("*.ipynb")) - {ROOT / "notebooks/index.ipynb"})


def kept_file(lab: Path, size: str) -> Path:
    """Return where a lab's outputs are kept; another text of the lab has another file."""
    digest = hashlib.sha256(lab.read_bytes()).hexdigest()[:16]
    return OUTPUTS / f"{lab.stem}-{size}-{digest}.ipynb"


def stored_output(lab: Path) -> tuple[Path, str] | None:
    """Return a lab with outputs and their size, the real one if there is one."""
    return next(((file, size) for size in ("real", "tiny") if (file := kept_file(lab, size)).is_file()), None)


def main(size: str) -> None:
    """Execute every lab whose outputs are not kept, of the same or of a larger size."""
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    os.environ |= SETTINGS[size]
    for lab in labs():
        done = stored_output(lab)
        if done is None or (size == "real" and done[1] == "tiny"):
            sys.stderr.write(f"Executing {lab.name} ({size})\n")
            file = kept_file(lab, size)
            part = file.with_suffix(".part.ipynb")
            run_notebook(lab, part)
            notebook = json.loads(part.read_text(encoding="utf-8"))
            notebook["metadata"].pop("widgets", None)  # up to 20 MB, and dead without a kernel
            part.write_text(json.dumps(notebook), encoding="utf-8")
            part.replace(file)


if __name__ == "__main__":
    main(os.environ.get("LABS") or "tiny")
