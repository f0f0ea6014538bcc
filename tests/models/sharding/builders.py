"""Lively tiny models, plans and shards for the tests of sharding."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.inference import InferencePlan
from workbench.models.families import FAMILIES
from workbench.models.loading import load_tokenizer, model_config
from workbench.models.sharding import ModelLayout, ModelShard, load_shard, model_layout, shard_spec, weights_of

CUT_FAMILIES = tuple(FAMILIES)


def make_lively(model: Any, seed: int = 0) -> Any:
    """Give every parameter a value that matters: fresh models have no biases, plain norms, and scores that are all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("shared.weight", "words.weight")):
                noise *= 0.1  # a tied head would say the last word again and again
            is_norm = "norm" in name.lower() or ".ln_" in name or name.startswith("ln_")
            if is_norm and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.3 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5))
    return model.eval()


def model_of(config: Any, seed: int = 0) -> Any:
    """Return a lively model of a configuration, with its language model head if the family has one."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family = FAMILIES[config.model_type]
    maker = AutoModelForSeq2SeqLM if family.decoder else AutoModelForCausalLM if family.is_causal else AutoModel
    with torch.random.fork_rng(devices=[]):
        return make_lively(maker.from_config(config, attn_implementation="sdpa"), seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, what is known of it, and a batch: ids (n, t) or patches, their mask, and what the decoder reads."""

    model: Any
    layout: ModelLayout
    ids: Tensor
    mask: Tensor
    decoder_ids: Tensor | None

    @property
    def real(self) -> Tensor:
        """Return which of the output's tokens are no padding."""
        return self.mask.bool() if self.decoder_ids is None else torch.ones_like(self.decoder_ids, dtype=torch.bool)

    def local(self) -> Tensor:
        """Return the final hidden states as the Hugging Face model gives them."""
        base = self.model.base_model
        with torch.no_grad():
            if self.layout.family.reads_images:
                pixels = self.ids[:, 1:].reshape(-1, 4, 4, 1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 1, 8, 8)
                return base(pixels / 127.5 - 1).last_hidden_state
            types = {} if self.layout.family_name != "bert" else {"token_type_ids": self.token_types()}
            decoder = {} if self.decoder_ids is None else {"decoder_input_ids": self.decoder_ids}
            found = base(input_ids=self.ids, attention_mask=self.mask, output_hidden_states=True, **types, **decoder)
            # T5 with a head is its own base model, which names the states of its last layer in another way.
            return found.decoder_hidden_states[-1] if self.layout.has_decoder else found.last_hidden_state

    def token_types(self) -> Tensor:
        """Return BERT's token types: 1 behind the first separator (3)."""
        is_separator = (self.ids == 3).long()
        return ((is_separator.cumsum(1) - is_separator).clamp(max=1) * self.mask).long()


def case_of(config: Any, seed: int = 0) -> Case:
    """Return a case with padding where the family reads texts."""
    model = model_of(config, seed)
    layout = model_layout(model)
    generator = torch.Generator().manual_seed(seed + 1)
    if layout.family.reads_images:
        ids = torch.randint(256, (2, 17, 4), generator=generator, dtype=torch.uint8)
        return Case(model=model, layout=layout, ids=ids, mask=torch.ones(2, 17, dtype=torch.int64), decoder_ids=None)
    ids = torch.randint(4, 1000, (3, 13), generator=generator)
    ids[0, 5] = 3
    mask = (torch.arange(13)[None] < torch.tensor([13, 8, 3])[:, None]).long()
    decoder_ids = torch.randint(4, 1000, (3, 7), generator=generator) if layout.has_decoder else None
    return Case(model=model, layout=layout, ids=ids * mask, mask=mask, decoder_ids=decoder_ids)


@functools.cache
def tiny_case(family: str, layers: int = 3) -> Case:
    """Return the case of a tiny model."""
    return case_of(model_config(f"tiny-{family}-{layers}"))


def separator_of(layout: ModelLayout) -> int | None:
    """Return the separator of the tiny models' tokenizer, for families with token types."""
    return load_tokenizer("tiny-bert").separator_id if layout.family.has_token_types else None


def hybrid(
    case: Case, units: tuple[int, ...], columns: tuple[int, ...], shares: tuple[float, ...], schemes: tuple[int, ...], tile: int = 0
):
    """Return a plan of Galaxy+; schemes are repeated over the layers."""
    repeated = (schemes * case.layout.num_layers)[: case.layout.num_layers]
    return InferencePlan(
        method="galaxy_plus", paradigm="hybrid", ranks=tuple(range(len(units))), units=units, columns=columns, shares=shares,
        schemes=repeated, tile_tokens=tile,
    )  # fmt: skip


def shards_of(case: Case, plan: InferencePlan) -> list[ModelShard]:
    """Return the shards of every position."""
    source = weights_of(case.model)
    specs = [shard_spec(plan, position, case.layout.stacks) for position in range(plan.num_positions)]
    return [load_shard(case.layout, spec, source, separator_id=separator_of(case.layout)) for spec in specs]


def assert_equal_to(found: Tensor, expected: Tensor) -> None:
    """Assert the issue's bound, with a margin of ten: error relative to the largest value, and the same argmax."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
