"""Fine-tune a language model of transformers with forward passes only, in the manner of transformers' Trainer.

P-RGE (MobiZO), Algorithm 1, on one process: the estimator, the seeds and the update are those of the method's runs.
Evaluation, prediction, callbacks, logging and checkpoints are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments

from workbench.core.errors import ConfigError
from workbench.core.files import make_folder
from workbench.methods.p_rge.options import EstimatorName, Execution
from workbench.methods.p_rge.zeroth_order import CausalModel, Prge, StepLog, TrainableConfig, ZerothOrderConfig
from workbench.methods.p_rge.zeroth_order.loading import TRAINED, save_for_peft, save_trained
from workbench.methods.p_rge.zeroth_order.trainables import ZerothOrderTechnique
from workbench.models.matmul import head_of
from workbench.models.saving import TrainedDescription
from workbench.models.stack import LayerStack
from workbench.tasks.prompts import PromptBatch, step_indices
from workbench.tasks.tokenize import padded_length

IGNORED = -100
"""The label of a token that is not predicted, as in transformers."""


@dataclass
class ZeroOrderArguments(TrainingArguments):
    """transformers' TrainingArguments with the settings of forward-only training.

    queries: random directions of a step.  epsilon: the perturbation's scale.  estimator, direction_rank,
    subspace_steps, momentum: how losses become a gradient (see PRGEOptions).  execution: which of a step's forward
    passes run in parallel (see ZerothOrderConfig).  technique, rank, alpha: the matrices that are trained (see
    TrainableConfig).
    per_device_train_batch_size is E, the samples of each query; the learning rate is constant unless another scheduler
    is named.
    """

    learning_rate: float = 1e-3
    lr_scheduler_type: str = "constant"
    per_device_train_batch_size: int = 4
    queries: int = 4
    epsilon: float = 1e-2
    estimator: EstimatorName = "two_point"
    direction_rank: int = 2
    subspace_steps: int = 50
    momentum: float = 0.9
    execution: Execution = "both"
    technique: ZerothOrderTechnique = "lora_fa"
    rank: int = 16
    alpha: float = 32.0


class ZeroOrderTrainer(Trainer):
    """Train a causal language model with forward passes only.

    model: a model of transformers, in memory on the CPU; its projections are replaced by adapted ones.  args:
    ZeroOrderArguments, or transformers' TrainingArguments, whose missing settings have their defaults.  A sample has
    input_ids and labels (-100: not predicted); batches are padded on the right.
    The training loss is the mean over the samples of each one's mean over its labels; evaluate() gives transformers'
    own, the mean over all labels.
    trained: the model with its trainable values, for the method's own functions.  step_logs: seeds and scalars of the
    steps so far, which repeat the training (see zeroth_order.replay).
    Raises ConfigError for another kind of model, a GPU, or gradients accumulated over batches.
    """

    optimizer: Any

    def __init__(self, model: Any, args: TrainingArguments | None = None, **settings: Any) -> None:
        args = args or ZeroOrderArguments()
        request = "Training by forward passes was asked for."
        if args.gradient_accumulation_steps != 1:
            todo = "Raise per_device_train_batch_size or queries instead."
            raise ConfigError(request, f"gradient_accumulation_steps is {args.gradient_accumulation_steps}.", todo)
        if args.device.type != "cpu":
            raise ConfigError(request, f"It computes on a CPU, and the device is {args.device}.", "Set use_cpu=True.")
        stack = LayerStack(model.base_model, language_model_head=head_of(model))
        if not stack.is_causal:
            problem = f"A '{model.config.model_type}' model does not predict the next word."
            raise ConfigError(request, problem, "Choose a causal model, or `workbench run --method p_rge`.")
        chosen: dict[str, Any] = {name: getattr(args, name, default) for name, default in _DEFAULTS.items()}
        trainable = TrainableConfig(
            technique=chosen["technique"], rank=chosen["rank"], alpha=chosen["alpha"], seed=args.seed
        )
        self.trained = CausalModel(stack.stage(0, stack.num_layers), stack.language_model_head, trainable)
        self._estimator = Prge(
            self.trained,
            ZerothOrderConfig(
                **{name: chosen[name] for name in _ESTIMATE}, learning_rate=args.learning_rate, seed=args.seed
            ),
        )
        self.step_logs: list[StepLog] = []
        super().__init__(model, args, **settings)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return an optimizer that only carries the learning rate for the scheduler: the estimator makes the update."""
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.args.learning_rate)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Make a step of the estimator and return the mean loss () of its passes."""
        self.trained.eval()  # no dropout, as in the method's runs
        rate = self.optimizer.param_groups[0]["lr"]
        if rate != self._estimator.config.learning_rate:
            self._estimator.config = replace(self._estimator.config, learning_rate=rate)
        result = self._estimator.step(prompts_of(inputs), self.state.global_step)
        self.step_logs.append(result.log)
        return torch.tensor(result.loss)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return _RunOrder(len(dataset), self.args.seed)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the trained values, as the method's runs do, and an adapter for peft where it has one."""
        folder, name = make_folder(output_dir or self.args.output_dir), self.model.name_or_path
        if not name:
            problem = "The model has no name_or_path, so that nobody could find what the values belong to."
            raise ConfigError(
                f"Saving trained values in '{folder}' was asked for.", problem, "Load it by from_pretrained."
            )
        save_for_peft(folder, self.trained, name=name)
        described = TrainedDescription(model=name, config=self.trained.config)
        save_trained(folder / TRAINED, self.trained.trainables.state(), described)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._estimator.config.rule.has_momentum:
            raise ConfigError(
                f"Training was to continue from '{resume_from_checkpoint}'.",
                "A checkpoint has no momentum.",
                "Begin again, or use `workbench run --method p_rge`, whose log has it.",
            )
        self.trained.trainables.load_state(load_file(Path(resume_from_checkpoint) / TRAINED))


_ESTIMATE = ("queries", "epsilon", "estimator", "direction_rank", "subspace_steps", "momentum", "execution")
_DEFAULTS = {
    name: ZeroOrderArguments.__dataclass_fields__[name].default for name in (*_ESTIMATE, "technique", "rank", "alpha")
}


class _RunOrder(Sampler[int]):
    """The order of samples in the method's runs: a permutation for each epoch that depends on the seed alone."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed, self._epoch = num_samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(step_indices(self._num_samples, self._num_samples, self._seed, self._epoch))

    def __len__(self) -> int:
        return self._num_samples


def prompts_of(inputs: dict[str, Tensor]) -> PromptBatch:
    """Return a batch of transformers, input_ids, labels and maybe attention_mask (n, t), for the estimator.

    Raises ConfigError without labels, or for padding on the left.
    """
    request = "A batch for training by forward passes was asked for."
    if "labels" not in inputs or inputs["labels"].shape != inputs["input_ids"].shape:
        raise ConfigError(request, "It has no label for each token.", "Use DataCollatorForSeq2Seq, or one like it.")
    ids, labels = inputs["input_ids"], inputs["labels"][:, 1:]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ConfigError(request, "It is padded on the left.", "Set the tokenizer's padding_side to 'right'.")
    is_label = labels != IGNORED
    if not bool(is_label.any(dim=1).all()):
        raise ConfigError(request, "A sample has no token to predict.", "Leave it out, or raise the maximum length.")
    count = int(is_label.sum(dim=1).max())
    # Positions of the labels first, in their order: a label's position is that of the token before it.
    positions = torch.argsort(~is_label, dim=1, stable=True)[:, :count]
    real = is_label.gather(1, positions)
    lengths = (positions * real).amax(dim=1) + 1  # what follows the last of them predicts nothing
    width = padded_length(lengths.tolist())
    return PromptBatch(
        input_ids=F.pad(ids, (0, width))[:, :width],
        attention_mask=F.pad(mask, (0, width))[:, :width] * (torch.arange(width) < lengths[:, None]),
        targets=labels.gather(1, positions) * real,
        positions=positions * real,
        target_mask=real,
        labels=torch.zeros(len(ids), dtype=torch.int64),
        indices=tuple(range(len(ids))),
    )
