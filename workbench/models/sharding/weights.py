"""Where a shard's weights come from: rectangles of matrices on disk, read by seek, or of a model in memory (Galaxy+, section III-E)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models import loading
from workbench.models.partial_loading import Span, StoredTensor
from workbench.models.sharding.building import model_layout
from workbench.models.sharding.layout import ModelLayout

_HEAD = ("lm_head.weight", "final_logits_bias")


class WeightSource:
    """Gives rectangles of a model's matrices by the parameter's name in the base model, or 'lm_head.weight', 'final_logits_bias'.

    tensors: in memory, which are copied, so that the model can be released, or in files, of which nothing is read, nor mapped, but
    the rectangles asked for.  bytes_read: of weights that were read (or copied) until now.
    """

    def __init__(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        self._tensors, self.bytes_read = dict(tensors), 0
        self.is_on_disk = all(isinstance(tensor, StoredTensor) for tensor in tensors.values())

    @property
    def words_stand_in(self) -> bool:
        """Return whether the word embedding is the head of a model without one (a base model in memory)."""
        return not self.is_on_disk and _HEAD[0] not in self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a stored tensor's shape, None if there is none of that name."""
        found = self._tensors.get(name)
        return None if found is None else tuple(found.shape)

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two names are of one stored tensor: what a configuration ties, files may hold apart."""
        found, same = (self._place(one) for one in (name, other))
        return found is not None and found == same

    def fill(self, out: Tensor, name: str, rows: Span, columns: Span | None = None) -> None:
        """Write rows [start, stop) and columns [start, stop), None is all, of a stored tensor into `out`, of just that shape.

        A vector's entries are its rows.
        """
        found = self._tensors[name]
        if isinstance(found, StoredTensor):
            self.bytes_read += found.fill(out, rows, columns)
            return
        piece = found[slice(*rows)] if columns is None else found[slice(*rows), slice(*columns)]
        out.copy_(piece)
        self.bytes_read += piece.nbytes

    def close(self) -> None:
        """Release the weights; the source cannot be used any more."""
        self._tensors.clear()

    def _place(self, name: str) -> object:
        found = self._tensors.get(name)
        return found.data_ptr() if isinstance(found, Tensor) else found


def open_weights(name: str, *, layout: ModelLayout | None = None) -> WeightSource:
    """Return the source of a model's weights.

    Of a folder with safetensors only what is asked for is read.  Of anything else (tiny models, checkpoints in other formats or under
    other names) the whole is loaded; close the source to release it.  Raises as `load_stack` does.
    """
    layout = layout or model_layout(name)
    tensors = loading.stored_weights(name)
    if tensors is not None:
        names = {**layout.stored_names, **{head: (head,) for head in _HEAD}}
        found = {own: tensors[one] for own, others in names.items() for one in others[::-1] if one in tensors}
        if all(own in found and found[own].shape == layout.sizes[own] for own in layout.names):
            return WeightSource(found)
    return weights_of(loading.load_model(name))


def weights_of(model: Any) -> WeightSource:
    """Return the weights of a Hugging Face model in memory, with its language model head if it has one."""
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
    return WeightSource(tensors)
