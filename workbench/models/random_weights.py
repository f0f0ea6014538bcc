"""Write the weights of a published shape, drawn at random, as a model folder: `workbench fetch random:NAME`.

Tensors are drawn one by one, each from its own seed and name, and written as bfloat16 in shards.  So memory holds one
tensor in float32 and one shard.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.assets.fetch import asset_path
from workbench.core.errors import MissingDataError
from workbench.core.files import make_folder, place_folder
from workbench.core.units import size_words
from workbench.models.configuration import config_of
from workbench.models.families import family_of
from workbench.models.hub import RANDOM, RANDOM_SEED, STAND_IN, named_settings, random_folder
from workbench.models.initialization import seeded_generator
from workbench.models.stored_tensors import save_tensors

DTYPE = torch.bfloat16
DEVIATION = 0.02
"""Standard deviation of matrices and tables, as transformers draws them; biases are 0, scales of norms 1."""
SHARD_BYTES = 256 << 20
"""A shard ends with the tensor that makes it at least so large."""
_ORIGIN = """# {name}

Random weights, drawn by `workbench fetch {name}` from the seed {seed}, in the shape of a published model. Nobody
trained them, and no terms apply to them. They serve to measure time and memory; what they answer means nothing. The
tokenizer is that of {tokenizer} (Apache License 2.0).
"""


def write_random(name: str, progress: Callable[[str], None]) -> Path:
    """Write a model with random weights into the cache, unless it is there, and return its folder.

    name: 'random:NAME'.  progress: called with one line before and after.
    Raises ConfigError for an unknown name, MissingDataError if the disk has too little room or the tokenizer was not
    fetched.
    """
    path = random_folder(name)
    if path.is_dir():
        progress(f"{name}: present in {path}")
        return path
    settings = named_settings(RANDOM, name, "")
    shapes = tensor_shapes(name, settings)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    nbytes = num_weights * DTYPE.itemsize
    make_folder(path.parent)
    free = shutil.disk_usage(path.parent).free
    size = f"{num_weights:,} weights, {size_words(nbytes)} in bfloat16"
    if free < 1.1 * nbytes:
        raise MissingDataError(
            f"'{name}' was to be written: {size}.",
            f"The disk of '{path.parent}' has {size_words(free)} free, and a tenth must remain.",
            "Make room, or set WORKBENCH_CACHE to a folder that has it.",
        )
    tokenizer = None if family_of(settings["model_type"]).reads_images else asset_path(STAND_IN)
    progress(f"{name}: drawing {size}; {size_words(free)} are free")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}-", suffix=".part") as scratch:
        unfinished = Path(scratch) / "model"
        unfinished.mkdir()
        _write_shards(unfinished, shapes)
        (unfinished / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        origin = _ORIGIN.format(name=name, seed=RANDOM_SEED, tokenizer=STAND_IN)
        (unfinished / "README.md").write_text(origin, encoding="utf-8")
        if tokenizer is not None:
            for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                if (tokenizer / file).is_file():
                    shutil.copyfile(tokenizer / file, unfinished / file)
        place_folder(unfinished, path)
    progress(f"{name}: done, in {path}")
    return path


def tensor_shapes(name: str, settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a complete model's tensors by name, those that are tied once; nothing gets memory."""
    import transformers

    config = config_of(settings, name)
    family = family_of(config.model_type)
    maker: Any = transformers.AutoModel if family.decoder is None else transformers.AutoModelForSeq2SeqLM
    if family.is_causal:
        maker = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = maker.from_config(config)
    persistent = model.state_dict()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *buffers)}


def _write_shards(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(shapes), start=1):
        file = f"model-{number:05}.safetensors"
        save_tensors(folder / file, shard, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        shard[name] = drawn(name, shape)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in bfloat16, which depends on its name and shape alone."""
    if len(shape) < 2:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=DTYPE)
    values = torch.randn(shape, generator=seeded_generator(RANDOM_SEED, name))
    return values.mul_(DEVIATION).to(DTYPE)
