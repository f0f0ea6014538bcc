"""Models cut inside the layers: by attention units, feed-forward columns and tokens (Galaxy+, section III-B)."""

from workbench.models.sharding.building import model_layout
from workbench.models.sharding.ends import What
from workbench.models.sharding.layout import ModelLayout
from workbench.models.sharding.placing import added_bytes, load_shard, reload_shard
from workbench.models.sharding.run import KeyValueCache, Run, Step
from workbench.models.sharding.shard import ModelShard
from workbench.models.sharding.slices import LayerSlices, ShardSpec, shard_spec
from workbench.models.sharding.weights import WeightSource, open_weights, weights_of

__all__ = [
    "KeyValueCache", "LayerSlices", "ModelLayout", "ModelShard", "Run", "ShardSpec", "Step", "WeightSource", "What", "added_bytes",
    "load_shard", "model_layout", "open_weights", "reload_shard", "shard_spec", "weights_of",
]  # fmt: skip
