"""Models cut inside the layers: by attention units, feed-forward columns and tokens (Galaxy+, section III-B)."""

from workbench.models.sharding.ends import What
from workbench.models.sharding.layout import Block, ModelLayout, StackLayout
from workbench.models.sharding.placing import added_bytes, load_shard, missing_bytes, reload_shard
from workbench.models.sharding.reference import generate, run_plan, tiles_of
from workbench.models.sharding.run import KeyValueCache, Run, Step
from workbench.models.sharding.shard import ModelShard
from workbench.models.sharding.slices import LayerSlices, ShardSpec, shard_spec
from workbench.models.sharding.sources import end_bytes, model_layout, open_weights, stack_shapes
from workbench.models.sharding.weights import WeightSource, weights_of

__all__ = [
    "Block", "KeyValueCache", "LayerSlices", "ModelLayout", "ModelShard", "Run", "ShardSpec", "StackLayout", "Step", "WeightSource",
    "What", "added_bytes", "end_bytes", "generate", "load_shard", "missing_bytes", "model_layout", "open_weights", "reload_shard",
    "run_plan", "shard_spec", "stack_shapes", "tiles_of", "weights_of",
]  # fmt: skip
