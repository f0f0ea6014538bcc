"""Storage format of one sample's activations: float32, bfloat16, or int8 with block-wise scales (PAC+, section IV-B,
Eq. 1-2).

A record is a sequence of rows, tap after tap: `num_taps` times the sample's length, then `num_target_taps` times the
target length.
A row is one token's `width` values.  An int8 row stores the scales of its blocks after its codes.  Any range of rows
can therefore be copied, sent and checked without decoding it.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError


def allocate(file: BinaryIO, nbytes: int) -> None:
    """Reserve disk space for a file.  Raises OSError if the disk is full."""
    # A memory map of a sparse file ends in SIGBUS when the disk is full.  Reserving the space now raises ENOSPC
    # instead.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    block = bytes(1 << 20)
    for _ in range(nbytes // len(block)):
        file.write(block)
    file.write(block[: nbytes % len(block)])


def map_file(path: Path, nbytes: int) -> mmap.mmap | None:
    """Map a file as shared, writable memory.  Returns None for an empty file, which cannot be mapped."""
    if nbytes == 0:
        return None
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)


def as_array(memory: mmap.mmap | None, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Return mapped memory as a writable array.  None gives an empty array."""
    return np.empty(shape, dtype=dtype) if memory is None else np.frombuffer(memory, dtype=dtype).reshape(shape)


# The dtype to which each storage dtype is decoded: the side network reads its taps in this dtype.
_DECODED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
MAX_BLOCK = 64
"""Number of values that share one scale: the largest divisor of the width up to this limit."""
_ALIGNMENT = 4  # bytes: a row's scales are float32


def decoded_dtype(name: str) -> torch.dtype:
    """Return the dtype in which taps stored as `name` are read back.  Raises ConfigError for an unknown name.

    int8 is decoded to bfloat16.  Rounding adds an error of 1/512 of a value to the 1/254 of the block's largest value
    that int8 costs.
    """
    if name not in _DECODED:
        raise ConfigError(
            f"An activation cache of type '{name}' was asked for.", f"There are {', '.join(_DECODED)}.", "Choose one."
        )
    return _DECODED[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """Layout of a record.  dtype: a storage dtype.  width: the backbone's hidden size d.

    num_taps: number of taps with one row per token of the sample.  num_target_taps: number of taps with `target_length`
    tokens (the decoder side of an encoder-decoder).
    """

    dtype: str
    width: int
    num_taps: int
    num_target_taps: int = 0
    target_length: int = 0

    @property
    def block_size(self) -> int:
        """Return the number of values that share a scale."""
        return next(size for size in range(min(MAX_BLOCK, self.width), 0, -1) if self.width % size == 0)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token in one tap."""
        if self.dtype == "int8":
            return self._scales_at + self.width // self.block_size * 4
        return self.width * decoded_dtype(self.dtype).itemsize

    def rows(self, length: int) -> int:
        """Return the number of rows in a record of `length` tokens."""
        return self.num_taps * length + self.num_target_taps * self.target_length

    def record_bytes(self, length: int) -> int:
        """Return the bytes of a record of `length` tokens."""
        return self.rows(length) * self.row_bytes

    def total_bytes(self, lengths: Iterable[int]) -> int:
        """Return the bytes of records of these lengths: s x h x l values per sample (section V-B, storage cost), plus
        int8's scales.
        """
        return sum(self.record_bytes(length) * count for length, count in Counter(lengths).items())

    def run(self, first: int, count: int, length: int) -> slice:
        """Return the row range of taps [first, first + count) in a record.  Target taps are numbered after the other
        taps.
        """

        def row(tap: int) -> int:
            return min(tap, self.num_taps) * length + max(0, tap - self.num_taps) * self.target_length

        return slice(row(first), row(first + count))

    def encode(self, values: Tensor, raw: Tensor) -> None:
        """Encode values (rows, width) of any float dtype into raw (rows, row_bytes) uint8 (Eq. 1 for int8, block by
        block).
        """
        if self.dtype != "int8":
            raw.view(decoded_dtype(self.dtype)).copy_(values)
            return
        blocks = values.to(torch.float32).reshape(len(values), -1, self.block_size)
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        # A block of zeros has scale 0.  Dividing by the smallest normal number instead also gives codes of 0.
        codes = torch.round(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).to(torch.int8)
        raw[:, : self.width].view(torch.int8).copy_(codes.view(len(values), self.width))
        raw[:, self._scales_at :].view(torch.float32).copy_(scales.squeeze(2))

    def decode(self, raw: Tensor, out: Tensor | None = None) -> Tensor:
        """Decode raw (rows, row_bytes) to values (rows, width) in the decoded dtype (Eq. 2 for int8).

        For float dtypes the result is a view of raw.  out: (rows, width), optional memory for decoded int8 values.
        """
        if self.dtype != "int8":
            return raw.view(decoded_dtype(self.dtype))
        out = torch.empty(len(raw), self.width, dtype=decoded_dtype(self.dtype)) if out is None else out
        codes = raw[:, : self.width].view(torch.int8).unflatten(1, (-1, self.block_size))
        scales = raw[:, self._scales_at :].view(torch.float32).unsqueeze(2)
        torch.mul(codes, scales, out=out.view(codes.shape))
        return out

    def split(self, values: Tensor, count: int) -> list[Tensor]:
        """Split a batch's rows (rows, width), tap-major, of `count` records into taps: (tokens, width) each, then
        (targets, width) each.
        """
        targets = count * self.target_length
        tokens = (len(values) - self.num_target_taps * targets) // max(1, self.num_taps)
        return list(values.split([tokens] * self.num_taps + [targets] * self.num_target_taps))

    def batch_rows(
        self, starts: Sequence[int], lengths: Sequence[int], padded_length: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the file rows of a batch, tap-major, and the batch rows that are padding.

        starts: first row of each record in the file.  padded_length: number of tokens per record in the batch; None
        packs the tokens without padding.  Padding rows point to the first row of their record.
        """
        start, length = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        num_rows = length if padded_length is None else np.full_like(length, padded_length)  # rows in the batch
        token = np.arange(num_rows.sum()) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
        record_length = np.repeat(length, num_rows)
        is_padding = token >= record_length
        first = np.repeat(start, num_rows) + np.where(is_padding, 0, token)
        rows = first + np.arange(self.num_taps)[:, None] * record_length
        target = np.repeat(start + self.num_taps * length, self.target_length) + np.tile(
            np.arange(self.target_length), len(start)
        )
        targets = target + np.arange(self.num_target_taps)[:, None] * self.target_length
        return np.concatenate([rows.reshape(-1), targets.reshape(-1)]), np.flatnonzero(
            np.tile(is_padding, self.num_taps)
        )

    def batch_bytes(self, count: int, padded_length: int) -> int:
        """Return the buffer size in bytes for a batch of `count` records: the raw bytes, followed by the decoded int8
        values.
        """
        rows = count * self.rows(padded_length)
        return _aligned(rows * self.row_bytes) + (rows * self._decoded_row_bytes if self.dtype == "int8" else 0)

    def raw_part(self, buffer: Tensor | None, rows: int) -> Tensor:
        """Return the part of a buffer for a batch's raw bytes, (rows, row_bytes) uint8.  buffer: None
        allocates memory.
        """
        size = rows * self.row_bytes
        return (torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]).view(-1, self.row_bytes)

    def decoded_part(self, buffer: Tensor | None, rows: int) -> Tensor | None:
        """Return the part of a buffer for a batch's decoded values, (rows, width).  None if no decoding is needed or
        buffer is None.
        """
        if self.dtype != "int8" or buffer is None:
            return None
        first = _aligned(rows * self.row_bytes)
        return (
            buffer[first : first + rows * self._decoded_row_bytes]
            .view(decoded_dtype(self.dtype))
            .view(rows, self.width)
        )

    @property
    def _decoded_row_bytes(self) -> int:
        return self.width * decoded_dtype(self.dtype).itemsize

    @property
    def _scales_at(self) -> int:
        return -(-self.width // _ALIGNMENT) * _ALIGNMENT


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
