"""Single-shot inference on several devices: Galaxy+'s two schemes, its baselines, and one more token with a key-value cache.

Operations (stage: block number; part: first tile; microbatch: step of the ring) and values (the same indices):

- EMB on the first position reads ids, writes emb of every tile; ENTER reads emb, writes hid and at the tile's owner res.
- QKV, CQ, UP read hid tiles and write one value for all of them: qkv, q, act.  CKV reads all mem tiles, writes kv.
- ATT reads all qkv, CATT q and kv; they write ctx of each of their tiles.  OUT, COUT (from ctx), DOWN (from act) write a product for
  each of their tiles: prod, or sum of step 0 where the ring's sum begins.  ADD reads prod and the received sum, writes the next sum.
- CONN reads its terms and, last, res; it writes hid and res for the next block; mem after an encoder, only hid at the end.
- HEAD on the first position reads all hid tiles, writes out.
- 'sequence': QKV writes q and kv, and kv goes around the ring.  'tensor': ALLREDUCE makes sum from prod; BROADCAST makes wide from emb.
  'pipeline': LAYER (stage: layer) makes lay of the next layer from lay.
"""

from __future__ import annotations

from workbench.core.schedule import Schedule
from workbench.schedules.inference.baselines import pipeline_inference, sequence_inference, tensor_inference
from workbench.schedules.inference.costs import MESSAGE_S, InferenceCosts
from workbench.schedules.inference.hybrid import hybrid_inference
from workbench.schedules.inference.layout import InferenceLayout
from workbench.schedules.inference.tuning import InferencePrices, choose_tiles, smallest_tile, tile_options, tune


def inference_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one sequence by the plan's paradigm, complete with its transfers.

    world_size: of the cluster; ranks that the plan does not use have no operations.
    """
    builders = {
        "hybrid": hybrid_inference,
        "tensor": tensor_inference,
        "sequence": sequence_inference,
        "pipeline": pipeline_inference,
    }
    return builders[layout.plan.paradigm](layout, world_size)


def decode_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one more token (a layout of InferenceLayout.decode): scheme 1 in every layer, or the pipeline."""
    if layout.plan.paradigm == "pipeline":
        return pipeline_inference(layout, world_size)
    return tensor_inference(layout, world_size)
