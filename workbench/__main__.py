"""The command line: `workbench` and `python -m workbench`."""

from __future__ import annotations


def main() -> None:
    """Run the command line; see `workbench --help`."""
    from workbench.cli.app import app

    app(prog_name="workbench")


if __name__ == "__main__":
    main()
