"""Where a shard's weights come from: rectangles of matrices on disk, read by seek, or of a model in memory (Galaxy+, section III-E)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.families import Family
from workbench.models.partial_loading import StoredTensor

Span = tuple[int, int]

_BUFFER_BYTES = 1 << 20


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

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two names are of one stored tensor: what a configuration ties, files may hold apart."""
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

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two names are of one tensor."""
        found, same = self.tensors.get(name), self.tensors.get(other)
        return found is not None and same is not None and found.data_ptr() == same.data_ptr()

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

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two names are of one stored tensor."""
        return other in self._found and self._found.get(name) == self._found[other]

    def fill(self, out: Tensor, name: str, rows: Span, columns: Span | None = None) -> None:
        """Read a rectangle: its rows at once where they are whole, else row by row, which needs no memory beyond the rectangle."""
        stored = self._found[name]
        width = math.prod(stored.shape[1:])
        start, stop = (0, width) if columns is None else columns
        is_whole = (start, stop) == (0, width)
        count, itemsize = rows[1] - rows[0], stored.dtype.itemsize
        is_direct = stored.dtype == out.dtype and (out.is_contiguous() if is_whole else out.stride(-1) == 1)
        # What has to be converted or turned goes through a small buffer, some rows at a time.
        band = count if is_direct else max(1, _BUFFER_BYTES // max(1, (stop - start) * itemsize))
        for first in range(0, count, band):
            part = out[first : first + band]
            target = part if is_direct else torch.empty(part.shape, dtype=stored.dtype)
            self._read_rows(stored, target, rows[0] + first, width, (start, stop))
            if target is not part:
                part.copy_(target)
        self.bytes_read += count * (stop - start) * itemsize

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read_rows(self, stored: StoredTensor, target: Tensor, row: int, width: int, columns: Span) -> None:
        itemsize = stored.dtype.itemsize
        at = stored.offset + row * width * itemsize
        if columns == (0, width):
            self._read(stored.path, at, memoryview(target.view(-1).view(torch.uint8).numpy()))
            return
        raw = target.view(torch.uint8).numpy()
        for index in range(len(target)):
            self._read(stored.path, at + (index * width + columns[0]) * itemsize, memoryview(raw[index]))

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

    def __del__(self) -> None:
        """Close the files of a source that was dropped."""
        self.close()


def weights_of(model: Any, dtype: torch.dtype | None = None) -> MemoryWeights:
    """Return the weights of a Hugging Face model in memory, with its language model head if it has one.

    dtype: None is the model's own.
    """
    base: Any = getattr(model, "base_model", model)
    tensors = {name: parameter.detach() for name, parameter in base.named_parameters(remove_duplicate=False)}
    tensors.pop("lm_head.weight", None)  # T5 with a head is its own base model
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
