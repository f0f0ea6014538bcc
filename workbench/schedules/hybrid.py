"""PAC+'s first epoch: hybrid parallelism, a 1F1B pipeline of device groups with data parallelism inside (section V-A, Fig. 10).

Operations: F backbone forward, SF side-network forward (on the last stage with head and loss), SB side-network backward, ALLREDUCE of
the adapters' gradients inside a group, STEP.  The frozen backbone has no backward.
Values: act:s.m.p backbone output of stage s, side:s.m.p side output, sgrad:s.m.p the gradient with respect to the side input of stage s
(p: the piece at the boundary); on rank r: tap:s.m.r the backbone activations that the side network reads, ctx:s.m.r the autograd context
without the tap, gacc:s.m.r the token of an accumulated gradient, gsum:s._.r of its sum, loss:s.m.r, adapter:s._.r the new adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.plan import Plan
from workbench.core.schedule import NONE, Op, Schedule, Value
from workbench.schedules.pieces import Portion
from workbench.schedules.pipeline import Slot, assemble, one_f_one_b_order


def hybrid_1f1b(
    plan: Plan,
    micro_batch_sizes: Sequence[int],
    *,
    world_size: int | None = None,
    order: Callable[[int, int, int], list[Slot]] = one_f_one_b_order,
) -> Schedule:
    """Return one mini-batch of the first epoch, without its transfers.

    order: of the slots; gpipe_order is what section VI-D calls 1F1B disabled.
    A tap lives until SB, which needs it for the gradient of the down-projections.
    Raises ScheduleError for a plan without stages, a rank with two shares, or an empty micro-batch.
    """
    last = len(plan.stages) - 1

    def forward(stage: int, m: int, portion: Portion) -> tuple[Op, ...]:
        tokens, tap = Value("tokens", NONE, m), Value("tap", stage, m, portion.rank)
        backbone_in = (Value("act", stage - 1, m, p) for p in portion.pieces_in)
        backbone_out = (Value("act", stage, m, p) for p in portion.pieces_out)
        side_in = (Value("side", stage - 1, m, p) for p in portion.pieces_in)
        side_out = (Value("side", stage, m, p) for p in portion.pieces_out)
        loss = (Value("loss", stage, m, portion.rank),) if stage == last else ()
        return (
            Op("F", stage, m, NONE, (tokens, *backbone_in), (*backbone_out, tap)),
            Op("SF", stage, m, NONE, (tokens, tap, *side_in), (*side_out, *loss, Value("ctx", stage, m, portion.rank))),
        )

    def backward(stage: int, m: int, portion: Portion) -> tuple[Op, ...]:
        gradients_in = (Value("sgrad", stage + 1, m, p) for p in portion.pieces_out)
        gradients_out = (Value("sgrad", stage, m, p) for p in portion.pieces_in)
        reads = (Value("ctx", stage, m, portion.rank), Value("tap", stage, m, portion.rank), *gradients_in)
        return (Op("SB", stage, m, NONE, reads, (*gradients_out, Value("gacc", stage, m, portion.rank))),)

    return assemble(plan, micro_batch_sizes, order, forward, backward, trained="adapter", world_size=world_size)
