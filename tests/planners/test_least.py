"""The longest chain of a mini-batch is never longer than its simulation, and most often as long."""

from statistics import median

import pytest

from workbench.core.program import Program
from workbench.planners import Problem, candidates
from workbench.schedules import backpropagation, hybrid_1f1b, insert_transfers, plan_costs
from workbench.schedules.least import BACKPROPAGATION, HYBRID, least_s
from workbench.schedules.pipeline import ORDERS
from workbench.simulator import makespan_s

from .builders import SEQUENCE_LENGTH, rough, unequal


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(("build", "passes"), [(hybrid_1f1b, HYBRID), (backpropagation, BACKPROPAGATION)])
def test_it_is_a_lower_bound_of_the_simulation_and_close(order, build, passes):
    shares = []
    for seed in range(8):
        make = rough if seed % 2 else unequal
        profile, cluster = make(seed, num_layers=6, world_size=5, tight=False)
        for plan in candidates(Problem(profile, cluster, batch_size=16, micro_batches=4, sequence_length=4)):
            for sizes in ((4, 4, 4, 4), (4, 1, 3)):
                lengths = tuple(SEQUENCE_LENGTH + number % 2 for number in range(len(sizes)))
                costs = plan_costs(profile, cluster, plan, sizes=sizes, lengths=lengths)
                schedule = insert_transfers(build(plan, sizes, world_size=5, order=order))
                simulated_s = makespan_s(Program.on(cluster, schedule, costs))
                shares.append(least_s(plan, sizes, lengths, costs, order, passes) / simulated_s)
    assert max(shares) <= 1 + 1e-9
    assert median(shares) > 0.95 and len(shares) > 50


def test_there_is_none_on_shared_air():
    profile, cluster = unequal(1, num_layers=6, world_size=5, tight=False)
    [plan, *_] = candidates(Problem(profile, cluster, batch_size=16, micro_batches=4, sequence_length=4))
    on_air = type(cluster)(name="air", devices=cluster.devices, medium="wifi")
    costs = plan_costs(profile, on_air, plan, sizes=(4,) * 4, lengths=(4,) * 4)
    assert least_s(plan, (4,) * 4, (4,) * 4, costs, ORDERS["1f1b"], HYBRID) == 0.0
