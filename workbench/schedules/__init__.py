"""Build a Schedule from a Plan: the schedules of the five papers and their baselines, lowering passes, checks."""

from workbench.schedules.costs import plan_costs
from workbench.schedules.hetpipe import asynchronous_1f1b, hetpipe
from workbench.schedules.lowering import check, insert_allreduce, insert_transfers
from workbench.schedules.pipeline import backpropagation, cached_step, gpipe_order, hybrid_1f1b
from workbench.schedules.tensor import ring_allgather_gemm, ring_gemm_reducescatter, split_heads
