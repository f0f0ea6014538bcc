"""The command line's commands; each imports what it needs when it runs, so that --help stays fast."""

import os

from workbench.assets.fetch import cache_folder

# torch makes this folder as soon as its compiler is imported, otherwise in the folder for temporary files, and leaves
# it there.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torch"))
