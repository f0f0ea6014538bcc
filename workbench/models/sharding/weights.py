"""Where a shard's weights come from: rectangles of matrices on disk, read by seek, or of a model in memory (Galaxy+, section III-E)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.families import Family
from workbench.models.partial_loading import StoredTensor

Span = tuple[int, int]


class WeightSource(Protocol):
    """Gives rectangles of a model's matrices by the parameter's name in the base model, or 'lm_head.weight', 'final_logits_bias'.

    dtype: that weights are held in.  bytes_read: of stored weights that were read (or copied) until now.
    words_stand_in: whether the word embedding is the head of a model without one (a base model in memory).
    """

    dtype: torch.dtype
    bytes_read: int
    words_stand_in: bool

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a stored tensor's shape, None if there is none of that name."""
        ...

    def fill(self, out: Tensor, name: str, rows: Span, columns: Span | None = None) -> None:
        """Write rows [start, stop) and columns [start, stop), None is all, of a stored tensor into `out`, of just that shape.

        A vector is a matrix of one row: `rows` are its entries.
        """
        ...

    def close(self) -> None:
        """Give files and memory back; the source cannot be used any more."""
        ...


class MemoryWeights:
    """Weights of a model in memory, by name; slices are copied, so that the model can be released."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype, self.bytes_read = dict(tensors), dtype, 0
        self.words_stand_in = "lm_head.weight" not in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape, None if there is no such tensor."""
        found = self.tensors.get(name)
        return None if found is None else tuple(found.shape)

    def fill(self, out: Tensor, name: str, rows: Span, columns: Span | None = None) -> None:
        """Copy a rectangle."""
        piece = self.tensors[name][slice(*rows)]
        if columns is not None:
            piece = piece[:, slice(*columns)]
        out.copy_(piece)
        self.bytes_read += piece.numel() * piece.element_size()

    def close(self) -> None:
        """Release the tensors."""
        self.tensors.clear()


class FileWeights:
    """Weights of a folder with safetensors, of which nothing is read, nor mapped, but the rectangles asked for.

    tensors: by the names in the files.  names: of every parameter, those under which it may be stored.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], names: Mapping[str, tuple[str, ...]], dtype: torch.dtype) -> None:
        self.dtype, self.bytes_read, self.words_stand_in = dtype, 0, False
        self._files: dict[Path, io.FileIO] = {}
        self._found = {name: tensors[one] for name, others in names.items() for one in others[::-1] if one in tensors}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape, None if there is no such tensor."""
        found = self._found.get(name)
        return None if found is None else found.shape

    def fill(self, out: Tensor, name: str, rows: Span, columns: Span | None = None) -> None:
        """Read a rectangle: its rows at once where they are whole, else row by row, which needs no memory beyond the rectangle."""
        stored = self._found[name]
        width = 1
        for extent in stored.shape[1:]:
            width *= extent
        itemsize = stored.dtype.itemsize
        start, stop = (0, width) if columns is None else columns
        whole = columns is None or columns == (0, width)
        target = out
        if stored.dtype != out.dtype or not (out.is_contiguous() if whole else out.stride(-1) == 1):
            target = torch.empty(out.shape, dtype=stored.dtype)
        at = stored.offset + rows[0] * width * itemsize
        if whole:
            self._read(stored.path, at, memoryview(target.reshape(-1).view(torch.uint8).numpy()))
        else:
            raw = target.view(torch.uint8).numpy()
            for index in range(rows[1] - rows[0]):
                self._read(stored.path, at + (index * width + start) * itemsize, memoryview(raw[index]))
        if target is not out:
            out.copy_(target)
        self.bytes_read += (rows[1] - rows[0]) * (stop - start) * itemsize

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read(self, path: Path, at: int, view: memoryview) -> None:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = io.FileIO(path)
        file.seek(at)
        while view:
            got = file.readinto(view)
            if not got:
                raise OSError(f"'{path}' ends within a tensor")
            view = view[got:]


def weights_of(model: Any, dtype: torch.dtype | None = None) -> MemoryWeights:
    """Return the weights of a Hugging Face model in memory, with its language model head if it has one.

    dtype: None is the model's own.
    """
    base: Any = getattr(model, "base_model", model)
    tensors = {name: parameter.detach() for name, parameter in base.named_parameters(remove_duplicate=False)}
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        tensors["lm_head.weight"] = head.weight.detach()
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        tensors["final_logits_bias"] = bias.detach()
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ConfigError("The weights of a model were asked for.", "It is on the meta device.", "Load it first.")
    return MemoryWeights(tensors, dtype or next(iter(tensors.values())).dtype)


def stored_under(model: Any, family: Family) -> dict[str, tuple[str, ...]]:
    """Return the names under which checkpoint files may keep each parameter of a base model, likeliest first.

    Tied weights are stored under one of their names; files of a model with a head have the base model's prefix.
    """
    groups: dict[int, list[str]] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        groups.setdefault(id(parameter), []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in named:
        ordered: dict[str, None] = {}
        for own in (name, *groups[id(parameter)]):
            other = own
            for ours, theirs in family.stored_names.items():
                other = other.replace(ours, theirs)
            for one in (own, other):
                for prefix in ("", f"{model.base_model_prefix}."):
                    ordered[f"{prefix}{one}"] = None
        found[name] = tuple(ordered)
    found["lm_head.weight"] = ("lm_head.weight",)
    found["final_logits_bias"] = ("final_logits_bias",)
    return found
