"""The command line: `workbench` and `python -m workbench`."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys


def main() -> None:
    """Run the command line; see `workbench --help`.  SIGTERM ends it like Ctrl-C: no process or file is left behind."""
    # Of `workbench ... >&-` Python makes no stream, and the next file to be opened would get its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    # Collections while libraries are imported take an eighth of that time, and find nothing.
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    from workbench.cli.app import app

    # A terminal that is not UTF-8 shows a character that it does not have by its number, as stderr does anyway.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Python's end collects garbage among the libraries' hundreds of thousands of objects, for over a second.
    atexit.register(gc.freeze)
    app(prog_name="workbench")


if __name__ == "__main__":
    main()
