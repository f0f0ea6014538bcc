"""A distributed PAC+ run gives what one plain process gives: losses, gradients, weights."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_training import train_reference
from stopped_run import train_rank

from tests.methods.builders import CACHED, LEARNING_RATE, PLANS, initial_adapter, losses_of, make_rank_job
from tests.methods.conftest import four_devices
from tests.weights import same_weights
from workbench.core.names import TrainedKind
from workbench.methods.pac_plus.rank_job import cached_steps, shard_owners
from workbench.methods.training.interrupted import begin, take_up
from workbench.models.loading import load_stack
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.runtime.engines import EngineCluster
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import TokenizedSplit, collate

SAMPLES = 22  # not a multiple of the mini-batch: the last one is smaller and cannot be cut as planned
EPOCHS = 3


def batches_of(split: TokenizedSplit) -> Callable[[int], list]:
    """Return the mini-batches of an epoch as one process would see them: whole, in the same order."""

    def batches(epoch: int) -> list:
        if epoch == 0:
            return [collate(split, batch) for batch in epoch_batches(split.lengths, 8, 0, 0)]
        return cached_batches(split, epoch)

    return batches


def cached_batches(split: TokenizedSplit, epoch: int) -> list:
    """Return the mini-batches of an epoch that runs from the cache."""
    owners = shard_owners(CACHED, split.lengths, 4, 0)
    steps = cached_steps(CACHED, owners, split.lengths, 4, seed=0, epoch=epoch)
    return [collate(split, [sample for samples in step.samples for sample in samples]) for step in steps]


def train_in_one_process(
    stack: LayerStack, split: TokenizedSplit, kind: TrainedKind = "classification"
) -> tuple[dict[tuple[int, int], float], dict[str, torch.Tensor]]:
    """Return each step's loss and the final weights, from a plain loop over the uncached backbone."""
    adapter = initial_adapter(stack, split, kind)
    losses: dict[tuple[int, int], float] = {}
    for epoch, loss in train_reference(stack, adapter, batches_of(split), EPOCHS, learning_rate=LEARNING_RATE):
        losses[epoch, sum(1 for known, _ in losses if known == epoch)] = loss
    return losses, {name: tensor.detach().clone() for name, tensor in adapter.named_parameters()}


PIPELINE, HYBRID = "[2, 2, 1, 1] on [1-1-1-1]", "[3, 3] on [2-2]"
CASES: list[tuple[str, str, TrainedKind]] = [
    # Every plan and every model once; test_combinations has them in every combination, without devices.
    ("tiny-bert", "[6] on [1]", "classification"),
    ("tiny-opt", "[6] on [4]", "classification"),
    ("tiny-bert", "[3, 3] on [1-1]", "regression"),
    ("tiny-llama", HYBRID, "classification"),
    ("all-MiniLM-L6-v2", "[2, 2, 2] on [2-1-1]", "classification"),
    ("tiny-gpt2", PIPELINE, "classification"),
    ("tiny-t5", PIPELINE, "sequence_to_sequence"),
    ("tiny-bart", HYBRID, "classification"),
]


@pytest.mark.parametrize(("model", "name", "kind"), CASES)
def test_losses_and_weights_equal_one_process(
    model: str, name: str, kind: TrainedKind, engines: EngineCluster, tmp_path: Path
) -> None:
    """First epoch through any split, then cached epochs: every loss and every weight, against uncached single-process
    training.

    Encoder-decoders are cut inside either stack and between them, with label and text targets.
    """
    stack = load_stack(model)
    job = make_rank_job(stack, model, PLANS[name], four_devices(), tmp_path, samples=SAMPLES, epochs=EPOCHS, kind=kind)
    losses = losses_of(engines.run(train_rank, [job] * 4))
    reference, weights = train_in_one_process(stack, job.split, kind)
    # AdamW divides by gradients' own size, which carries float noise of tiny gradients into later steps.
    assert losses == {step: pytest.approx(loss, rel=1e-5 if step[0] == 0 else 1e-4) for step, loss in reference.items()}
    # A decoder that reads one token, always the same, gives its embedding's W_down, queries and keys no gradient.
    unread = ("decoder_first", "layers.3.query", "layers.4.query", "layers.5.query")
    without = unread if job.adapter.target_length == 1 else ()
    trained, weights = (
        {name: tensor for name, tensor in each.items() if not name.startswith(without)}
        for each in (job.trained(EPOCHS - 1), weights)
    )
    same_weights(trained, weights, 1e-3, 2e-4, noise="key_value.bias")


def test_a_backbone_computed_with_in_bfloat16_gives_what_it_gives_in_one_process(
    engines: EngineCluster, tmp_path: Path
) -> None:
    model = "tiny-bert"
    quantization = QuantizationConfig(storage="bfloat16", compute="bfloat16")
    stack = quantize(load_stack(model), quantization)
    job = make_rank_job(
        stack, model, PLANS[HYBRID], four_devices(), tmp_path, samples=SAMPLES, epochs=EPOCHS, quantization=quantization
    )
    losses = losses_of(engines.run(train_rank, [job] * 4))
    # bfloat16 rounds the sums of smaller products in another order.
    assert losses == {
        step: pytest.approx(loss, rel=1e-2) for step, loss in train_in_one_process(stack, job.split)[0].items()
    }


WHOLE = PLANS[HYBRID]


@pytest.fixture(scope="module")
def whole(
    engines: EngineCluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[tuple[int, int], float]]:
    """The folder of an uninterrupted run of three epochs, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    job = make_rank_job(load_stack("tiny-bert"), "tiny-bert", WHOLE, four_devices(), folder, samples=SAMPLES, epochs=3)
    return folder, losses_of(engines.run(train_rank, [job] * 4))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[3 * len(content) // 4] ^= 1
    path.write_bytes(content)


def edit(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the lines of a file."""
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


WEIGHTS, LOGS = "snapshots/weights-epoch-{}-step-0-layers-0-6.safetensors", "steps/epoch-{}-from-0-rank-{}.jsonl"


@pytest.mark.parametrize(
    ("damage", "at", "said"),
    [
        (lambda folder: flip(folder / WEIGHTS.format(2)), (1, 0), "were changed after they were written"),
        (lambda folder: os.truncate(folder / WEIGHTS.format(3), 900), (2, 0), "cut or changed"),
        (lambda folder: (folder / WEIGHTS.format(2)).unlink(), (1, 0), "Epochs 2 to 3 are done again"),
        (
            lambda folder: exchange(*(folder / WEIGHTS.format(epoch) for epoch in (2, 3))),
            (1, 0),
            "belongs to weights-epoch-3-step-0-layers-0-6.safetensors",
        ),
        (
            lambda folder: edit(
                folder / LOGS.format(1, 0), lambda lines: [line.replace(b"[1,1,", b"[1,7,") for line in lines]
            ),
            (1, 0),
            "line 3",
        ),
        (lambda folder: edit(folder / LOGS.format(1, 1), lambda lines: lines[1:]), (1, 0), "Line 1 was changed"),
        (
            lambda folder: edit(folder / LOGS.format(2, 1), lambda lines: [*lines[:2], *lines[3:]]),
            (2, 0),
            "line 3 was changed",
        ),
        (
            lambda folder: edit(folder / LOGS.format(2, 0), lambda lines: lines[:-1]),
            (2, 0),
            "",
        ),  # as a crash may leave it
        (lambda folder: (folder / LOGS.format(2, 1)).unlink(), (2, 0), ""),
        (
            lambda folder: exchange(*(folder / LOGS.format(1, rank) for rank in (0, 1))),
            (1, 0),
            "belongs to epoch-1-from-0-rank-1.jsonl",
        ),
        (lambda folder: flip(folder / "plan.json"), (3, 0), "'plan.json' was to be read"),
    ],
    ids=[
        "changed weights",
        "cut weights",
        "missing weights",
        "exchanged weights",
        "edited log",
        "log without a beginning",
        "log without a line",
        "log without an end",
        "missing log",
        "exchanged logs",
        "changed plan",
    ],
)
def test_what_was_damaged_is_told_and_never_used(
    damage: Callable[[Path], object],
    at: tuple[int, int],
    said: str,
    tmp_path: Path,
    whole: tuple[Path, dict[tuple[int, int], float]],
) -> None:
    """The run goes on from the newest intact snapshot up to which all is intact, with the losses until then."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    job = make_rank_job(load_stack("tiny-bert"), "tiny-bert", WHOLE, four_devices(), folder, samples=SAMPLES, epochs=3)
    begin(job)
    assert (take_up(job).epochs, take_up(job).damage) == (3, ())
    damage(folder)
    former = take_up(job)
    assert (former.epochs, former.step) == at
    assert said in " ".join(former.damage) and bool(former.damage) == bool(said)
    assert losses_of(former.results) == {step: loss for step, loss in whole[1].items() if step < at}
    again = take_up(job)  # what was damaged is gone, and nothing is told twice
    assert ((again.epochs, again.step), again.damage, again.results) == (at, (), former.results)
