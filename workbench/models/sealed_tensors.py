"""Safetensors files that name their owner and carry a checksum for each tensor (see core.sealed)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from workbench.core.errors import DamagedError
from workbench.core.files import whole_file
from workbench.core.sealed import NO_FILE, checksum, damaged, digest, require_owner
from workbench.models.stored_tensors import DTYPES, StoredTensor, tensors_in

_OWNER, _CHECKSUMS, _DIGEST = "owner", "checksums", "digest"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Content(NamedTuple):
    """A tensor's values.  data: its bytes, in the order of its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview


def content_of(tensor: Tensor) -> Content:
    """Return a tensor's values; if it is contiguous and in the processor's memory they are not copied."""
    return Content(tensor.dtype, tuple(tensor.shape), _bytes(tensor.detach().cpu().contiguous()))


def save_sealed(path: Path, owner: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors under their owner's name, atomically.  Raises WriteError if the system refuses."""
    with whole_file(path) as part:
        write_sealed_tensors(part, owner, {name: content_of(tensor) for name, tensor in tensors.items()})


def write_sealed_tensors(path: Path, owner: str, contents: Mapping[str, Content]) -> None:
    """Write tensors into an existing file, over its content.  The tensors need no additional memory.

    safetensors' own writer makes a new file, whose space the system has to find again (see core.files.quick_file).
    """
    checksums = {name: _checksum(owner, name, *content) for name, content in contents.items()}
    described = {_OWNER: owner, _CHECKSUMS: json.dumps(checksums, sort_keys=True)}
    header: dict[str, object] = {"__metadata__": described | {_DIGEST: _digest(described)}}
    aligned, end = sorted(contents.items(), key=lambda item: -item[1].dtype.itemsize), 0
    for name, (dtype, shape, data) in aligned:
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (end, end + len(data))}
        end += len(data)
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with open(path, "r+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, content in aligned:
            file.write(content.data)
        file.truncate()


def load_sealed(path: Path, owner: str, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return tensors by name.

    into: memory for those to load; None loads all.

    Tensors whose name or shape is not in `into` are left out, and nothing else is read, because a device may have less
    memory than the file's size.  Raises DamagedError if the data was changed or truncated, or belongs to another owner.
    """
    stored, checksums = _opened(path, owner)
    tensors = {}
    for name, entry in stored.items():
        if into is None:
            tensors[name] = _read_tensor(path, owner, name, entry, checksums)
        elif name in into and entry.shape == into[name].shape:
            tensors[name] = _read_tensor(path, owner, name, entry, checksums, into[name])
    return tensors


def damage_of(path: Path, owner: str) -> str:
    """Return a sentence about a file's damage; '' if it is intact.  One tensor at a time is in memory."""
    try:
        stored, checksums = _opened(path, owner)
        for name, entry in stored.items():
            _read_tensor(path, owner, name, entry, checksums)
    except DamagedError as error:
        return str(error)
    return ""


def _opened(path: Path, owner: str) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    if not path.is_file() and os.path.lexists(path):
        raise damaged(path, NO_FILE)
    try:
        stored, metadata = tensors_in(path)
    except (OSError, ValueError) as error:
        raise damaged(
            path, "it is missing" if isinstance(error, FileNotFoundError) else "it was cut or changed"
        ) from error
    described = {name: value for name, value in metadata.items() if name != _DIGEST}
    if metadata.get(_DIGEST) != _digest(described):
        raise damaged(path, "its header was changed after it was written")
    require_owner(path, metadata.get(_OWNER), owner)
    checksums: dict[str, int] = json.loads(metadata[_CHECKSUMS])
    if stored.keys() != checksums.keys():
        raise damaged(path, "its header was changed after it was written")
    return stored, checksums


def _read_tensor(
    path: Path, owner: str, name: str, stored: StoredTensor, checksums: Mapping[str, int], out: Tensor | None = None
) -> Tensor:
    is_direct = out is not None and out.dtype == stored.dtype and out.is_contiguous()
    tensor = out if out is not None and is_direct else torch.empty(stored.shape, dtype=stored.dtype)
    try:
        stored.read_into(tensor)
    except OSError as error:
        raise damaged(path, "it was cut") from error
    if _checksum(owner, name, *content_of(tensor)) != checksums[name]:
        raise damaged(path, f"the values of {name} were changed after they were written")
    return tensor if out is None or is_direct else out.copy_(tensor)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _checksum(owner: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], data: memoryview) -> int:
    return checksum(checksum(f"{owner} {name} {dtype} {shape}"), data)


def _digest(metadata: Mapping[str, str]) -> str:
    return digest("", json.dumps(metadata, sort_keys=True).encode())
