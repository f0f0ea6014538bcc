"""P-RGE's declaration: its options, its form, and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.effects import SEVERAL_DEVICES, only
from workbench.core.methods import Declaration, FormField
from workbench.core.names import FloatType
from workbench.core.ranges import Count, Positive, Width
from workbench.methods.option_values import Published
from workbench.methods.p_rge.seeds import MAX_QUERIES
from workbench.methods.training.options import training_calls

METHOD = "p_rge"
Execution = Literal["sequential", "outer", "inner", "both"]
Choice = Literal["auto", "sequential", "outer", "inner", "both"]
Precision = Literal["float32", "bfloat16", "float16", "int8", "nf4"]
EstimatorName = Literal["two_point", "one_sided", "low_rank", "low_rank_momentum", "jvp"]

Projections = Literal["query_value", "all"]
LOW_RANK: tuple[EstimatorName, ...] = ("low_rank", "low_rank_momentum")
Momentum = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PRGEOptions:
    """Settings of P-RGE, given in Job.options.  E, the samples per query, is the job's batch_size; eta is its
    learning_rate, which is constant.

    queries: q, random directions per step.  epsilon: scale of the perturbation; 'jvp' has none.
    estimator: how the gradient is estimated (see estimator_table).  'two_point': from the losses on both sides (P-RGE).
    'one_sided': from the loss on one side and the loss in the middle (FZOO).  'low_rank': along matrices of low rank
    (LOZO).  'low_rank_momentum': the same with momentum (LOZO-M).  'jvp': from exact derivatives along the directions.
    direction_rank: r, the rank of LOZO's directions U V^T.  subspace_steps: nu, the steps in which V stays the same.
    momentum: beta, the share of LOZO-M's former steps in the next one.
    steps: number of steps of the whole run; None uses the job's epochs.
    execution: which passes run in parallel; 'auto' chooses the fastest that fits, by the profile.
    prompts: the paper's (Table 8), or those of the public code of MobiZO, its later form; own data have one prompt.
    evaluation: which score is reported.  'p_rge': the validation split chooses the epoch, and the test split is scored
    once.  'mobizo', as in MobiZO's public code: the best of all epochs on one split, which is the test split here (the
    published validation split if test labels are secret), so validation_samples has no effect; a question has one
    accepted answer.
    words: label words of a classification instead of the prompt's own, such as 'bad/good'.
    loss: whether the loss is over the whole vocabulary, as in the paper (appendix D.2), or only over the label words,
    as in MeZO.
    technique, projections, rank, alpha: the trained matrices (see TrainableConfig); MobiZO, the later form of P-RGE,
    trains matrices next to all projections.
    precision: precision of the frozen weights.
    compute_dtype: dtype of activations; weights of another dtype are converted to it once per step.  None: the weights'
    dtype, or float32 if they are int8 or nf4.  A processor without 16-bit instructions is many times
    faster in float32.
    after_loss: what to do with a step in which a device is lost.  'drop' completes it from the other devices' queries.
    'repeat' repeats it with all q, so that the run's result does not change.
    adapt: whether to change q, E and shares if devices have too little memory or change their speed during the run.  q
    and E are lowered until a step takes at most 1.5 times as long as the first.
    """

    published_job = MappingProxyType(
        {
            "batch_size": Published(4, "appendix D.3: q E = 16"),
            "learning_rate": Published(1e-3, "Table 9: the largest of its grid"),
        }
    )

    queries: Annotated[int, Meta(ge=1, le=MAX_QUERIES)] = 4
    epsilon: Annotated[Positive, only(estimator=("two_point", "one_sided", *LOW_RANK))] = 1e-2
    estimator: EstimatorName = "two_point"
    direction_rank: Annotated[Width, only(estimator=LOW_RANK)] = 2
    subspace_steps: Annotated[Count, only(estimator=LOW_RANK)] = 50
    momentum: Annotated[Momentum, only(estimator="low_rank_momentum")] = 0.9
    steps: Annotated[Annotated[int, Meta(ge=1, le=100_000)] | None, Published(20_000, "section 4.1")] = None
    execution: Choice = "auto"
    prompts: Literal["p_rge", "mobizo"] = "p_rge"
    evaluation: Literal["p_rge", "mobizo"] = "p_rge"
    words: str = ""
    loss: Literal["vocabulary", "label_words"] = "vocabulary"
    technique: Literal["lora_fa", "lora", "dora", "vera"] = "lora_fa"
    projections: Projections = "query_value"
    rank: Width = 16
    alpha: Annotated[Positive, only(technique=("lora_fa", "lora", "dora"))] = 32.0
    precision: Precision = "float32"
    compute_dtype: FloatType | None = None
    after_loss: Annotated[Literal["drop", "repeat"], SEVERAL_DEVICES] = "drop"
    adapt: bool = False


_METHOD, _RANK_JOB = "workbench.methods.p_rge.method:PRGE", "workbench.methods.p_rge.rank_job"
DECLARATION = Declaration(
    options=PRGEOptions,
    title="P-RGE",
    implementation=_METHOD,
    calls=training_calls(
        _METHOD,
        f"{_RANK_JOB}:PRGERankJob",
        result=f"{_RANK_JOB}:QueryResult",
        done="workbench.methods.p_rge.zeroth_order:StepLog",
    ),
    form={
        "queries": FormField(label="Queries q", tooltip="Random directions of a step, divided among the devices"),
        "batch_size": FormField(label="Samples E", tooltip="Samples of each query"),
        "estimator": FormField(
            label="Estimator",
            tooltip="How the losses of a step become a gradient",
            values={
                "two points (P-RGE)": "two_point",
                "one-sided, q + 1 passes (FZOO)": "one_sided",
                "low-rank (LOZO)": "low_rank",
                "low-rank with momentum (LOZO-M)": "low_rank_momentum",
                "exact derivatives (jvp)": "jvp",
            },
        ),
        "steps": FormField(label="Steps", tooltip="Steps of the run; 0 takes those of the job's epochs"),
        "execution": FormField(
            label="Execution",
            tooltip="Which passes of a device run side by side",
            values={
                "auto (by measurement)": "auto",
                "sequential": "sequential",
                "outer: queries side by side": "outer",
                "inner: both signs side by side": "inner",
                "both: all in one pass": "both",
            },
        ),
        "after_loss": FormField(
            label="A lost step",
            tooltip="What becomes of the step in which a device dies: it is made ...",
            values={"without its queries": "drop", "again, with all": "repeat"},
        ),
    },
    load_prompted="workbench.methods.p_rge.zeroth_order:load_trained",
    backpropagates=False,
    converges=False,
    schedules="workbench.methods.p_rge.named_schedules:SCHEDULES",
    alternatives={"LoRA-FA, forward passes only": {}, "LoRA-FA, forward passes only, int8": {"precision": "int8"}},
)
