"""Models divided within layers: by attention units, feed-forward columns and tokens (Galaxy+, section III-B)."""

from workbench.models.sharding.building import WeightSource, layout_facts, model_layout, open_weights, weights_of
from workbench.models.sharding.held import What
from workbench.models.sharding.layout import LayerSlices, LayoutFacts, ModelLayout, ShardSpec, shard_spec
from workbench.models.sharding.run import KeyValueCache, Row, Run
from workbench.models.sharding.shard import ModelShard, added_bytes
