"""A job: the model, the task and the method of a fine-tuning run.  Notebooks, papermill and the command line all create
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from workbench.core.effects import Effect, prepared
from workbench.core.errors import ConfigError
from workbench.core.methods import declaration_of, registered
from workbench.core.ranges import Count, Name, Seed, Text, require_ranges
from workbench.core.serial import shown

Mode = Literal["simulate", "execute"]
Fidelity = Literal["auto", "kernel", "paced"]
Tracker = Literal["none", "tensorboard", "trackio"]
"""How links are emulated: by the kernel, by our own pacing, or the best that works here."""
SnapshotPlace = Literal["disk", "neighbour"]
ADAPTER_RATE, FULL_RATE = 2e-3, 5e-5
"""Default peak learning rates.  For adapters: within what Houlsby et al. (2019, 3.2) tried, 3e-5 to 3e-3.  For full
fine-tuning: the highest that BERT's authors tried (Devlin et al., 2019, A.3)."""
_TRAINS = Effect(lambda situation: declaration_of(situation.job.method).trains, "a method that trains")
_BACKPROPAGATES = Effect(
    lambda situation: declaration_of(situation.job.method).backpropagates, "a method that backpropagates"
)
_BY_EPOCHS = Effect(lambda situation: getattr(situation.options, "steps", None) is None, "steps left out")
_CUT = Effect(
    lambda situation: (
        situation.plan is None or situation.plan.num_micro_batches > 1 or situation.job.micro_batches == 1
    ),
    "a plan that cuts mini-batches into micro-batches",
)
_READS_TEXT = prepared("a model that reads text", lambda prepared: prepared.facts.vocabulary_size > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """method: the method that trains or answers.  model: a name of the list, a folder or a hub name.  task: the task to
    learn.

    epochs: passes over the training samples.  seed: random seed of splits, data order and initial weights.  batch_size:
    number of samples of one optimizer step.  weight_decay, warmup_fraction: AdamW's, and the share of the steps in
    which the learning rate rises.

    train_samples, validation_samples, test_samples: None takes the task's whole split.
    learning_rate: the peak; None: ADAPTER_RATE, or FULL_RATE if the technique is full fine-tuning.
    max_length: the number of tokens to which a sample is truncated.  micro_batches: the number per mini-batch.
    data: a local folder for tasks that are not embedded; for own data (tasks.own.FROM_FILES) a file, a folder or a hub
    name.
    columns: the columns of own data whose names are not the usual ones: 'text=review,label=stars'.  options: the
    method's own settings.
    faults: faults injected into an executed run, such as 'kill:beta@step20; slow:gamma:4@step30-50' (see
    core.device_faults).
    converged_after: a run ends before its last epoch if the mean training loss has not fallen for this many epochs; 0:
    never (see methods.training.policy.plateaus).
    as_published: take the paper's settings (see methods.option_values.Published) instead of our defaults; explicit
    settings stay.
    snapshot_every: steps between two snapshots of the trained state, from which a run continues after a loss; 0: as
    often as it pays (see runtime.snapshot).  snapshot_to: 'disk', the run's folder; 'neighbour', the memory of the
    device and of the next one.
    """

    method: Name = "pac_plus"
    model: Text = "all-MiniLM-L6-v2"
    task: Text = "sentiment"
    epochs: Annotated[int, Meta(ge=1, le=1000), _TRAINS, _BY_EPOCHS] = 3
    seed: Annotated[Seed, _TRAINS] = 0
    batch_size: Annotated[int, Meta(ge=1, le=65_536), _TRAINS] = 32
    micro_batches: Annotated[int, Meta(ge=1, le=4096), _CUT] = 4
    learning_rate: Annotated[float, Meta(gt=0, le=1e3), _TRAINS] | None = None
    weight_decay: Annotated[float, Meta(ge=0, le=1e3), _BACKPROPAGATES] = 0.01
    warmup_fraction: Annotated[float, Meta(ge=0, lt=1), _BACKPROPAGATES] = 0.06
    max_length: Annotated[int, Meta(ge=1, le=10**6), _READS_TEXT] = 64
    train_samples: Annotated[Count, _TRAINS] | None = None
    validation_samples: Annotated[Count, _TRAINS] | None = None
    test_samples: Count | None = None
    data: Text | None = None
    columns: Text = ""
    options: dict[str, Any] = field(default_factory=dict)
    faults: Text = ""
    converged_after: Annotated[int, Meta(ge=0, le=1000)] = 0
    snapshot_every: Annotated[int, Meta(ge=0, le=10**6), _BACKPROPAGATES] = 0
    snapshot_to: Annotated[SnapshotPlace, _BACKPROPAGATES] = "disk"
    as_published: bool = False

    @property
    def identity(self) -> Job:
        """Return the parts of the job that must match to resume a run: all except faults, snapshots, and when
        to end.
        """
        return replace(
            self,
            learning_rate=self.peak_learning_rate,
            faults="",
            snapshot_every=0,
            snapshot_to="disk",
            converged_after=0,
        )

    @property
    def peak_learning_rate(self) -> float:
        """Return the requested learning rate, or else the technique's default."""
        if self.learning_rate is not None:
            return self.learning_rate
        by_default = self.method in registered() and declaration_of(self.method).trains_all_weights
        technique = self.options.get("technique", "full" if by_default else "")
        return FULL_RATE if technique == "full" else ADAPTER_RATE

    def __post_init__(self) -> None:
        require_ranges(self, "A job")
        if not isinstance(self.options, dict):
            raise ConfigError(
                f"A job with options = {shown(self.options)} was asked for.",
                "They are not a dict.",
                "Give {'name': value}.",
            )
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"A batch_size of {self.batch_size} in {self.micro_batches} micro_batches was asked for.",
                f"{self.batch_size} is not a multiple of {self.micro_batches}.",
                "Change one of them.",
            )
