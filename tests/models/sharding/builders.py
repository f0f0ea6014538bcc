"""Lively tiny models, plans and shards for the tests of sharding."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.methods.one_process import run_schedule
from tests.plans import inference_plan
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.schedules import InferenceLayout, inference_schedule
from workbench.methods.galaxy_plus.session import InferenceHandlers
from workbench.models.configuration import model_config
from workbench.models.families import FAMILIES
from workbench.models.sharding import ModelLayout, ModelShard, Row, model_layout, shard_spec, weights_of

CUT_FAMILIES = tuple(FAMILIES)


def make_lively(model: Any, seed: int = 0) -> Any:
    """Give every parameter a value that matters: fresh models have no biases, plain norms, and scores that are all
    alike."""
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
    """A model, what is known of it, and a batch: ids (n, t) or patches, and what the decoder reads."""

    model: Any
    layout: ModelLayout
    ids: Tensor
    decoder_ids: Tensor | None

    def local(self) -> Tensor:
        """Return the final hidden states as the Hugging Face model gives them."""
        base = self.model.base_model
        with torch.no_grad():
            if self.layout.family.reads_images:
                pixels = self.ids[:, 1:].reshape(-1, 4, 4, 1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 1, 8, 8)
                return base(pixels / 127.5 - 1).last_hidden_state
            types = {} if self.layout.config.model_type != "bert" else {"token_type_ids": self.token_types()}
            decoder = {} if self.decoder_ids is None else {"decoder_input_ids": self.decoder_ids}
            ids = torch.where(self.ids < 0, ~self.ids, self.ids)
            result = base(
                input_ids=ids, attention_mask=torch.ones_like(self.ids), output_hidden_states=True, **types, **decoder
            )
            # T5 with a head is its own base model, which names the states of its last layer in another way.
            return result.decoder_hidden_states[-1] if self.layout.has_decoder else result.last_hidden_state

    def token_types(self) -> Tensor:
        """Return BERT's token types: 1 for a token of the second text."""
        return (self.ids < 0).long()


def case_of(config: Any, seed: int = 0) -> Case:
    """Return a case of three texts or two pictures."""
    model = model_of(config, seed)
    layout = model_layout(model)
    generator = torch.Generator().manual_seed(seed + 1)
    if layout.family.reads_images:
        ids = torch.randint(256, (2, 17, 4), generator=generator, dtype=torch.uint8)
        return Case(model=model, layout=layout, ids=ids, decoder_ids=None)
    ids = torch.randint(4, 1000, (3, 13), generator=generator)
    ids[0, 5] = 3
    if layout.family.has_token_types:
        ids[0, 6:] = ~ids[0, 6:]
    decoder_ids = torch.randint(4, 1000, (3, 7), generator=generator) if layout.has_decoder else None
    return Case(model=model, layout=layout, ids=ids, decoder_ids=decoder_ids)


@functools.cache
def tiny_case(family: str, layers: int = 3) -> Case:
    """Return the case of a tiny model."""
    return case_of(model_config(f"tiny-{family}-{layers}"))


def hybrid(
    case: Case,
    units: tuple[int, ...],
    columns: tuple[int, ...],
    shares: tuple[float, ...],
    schemes: tuple[int, ...],
    tile: int = 0,
):
    """Return a plan of Galaxy+; schemes are repeated over the layers."""
    repeated = (schemes * case.layout.num_layers)[: case.layout.num_layers]
    return inference_plan(
        method="galaxy_plus",
        units=units,
        columns=columns,
        shares=shares,
        schemes=repeated,
        tile_tokens=tile,
    )


def shards_of(case: Case, plan: InferencePlan) -> list[ModelShard]:
    """Return the shards of every position."""
    source = weights_of(case.model)
    specs = [shard_spec(plan, position, case.layout.stacks) for position in range(plan.num_positions)]
    return [ModelShard(case.layout, spec, source) for spec in specs]


def run_plan(plan, shards, ids, decoder_ids=None, *, what="hidden", caches=None):
    """Return final hidden states or logits of a batch, by the schedule and the handlers that devices run.

    shards, caches: of each position.  ids: (n, t), or a picture's patches.  decoder_ids: (n, s).
    """
    layout = shards[0].layout
    if layout.has_decoder and decoder_ids is None:
        decoder_ids = torch.full((len(ids), 1), layout.config.decoder_start_token_id)
    lengths = (ids.shape[1],) if decoder_ids is None else (ids.shape[1], decoder_ids.shape[1])
    with torch.inference_mode():
        runs = [
            shard.begin(ids.shape[1], target_length=lengths[-1], cache=cache)
            for shard, cache in zip(shards, caches or [None] * len(shards), strict=True)
        ]
        result = InferenceLayout.build(plan, layout.stacks, lengths)
        handlers = [InferenceHandlers(shard, result, run, output=what) for shard, run in zip(shards, runs, strict=True)]
        return _output(inference_schedule(result), handlers, (ids, decoder_ids))


def run_step(plan, shards, tokens, caches, memory_length=0):
    """Return the logits (n, V) behind one more token (n,) of each sample.  memory_length: tokens that the encoder
    read."""
    with torch.inference_mode():
        stacks = shards[0].layout.stacks
        result = InferenceLayout.decode(
            plan, stacks, past=caches[0].length, memory_length=memory_length if len(stacks) > 1 else 0
        )
        pairs = zip(shards, caches, strict=True)
        handlers = [
            InferenceHandlers(shard, result, shard.positions.step([Row(cache, cache.length)]), output="last")
            for shard, cache in pairs
        ]
        logits = _output(inference_schedule(result), handlers, (tokens[:, None],) * len(stacks))
    for cache in caches:
        cache.length += 1
    return logits


def generate(plan, shards, ids, max_new_tokens):
    """Return the likeliest next tokens (n, max_new_tokens), greedily; ids: (n, t) prompts, of an encoder-decoder the
    encoder's."""
    prompt = 1 if shards[0].layout.has_decoder else ids.shape[1]
    caches = [shard.new_cache(prompt + max_new_tokens) for shard in shards]
    tokens = [run_plan(plan, shards, ids, what="last", caches=caches).argmax(-1)]
    while len(tokens) < max_new_tokens:
        tokens.append(run_step(plan, shards, tokens[-1], caches, ids.shape[1]).argmax(-1))
    return torch.stack(tokens, dim=1)


def _output(schedule, handlers, ids):
    """Run a schedule in this process and return what its first position says.  ids: what each stack reads."""
    blocks = handlers[0]._layout.blocks
    tensors = [{value: ids[blocks[value.stage].stack] for value in values} for values in schedule.inputs]
    ranks = handlers[0]._layout.plan.ranks
    result = run_schedule(schedule, dict(zip(ranks, (handler.table() for handler in handlers), strict=True)), tensors)
    return result[ranks[0]][schedule.outputs[ranks[0]][0]]


def assert_equal_to(found: Tensor, expected: Tensor) -> None:
    """Assert the issue's bound, with a margin of ten: error relative to the largest value, and the same argmax."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
