"""How one sample's activations lie on the disk: float32, bfloat16, or int8 with block-wise scales (PAC+, section IV-B, Eq. 1-2).

A record is a run of rows, tap by tap: `num_taps` times the sample's own length, then `num_target_taps` times the target's length.
A row is one token's `width` values.  An int8 row carries the scales of its blocks behind its codes, so that any run of rows can be
copied, sent and checked without knowing what is in it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError


def allocate(file: BinaryIO, nbytes: int) -> None:
    """Take a file's space on the disk.  Raises OSError if there is none."""
    # A memory map of a sparse file ends in SIGBUS when the disk is full; taking the space now gives ENOSPC instead.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    block = bytes(1 << 20)
    for _ in range(nbytes // len(block)):
        file.write(block)
    file.write(block[: nbytes % len(block)])


def map_file(path: Path, nbytes: int) -> mmap.mmap | None:
    """Return a file as shared, writable memory; an empty file cannot be mapped."""
    if nbytes == 0:
        return None
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)


def as_array(memory: mmap.mmap | None, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Return mapped memory, or for None nothing, as an array that may be written."""
    return np.empty(shape, dtype=dtype) if memory is None else np.frombuffer(memory, dtype=dtype).reshape(shape)


# What a storage type is decoded to: the type in which the side network reads its taps.
_DECODED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
STORAGE_TYPES = tuple(_DECODED)
MAX_BLOCK = 64
"""Values that share one scale: the largest divisor of the width up to this."""
_ALIGNMENT = 4  # bytes: a row's scales are float32


def decoded_dtype(name: str) -> torch.dtype:
    """Return the type in which taps stored as `name` are read back.  Raises ConfigError for an unknown one.

    int8 is decoded to bfloat16: rounding adds 1/512 of a value to the 1/254 of its block's largest that the codes cost.
    """
    if name not in _DECODED:
        raise ConfigError(f"An activation cache of type '{name}' was asked for.", f"There are {', '.join(_DECODED)}.", "Choose one.")
    return _DECODED[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """The shape of a record.  dtype: a storage type.  width: the backbone's d.

    num_taps: with as many tokens as the sample.  num_target_taps: with `target_length` tokens (an encoder-decoder's decoder side).
    """

    dtype: str
    width: int
    num_taps: int
    num_target_taps: int = 0
    target_length: int = 0

    @property
    def block_size(self) -> int:
        """Return how many values share a scale."""
        return next(size for size in range(min(MAX_BLOCK, self.width), 0, -1) if self.width % size == 0)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token of one tap."""
        if self.dtype == "int8":
            return self._scales_at + self.width // self.block_size * 4
        return self.width * decoded_dtype(self.dtype).itemsize

    def rows(self, length: int) -> int:
        """Return the rows of a record of `length` tokens."""
        return self.num_taps * length + self.num_target_taps * self.target_length

    def nbytes(self, length: int) -> int:
        """Return the bytes of a record of `length` tokens."""
        return self.rows(length) * self.row_bytes

    def total_bytes(self, lengths: Iterable[int]) -> int:
        """Return the bytes of records of these lengths: s x h x l values a sample (section V-B, storage cost), and int8's scales."""
        return sum(map(self.nbytes, lengths))

    def run(self, first: int, count: int, length: int) -> slice:
        """Return which rows of a record hold taps [first, first + count), target taps counted on from the others."""

        def row(tap: int) -> int:
            return min(tap, self.num_taps) * length + max(0, tap - self.num_taps) * self.target_length

        return slice(row(first), row(first + count))

    def encode(self, values: Tensor, raw: Tensor) -> None:
        """Store values (rows, width), of any float type, in raw (rows, row_bytes) uint8 (Eq. 1 for int8, block by block)."""
        if self.dtype != "int8":
            raw.view(decoded_dtype(self.dtype)).copy_(values)
            return
        blocks = values.to(torch.float32).reshape(len(values), -1, self.block_size)
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        # A block of zeros has scale 0: divide by the smallest normal number instead, which gives the codes 0 all the same.
        codes = torch.round(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).to(torch.int8)
        raw[:, : self.width].view(torch.int8).copy_(codes.view(len(values), self.width))
        raw[:, self._scales_at :].view(torch.float32).copy_(scales.squeeze(2))

    def decode(self, raw: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the values (rows, width) of raw (rows, row_bytes) in the decoded type (Eq. 2 for int8).

        The result of float types is a view of raw.  out: (rows, width), where int8 values are to be written.
        """
        if self.dtype != "int8":
            return raw.view(decoded_dtype(self.dtype))
        out = torch.empty(len(raw), self.width, dtype=decoded_dtype(self.dtype)) if out is None else out
        codes = raw[:, : self.width].view(torch.int8).unflatten(1, (-1, self.block_size))
        scales = raw[:, self._scales_at :].view(torch.float32).unsqueeze(2)
        torch.mul(codes, scales, out=out.view(codes.shape))
        return out

    def split(self, values: Tensor, count: int) -> list[Tensor]:
        """Return a batch's rows (rows, width), tap-major, of `count` records as taps: (tokens, width) each, then (targets, width) each."""
        targets = count * self.target_length
        tokens = (len(values) - self.num_target_taps * targets) // max(1, self.num_taps)
        return list(values.split([tokens] * self.num_taps + [targets] * self.num_target_taps))

    def batch_rows(self, starts: Sequence[int], lengths: Sequence[int], padded_length: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return where the rows of a batch lie in the file, tap-major, and which rows of the batch are padding.

        starts: first row of each record in the file.  padded_length: of each record in the batch; None packs their tokens without
        padding.  Padding points at its record's first row.
        """
        start, length = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        own = length if padded_length is None else np.full_like(length, padded_length)  # rows in the batch
        token = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        record_length = np.repeat(length, own)
        is_padding = token >= record_length
        first = np.repeat(start, own) + np.where(is_padding, 0, token)
        rows = first + np.arange(self.num_taps)[:, None] * record_length
        target = np.repeat(start + self.num_taps * length, self.target_length) + np.tile(np.arange(self.target_length), len(start))
        targets = target + np.arange(self.num_target_taps)[:, None] * self.target_length
        return np.concatenate([rows.reshape(-1), targets.reshape(-1)]), np.flatnonzero(np.tile(is_padding, self.num_taps))

    def batch_bytes(self, count: int, padded_length: int) -> int:
        """Return how large a buffer a batch of `count` records needs: its bytes, and behind them what int8 is decoded to."""
        rows = count * self.rows(padded_length)
        return _aligned(rows * self.row_bytes) + (rows * self._decoded_row_bytes if self.dtype == "int8" else 0)

    def raw_part(self, buffer: Tensor | None, rows: int) -> Tensor:
        """Return where in a buffer (None: a new one) a batch's bytes go: (rows, row_bytes) uint8."""
        size = rows * self.row_bytes
        return (torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]).view(-1, self.row_bytes)

    def decoded_part(self, buffer: Tensor | None, rows: int) -> Tensor | None:
        """Return where in a buffer a batch is decoded to, (rows, width); None where it needs none or there is no buffer."""
        if self.dtype != "int8" or buffer is None:
            return None
        first = _aligned(rows * self.row_bytes)
        return buffer[first : first + rows * self._decoded_row_bytes].view(decoded_dtype(self.dtype)).view(rows, self.width)

    @property
    def _decoded_row_bytes(self) -> int:
        return self.width * decoded_dtype(self.dtype).itemsize

    @property
    def _scales_at(self) -> int:
        return -(-self.width // _ALIGNMENT) * _ALIGNMENT


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
