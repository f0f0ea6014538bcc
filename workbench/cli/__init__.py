"""The command line's commands; each imports what it needs when it runs, so that --help stays fast."""
