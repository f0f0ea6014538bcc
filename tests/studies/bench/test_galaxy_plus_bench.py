"""The benchmark of single-shot inference: which points are measured, and what is made of what the ranks send back."""

from __future__ import annotations

import pytest
from torch import tensor

from tests.plans import inference_plan
from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.core.schedule import Op
from workbench.core.timeline import Span
from workbench.methods.galaxy_plus.costs import scaled_to
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.planners import Problem
from workbench_studies.bench.galaxy_plus import DILATION, MBIT_PER_S, MODELS, Selection, _latencies
from workbench_studies.bench.inference_parts import _layer_s, emulated_cluster
from workbench_studies.bench.inference_sides import Side, SidesResult, overlap_point

PLAN = inference_plan(units=(1, 1), columns=(2, 2), shares=(1.0, 1.0), schemes=(1, 1), overlap=True)


def prices() -> SequencePrice:
    stack = StackShape(
        num_layers=2, num_units=2, hidden_size=8, columns=4, unit_bytes=1, column_bytes=1, hidden_bytes=32
    )
    costs = (StackTimes(pieces={"UP": PieceCost(fixed_s=1.0)}),)
    cluster = emulated_cluster("homogeneous", 500, 60e9)
    profile = InferenceProfile(model="test", source="analytic", stacks=(stack,), costs=(costs,) * cluster.world_size)
    return SequencePrice(Problem(profile, cluster, sequence_length=8))


def test_words_restrict_the_points() -> None:
    """Words of one kind are alternatives; a kind of which none is named has all; an unknown word is answered with those
    that there are."""
    reference = Selection.of(())
    chosen = Selection.of(("minilm", "125", "1000", "latency"))
    assert (chosen.models, chosen.mbit_per_s, chosen.parts) == (("MiniLM",), (125, 1000), ("latency",))
    assert chosen.clusters == ("homogeneous", "heterogeneous")
    assert (reference.models, reference.mbit_per_s) == (MODELS, MBIT_PER_S)
    with pytest.raises(ConfigError, match="bert-base, homogeneous"):
        Selection.of(("roberta",))


def test_devices_keep_their_proportions() -> None:
    """Two fast, one medium and one slow device, as fast as the catalogue says, behind links of the asked bandwidth."""
    cluster = emulated_cluster("heterogeneous", 250, 60e9)
    shares = [device.host_share or 0.0 for device in cluster.devices]
    assert [share * 60e9 for share in shares] == pytest.approx([15.7e9, 15.7e9, 8.8e9, 4.3e9])
    assert shares[0] == shares[1] > shares[2] > shares[3]
    assert shares[0] / shares[3] == pytest.approx(cluster.devices[0].flops_per_s / cluster.devices[3].flops_per_s)
    assert {device.link.bytes_per_s for device in cluster.devices} == {250 * 125_000}


def test_dilation_slows_all_in_proportion_and_is_divided_out() -> None:
    """A simulated request takes twice as long on devices and links at half their speed; reported times are as at full
    speed."""
    usual, slowed = (emulated_cluster("heterogeneous", 250, 60e9, dilation) for dilation in (1.0, 2.0))
    for device, other in zip(usual.devices, slowed.devices, strict=True):
        assert (other.host_share, other.link.bytes_per_s) == pytest.approx(
            ((device.host_share or 0.0) / 2, device.link.bytes_per_s / 2)
        )
    host = StackTimes(pieces={name: PieceCost(fixed_s=1e-3) for name in ("UP", "DOWN", "QKV", "OUT")})
    stack = StackShape(
        num_layers=2, num_units=2, hidden_size=8, columns=4, unit_bytes=1, column_bytes=1, hidden_bytes=1 << 20
    )
    profile = InferenceProfile(model="test", source="measured", stacks=(stack,), costs=((host,),))
    seconds = [
        SequencePrice(Problem(scaled_to(profile, cluster), cluster, sequence_length=8), message_s=0.0)(PLAN)
        for cluster in (usual, slowed)
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0]) and seconds[0] > 0
    result = SidesResult(
        seconds={"galaxy_plus": [2.0], "local": [3.0]},
        outputs={name: tensor([1.0]) for name in ("galaxy_plus", "local")},
    )
    result.paced_s = 1.0
    point = _latencies(
        [result],
        [Side(name=name, plan=PLAN, ids=tensor([[1]]), rounds=1) for name in ("galaxy_plus", "local")],
        prices(),
    )
    assert (point["galaxy_plus_s"], point["local"]) == (2.0 / DILATION, 1.5)


def test_ratios_are_of_one_round() -> None:
    """Each baseline's seconds over Galaxy+'s of the same round; late time makes a point invalid; unequal answers are an
    error."""
    names = {"galaxy_plus": [1.0, 2.0], "megatron_lm": [1.5, 4.0], "local": [3.0]}
    sides = [Side(name=name, plan=PLAN, ids=tensor([[1]]), rounds=2) for name in names]
    outputs = {name: tensor([1.0]) for name in names}
    result = SidesResult(seconds=names, outputs=outputs, late_s=0.02, paced_s=1.0)
    point = _latencies([result, SidesResult(paced_s=1.0)], sides, prices())
    assert (point["megatron_lm"], point["megatron_lm from, to"], point["local"]) == (1.75, (1.5, 2.0), 2.0)
    assert point["overrun_share"] == pytest.approx(0.02) and point["is_valid"]
    result.late_s = 1.0
    assert not _latencies([result], sides, prices())["is_valid"]
    result.outputs["megatron_lm"] = tensor([1.1])
    with pytest.raises(AssertionError, match="do not compute the same"):
        _latencies([result], sides, prices())


def test_overlap_compares_with_the_longer_side() -> None:
    """Blocks of the second layer, from the last device's end to the next last device's end; computation of the busiest
    device."""
    both = [{1: 1.0, 2: 2.0, 3: 4.0}, {1: 1.5, 2: 2.5, 3: 4.6}]
    alone = [{1: 0.1, 2: 0.9, 3: 2.7}, {1: 0.2, 2: 0.7, 3: 1.0}]
    busy = [{2: 0.5, 3: 2.0}, {2: 0.8, 3: 1.0}]
    parts = zip(both, alone, busy, strict=True)
    results = [SidesResult(blocks={"both": [b], "communication": [a], "computation": [c]}) for b, a, c in parts]
    point = overlap_point(PLAN, prices(), results)
    blocks = point["overlap blocks"]
    assert blocks["attention"]["both_s"] == pytest.approx(1.0)  # 1.5 to 2.5; communication 0.2 to 0.9, computation 0.8
    assert blocks["attention"]["computation_s"] == pytest.approx(0.8)
    assert blocks["feed_forward"]["both_s"] == pytest.approx(2.1)
    assert point["overlap"] == pytest.approx((1.0 + 2.1) / (0.8 + 2.0))


def test_a_layer_lasts_from_end_to_end() -> None:
    """A layer ends with its last connection on the last device."""

    def span(rank: int, kind: str, stage: int, end_s: float) -> Span:
        return Span(rank, Op(kind, stage), 0.0, end_s)

    split = [SidesResult(spans={"a": tuple(span(0, "CONN", block, 1.0 + block) for block in range(6))})]
    split.append(SidesResult(spans={"a": (span(1, "CONN", 5, 8.0),)}))
    assert _layer_s(split, "a") == pytest.approx(3.0)  # ends of 2, 4 and 8
