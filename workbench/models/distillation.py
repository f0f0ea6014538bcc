"""Distill the backbone's hidden states and soft labels into the narrow network's initial weights (PAC+, section IV-C).

The student sees only b_0 (lambda = 0), and its activation after each layer learns the backbone's.  The target is W_down
b_i with one orthonormal W_down for all taps, their joint principal directions, because a residual stream has one basis.
A backbone without a language model head has no labels to give.  Its soft label for a sentence is a distribution over
the batch's other sentences, by similarity.  Distillation needs only unlabelled text and no validation or test data, so
a server can do it once for all devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError, DamagedError
from workbench.core.sealed import owner_of
from workbench.core.serial import to_json
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import BatchLike, TapStatistics, calibrate, set_statistics
from workbench.models.initialization import require_own_backbone
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.sealed_tensors import load_sealed, save_sealed
from workbench.models.side_layers import pooling_matrix
from workbench.models.stack import LayerStack

_OWN_HEAD = "last.output."  # the task's head depends on labels: it is not distilled
_CALIBRATION_BATCHES = 16


EPOCHS = 2
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.06
LABEL_WEIGHT = 0.5
"""Weight of the soft labels' loss, relative to 1 for the hidden states."""
TEMPERATURE = 0.1
"""Temperature of the similarities (cosines) in the soft labels."""


def distill(
    stack: LayerStack,
    config: ParallelAdapterConfig,
    epochs: Callable[[int], Sequence[BatchLike]],
    progress: Callable[[str], None] | None = None,
    *,
    num_epochs: int = EPOCHS,
) -> dict[str, Tensor]:
    """Return the state_dict of a whole adapter without its task head.  It depends only on the arguments and
    config.seed.

    epochs: epochs(epoch) returns that epoch's mini-batches, the same number in each.  The state includes the input
    statistics of the text.
    Raises ConfigError if the adapter is not for this backbone, or if a mini-batch has only one sample, because a soft
    label needs other sentences.
    """
    batches = epochs(0)
    require_own_backbone(config, stack)
    if not batches or min(len(batch.input_ids) for batch in batches) < 2:
        raise ConfigError(
            "Text to distill on was given.", "A mini-batch of it has fewer than 2 samples.", "Give more text."
        )
    statistics = calibrate(stack, batches[:_CALIBRATION_BATCHES])
    adapter = ParallelAdapter(config)
    set_statistics(adapter, statistics)
    set_projections(adapter, principal_directions(stack, statistics, batches[:_CALIBRATION_BATCHES], config.width))
    student = _Student(adapter)
    optimizer = make_optimizer(adapter, WEIGHT_DECAY)
    total_steps = num_epochs * len(batches)
    adapter.eval()  # no dropout: the student should match the teacher's states exactly
    step = 0
    for epoch in range(num_epochs):
        sums = torch.zeros(2)
        for batch in epochs(epoch):
            with torch.no_grad():
                taps = stack(batch.input_ids, batch.attention_mask)[1]
            hidden, label = student.losses(taps, batch.attention_mask)
            (hidden + LABEL_WEIGHT * label).backward()
            rate = learning_rate_at(step, total_steps, LEARNING_RATE, WARMUP_FRACTION)
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
            sums += torch.stack([hidden, label]).detach()
            step += 1
        if progress is not None:
            hidden_mean, label_mean = (sums / len(batches)).tolist()
            progress(
                f"Distillation, epoch {epoch + 1} of {num_epochs}: hidden states {hidden_mean:.3f}, soft labels "
                f"{label_mean:.3f}"
            )
    return student.release()


def principal_directions(
    stack: LayerStack, statistics: TapStatistics, batches: Iterable[BatchLike], width: int
) -> Tensor:
    """Return the `width` strongest principal directions of all standardised taps together, (width, d) orthonormal rows.

    The sign of a direction is arbitrary.  We make its largest component positive, so that the result does not depend on
    the library.
    """
    second_moment = torch.zeros(stack.hidden_size, stack.hidden_size, dtype=torch.float64)
    count = 0
    with torch.no_grad():
        for batch in batches:
            taps = stack(batch.input_ids, batch.attention_mask)[1]
            for index, tap in enumerate(taps):
                real = (
                    tap.flatten(0, 1)
                    if tap.shape[1] != batch.attention_mask.shape[1]
                    else tap[batch.attention_mask.bool()]
                )
                values = ((real.float() - statistics.mean[index]) * statistics.inverse_std[index]).double()
                second_moment += values.T @ values
                count += len(values)
    directions = torch.linalg.eigh(second_moment / count).eigenvectors.flip(1)[:, :width].T
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    return (directions * largest.sign()).float().contiguous()


def set_projections(adapter: nn.Module, directions: Tensor) -> None:
    """Write (d / r, d) orthonormal rows into every W_down of an adapter, and their transpose into every W_up."""
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if _is_projection(name):
                parameter.copy_(directions) if parameter.ndim == 2 else parameter.zero_()
            elif name == "last.up.weight":
                parameter.copy_(directions.T)


def _is_projection(name: str) -> bool:
    return name.startswith(("first.", "decoder_first.")) or ".down." in name


class _Student:
    """An adapter in training.  Its only input is the backbone's embedding, its W_down is frozen, and its layers'
    outputs are recorded.
    """

    def __init__(self, adapter: ParallelAdapter) -> None:
        self._adapter = adapter
        self._mixes = {
            name: parameter.detach().clone() for name, parameter in adapter.named_parameters() if name.endswith(".mix")
        }
        self._fixed = [
            parameter for name, parameter in adapter.named_parameters() if _is_projection(name) or name.endswith(".mix")
        ]
        for parameter in self._fixed:
            parameter.requires_grad_(False)
            if parameter.ndim == 0:
                parameter.zero_()
        self._outputs: dict[int, Tensor] = {}
        self._hooks = [
            layer.register_forward_hook(
                lambda module, inputs, output, index=int(index): self._outputs.update({index: output})
            )
            for index, layer in adapter.layers.items()
        ]

    def losses(self, taps: Sequence[Tensor], attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of the hidden states and the loss of the soft labels.

        The first is the mean over layers of |a - W_down b|^2 / |W_down b|^2, which is 1 for an output of zeros.
        """
        side = self._adapter(None, taps, attention_mask)
        first_decoder = self._adapter.config.num_encoder_layers
        by_layer = []
        for index, output in self._outputs.items():
            # An encoder-decoder has one more tap, the decoder's embedding, and its states follow the encoder's.
            in_decoder = first_decoder is not None and index >= first_decoder
            tap = taps[index + 1 + in_decoder]
            with torch.no_grad():
                target = self._adapter.layers[str(index)].down(tap)
            share = torch.ones(tap.shape[:2]) if in_decoder else attention_mask.to(target.dtype)
            error = (output[:, -tap.shape[1] :] - target).square().sum(dim=2)
            by_layer.append((error * share).sum() / (target.square().sum(dim=2) * share).sum())
        return torch.stack(by_layer).mean(), self._label_loss(side, taps[-1], attention_mask)

    def _label_loss(self, side: Tensor, last_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the divergence between the student's and the teacher's distribution of similarities among the batch's
        sentences.
        """
        head = self._adapter.last
        assert head is not None, "a whole adapter has a head"
        length = last_hidden.shape[1]
        share = pooling_matrix(
            attention_mask if length == attention_mask.shape[1] else torch.ones(len(side), length), side.dtype
        )
        student = head.up(torch.bmm(share, head.norm(side[:, -length:])).squeeze(1))
        teacher = (torch.bmm(share, last_hidden.to(side.dtype)).squeeze(1) - head.mean) * head.inverse_std
        student_similarities, teacher_similarities = (_similarities(states) for states in (student, teacher))
        return F.kl_div(student_similarities, teacher_similarities, log_target=True, reduction="batchmean")

    def release(self) -> dict[str, Tensor]:
        """Return the distilled state with the original lambda, and detach from the adapter."""
        for hook in self._hooks:
            hook.remove()
        state = {
            name: tensor.detach().clone()
            for name, tensor in self._adapter.state_dict().items()
            if not name.startswith(_OWN_HEAD)
        }
        return state | self._mixes


def _similarities(pooled: Tensor) -> Tensor:
    """Return the log-probabilities over the other samples for each sample of (n, d): (n, n - 1)."""
    unit = F.normalize(pooled, dim=1)
    count = len(unit)
    others = ~torch.eye(count, dtype=torch.bool)
    return F.log_softmax((unit @ unit.T)[others].view(count, count - 1) / TEMPERATURE, dim=1)


def load_distilled(adapter: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a distilled state into an adapter or a stage of one, except for the task head.  Raises ConfigError if it
    does not fit.
    """
    own_state = adapter.state_dict()
    names = [name for name in own_state if not name.startswith(_OWN_HEAD)]
    wrong = next((name for name in names if name not in state or state[name].shape != own_state[name].shape), None)
    if wrong is not None:
        actual = list(state[wrong].shape) if wrong in state else "missing"
        raise ConfigError(
            "Distilled initial weights were to be used.",
            f"'{wrong}' is {actual}, not {list(own_state[wrong].shape)}.",
            "Distill for this adapter's shape.",
        )
    with torch.no_grad():
        for name in names:
            own_state[name].copy_(state[name])


def distillation_fingerprint(model: str, weights: str, config: ParallelAdapterConfig, texts: Iterable[str]) -> str:
    """Return a digest of everything that a distilled state depends on.

    weights: identifies the backbone's weights (a file's digest, a revision).  Settings of only the task head are left
    out.
    """
    shape = replace(config, num_heads=config.heads, target_length=int(config.num_encoder_layers is not None))
    shape = replace(shape, kind="classification", num_outputs=2, dropout=0.0, label_mean=0.0, label_std=1.0)
    settings = (EPOCHS, LEARNING_RATE, WEIGHT_DECAY, WARMUP_FRACTION, LABEL_WEIGHT, TEMPERATURE)
    digest = hashlib.sha256(to_json((model, weights, shape, settings)).encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return digest.hexdigest()


def distilled(folder: Path, fingerprint: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the state stored in `folder` under this fingerprint.  If it is missing or damaged, make and store it."""
    path = folder / f"distilled-{fingerprint[:32]}.safetensors"
    owner = owner_of(fingerprint, path)
    try:
        return load_sealed(path, owner)
    except DamagedError:
        state = make()
    save_sealed(path, owner, state)
    return state
