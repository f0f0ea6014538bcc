"""Galaxy+'s declaration: its options, its form, and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from workbench.core.effects import Effect, Situation, only
from workbench.core.methods import Declaration, FormField, Parts, RequestService
from workbench.core.ranges import Tokens
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings
from workbench.methods.option_values import Published

METHOD = "galaxy_plus"
System = Literal["galaxy_plus", "galaxy", "megatron_lm", "sequence_parallel", "edgeshard", "local"]


OF_GALAXY_PLUS = ("system", "galaxy_plus")


def _positions(situation: Situation) -> int:
    """Return how many devices split a sequence; all of the cluster's before there is a plan."""
    return (
        situation.cluster.world_size
        if situation.plan is None or situation.plan.inference is None
        else situation.plan.inference.num_positions
    )


def _is_tiled(situation: Situation) -> bool:
    chosen, size = None if situation.plan is None else situation.plan.inference, situation.options.tile_tokens
    return chosen is None or not size or not chosen.shares or size < max(chosen.tokens(chosen.length))


_OWN_PLANNER = only(system="galaxy_plus", is_refused=True)
_SCHEME_2 = Effect(
    lambda situation: (situation.options.planner, situation.options.scheme) != ("algorithm_1", 2),
    "planner = own",
    True,
    ("planner",),
)
_RING = only(system=("galaxy_plus", "galaxy"))
_SPLIT = Effect(lambda situation: _positions(situation) > 1, "a plan that splits a sequence over two or more devices")
_TWO_WAYS = Effect(lambda situation: _positions(situation) > 2, "a ring of three or more devices")
_OVERLAPPED = Effect(lambda situation: situation.options.overlap is not False, "overlap = true", reads=("overlap",))
_TILED = Effect(_is_tiled, "a size below a device's tokens")
_ALTERNATIVES = Effect(
    lambda situation: situation.cluster.world_size > 1 or situation.options.system == "local", "two or more devices"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions:
    """Settings of single-shot inference, given in Job.options.

    system: 'galaxy_plus' divides layers by two schemes, 'galaxy' by scheme 1 only; 'megatron_lm', 'sequence_parallel',
    'edgeshard' (a pipeline) and 'local' (the fastest device) are the baselines (section IV-A).
    planner: planner of the system galaxy_plus: 'own' (ours), or 'algorithm_1' as printed.  overlap, both_ways: see
    InferencePlan; by default the planner decides.
    tile_tokens: size of the ring's tiles; by default the planner decides; 0: undivided tiles.  scheme: 1 or 2 for all
    layers.
    generate: number of new tokens for each request; 0 returns hidden states.
    compare: number of answers to compare with the local model's.
    """

    system: Annotated[System, _ALTERNATIVES] = "galaxy_plus"
    planner: Annotated[
        Literal["own", "algorithm_1"], _OWN_PLANNER, Published("algorithm_1", "section III-C", OF_GALAXY_PLUS)
    ] = "own"
    overlap: Annotated[bool | None, _RING, _SPLIT, Published(True, "section III-D", OF_GALAXY_PLUS)] = None
    both_ways: Annotated[bool | None, _RING, _TWO_WAYS, _OVERLAPPED, Published(False, "Fig. 9", OF_GALAXY_PLUS)] = None
    tile_tokens: Annotated[
        Tokens | None, _RING, _SPLIT, _OVERLAPPED, _TILED, Published(0, "Fig. 9: one tile per device", OF_GALAXY_PLUS)
    ] = None
    scheme: Annotated[Literal[1, 2], _OWN_PLANNER, _SCHEME_2] | None = None
    generate: Tokens = 0
    compare: Tokens = 4


_SERVING = "workbench.methods.galaxy_plus.serving.worker"
_MESSAGES = "workbench.methods.galaxy_plus.serving.messages"
DECLARATION = Declaration(
    options=InferenceOptions,
    title="Galaxy+",
    implementation="workbench.methods.galaxy_plus.method:GalaxyPlus",
    calls={
        "workbench.methods.galaxy_plus.method:measure_rank": "",
        f"{_SERVING}:serve_worker": Parts(
            job=f"{_SERVING}:ServiceJob",
            ended="workbench.methods.common.rank_results:RankResult",
            done=f"{_SERVING}:Served",
            probe="builtins:int",
            order=f"{_MESSAGES}:TextOrder",
            events=(
                *(f"{_SERVING}:{name}" for name in ("Loaded", "ServiceBegun", "UnderWay", "BlockReport", "Failed")),
                f"{_MESSAGES}:TextToken",
            ),
        ),
    },
    form={
        "system": FormField(
            label="System",
            tooltip="How a sequence is split (section IV-A)",
            values={
                "Galaxy+": "galaxy_plus",
                "Galaxy": "galaxy",
                "Megatron-LM": "megatron_lm",
                "sequence parallel": "sequence_parallel",
                "EdgeShard": "edgeshard",
                "one device": "local",
            },
        ),
        "scheme": FormField(
            label="Schemes",
            tooltip="Of Galaxy+: which scheme a layer takes (section III-B)",
            values={"chosen layer by layer": "planned", "scheme 1 everywhere": 1, "scheme 2 everywhere": 2},
        ),
        "overlap": FormField(
            label="Overlap",
            tooltip="Transfers of tiles overlap with computation (section III-D)",
            values={"as planned": "planned", "on": True, "off": False},
        ),
        "max_length": FormField(label="Tokens", tooltip="Tokens at which a request is cut"),
        "test_samples": FormField(
            label="Requests", tooltip="How many requests are answered, one after the other; 0 takes all"
        ),
    },
    trains=False,
    backpropagates=False,
    converges=False,
    serves_texts="workbench.methods.galaxy_plus.serving.panel:serve_texts",
    serves_requests=RequestService(
        ReschedulingSettings,
        "workbench.methods.galaxy_plus.serving.stream:serve_requests",
        "workbench.methods.galaxy_plus.serving.figures:serving",
    ),
    advises_drafts="workbench.methods.galaxy_plus.serving.draft_advice:advise_drafts",
    alternatives={
        "cut inside the layers": {},
        "a pipeline of layers (EdgeShard)": {"system": "edgeshard"},
        "tensor parallel (Megatron-LM)": {"system": "megatron_lm"},
        "sequence parallel": {"system": "sequence_parallel"},
        "one device": {"system": "local"},
    },
)
