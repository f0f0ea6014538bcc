"""Safetensors files that name their owner and carry a checksum for each tensor (see core.sealed)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.errors import DamagedError
from workbench.core.sealed import checksum, damaged, digest, require_owner
from workbench.models.partial_loading import StoredTensor, save_tensors, tensors_in

_OWNER, _CHECKSUMS, _DIGEST = "owner", "checksums", "digest"


def save_sealed(path: Path, owner: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors and metadata under their owner's name, atomically.  Raises WriteError if the system refuses."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(owner, name, tensor) for name, tensor in kept.items()}
    described = dict(metadata or {}) | {_OWNER: owner, _CHECKSUMS: json.dumps(checksums, sort_keys=True)}
    save_tensors(path, kept, described | {_DIGEST: _digest(described)})


def load_sealed(path: Path, owner: str, into: Mapping[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by name, and the file's metadata.  into: memory for those to load; None loads all.

    Tensors whose name or shape is not in `into` are left out, and nothing else is read: a device may have less memory than the file is
    long.  Raises DamagedError if what is read was changed, cut or is another owner's.
    """
    stored, metadata, checksums = _opened(path, owner)
    found = {}
    for name, one in stored.items():
        if into is None:
            found[name] = _read(path, owner, name, one, checksums)
        elif name in into and one.shape == into[name].shape:
            found[name] = _read(path, owner, name, one, checksums, into[name])
    return found, metadata


def damage_of(path: Path, owner: str) -> str:
    """Return in a sentence why a file cannot be used; '' if it is intact.  One tensor at a time is in memory."""
    try:
        stored, _, checksums = _opened(path, owner)
        for name, one in stored.items():
            _read(path, owner, name, one, checksums)
    except DamagedError as error:
        return str(error)
    return ""


def _opened(path: Path, owner: str) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, int]]:
    try:
        stored, metadata = tensors_in(path)
    except (OSError, ValueError) as error:
        raise damaged(path, "it is missing" if isinstance(error, FileNotFoundError) else "it was cut or changed") from error
    described = {name: value for name, value in metadata.items() if name != _DIGEST}
    if metadata.get(_DIGEST) != _digest(described):
        raise damaged(path, "its header was changed after it was written")
    require_owner(path, metadata.get(_OWNER), owner)
    checksums: dict[str, int] = json.loads(metadata[_CHECKSUMS])
    if stored.keys() != checksums.keys():
        raise damaged(path, "its header was changed after it was written")
    return stored, metadata, checksums


def _read(path: Path, owner: str, name: str, stored: StoredTensor, checksums: Mapping[str, int], out: Tensor | None = None) -> Tensor:
    is_direct = out is not None and out.dtype == stored.dtype and out.is_contiguous()
    read = out if out is not None and is_direct else torch.empty(stored.shape, dtype=stored.dtype)
    try:
        stored.read_into(read)
    except OSError as error:
        raise damaged(path, "it was cut") from error
    if _checksum(owner, name, read) != checksums[name]:
        raise damaged(path, f"the values of {name} were changed after they were written")
    return read if out is None or is_direct else out.copy_(read)


def _checksum(owner: str, name: str, tensor: Tensor) -> int:
    start = checksum(f"{owner} {name} {tensor.dtype} {tuple(tensor.shape)}")
    return checksum(start, memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def _digest(metadata: Mapping[str, str]) -> str:
    return digest("", json.dumps(metadata, sort_keys=True).encode())
