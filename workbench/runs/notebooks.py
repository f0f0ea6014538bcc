"""Run a notebook without a browser, by papermill, with given parameters and a kernel that opens no port."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import read_text


def require_parameters(notebook: Path, names: Mapping[str, Any]) -> None:
    """Raise ConfigError if the file is not a notebook, or if its cell tagged 'parameters' lacks one of the names."""
    from IPython.core.inputtransformer2 import TransformerManager

    request = f"The notebook '{notebook}' was asked for."
    try:
        cells = json.loads(read_text(notebook, "the notebook"))["cells"]
        tagged = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
        plain = map(TransformerManager().transform_cell, tagged)  # IPython's magics and shell commands become calls
        assigned = [
            statement
            for text in plain
            for statement in ast.parse(text).body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
        ]
        nodes = [node for statement in assigned for node in ast.walk(statement)]
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(request, "It is malformed.", "Name a file that Jupyter opens.") from error
    parameters = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    for name in names:
        if name not in parameters:
            raise ConfigError(
                f"The parameter '{name}' of '{notebook}' was asked for.",
                f"Its parameters are {', '.join(parameters) or 'none'}.",
                did_you_mean(name, parameters),
            )


def run_notebook(notebook: Path, written: Path, parameters: Mapping[str, Any] | None = None) -> None:
    """Run a notebook in its own folder with the given parameters, and write it with its outputs.

    Raises papermill's PapermillExecutionError if a cell fails; the outputs up to that cell are written.
    """
    import papermill
    from jupyter_client.manager import AsyncKernelManager

    # The kernel listens on Unix sockets in a private folder: no other user reaches it, and no port is opened.
    # What it writes to its standard error, outside of cells, is shown if the notebook fails: an ending kernel may log
    # that one of its threads found a socket closed.
    with (
        scratch_folder() as sockets,
        open(sockets / "stderr.txt", "w+", errors="replace", encoding="utf-8") as errors_file,
    ):

        class PrivateKernel(AsyncKernelManager):
            def __init__(self, **settings: Any) -> None:
                super().__init__(transport="ipc", connection_file=f"{sockets}/kernel.json", **settings)

            async def start_kernel(self, **settings: Any) -> None:  # type: ignore[override]  # declared as a variable
                await super()._async_start_kernel(stderr=errors_file, **settings)

        try:
            papermill.execute_notebook(
                notebook,
                written,
                dict(parameters or {}),
                cwd=notebook.parent,
                kernel_name="python3",
                progress_bar=sys.stderr.isatty(),
                kernel_manager_class=PrivateKernel,
                extra_arguments=[
                    "--IPKernelApp.log_level=CRITICAL"
                ],  # a kernel that ends slowly on a busy machine is not an error
            )
        except BaseException:
            errors_file.seek(0)
            sys.stderr.write(errors_file.read())
            raise
