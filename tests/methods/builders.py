"""Small PAC+ jobs on made-up token ids."""

import random
from pathlib import Path

from tests.plans import plan_of, stage
from workbench.core import Job, Stage
from workbench.core.cluster import Cluster
from workbench.core.names import TrainedKind
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.common.rank_results import RankResult
from workbench.methods.pac_plus.epochs import save_initial
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import calibrate, set_statistics
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.quantization import QuantizationConfig
from workbench.models.side_layers import TOKEN_KINDS, WORD_KINDS
from workbench.models.stack import LayerStack
from workbench.tasks.embedded import SOURCES
from workbench.tasks.tokenize import IGNORED, TokenizedSplit, collate
from workbench.tasks.windows import Window

LEARNING_RATE = 5e-4
FLOAT32 = QuantizationConfig(storage="float32")
CACHED = stage(0, 6, {0: 3, 1: 3, 3: 2})
PLANS = {
    "[6] on [1]": (stage(0, 6, {0: 4}),),
    "[6] on [4]": (stage(0, 6, {0: 1, 1: 1, 2: 1, 3: 1}),),
    "[3, 3] on [1-1]": (stage(0, 3, {1: 4}), stage(3, 6, {0: 4})),
    "[3, 3] on [2-2]": (stage(0, 3, {0: 3, 1: 1}), stage(3, 6, {2: 2, 3: 2})),
    "[2, 2, 2] on [2-1-1]": (stage(0, 2, {0: 1, 1: 3}), stage(2, 4, {2: 4}), stage(4, 6, {3: 4})),
    "[2, 2, 1, 1] on [1-1-1-1]": (stage(0, 2, {0: 4}), stage(2, 4, {1: 4}), stage(4, 5, {2: 4}), stage(5, 6, {3: 4})),
}


def made_up_split(
    count: int,
    vocabulary: int = 60,
    seed: int = 0,
    *,
    start_id: int | None = None,
    words: tuple[tuple[int, ...], ...] = (),
    kind: TrainedKind = "classification",
) -> TokenizedSplit:
    """Return samples of 3 to 19 tokens with labels by chance.

    start_id, words: of an encoder-decoder, and what it is to write.  kind: labels of a regression are numbers around 3;
    of spans, tags and following tokens the targets are by chance, too.
    """
    chance = random.Random(seed)
    ids = tuple(tuple(chance.randrange(5, vocabulary) for _ in range(chance.randrange(3, 20))) for _ in range(count))
    rated, windows = kind == "regression", []
    for number, sample in enumerate(ids if kind in (*TOKEN_KINDS, "text_generation") else ()):
        tagged = kind != "question_answering"
        targets = [
            chance.choice((0, 1, IGNORED)) if tagged else chance.randrange(len(sample))
            for _ in (sample if tagged else "12")
        ]
        windows.append(Window(number, 100 + number, 0, (), tuple(targets), tagged))
    return TokenizedSplit(
        ids=ids,
        windows=tuple(windows),
        labels=tuple(chance.gauss(3.0, 0.5) if rated else chance.randrange(2) for _ in range(count)),
        sample_ids=tuple(range(100, 100 + count)),
        pad_id=0,
        start_id=start_id,
        words=words,
    )


WORDS = ((11, 12, 1), (13, 1))


def split_for(stack: LayerStack, count: int, kind: TrainedKind = "classification") -> TokenizedSplit:
    """Return samples that suit a backbone and a target: with label words for sequence-to-sequence."""
    words = WORDS if kind == "sequence_to_sequence" else ()
    return made_up_split(count, start_id=stack.decoder_start_id, words=words, kind=kind)


def adapter_config(stack: LayerStack, kind: TrainedKind = "classification") -> ParallelAdapterConfig:
    """Return the shape of an adapter for a backbone."""
    return ParallelAdapterConfig(
        hidden_size=stack.hidden_size,
        num_layers=stack.num_layers,
        is_causal=stack.is_causal,
        kind=kind,
        num_outputs=1 if kind == "regression" else 2,
        label_mean=3.0 if kind == "regression" else 0.0,
        label_std=0.5 if kind == "regression" else 1.0,
        num_encoder_layers=stack.num_encoder_layers,
        target_length=split_for(stack, 1, kind).target_length,
    )


def initial_adapter(stack: LayerStack, split: TokenizedSplit, kind: TrainedKind = "classification") -> ParallelAdapter:
    """Return a calibrated adapter: without calibration the random models' small activations make the side network
    ill-conditioned."""
    adapter = ParallelAdapter(adapter_config(stack, kind))
    if stack.language_model_head is not None and kind in WORD_KINDS:
        adapter.attach(stack.language_model_head)
    set_statistics(adapter, calibrate(stack, [collate(split, range(len(split)))]))
    return adapter


def make_rank_job(
    stack: LayerStack,
    model: str,
    stages: tuple[Stage, ...],
    cluster: Cluster,
    folder: Path,
    *,
    samples: int,
    epochs: int,
    cache_dtype: str = "float32",
    start_epoch: int = 0,
    batch_size: int = 8,
    kind: TrainedKind = "classification",
    quantization: QuantizationConfig = FLOAT32,
) -> PacPlusRankJob:
    """Return a job of mini-batches of 8 in 2 micro-batches, its initial adapter written to the folder."""
    split = split_for(stack, samples, kind)
    if start_epoch == 0:
        save_initial(initial_adapter(stack, split, kind), folder, "test")
    return PacPlusRankJob(
        job=Job(model=model, epochs=epochs, batch_size=batch_size, micro_batches=2, learning_rate=LEARNING_RATE),
        cluster=cluster,
        plan=plan_of(stages, method="pac_plus", micro_batches=2, cached=CACHED, micro_batch_size=batch_size // 2),
        profile=free_profile(stack.num_layers, cluster.world_size),
        is_paced=False,
        adapter=adapter_config(stack, kind),
        quantization=quantization,
        split=split,
        folder=folder,
        fingerprint="test",
        cache_dtype=cache_dtype,
        start_epoch=start_epoch,
    )


def free_profile(num_layers: int, world_size: int) -> Profile:
    """Return a profile in which nothing takes time or memory."""
    sizes = dict.fromkeys(("frozen_bytes", "trainable_bytes"), 0)
    layers = tuple(LayerProfile(name=f"layer {index}", times={}, **sizes) for index in range(num_layers))
    return Profile(model="made up", method="made up", source="analytic", layers=(layers,) * world_size)


def losses_of(results: list[RankResult]) -> dict[tuple[int, int], float]:
    """Return each step's loss, the ranks' parts added up."""
    losses: dict[tuple[int, int], float] = {}
    for result in results:
        for trace in result.steps:
            losses[trace.epoch, trace.step] = losses.get((trace.epoch, trace.step), 0.0) + trace.loss
    return losses


def write_sentences(folder: Path) -> Path:
    """Write rated sentences of different lengths in the form of the embedded ones."""
    chance = random.Random(0)
    folder.mkdir()
    for source in SOURCES:
        lines = []
        for number in range(1, 12000):
            words = " ".join(
                chance.choice(("good", "bad", "film", "plot", "fine", "dull")) for _ in range(chance.randrange(2, 15))
            )
            lines.append(f"{number}\t{(number % 9 - 4) / 2}\t{words} {number} of {source}")
        (folder / f"{source}_GroundTruth.txt").write_text("\n".join(lines))
    return folder
