"""The activation cache of a ring's frozen layers: PAC+'s cache, layer by layer, until the layer is trained.

A sample's hidden state in front of a layer does not change while all layers below are frozen: the backbone runs without dropout.  Each
device caches those in front of its own frozen layers, so the input of the lowest trained layer is always available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.state import Run, carry_out
from workbench.schedules.moves import moves
from workbench.schedules.plan_costs import Crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """The hidden states in front of some layers, on the disk.

    lengths: tokens of every sample.  lowest: no layer below it is ever trained.
    """

    folder: Path
    lengths: tuple[int, ...]
    crossing: Crossing
    lowest: int = 0
    _caches: dict[int, ActivationCache] = field(default_factory=dict)

    def keep(self, layer: int, samples: Sequence[int], hidden: Tensor) -> None:
        """Store the input (n, t, d) of a layer, (n, t + s, d) for a decoder.  Raises CacheError if the disk is full."""
        if layer < self.lowest:
            return
        if layer not in self._caches:
            self._caches[layer] = ActivationCache.create(self._folder(layer), self._manifest(layer))
        beside = self.crossing.tokens(layer, 0)
        tokens = hidden.shape[1] - beside
        self._caches[layer].write_batch(samples, hidden.split([tokens, beside], dim=1) if beside else [hidden])

    def read(self, layer: int, samples: Sequence[int], padded_length: int) -> Tensor:
        """Return the stored input of a layer, with zeros in the padding."""
        return torch.cat(self._caches[layer].batch(samples, padded_length), dim=1)

    def take_over(self, moving: Sequence[tuple[int, int, int]], rank: int, run: Run, cluster: Cluster) -> None:
        """Continue with a ring's caches after layers have moved; all ranks do it at once.

        moving: (layer, the rank that has its inputs, the rank that needs them).
        """
        for layer, holder, _ in moving:
            if holder == rank:
                self._caches[layer] = ActivationCache.reopen(self._folder(layer), self._manifest(layer), verify=False)
        moving = [one for one in moving if one[1] != one[2]]
        specs = {str(layer): Spec((self._manifest(layer).nbytes,), "uint8") for layer, *_ in moving}
        rounds = moves({str(one[0]): one[2:] for one in moving}, {str(one[0]): one[1:2] for one in moving}, specs, cluster)
        held = {str(layer): torch.from_numpy(self._caches[layer].rows) for layer, holder, _ in moving if holder == rank}
        for layer, _, receiver in moving:
            if receiver == rank:
                self._caches[layer] = ActivationCache.create(self._folder(layer), self._manifest(layer))
        into = {str(layer): torch.from_numpy(self._caches[layer].rows) for layer, _, receiver in moving if receiver == rank}
        carry_out(rounds, rank, run, held, into)
        for layer, holder, _ in moving:
            if holder == rank:
                self._caches.pop(layer).remove()

    def _folder(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}"

    def _manifest(self, layer: int) -> CacheManifest:
        beside = self.crossing.tokens(layer, 0)
        return CacheManifest(
            fingerprint="",
            samples=tuple(range(len(self.lengths))),
            lengths=self.lengths,
            num_taps=1,
            width=self.crossing.hidden_size + self.crossing.side_width,
            dtype="float32",
            num_target_taps=int(beside > 0),
            target_length=beside,
        )

    def forget_above(self, layer: int) -> None:
        """Delete the inputs of higher layers, which no longer follow only frozen layers."""
        for above in [one for one in self._caches if one > layer]:
            self._caches.pop(above).remove()

    @property
    def nbytes(self) -> int:
        """Return the bytes on the disk."""
        return sum(cache.manifest.nbytes for cache in self._caches.values())
