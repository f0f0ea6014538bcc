"""Read a GGUF file as a model: transformers converts it once, to a folder under the cache folder."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

from workbench.assets.fetch import cache_folder
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.files import make_folder, place_folder
from workbench.core.serial import text_digest
from workbench.models.families import family_of
from workbench.models.partial_loading import HEAD
from workbench.models.quiet import quiet_transformers
from workbench.models.stored_tensors import save_tensors


def converted(path: Path) -> Path:
    """Return the folder with a GGUF file's configuration, weights (float32) and tokenizer, made on the first use.

    Raises ConfigError for a family that is not known, MissingDataError for a file that does not load.
    """
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    folder = cache_folder() / "gguf" / text_digest(key)
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "model"
        unfinished.mkdir()
        try:
            sys.stderr.write(f"{path.name}: converting to float32 weights, once\n")
            # Its reader of GGUF files shows a bar whatever the settings of transformers.
            with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
                _convert(path, unfinished)
        except ConfigError:
            raise
        except Exception as error:  # libraries raise many kinds of errors for a user's file
            line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise MissingDataError(
                f"The model '{path}' was asked for.",
                f"Transformers does not read it: {line}.",
                "Check the file, or give a Hugging Face folder.",
            ) from error
        place_folder(unfinished, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**place)
    maker = AutoModelForCausalLM if family_of(config.model_type).is_causal else AutoModel
    # Not by save_pretrained, which refuses a model that was read from a GGUF file.
    state = maker.from_pretrained(**place, config=config, dtype=torch.float32).state_dict()
    if config.tie_word_embeddings:
        state.pop(HEAD, None)
    save_tensors(folder / "model.safetensors", state, {"format": "pt"})
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
