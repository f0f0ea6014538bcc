"""A model cut by units, columns and tokens gives the numbers of the whole model (Galaxy+, section III-B).

Variants of the families: test_folders.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.plans import inference_plan

from .builders import CUT_FAMILIES, assert_equal_to, hybrid, run_plan, shards_of, tiny_case

SCHEMES = ((1,), (2,), (2, 1, 1))


def partitions(units, columns):
    """Return uneven partitions A, B and S for 1 to 4 devices, with nothing of one kind or of all kinds on some."""
    yield (units,), (columns,), (1.0,)
    yield (1, units - 1), (columns - 7, 7), (0.2, 0.8)
    yield (0, units), (columns, 0), (0.6, 0.4)
    yield (units - 1, 0, 1), (5, 0, columns - 5), (0.3, 0.7, 0.0)
    yield (0, 0, units), (0, columns, 0), (1.0, 0.0, 0.0)
    if units >= 4:
        yield (1, 1, 1, units - 3), (1, columns - 30, 20, 9), (0.4, 0.1, 0.3, 0.2)
    yield (0, 1, 0, units - 1), (columns // 2, 0, 0, columns - columns // 2), (0.0, 0.5, 0.0, 0.5)


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_every_scheme_and_partition_equals_the_local_model(family):
    case = tiny_case(family)
    expected = case.local()
    shape = case.layout.stacks[0]
    tiles = itertools.cycle(
        (0, 3, 0, 5)
    )  # against three schemes: every partition and every scheme meet whole tiles and pieces
    for units, columns, shares in partitions(shape.num_units, shape.columns):
        for schemes in SCHEMES:
            plan = hybrid(case, units, columns, shares, schemes, next(tiles))
            actual = run_plan(plan, shards_of(case, plan), case.ids, case.decoder_ids)
            assert_equal_to(actual, expected)


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_baselines_equal_the_local_model(family):
    case = tiny_case(family)
    expected, shape = case.local(), case.layout.stacks[0]
    plans = (
        inference_plan("tensor", units=(1, 0, shape.num_units - 1), columns=(24, 40, 0)),
        inference_plan("sequence", shares=(0.5, 0.0, 0.5)),
        inference_plan("sequence", shares=(0.2, 0.3, 0.5), tile_tokens=2),
        inference_plan("pipeline", layers=(1, 0, 2)),
    )
    for plan in plans:
        assert_equal_to(run_plan(plan, shards_of(case, plan), case.ids, case.decoder_ids), expected)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_attention_of_parts_of_the_queries(family):
    """Asked for piece by piece, in any order, attention is what it is at once."""
    case = tiny_case(family)
    units = case.layout.stacks[0].num_units
    shard = shards_of(case, hybrid(case, (units - 1, 1), (60, 4), (0.5, 0.5), (1,)))[0]
    stack = len(case.layout.parts) - 1
    block = case.layout.parts[stack].first_block
    ids = case.ids if case.decoder_ids is None else case.decoder_ids
    length = ids.shape[1]
    with torch.inference_mode():
        tile = shard.qkv(block, shard.enter(block, shard.embed(stack, ids)))
        reference = shard.attend(block, [tile], shard.begin(13, target_length=length))
        run = shard.begin(13, target_length=length)
        for start, stop in ((4, length), (0, 2), (2, 4), (0, length)):
            part = shard.attend(block, [tile[:, :3], tile[:, 3:]], run, start, stop)
            torch.testing.assert_close(part, reference[:, start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("length", [1, 2])
def test_sequences_shorter_than_the_devices(family, length):
    case = tiny_case(family)
    short = replace(case, ids=case.ids[:1, :length])
    units = case.layout.stacks[0].num_units
    plan = hybrid(case, (1, 0, units - 1, 0), (16, 16, 16, 16), (0.25,) * 4, (1, 2))
    assert_equal_to(run_plan(plan, shards_of(case, plan), short.ids), short.local())
