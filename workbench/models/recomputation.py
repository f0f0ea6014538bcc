"""Run a stage's layers one at a time: first without keeping their activations, then again for the backward pass (see
schedules.recomputation).

The first pass builds each layer's graph without the tensors that the graph would keep.  The second pass computes these
tensors and stops as soon as it has the last one: nobody needs the layer's output again.
On the disk, the first pass writes each layer's tensors to a file, which takes the place of the second pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workbench.models.layer_inputs import Contexts, tensors_of
from workbench.models.techniques import TechniqueStage

P = ParamSpec("P")
Loss = Callable[[Tensor], Tensor]
"""Computes the loss from the last layer's output, (n, t, d)."""


class _Enough(Exception):
    """The second pass has computed everything that the backward pass needs."""


@dataclass(slots=True)
class _Kept:
    """The tensors that a graph needs, by the order in which it has saved them.  count: their number."""

    count: int = 0
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def leave_out(self, tensor: Tensor) -> int:
        """Return the number that stands for a tensor in the graph."""
        self.count += 1
        return self.count - 1

    def add(self, tensor: Tensor) -> None:
        """Keep the next tensor.  Raises _Enough after the last."""
        self.tensors[len(self.tensors)] = tensor.detach()
        if len(self.tensors) == self.count:
            raise _Enough

    def take(self, number: int) -> Tensor:
        """Return a tensor for the backward pass, which needs it once."""
        return self.tensors.pop(number)


class _View(NamedTuple):
    """A tensor in a storage of a file.  storage: its number.  offset, stride: in elements."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _OnDisk:
    """The tensors that a graph needs, in a file without a name, which the system removes when nobody has it open.

    folder: on the device's disk.  existing: the storages of tensors that are in memory anyway: weights, masks and the
    layer's input.
    """

    def __init__(self, folder: Path, existing: Iterable[Tensor]) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - `read` closes it
        self._existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self._tensors: dict[int, Tensor] = {}
        self._storages: list[int] = []  # their bytes
        self._views: list[_View] = []

    def leave_out(self, tensor: Tensor) -> int | Tensor:
        """Return the number that stands for a tensor in the graph; one that is in memory anyway stands for itself."""
        if tensor.untyped_storage().data_ptr() in self._existing:
            return tensor
        self._tensors[number := len(self._tensors)] = tensor.detach()
        return number

    def write(self) -> None:
        """Write each storage once, and release it."""
        numbers = dict[int, int]()
        for tensor in self._tensors.values():
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(numbers))
            if number == len(self._storages):
                self._storages.append(storage.nbytes())
                self._file.write(memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()))
            self._views.append(_View(number, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()))
        self._tensors.clear()

    def read(self) -> None:
        """Read the tensors, and remove the file."""
        self._file.seek(0)
        storages = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in self._storages]
        for storage in storages:
            self._file.readinto(storage.numpy())
        self._file.close()
        for number, (storage, dtype, *layout) in enumerate(self._views):
            self._tensors[number] = torch.empty(0, dtype=dtype).set_(storages[storage].untyped_storage(), *layout)

    def take(self, kept: int | Tensor) -> Tensor:
        """Return a tensor for the backward pass, which needs it once."""
        return kept if isinstance(kept, Tensor) else self._tensors.pop(kept)


@dataclass(slots=True, kw_only=True)
class LayerInput:
    """The values that a layer needs to recompute its activations or to read them, and its graph without them.

    source: its input: (n, t, d), a leaf of the graph, or (n, t) ids in front of the model's first layer.
    output: its output, with the graph but without its values, or the loss.
    contexts: masks and position tables, shared by the stage's layers; None if they are trained or the decoder's.
    random_state: state of torch's generator before the layer; None if the layer draws nothing.
    """

    source: Tensor
    output: Tensor
    contexts: Contexts | None
    random_state: Tensor | None
    loss: Loss | None
    store: _Kept | _OnDisk

    @property
    def leaf(self) -> Tensor | None:
        """Return the input if its gradient is needed."""
        return self.source if self.source.requires_grad else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the input; ids belong to the batch."""
        return self.source.nbytes if self.source.is_floating_point() else 0


class SingleLayers:
    """The layers of a stage, one at a time.  model: its technique has adapters inside the layers."""

    def __init__(self, model: TechniqueStage) -> None:
        assert not model.config.side_width, "Parallel Adapters do not backpropagate through the layers"
        self._model = model
        self._backbone = backbone = model.backbone
        self._parts = {layer: backbone.part(layer, layer + 1) for layer in range(backbone.start, backbone.stop)}
        if backbone.embedding is not None:
            self._parts[backbone.start].embedding = backbone.embedding
        self._draws = model.config.technique == "lora" and model.config.lora_dropout > 0
        # The masks and tables of all layers are the same, and have no graph.
        self._shares_contexts = backbone.num_encoder_layers is None and backbone.position_bias is None

    def first_pass(
        self,
        source: Tensor,
        attention_mask: Tensor,
        loss: Loss | None,
        *,
        keeps_last: bool,
        start: int = 0,
        needs_gradient: bool = True,
        folder: Path | None = None,
    ) -> tuple[Tensor, list[LayerInput], tuple[Tensor | None, Tensor] | None]:
        """Run the layers, and keep only their inputs.

        source: (n, t, d) float, or (n, t) int64 in the model's first stage.  loss: in the model's last stage.
        start: the first layer, if not all are run.  needs_gradient: whether a layer below is trained.
        folder: where the layers' activations are written; None: they are computed again.
        Returns the output or the loss, without graph; the inputs; and if `keeps_last`, instead of the last layer's
        input, its (input, output) with their whole graph.
        """
        hidden, inputs = source, list[LayerInput]()
        contexts: Contexts | None = None
        for layer, part in self._parts.items():
            if layer < start:
                continue
            is_last = part.stop == self._backbone.stop
            if part.embedding is None:
                hidden = hidden.detach().requires_grad_(needs_gradient or hidden is not source)
                if contexts is None and self._shares_contexts:
                    with torch.no_grad():
                        contexts = self._backbone.contexts(attention_mask, hidden)
            own_loss = loss if is_last else None
            if is_last and keeps_last:
                output = self._run(layer, hidden, attention_mask, contexts, own_loss)
                return output.detach(), inputs, (hidden if hidden.requires_grad else None, output)
            state = torch.get_rng_state() if self._draws and folder is None else None
            store: _Kept | _OnDisk = _Kept()
            if folder is not None:
                shared = () if contexts is None else tensors_of(contexts)
                weights = itertools.chain(self._model.parameters(), self._model.buffers())
                store = _OnDisk(folder, (*weights, hidden, attention_mask, *shared))
            with saved_tensors_hooks(store.leave_out, store.take):
                output = self._run(layer, hidden, attention_mask, contexts, own_loss)
            if isinstance(store, _OnDisk):
                store.write()
            inputs.append(
                LayerInput(
                    source=hidden, output=output, contexts=contexts, random_state=state, loss=own_loss, store=store
                )
            )
            hidden = output.detach()
            if own_loss is None:
                output.data = output.new_empty(0)  # its values are the next layer's input, or are sent
        return hidden, inputs, None

    def again(self, layer: int, given: LayerInput, attention_mask: Tensor) -> None:
        """Compute a layer's activations again, or read them, for the graph of its output."""
        if isinstance(given.store, _OnDisk):
            return given.store.read()
        source = given.source.detach().requires_grad_(given.source.requires_grad)
        with _drawing_again(given.random_state), saved_tensors_hooks(given.store.add, _not_taken):
            try:
                self._run(layer, source, attention_mask, given.contexts, given.loss)
            except _Enough:
                return
        assert not given.store.count, f"layer {layer} saved fewer tensors than in its first pass"

    def _run(
        self, layer: int, source: Tensor, attention_mask: Tensor, contexts: Contexts | None, loss: Loss | None
    ) -> Tensor:
        output, taps = self._parts[layer](source, attention_mask, None, contexts)
        last = taps[-1] if layer == self._backbone.num_layers - 1 else output
        return last if loss is None else loss(last)


def _not_taken(nothing: None) -> Tensor:
    raise AssertionError("nobody backpropagates through the second pass")


def recomputed(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return a function that keeps only its inputs, and computes the rest again when the backward pass needs it.

    For a whole model in one process, where no schedule says when.  forward: draws no random numbers.
    """

    def run(*inputs: P.args, **named: P.kwargs) -> Tensor:
        store = _Kept()

        def take(number: int) -> Tensor:
            if not store.tensors:
                with torch.enable_grad(), saved_tensors_hooks(store.add, _not_taken), suppress(_Enough):
                    forward(*inputs, **named)
            return store.take(number)

        with saved_tensors_hooks(store.leave_out, take):
            return forward(*inputs, **named)

    return run


@contextmanager
def _drawing_again(state: Tensor | None) -> Iterator[None]:
    """Draw inside the block what was drawn from this state of torch's generator on, and continue afterwards as if
    nothing had been drawn.
    """
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield
