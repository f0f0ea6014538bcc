"""Models of random weights for the inference benchmark, and the environments that they run in."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.inference import InferenceProfile
from workbench.methods.galaxy_plus.measuring import measure_host
from workbench.models.sharding import model_layout, open_weights
from workbench.models.tokenizer import tiny_tokenizer
from workbench.profiler.inference_timing import MeasuredInference, cached_inference

VOCABULARY = 2000
CLUSTERS = {"homogeneous": "galaxy-env-a", "heterogeneous": "galaxy-env-b"}
MEMORY_BYTES = 8_000_000_000
"""Of every device: the baselines of the benchmark must all fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSize:
    """A BERT by its sizes."""

    hidden_size: int
    num_heads: int
    num_layers: int


SIZES = {
    "MiniLM": BertSize(hidden_size=384, num_heads=12, num_layers=6),
    "BERT-base": BertSize(hidden_size=768, num_heads=12, num_layers=12),
    "GPT2-L layer": BertSize(hidden_size=1280, num_heads=20, num_layers=3),
}
"""GPT2-L layer: a layer of that size, repeated, for the scaling of section IV-E."""


def save_model(size: BertSize, folder: Path) -> None:
    """Write a BERT of random weights as a folder with safetensors."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        intermediate_size=4 * size.hidden_size,
        max_position_embeddings=512,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tiny_tokenizer(is_causal=False).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "pad_token": "[PAD]"}), encoding="utf-8")


def host_profile(folder: Path, size: BertSize, longest: int) -> tuple[InferenceProfile, str]:
    """Return what the model's operations take on one core of this host (measured once and kept), and where that is from."""
    name = str(folder)
    key = {"bench": "BERT of random weights", "hidden": size.hidden_size, "heads": size.num_heads, "longest": longest}

    def measure() -> MeasuredInference:
        layout = model_layout(name)
        source = open_weights(name, layout=layout)
        try:
            return measure_host(layout, source, longest=longest, what="hidden")
        finally:
            source.close()

    measured, note = cached_inference(key, measure)
    stacks = tuple(replace(shape, num_layers=size.num_layers) for shape in measured.profile.stacks)
    return replace(measured.profile, stacks=stacks), note


def emulated_cluster(name: str, mbit_per_s: float, host_flops_per_s: float, dilation: float = 1.0) -> Cluster:
    """Return the catalogue's environment with links of a bandwidth; a device multiplies matrices as fast as the catalogue says.

    host_flops_per_s: of one core of this host in GEMMs.  dilation: so many times slower are devices and links, and so many times as long is
    all that they do, in the same proportions; a host that is shared or small keeps up then.
    """
    cluster = load_cluster(CLUSTERS[name])
    link = Link(bytes_per_s=mbit_per_s * 125_000 / dilation)
    devices = tuple(
        replace(
            device,
            flops_per_s=device.flops_per_s / dilation,
            link=link,
            memory_bytes=MEMORY_BYTES,
            host_share=device.flops_per_s / dilation / host_flops_per_s,
        )
        for device in cluster.devices
    )
    return replace(cluster, name=f"{name}, {mbit_per_s:g} Mbit/s", devices=devices)
