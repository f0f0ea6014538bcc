"""The command line: `workbench` and `python -m workbench`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; see `workbench --help`.  SIGTERM ends it like Ctrl-C: no process or file is left behind."""
    from workbench.cli.app import app

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="workbench")


if __name__ == "__main__":
    main()
