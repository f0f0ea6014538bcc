"""The dual-forwarding model: a training step as one inference pass, without a random generator to reset (P-RGE, Algorithm 2).

The state is the 2q perturbed copies of theta.  A pass recovers the last step's noise from them, applies its scalars, perturbs again and
computes.  Algorithm 2 does this in each layer's forward for q = 1.  Lines 2 to 6 do not read x, so here they run for all layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import check_positive
from workbench.models.zeroth_order.losses import Prompts, shifted


class DualForwardingModel(nn.Module):
    """A complete model that predicts words, with 2q perturbed copies of theta in a buffer that each pass updates.

    model: is modified; theta starts with its trained values.  copies: (2q, d) in the compute dtype, with the plus copy of query i
    at 2i and its minus copy at 2i + 1.
    choices: the tokens over which the loss is computed (see PromptLike); empty: the whole vocabulary.
    Raises ConfigError for q below 1, epsilon not above 0, a stage of a model, and trainable values that are the model's own parameters.
    """

    copies: Tensor

    def __init__(self, model: CausalModel, *, queries: int, epsilon: float, choices: Sequence[int] = ()) -> None:
        super().__init__()
        if queries < 1:
            raise ConfigError(f"{queries} queries a step were asked for.", "A step needs one.", "Raise the number of queries.")
        check_positive("epsilon", epsilon, "The losses on both sides would be the same.")
        theta = model.trainables.flat
        if theta is None or not (model.is_first and model.is_last and model.predicts_words):
            raise ConfigError(
                "A dual-forwarding model was asked for.",
                "It takes a whole model that predicts words and trains values beside its projections.",
                "Choose such a model and technique, as LoRA-FA.",
            )
        model.packs = False  # its shapes must be those of the exported program
        self.model, self.queries, self.epsilon = model, queries, epsilon
        self._choices = torch.tensor(choices) if choices else None
        self.register_buffer("copies", theta.detach().to(model.dtype).repeat(2 * queries, 1))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        targets: Tensor,
        positions: Tensor,
        target_mask: Tensor,
        gradients: Tensor,
        learning_rate: Tensor,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Apply the last step's scalars to theta, perturb it again, and return the losses (2q,).

        A batch of E rows as in PromptLike; a decoder reads the targets, shifted by one.
        gradients: (q,), from the last call's losses (in the first call: any finite values).  learning_rate: (), of that step.
        noise: (q, d) standard normal; None draws it.
        """
        if noise is None:
            noise = torch.randn(self.queries, self.copies.shape[1])
        self.copies.copy_(advance(self.copies, gradients, learning_rate, noise, self.epsilon))
        start_id = self.model.backbone.decoder_start_id
        batch = Prompts(
            input_ids=input_ids,
            attention_mask=attention_mask,
            targets=targets,
            positions=positions,
            target_mask=target_mask,
            decoder_ids=None if start_id is None else shifted(targets, target_mask, start_id),
            choices=self._choices,
        )
        self.model.trainables.bind(self.copies)
        try:
            return self.model.part_losses(batch, 2 * self.queries)
        finally:
            self.model.trainables.bind(None)

    def trained(self, gradients: Tensor, learning_rate: Tensor) -> Tensor:
        """Return theta (d,) float32 with the last step's scalars applied: the final result of training."""
        return recovered(self.copies, gradients, learning_rate, self.epsilon)


def advance(copies: Tensor, gradients: Tensor, learning_rate: Tensor, noise: Tensor, epsilon: float) -> Tensor:
    """Return the next copies (2q, d) (Algorithm 2, lines 2 to 6): theta' +- epsilon * noise.

    copies: (2q, d).  gradients: (q,).  learning_rate: ().  noise: (q, d).
    """
    theta = recovered(copies, gradients, learning_rate, epsilon)
    scaled = epsilon * noise
    return torch.stack([theta + scaled, theta - scaled], dim=1).view(copies.shape).to(copies.dtype)


def recovered(copies: Tensor, gradients: Tensor, learning_rate: Tensor, epsilon: float) -> Tensor:
    """Return theta (d,) float32 after a step: the copies' mean, minus learning_rate / q times the sum of g_i z_i.

    z_i = (plus - minus) / (2 epsilon).  All pairs have the same mean.  We average over all of them, so that rounding does not make
    them drift apart.
    """
    pairs = copies.float().view(-1, 2, copies.shape[1])
    shift = learning_rate * gradients / (2 * epsilon * len(pairs))
    return pairs.mean(dim=(0, 1)) - (shift[:, None] * (pairs[:, 0] - pairs[:, 1])).sum(dim=0)
