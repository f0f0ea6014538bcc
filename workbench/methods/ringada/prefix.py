"""The activation cache of a ring's frozen layers: what PAC+ keeps for its side network, layer by layer, until the layer is trained.

A sample's hidden state in front of a layer never changes while all layers below are frozen: the backbone runs without dropout.  Each
device keeps those in front of its own frozen layers, so that the lowest trained layer finds its input, however deep it lies by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.schedules.plan_costs import Crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """The hidden states in front of some layers, on the disk.

    lengths: tokens of every sample.  lowest: below it no layer is ever trained.
    """

    folder: Path
    lengths: tuple[int, ...]
    crossing: Crossing
    lowest: int = 0
    _caches: dict[int, ActivationCache] = field(default_factory=dict)

    def keep(self, layer: int, samples: Sequence[int], hidden: Tensor) -> None:
        """Keep the input (n, t, d) of a layer, of a decoder's (n, t + s, d).  Raises CacheError if the disk is full."""
        if layer < self.lowest:
            return
        beside = self.crossing.tokens(layer, 0)
        if layer not in self._caches:
            manifest = CacheManifest(
                fingerprint="",  # it is not opened again
                samples=tuple(range(len(self.lengths))),
                lengths=self.lengths,
                num_taps=1,
                width=self.crossing.hidden_size,
                dtype="float32",
                num_target_taps=int(beside > 0),
                target_length=beside,
            )
            self._caches[layer] = ActivationCache.create(self.folder / f"layer-{layer}", manifest)
        tokens = hidden.shape[1] - beside
        self._caches[layer].write_batch(samples, hidden.split([tokens, beside], dim=1) if beside else [hidden])

    def read(self, layer: int, samples: Sequence[int], padded_length: int) -> Tensor:
        """Return the input of a layer, as it was kept, zero where it is padded."""
        return torch.cat(self._caches[layer].batch(samples, padded_length), dim=1)

    def forget_above(self, layer: int) -> None:
        """Delete what lies in front of higher layers, which are no longer behind frozen ones alone."""
        for above in [one for one in self._caches if one > layer]:
            self._caches.pop(above).remove()

    @property
    def nbytes(self) -> int:
        """Return the bytes on the disk."""
        return sum(cache.manifest.nbytes for cache in self._caches.values())
