"""Score pairs of sentences by the embeddings of a frozen backbone, without and with a trained head (not in PAC+; see
its Table VI).

Parallel Adapters do not reach parity with LoRA on pairs.  If the cosine of two frozen embeddings scores as high as
Parallel Adapters, the adapters have learned nothing that the backbone's activations do not contain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.parallel_adapter import task_loss
from workbench.models.stack import LayerStack
from workbench.tasks.task import Split, Task
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches, tokenize
from workbench.trainings.common import SPLITS
from workbench.trainings.inputs import task_of
from workbench.trainings.techniques import score, score_answers, score_name
from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus.executed import TITLES, training
from workbench_studies.papers.pac_plus.parity import PAIRS, frequent_score
from workbench_studies.papers.pac_plus.testbed import PAPER
from workbench_studies.papers.result import Result, Row, Settings, shipped_result, spread

COSINE = "cosine of both sentences, nothing trained"
COMPARED = "trained head on both sentences, compared"
TOGETHER = "trained head on the pair in one text"
FREQUENT = "the most frequent answer, nothing read"
HEADS = (COMPARED, TOGETHER)
SHIPPED = {"r = 8": "Parallel Adapters, r = 8", "LoRA": "LoRA"}
WORDS = {
    "cosine": COSINE,
    "always": FREQUENT,
    "head": COMPARED,
    "together": TOGETHER,
    "ours": SHIPPED["r = 8"],
    "lora": SHIPPED["LoRA"],
}
"""Names of the ways in the item's texts."""
HIDDEN, EPOCHS, BATCH_SIZE, LEARNING_RATE, DROPOUT = 256, 12, 32, 1e-3, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A split's mean-pooled last hidden states, (samples, d) each: of both sentences alone, and of the pair as one
    text.
    """

    first: Tensor
    second: Tensor
    pair: Tensor

    def features(self, head: str) -> Tensor:
        """Return what a head reads, (samples, features)."""
        if head == TOGETHER:
            return self.pair
        parts = [self.first, self.second, (self.first - self.second).abs(), self.first * self.second]
        return torch.cat(parts, dim=1)


def pairs(item: Item, settings: Settings) -> Result:
    """Score the frozen embeddings of each task's pairs, and heads on them, with each seed."""
    comparisons, rows, words = [], list[Row](), dict[str, Any]()
    before = shipped_result(PAPER, "parity")
    for name in PAIRS:
        like, title = training(settings, name), TITLES[name]
        task = task_of(like, settings.data)
        splits = embed_task(task, like.model, like.max_length)
        scores = {COSINE: [cosine_score(task, splits)]}
        if task.kind == "classification":
            scores |= {FREQUENT: [frequent_score(task)]}
        scores |= {head: [trained_score(task, splits, head, seed) for seed in settings.seeds] for head in HEADS}
        for way, values in scores.items():
            comparisons.append(item.cell((way, title), None, fmean(values)))
            rows.append((title, way, fmean(values), spread(values), len(values), score_name(name)))
        if before is not None:
            num_seeds, measure = len(before.environment["seeds"].split(",")), f"{score_name(name)} (parity)"
            rows += [
                (title, SHIPPED[str(row[1])], row[4], row[5], num_seeds, measure)
                for row in before.tables[0].rows
                if row[0] == title and row[1] in SHIPPED
            ]
        settings.progress(f"{title}: " + ", ".join(f"{way} {fmean(values):.1f}" for way, values in scores.items()))
        score_of = {str(row[1]): row[2] for row in rows if row[0] == title}
        words |= {f"{name}_{key}": float(score_of.get(way) or math.nan) for key, way in WORDS.items()}
    return item.result(comparisons, tables={"scores": rows}, model=like.model, epochs=EPOCHS, hidden=HIDDEN, **words)


def embed_task(task: Task, model: str, max_length: int) -> dict[str, Embedded]:
    """Return every split's embeddings by the frozen backbone."""
    stack, tokenizer = load_stack(model).eval(), load_tokenizer(model)

    def embed(split: Split) -> Tensor:
        return pooled(stack, tokenize(split, tokenizer, max_length=max_length))

    embedded = {}
    for name in SPLITS:
        split: Split = getattr(task, name)
        assert split.pairs is not None, f"'{task.name}' has no pairs"
        alone = [replace(split, texts=texts, pairs=None) for texts in (split.texts, split.pairs)]
        embedded[name] = Embedded(first=embed(alone[0]), second=embed(alone[1]), pair=embed(split))
    return embedded


@torch.no_grad()
def pooled(stack: LayerStack, tokenized: TokenizedSplit) -> Tensor:
    """Return the mean over each sample's tokens of the last hidden states, (samples, d)."""
    rows = torch.zeros(len(tokenized), stack.hidden_size)
    for batch in evaluation_batches(tokenized):
        mask = batch.attention_mask[..., None].float()
        hidden = stack(batch.input_ids, batch.attention_mask)[1][-1]
        rows[list(batch.indices)] = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return rows


def cosine_score(task: Task, splits: Mapping[str, Embedded]) -> float:
    """Return the test score of the sentences' cosine; classes begin at the best threshold of the training split."""
    cosines = {name: F.cosine_similarity(each.first, each.second).numpy() for name, each in splits.items()}
    if task.kind == "regression":
        return score_answers(task, cosines["test"].tolist(), task.test.labels)

    def above(name: str, threshold: float) -> float:
        labels: Sequence[float] = getattr(task, name).labels
        return score_answers(task, (cosines[name] >= threshold).astype(float).tolist(), labels)

    thresholds = np.quantile(cosines["train"], np.linspace(0, 1, 201))
    return above("test", max(thresholds, key=lambda threshold: above("train", threshold)))


@torch.random.fork_rng(devices=[])
def trained_score(task: Task, splits: Mapping[str, Embedded], head: str, seed: int) -> float:
    """Return the test score of a head of one hidden layer at its best epoch on the validation split."""
    torch.manual_seed(seed)
    features = {name: each.features(head) for name, each in splits.items()}
    mean, std = features["train"].mean(dim=0), features["train"].std(dim=0) + 1e-6
    features = {name: (each - mean) / std for name, each in features.items()}
    labels = torch.tensor(task.train.labels)
    width = features["train"].shape[1]
    model = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, task.num_outputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    best = (-float("inf"), 0.0)
    for _ in range(EPOCHS):
        model.train()
        for rows in torch.randperm(len(labels)).split(BATCH_SIZE):
            task_loss(model(features["train"][rows]), labels[rows], task.kind).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            validation, test = (
                score(task, model(features[name]).tolist(), getattr(task, name).labels) for name in SPLITS[1:]
            )
        best = max(best, (validation, test))
    return best[1]
