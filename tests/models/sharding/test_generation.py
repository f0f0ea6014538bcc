"""Texts made token by token over keys and values that stay with their units are those of the whole model."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.clusters import cluster_of
from tests.methods.test_number_formats import two_of_a_kind
from tests.plans import inference_plan
from workbench.core.errors import ConfigError
from workbench.methods.galaxy_plus.costs import analytic_from
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, StackTimes
from workbench.methods.galaxy_plus.planners import needs
from workbench.methods.galaxy_plus.prices import Programs
from workbench.models import families
from workbench.models.configuration import model_config
from workbench.models.sharding.whole import WholeModel
from workbench.planners.problem import Problem
from workbench.simulator import simulate

from .builders import assert_equal_to, case_of, generate, hybrid, run_plan, run_step, shards_of, tiny_case

FAMILIES = tuple(name for name, family in families.FAMILIES.items() if family.generates)


def expected_of(case, ids, count):
    """Return what transformers generates, without an end before the last token."""
    options = (
        {} if not case.layout.has_decoder else {"decoder_start_token_id": case.layout.config.decoder_start_token_id}
    )
    settings = {"forced_eos_token_id": None, "forced_bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    tokens = case.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=count,
        min_new_tokens=count,
        use_cache=True,
        **settings,
        **options,
    )
    return tokens[:, 1:] if case.layout.has_decoder else tokens[:, ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_transformers(family):
    case = tiny_case(family)
    units = case.layout.stacks[0].num_units
    ids = case.ids[:2, :3] if case.layout.has_decoder else case.ids[:2, :7]
    expected = expected_of(case, ids, 12)
    assert len(set(expected[0].tolist())) > 2  # no text of one word
    plans = (
        hybrid(case, (1, 0, units - 1), (24, 40, 0), (0.2, 0.5, 0.3), (1, 2)),
        hybrid(case, (0, units), (30, 34), (1.0, 0.0), (2,), 2),
        hybrid(case, (units,), (64,), (1.0,), (1,)),
        inference_plan("pipeline", method="edgeshard", layers=(1, 0, 2)),
        inference_plan("tensor", method="megatron_lm", units=(1, units - 1), columns=(32, 32)),
    )
    for plan in plans:
        assert torch.equal(generate(plan, shards_of(case, plan), ids, 12), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_joins_others_equals_transformers(family):
    """The second text is shorter and joins after two tokens of the first, which leaves first."""
    case = tiny_case(family)
    prompts = [case.ids[:1, :7], case.ids[1:2, :4]]
    expected = [expected_of(case, ids, 8)[0].tolist() for ids in prompts]
    start = [case.layout.config.decoder_start_token_id] if case.layout.has_decoder else []
    model, states, results = WholeModel(case.model), [], [[], []]
    with torch.inference_mode():
        for step in range(9):
            if step in (0, 2):
                state, logits = model.start(prompts[len(states)][0].tolist(), start, 8)
                results[len(states)].append(int(logits.argmax(-1)))
                states.append(state)
            going = [at for at in range(len(states)) if len(results[at]) < 8]
            rows = model.step([states[at] for at in going], [[results[at][-1]] for at in going])
            for at, token in zip(going, rows.argmax(-1).tolist(), strict=True):
                results[at].append(token)
    assert results == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_a_model_without_the_others(family):
    """In a draft, they share the whole model's weights, the decoder's norm and its head."""
    case = tiny_case(family)
    if case.layout.has_decoder:
        case = case_of(model_config(f"tiny-{family}-6"))
    start = [] if case.decoder_ids is None else case.decoder_ids[0].tolist()
    with torch.inference_mode():
        _, actual = WholeModel(case.model).first_layers(2).start(case.ids[0].tolist(), start, 1)
        cut = copy.deepcopy(case.model)
        del cut.base_model.get_submodule((case.layout.family.decoder or case.layout.family).layers)[2:]
        texts = {"input_ids": case.ids[:1]} | ({} if not start else {"decoder_input_ids": case.decoder_ids[:1]})
        expected = cut(**texts).logits[:, -1]
    assert not torch.allclose(expected, case.model(**texts).logits[:, -1], atol=1e-3)
    assert_equal_to(actual, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_given_tokens_one_by_one(family):
    """Read token by token behind a prompt, a text has the logits that it has at once."""
    case = tiny_case(family)
    texts = case.ids[:1] if case.decoder_ids is None else case.decoder_ids
    start = 4 if case.decoder_ids is None else 1
    arguments = (
        {"input_ids": texts} if case.decoder_ids is None else {"input_ids": case.ids, "decoder_input_ids": texts}
    )
    with torch.no_grad():
        expected = case.model(**arguments).logits
    plan = hybrid(case, (1, case.layout.stacks[0].num_units - 1), (24, 40), (0.5, 0.5), (1, 2))
    shards = shards_of(case, plan)
    caches = [shard.new_cache(texts.shape[1]) for shard in shards]
    first = (case.ids, texts[:, :start]) if case.layout.has_decoder else (texts[:, :start],)
    results = [run_plan(plan, shards, *first, what="last", caches=caches)]
    results += [run_step(plan, shards, texts[:, at], caches, case.ids.shape[1]) for at in range(start, texts.shape[1])]
    assert_equal_to(torch.stack(results, dim=1), expected[:, start - 1 :])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "t5"])
def test_the_cache_holds_own_units_alone_and_is_planned_and_simulated(family):
    """A device keeps what its plan counts: of T5 also the encoder's output, in its decoder's cross-attention."""
    case = tiny_case(family)
    stacks, room = case.layout.stacks, 20
    units = stacks[0].num_units
    profile = InferenceProfile(
        model="tiny",
        source="analytic",
        stacks=stacks,
        costs=((StackTimes(pieces={}),) * len(stacks),) * 2,
    )
    cluster = two_of_a_kind()
    problem = Problem(profile, cluster, sequence_length=13, decoder_length=1 if len(stacks) > 1 else None)
    programs = Programs(cluster, stacks, profile)
    for plan in (
        hybrid(case, (units, 0), (24, 40), (0.5, 0.5), (1,)),
        inference_plan("pipeline", method="edgeshard", layers=(1, 2)),
    ):
        shards = shards_of(case, plan)
        caches = [shard.new_cache(room) for shard in shards]
        run_plan(plan, shards, case.ids[:1], what="last", caches=caches)
        planned = needs(replace(problem, kept_tokens=room), plan)
        assert [cache.nbytes for cache in caches] == [need.cache_bytes for need in planned.values()]
        assert max(cache.nbytes for cache in caches) > 0
        assert [need.cache_bytes for need in needs(problem, plan).values()] == [0, 0]
        twice = needs(replace(problem, kept_tokens=2 * room, kept_texts=2), plan)
        assert [need.cache_bytes for need in twice.values()] == [2 * cache.nbytes for cache in caches]
        lengths = (13, 1)[: len(stacks)]
        reference, without = (simulate(programs.sequence(plan, lengths, room=counted).program) for counted in (room, 0))
        more = [reference.peak_bytes(rank) - without.peak_bytes(rank) for rank in (0, 1)]
        assert more == [cache.nbytes for cache in caches]
        token, bare = (programs.token(plan, lengths, room=tokens).program.costs for tokens in (room, 1))
        per_token = [(token.resident_bytes(rank) - bare.resident_bytes(rank)) / (room - 1) for rank in (0, 1)]
        crossed = [cache.nbytes - room * each for cache, each in zip(caches, per_token, strict=True)]
        assert (max(crossed) > 0) == (len(stacks) > 1) and min(crossed) == 0


@pytest.mark.parametrize("paradigm", ["hybrid", "tensor"])
def test_devices_without_a_part_of_the_layers_hold_what_is_planned_and_simulated(paradigm):
    """The first device has embedding, head and norms even if it computes no layer; one without any work has nothing."""
    case = tiny_case("gpt2")
    stacks, (first, last) = case.layout.stacks, case.layout.end_bytes
    plan = hybrid(case, (0, stacks[0].num_units, 0, 0), (0, 40, 24, 0), (0.0, 1.0, 0.0, 0.0), (1,))
    plan = plan if paradigm == "hybrid" else replace(plan, paradigm="tensor", shares=(), schemes=())
    cluster = cluster_of(4)
    profile = replace(analytic_from("tiny", stacks, cluster), first_bytes=first, last_bytes=last)
    shards = shards_of(case, plan)
    behind = [sum(tensor.nbytes for norm in shard.finals if norm for tensor in norm.tensors) for shard in shards]
    assert behind == [behind[0]] * 3 + [behind[0] * (paradigm == "tensor")] and behind[0] > 0
    planned = needs(Problem(profile, cluster, sequence_length=13), plan)
    weights = [need.total_bytes - need.working_bytes for need in planned.values()]
    # Everyone holds the norm behind the stack, which counts as the end's.
    values = [
        shard.held_bytes - extra * (place > 0) for place, (shard, extra) in enumerate(zip(shards, behind, strict=True))
    ]
    assert weights == values
    simulated = Programs(cluster, stacks, profile).sequence(plan, (13,)).program.costs
    assert [simulated.resident_bytes(rank) for rank in range(4)] == [need.total_bytes for need in planned.values()]


def test_bad_prompts_are_answered_clearly():
    case = tiny_case("gpt2")
    plan = hybrid(case, (4,), (64,), (1.0,), (1,))
    shards = shards_of(case, plan)
    with pytest.raises(ConfigError, match=r"knows 128 positions.*Shorten the prompt"):
        generate(plan, shards, case.ids[:1], 120)
    config = model_config("tiny-bert-2")
    bert = case_of(config)
    plan = hybrid(bert, (4,), (64,), (1.0,), (1,))
    with pytest.raises(ConfigError, match="has no language model head"):
        run_plan(plan, shards_of(bert, plan), bert.ids, what="last")
