"""A run is its seeds and scalars: replayed they give the same weights, whatever killed it (MeZO, section 2.1)."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.core.errors import ConfigError, DivergedError
from workbench.methods.p_rge.seeds import MAX_QUERIES, MAX_STEPS, query_seed
from workbench.methods.p_rge.zeroth_order import (
    LogFile,
    Mezo,
    Prge,
    StepLog,
    TrainableConfig,
    ZerothOrderConfig,
    gradients_of,
    load_causal_model,
    read_log,
    replay,
)

from ..memory_growth import least_growth
from .prompts import prompts

CONFIG = ZerothOrderConfig(queries=2, epsilon=1e-2, learning_rate=0.01)
HEADER = {"model": "tiny-llama-2", "queries": 2}


def fresh(technique="lora_fa"):
    return load_causal_model("tiny-llama-2", TrainableConfig(technique=technique, rank=4))


@pytest.mark.parametrize(
    ("make", "technique", "settings"),
    [
        (Prge, "lora_fa", {}),
        (Mezo, "lora_fa", {}),
        (Mezo, "full", {}),
        (Prge, "lora_fa", {"estimator": "one_sided"}),
        (Mezo, "full", {"estimator": "one_sided"}),
        (Prge, "lora", {"estimator": "low_rank", "subspace_steps": 2}),
        (Mezo, "full", {"estimator": "low_rank", "subspace_steps": 2}),
        (Prge, "dora", {"estimator": "low_rank_momentum", "subspace_steps": 2}),
        (Mezo, "full", {"estimator": "low_rank_momentum", "subspace_steps": 2}),
        (Prge, "lora_fa", {"estimator": "jvp"}),
    ],
)
def test_a_run_that_was_cut_anywhere_goes_on_to_the_same_weights(make, technique, settings, tmp_path):
    path, model, config = tmp_path / "steps.jsonl", fresh(technique), replace(CONFIG, **settings)
    estimator = make(model, config)
    log = LogFile(path, HEADER)
    for step in range(5):
        log.append(estimator.step(prompts(seed=step), step).log)
    expected = model.trainables.state()
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    in_place = config if make is Mezo else None
    for cut in (
        len(content),
        len(content) - 1,
        len(content) - len(lines[-1]) + 3,
        len(lines[0]) + len(lines[1]) + 1,
        len(lines[0]) - 2,
    ):
        path.write_bytes(content[:cut])
        model = fresh(technique)
        estimator = make(model, config)
        log = LogFile(path, HEADER)
        done = replay(model.trainables, log.steps, in_place=in_place)
        assert done == max(0, content[:cut].count(b"\n") - 1)
        for step in range(done, 5):
            log.append(estimator.step(prompts(seed=step), step).log)
        assert path.read_bytes() == content
        assert all(torch.equal(value, expected[name]) for name, value in model.trainables.state().items())
    header, steps = read_log(path)
    assert header == HEADER and [step.step for step in steps] == [0, 1, 2, 3, 4]


def test_a_log_of_another_run_or_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = LogFile(path, HEADER)
    log.remark({"a": 1})
    for step in range(3):
        log.append(StepLog(step=step, seeds=(1, 2), gradients=(0.5, -0.25), learning_rate=0.1, loss=0.7, seconds=0.2))
    [last] = LogFile(path, HEADER).steps[2:]
    assert (last.loss, last.seconds, LogFile(path, HEADER).remarks) == (0.7, 0.2, (b'{"a":1}',))
    with pytest.raises(ConfigError, match="another run's: it differs in queries"):
        LogFile(path, HEADER | {"queries": 3})
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[2].replace(b"0.5", b"9.5")
    for damaged in (
        [*lines[:2], b"[oops]\n", *lines[3:]],
        lines[:2] + 2 * lines[3:],
        [*lines[:2], changed, *lines[3:]],
    ):
        path.write_bytes(b"".join(damaged))
        for read in (lambda: read_log(path), lambda: LogFile(path, HEADER)):
            with pytest.raises(ConfigError, match="Line 3 was changed after it was written"):
                read()
    mended = LogFile(path, HEADER, mends=True)
    assert "line 3" in mended.damage and mended.steps == () and path.read_bytes() == b"".join(lines[:2])
    for step in range(3):
        mended.append(
            StepLog(step=step, seeds=(1, 2), gradients=(0.5, -0.25), learning_rate=0.1, loss=0.7, seconds=0.2)
        )
    assert path.read_bytes() == b"".join(lines)
    for foreign in (b"my notes", b"my notes\n", b'{"model": "mine"}', b"\xff"):
        path.write_bytes(foreign)
        with pytest.raises(ConfigError, match="holds something else"):
            LogFile(path, HEADER)
        assert path.read_bytes() == foreign
    with pytest.raises(ConfigError, match="not a file that can be read again"):
        LogFile(Path("/dev/null"), HEADER)
    with pytest.raises(ConfigError, match="no such file"):
        read_log(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="2 seeds"):
        StepLog(step=0, seeds=(1, 2), gradients=(0.5,), learning_rate=0.1)


def test_losses_that_are_not_finite_end_the_run_before_they_spoil_it():
    with pytest.raises(DivergedError, match="nan, 7"):
        gradients_of(torch.tensor([float("nan"), 7.0]), 1e-2)
    model = fresh()
    model.trainables.flat.fill_(float("inf"))
    with pytest.raises(DivergedError):
        Prge(model, CONFIG).step(prompts(), 0)


def test_values_of_another_model_are_refused():
    with pytest.raises(ConfigError, match="not this model's"):
        fresh().trainables.load_state(load_causal_model("tiny-llama-2", TrainableConfig(rank=2)).trainables.state())
    model = fresh()
    state = {name: value + 1 for name, value in model.trainables.state().items()}
    model.trainables.load_state(state)
    assert float(model.trainables.flat.min()) == 1.0  # the parameters are still its pieces


def test_no_two_queries_of_a_run_share_a_seed():
    seeds = {query_seed(1, step, query) for step in range(2000) for query in range(16)}
    assert len(seeds) == 32_000 and all(0 <= seed < 1 << 32 for seed in seeds)
    assert query_seed(1, 0, 0) != query_seed(2, 0, 0) and query_seed(-1, 0, 0) == query_seed(-1, 0, 0)
    query_seed(1, MAX_STEPS - 1, MAX_QUERIES - 1)
    for step, query in ((MAX_STEPS, 0), (0, MAX_QUERIES), (-1, 0)):
        with pytest.raises(ConfigError, match="Seeds differ"):
            query_seed(1, step, query)


def test_noise_is_standard_normal_and_differs_between_queries():
    trainables = fresh().trainables
    rows = torch.stack([trainables.noise(query_seed(0, 0, query)) for query in range(200)])
    assert abs(float(rows.mean())) < 0.02 and abs(float(rows.std()) - 1) < 0.02
    correlation = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
    assert correlation.abs().max() < 6 * rows.shape[1] ** -0.5


@pytest.mark.parametrize("made", [Prge, Mezo])
def test_memory_does_not_grow_with_steps(made):
    gc.freeze()  # what other tests left is looked at by no collection
    model = load_causal_model("tiny-llama-1", TrainableConfig(rank=4))
    estimator, batch = made(model, ZerothOrderConfig(queries=1, learning_rate=1e-4)), prompts(lengths=(4,))

    def held():
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return len(tensors), sum(tensor.nbytes for tensor in tensors)

    numbers = itertools.count()
    for _ in range(20):
        estimator.step(batch, next(numbers))
    before = held()
    assert least_growth(lambda: estimator.step(batch, next(numbers))) < 512
    assert held() == before
