"""Wait for the owner of a run folder to die, then end its processes and remove what they left (python -m ... FOLDER)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from workbench.core.serial import from_json
from workbench.runtime.run_folder import Owner, remove_run_folder


def main(folder: Path) -> None:
    """Return when the owner has removed the folder itself, or after having done so for a dead owner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = from_json((folder / "owner.json").read_text(), Owner, source=str(folder)).process
    while not owner.wait(1.0):
        if not folder.exists():
            return
    remove_run_folder(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
