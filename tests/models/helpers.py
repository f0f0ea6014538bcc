"""Small inputs for the tests of models."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.tasks.tokenize import Batch

TARGET_LENGTH = 4


def small_batch(lengths=(11, 7, 2, 9, 11, 5, 8, 3), seed=0, first_id=0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    count, width = len(lengths), max(lengths)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 1400, (count, width), generator=generator) * mask
    labels = torch.randint(0, 2, (count,), generator=generator)
    numbers = torch.arange(first_id, first_id + count)
    return Batch(input_ids=ids, attention_mask=mask, labels=labels, sample_ids=numbers, indices=tuple(range(count)))


def batch_for(stack, lengths=(11, 7, 2, 9, 11, 5, 8, 3), **options) -> Batch:
    """Return a batch of what the stack reads: texts, texts with targets of several tokens, or pictures."""
    batch = small_batch(lengths, **options)
    generator = torch.Generator().manual_seed(7)
    if stack.family.reads_images:
        patches = torch.randint(256, (len(lengths), 17, 4), generator=generator, dtype=torch.uint8)
        return replace(batch, input_ids=patches, attention_mask=torch.ones(len(lengths), 17, dtype=torch.long))
    if stack.num_encoder_layers is not None:
        return replace(batch, decoder_ids=torch.randint(4, 1400, (len(lengths), TARGET_LENGTH), generator=generator))
    return batch


def small_config(stack, **changes) -> ParallelAdapterConfig:
    settings = {"reduction": 4, "dropout": 0.1, "is_causal": stack.is_causal, "seed": 3}
    if stack.num_encoder_layers is not None:
        settings |= {"num_encoder_layers": stack.num_encoder_layers, "target_length": TARGET_LENGTH}
    settings |= changes
    return ParallelAdapterConfig(hidden_size=stack.hidden_size, num_layers=stack.num_layers, **settings)


def technique_config(stack, technique: str, **changes) -> TechniqueConfig:
    """Return settings; narrow adapters keep the tiny models' gradients from vanishing in the many."""
    sizes = {"hidden_size": stack.hidden_size, "num_layers": stack.num_layers, "bottleneck": 8}
    return TechniqueConfig(technique=technique, **sizes | changes)


def technique_part(stack, config: TechniqueConfig, start: int = 0, stop: int | None = None) -> TechniqueStage:
    """Return layers of a stack, by default all, with weights of its own."""
    return TechniqueStage(copy.deepcopy(stack.stage(start, stack.num_layers if stop is None else stop)), config)


def check_embeddings(facts, stack) -> None:
    """Compare a model's facts with its weights before each stack; shared weights count with the first."""
    first, second = (
        {
            id(parameter): parameter.numel()
            for module in modules
            if module is not None
            for parameter in module.parameters()
        }
        for modules in ((stack.embedding, stack.position_bias), (stack.decoder_embedding, stack.decoder_position_bias))
    )
    own = sum(count for key, count in second.items() if key not in first)
    assert (facts.embedding_parameters, facts.decoder_embedding_parameters) == (sum(first.values()), own)
