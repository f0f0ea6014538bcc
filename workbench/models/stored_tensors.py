"""Read tensors and their slices from safetensors files without mapping them, and write such files.

safetensors' own reader does not serve here.  Its `safe_open` maps the whole file as private memory, which counts
against a device's limit: with room for 50 MB, a file of 269 MB does not open.  With backend="pread" a slice of 10 of
49,152 rows reads the whole tensor.
A real device may have only the file's header.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypeVar

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from workbench.core.errors import MissingDataError, WriteError
from workbench.core.files import advice, whole_file
from workbench.core.serial import NOT_JSON, shown

T = TypeVar("T")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


HEADER, TENSORS = ".header", ".tensors"
"""After the name of a safetensors file that a real device does not have: its header, and the folder of the tensors that
were sent."""


class MissingWeights:
    """How a real device gets missing weights.

    fetch: requests missing files; set by the device's engine, None elsewhere.  makes_up: whether to use random numbers
    instead.
    """

    def __init__(self) -> None:
        self.fetch: Callable[[Sequence[Path]], None] | None = None
        self.makes_up = False

    def has(self, *paths: Path) -> bool:
        """Return whether files are present.  Missing ones are first requested, all at once, if that is possible."""
        missing = [] if self.fetch is None else [path for path in paths if not path.exists()]
        if missing and self.fetch is not None and not self.makes_up:
            self.fetch(missing)
        return not (missing and self.makes_up)


MISSING_WEIGHTS = MissingWeights()


@contextmanager
def made_up_weights() -> Iterator[None]:
    """Let a real device use random numbers for missing weights in this block.  Its speed does not depend on their
    values.
    """
    before, MISSING_WEIGHTS.makes_up = MISSING_WEIGHTS.makes_up, True
    try:
        yield
    finally:
        MISSING_WEIGHTS.makes_up = before


_MOST_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
_BUFFER_BYTES = 1 << 20
"""Bytes read and converted at a time."""
_CHECKED_ROWS = 1024


Span = tuple[int, int]


class StoredTensor(NamedTuple):
    """A tensor's location in a safetensors file.  offset: position of its first byte in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the converted tensor.  Nothing else in the file is mapped or read.

        Raises MissingDataError if it holds NaN or infinity: every result computed with it would be meaningless.
        """
        return require_finite(self.read_into(torch.empty(self.shape, dtype=dtype)), f"The weights '{self.path.name}'")

    def read_into(self, out: Tensor) -> Tensor:
        """Return `out`, which has the tensor's shape, with its values."""
        self.fill(out if self.shape else out[None], (0, self.shape[0] if self.shape else 1))
        return out

    def fill(self, out: Tensor, rows: Span, columns: Span | None = None) -> int:
        """Read rows [start, stop) and columns [start, stop) into `out`, which has exactly that shape; return the bytes
        read.

        columns: None reads all.  A vector counts as a matrix with one column.  Complete rows are read at once, others
        one by one, without extra memory.  Data that must be converted or transposed passes through a small buffer,
        several rows at a time.
        """
        width = math.prod(self.shape[1:])
        start, stop = (0, width) if columns is None else columns
        is_whole = (start, stop) == (0, width)
        count, itemsize = rows[1] - rows[0], self.dtype.itemsize
        if not MISSING_WEIGHTS.has(self.path):
            torch.nn.init.normal_(out, std=0.02)
            return 0
        is_direct = self.dtype == out.dtype and (out.is_contiguous() if is_whole else out.stride(-1) == 1)
        band = count if is_direct else max(1, _BUFFER_BYTES // max(1, (stop - start) * itemsize))
        with open(self.path, "rb", buffering=0) as file:
            for first in range(0, count, max(1, band)):
                part = out[first : first + band]
                target = part if is_direct else torch.empty(part.shape, dtype=self.dtype)
                begin = self.offset + (rows[0] + first) * width * itemsize
                raw = (target.view(1, -1) if is_whole else target).view(torch.uint8).numpy()
                for index in range(len(raw)):
                    _read_bytes(file, begin + (index * width + start) * itemsize, memoryview(raw[index]))
                if target is not part:
                    part.copy_(target)
        return count * (stop - start) * itemsize


def require_finite(tensor: Tensor, owner: str) -> Tensor:
    """Return a weight unchanged.

    owner: the beginning of the error's sentence.  Raises MissingDataError if the weight holds NaN or infinity.
    """
    # A sum in the tensor's own dtype needs no memory of its size; NaN and infinity survive in it, and it may overflow.
    parts = torch.atleast_1d(tensor).split(_CHECKED_ROWS)
    if not bool(tensor.sum().isfinite()) and not all(bool(part.isfinite().all()) for part in parts):
        raise MissingDataError(
            f"{owner} were asked for.",
            "A tensor holds values that are not numbers.",
            "Take the model's files from their source again.",
        )
    return tensor


def _read_bytes(file: IO[bytes], offset: int, view: memoryview) -> None:
    file.seek(offset)
    while view:
        num_bytes = file.readinto(view)  # type: ignore[attr-defined]
        if not num_bytes:
            raise OSError(f"'{file.name}' ends within a tensor")
        view = view[num_bytes:]


def stored_tensors(folder: Path) -> dict[str, StoredTensor] | None:
    """Return a model folder's tensors by name.  None if it holds no safetensors files.  Raises OSError or ValueError if
    damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(_decoded(index, index.read_bytes(), _Index).weight_map.values()))
        outside = next((name for name in files if Path(name).name != name), None)
        if outside is not None:
            raise ValueError(f"its index names '{outside}', which is not in the folder")
    elif any((folder / f"model.safetensors{end}").is_file() for end in ("", HEADER)):
        files = ["model.safetensors"]
    else:
        return None
    return {key: tensor for name in files for key, tensor in tensors_in(folder / name)[0].items()}


def stored_as(names: Iterable[str], tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return a weight's tensor; None if it is not there.  names: under which files may store it, most likely first."""
    return next((tensors[name] for name in names if name in tensors), None)


def tensors_in(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return a safetensors file's tensors by name, and its metadata.  Raises OSError or ValueError if it is damaged.

    On a real device that has only the file's header, every tensor is in a separate file, or will be.
    """
    is_whole = path.is_file() or not path.with_name(path.name + HEADER).is_file()
    stored = path if is_whole else path.with_name(path.name + HEADER)
    size = stored.stat().st_size
    with open(stored, "rb") as file:
        beginning = file.read(8)
        (length,) = struct.unpack("<Q", beginning.ljust(8, b"\0"))
        if beginning + file.read(len(_LFS_POINTER) - 8) == _LFS_POINTER:
            raise OSError(f"'{path}' is a pointer to the file, which `git lfs pull` gets")
        file.seek(8)
        if 8 + length > size:
            raise OSError(f"'{path}' is truncated")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"the header of '{path}' is malformed: it has {length} bytes")
        header = _decoded(path, file.read(length), dict[str, msgspec.Raw])
    metadata = _decoded(path, header.pop("__metadata__", msgspec.Raw(b"{}")), dict[str, str])
    stored_tensors: dict[str, StoredTensor] = {}
    for key, raw in header.items():
        if (entry := _decoded(path, raw, _Entry)).dtype not in DTYPES:
            continue
        dtype, (begin, end) = DTYPES[entry.dtype], entry.data_offsets
        if is_whole and 8 + length + end > size:
            raise OSError(f"'{path}' is truncated")
        if begin < 0 or end - begin != math.prod(entry.shape) * dtype.itemsize:
            raise ValueError(
                f"the header of '{path}' is malformed: {shown(key)} has other bytes than its shape {entry.shape}"
            )
        begin, end = 8 + length + begin, 8 + length + end
        piece_path = path.with_name(path.name + TENSORS) / f"{begin}-{end}"
        stored_tensors[key] = (
            StoredTensor(path, dtype, entry.shape, begin)
            if is_whole
            else StoredTensor(piece_path, dtype, entry.shape, 0)
        )
    return stored_tensors, metadata


def header_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file before its first tensor."""
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


_LFS_POINTER = b"version https://git-lfs"
"""How a file begins that git has in place of a large one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The index that maps tensors to files."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def _decoded(path: Path, data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        raise ValueError(f"'{path}' is malformed: {error}") from error


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors under their names, atomically (see whole_file).  Raises WriteError if the system refuses."""
    with whole_file(path) as part:
        try:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata=metadata
            )
        except SafetensorError as error:  # it wraps operating system errors
            number = re.search(r"os error (\d+)", str(error))
            raise WriteError(
                f"Writing '{path}' was asked for.", f"{error}.", advice(int(number[1]) if number else None)
            ) from error
