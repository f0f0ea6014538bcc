"""Quantized backbones: every family and storage type, gradients, and the bytes that are held."""

import ctypes
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import nn

from workbench.core.errors import ConfigError
from workbench.core.names import StorageType
from workbench.models.families import FAMILIES
from workbench.models.loading import load_stack
from workbench.models.matmul import LanguageModelHead
from workbench.models.quantization import (
    QuantizationConfig,
    QuantizedEmbedding,
    QuantizedLinear,
    dense_weight,
    held_bytes,
    quantize,
)
from workbench.models.quantization.config import dequantize_blocks, quantize_blocks
from workbench.models.quantization.stored import BlockWeight, store

FLOATS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
CODED = {"int8": 0.03, "int4": 0.4, "nf4": 0.4}


@pytest.fixture(scope="module")
def bitsandbytes() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.delitem(sys.modules, "bitsandbytes", raising=False)  # see tests/conftest.py
        warnings.simplefilter("ignore")
        yield pytest.importorskip("bitsandbytes")


def run(stack):
    """Return the taps of a batch with padding."""
    stage = stack.stage(0, stack.num_layers)
    torch.manual_seed(0)
    inputs, mask, targets = stage.make_inputs(
        3, 17 if stack.family.reads_images else 5, 2
    )  # tiny pictures have 16 patches
    mask = mask.clone()
    if not stack.family.reads_images:
        mask[1, 3:] = 0
    with torch.no_grad():
        return stage(inputs, mask, targets)[1]


def distance(taps, expected):
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(taps, expected, strict=True))


def linears(stack):
    return [module for module in stack.modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"]


@pytest.mark.parametrize(
    ("family", "storage", "compute"),
    [
        # By linear layers, by Conv1D, and with a decoder.
        *product(("bert", "gpt2", "t5"), get_args(StorageType), ("float32", "bfloat16")),
        *product((name for name in FAMILIES if name not in ("bert", "gpt2", "t5")), ("int8",), ("float32", "bfloat16")),
    ],
)
def test_every_family_runs_quantized_and_some_in_every_type(family, storage, compute):
    stack = load_stack(f"tiny-{family}-2")
    expected, before = run(stack), held_bytes(stack)
    dense = len(linears(stack))
    assert quantize(stack, QuantizationConfig(storage=storage, compute=compute)) is stack
    taps = run(stack)
    assert {tap.dtype for tap in taps} == {getattr(torch, compute)}
    assert distance(taps, expected) < {**FLOATS, **CODED}[storage] + (
        FLOATS["bfloat16"] if compute == "bfloat16" else 0
    )
    if storage != "float32" or compute != "float32":
        replaced = [module for module in stack.modules() if isinstance(module, QuantizedLinear)]
        heads = sum(isinstance(module, LanguageModelHead) for module in load_stack(f"tiny-{family}-2").modules())
        assert len(replaced) == dense + heads and not linears(stack)
    if storage != "float32":
        assert held_bytes(stack) < before
    assert not any(parameter.requires_grad for parameter in stack.parameters())


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart"])
def test_embeddings_as_int8_rows(family):
    stack = load_stack(f"tiny-{family}-2")
    expected, before = run(stack), held_bytes(stack)
    quantize(stack, QuantizationConfig(storage="int8", embeddings="int8"))
    assert any(isinstance(module, QuantizedEmbedding) for module in stack.modules())
    assert distance(run(stack), expected) < CODED["int8"]
    assert held_bytes(stack) < 0.45 * before


def test_shared_words_stay_shared():
    stack = load_stack("tiny-t5-2")
    quantize(stack, QuantizationConfig(storage="float16"))
    words = stack.embedding["words"].weight
    assert stack.decoder_embedding["words"].weight is words and stack.language_model_head.weight is words


def test_quantizing_layer_by_layer_is_quantizing_the_whole():
    config = QuantizationConfig(storage="nf4")
    reference, parts = quantize(load_stack("tiny-gpt2-3"), config), load_stack("tiny-gpt2-3")
    for layer in parts.layers:
        quantize(layer, config)
    quantize(parts, config)
    assert all(torch.equal(a, b) for a, b in zip(run(reference), run(parts), strict=True))
    stage = quantize(load_stack("tiny-gpt2-3").stage(1, 3), config)
    assert all(
        torch.equal(stage.state_dict()[name], reference.stage(1, 3).state_dict()[name]) for name in stage.state_dict()
    )


@pytest.mark.parametrize("storage", ["float16", "int8", "int4", "nf4"])
@pytest.mark.parametrize("shape", [(5, 7), (48, 33), (64, 64)])
def test_product_and_gradient_are_those_of_the_dequantized_weights(storage, shape):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    layer = QuantizedLinear(store(weight, storage, QuantizationConfig(storage=storage, block_size=16)), bias)
    inputs = torch.randn(2, 3, shape[1], generator=generator, requires_grad=True)
    twin = inputs.detach().clone().requires_grad_()
    outputs, expected = layer(inputs), nn.functional.linear(twin, layer.weight.dequantize(), bias)
    weights = torch.randn(expected.shape, generator=generator)
    (outputs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(outputs, expected)
    torch.testing.assert_close(inputs.grad, twin.grad)
    assert not any(parameter.grad is not None for parameter in layer.parameters())


def test_the_graph_keeps_codes_not_weights():
    layer = QuantizedLinear(store(torch.randn(64, 64), "int8", QuantizationConfig()), None)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert not any(tensor.shape == (64, 64) for tensor in kept)


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_double_quantization_takes_less_and_differs_little(storage):
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    single = store(weight, storage, QuantizationConfig(storage=storage))
    double = store(weight, storage, QuantizationConfig(storage=storage, double_quantization=True))
    bits = [8 * held_bytes(stored) / weight.numel() for stored in (single, double)]
    assert bits[0] - bits[1] == pytest.approx(0.37, abs=0.01)
    assert (single.dequantize() - double.dequantize()).norm() < 0.01 * weight.norm()
    assert (weight - double.dequantize()).norm() < 1.05 * (weight - single.dequantize()).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (96, 40), (64, 192)])
@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024])
def test_bitsandbytes_gives_the_same_weights(bitsandbytes, shape, dtype, block_size):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, absmax = quantize_blocks(weight, "nf4", block_size)
    theirs = torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, block_size, "nf4", (len(codes), block_size), dtype)
    ours = dequantize_blocks(codes, absmax, "nf4").to(dtype)
    torch.testing.assert_close(theirs, ours, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


def test_bitsandbytes_makes_the_same_codes(bitsandbytes):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    theirs, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    codes, absmax = quantize_blocks(weight, "nf4", 64)
    assert torch.equal(state.absmax, absmax) and torch.equal(theirs.flatten(), codes.flatten())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage": "int3"}, "Did you mean 'int4'|Did you mean 'int8'"),
        ({"compute": "int8"}, "compute = int8"),
        ({"embeddings": "nf4"}, "embeddings = nf4"),
        ({"block_size": 63}, "even"),
        ({"storage": "float16", "double_quantization": True}, "Only int8, int4 and nf4"),
    ],
)
def test_what_cannot_be_meant(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationConfig(**settings)


def test_float16_cannot_hold_large_weights():
    stack = load_stack("tiny-bert-1")
    stack.layers[0].intermediate.dense.weight.data[0, 0] = 1e5
    with pytest.raises(ConfigError, match="bfloat16"):
        quantize(stack, QuantizationConfig(storage="float16"))


def test_descriptions_tell_configurations_apart():
    configs = [
        QuantizationConfig(storage=storage, compute=compute, embeddings=embeddings)
        for storage in get_args(StorageType)
        for compute in ("float32", "bfloat16")
        for embeddings in ("float16", "int8")
    ]
    assert len({config.description for config in configs}) == len(configs)
    assert QuantizationConfig(storage="int8").description == "int8/64+float32+float32"


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_dense_weights_of_any_layer(storage):
    for family, path in (("bert", "intermediate.dense"), ("gpt2", "mlp.c_fc")):
        stack = load_stack(f"tiny-{family}-1")
        before = dense_weight(stack.layers[0].get_submodule(path))
        quantize(stack, QuantizationConfig(storage=storage))
        after = dense_weight(stack.layers[0].get_submodule(path))
        assert before.shape == after.shape == (64, 32)
        torch.testing.assert_close(after, before, rtol=0, atol=float(before.abs().max()) / 250)


class _Statistics(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]  # ctypes reads it


def allocated_bytes():
    """Return the bytes that the process has from the C library's allocator, which torch uses on a CPU."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        pytest.skip("the C library does not tell what is allocated")
    function.restype = _Statistics
    result = function()
    return result.uordblks + result.hblkhd


@pytest.mark.parametrize("storage", ["float16", "int8", "int4", "nf4"])
def test_held_bytes_are_those_that_the_process_has(storage):
    config = QuantizationConfig(storage=storage)
    quantize(nn.Sequential(nn.Linear(512, 512)), config)  # what the first call alone allocates
    before = allocated_bytes()
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    dense = allocated_bytes() - before
    assert held_bytes(module) == pytest.approx(dense, rel=0.02)
    quantize(module, config)
    assert held_bytes(module) == pytest.approx(allocated_bytes() - before, rel=0.05)
    bits = {"float16": 16, "int8": 8.5, "int4": 4.5, "nf4": 4.5}[storage]
    assert held_bytes(module) == pytest.approx(8 * (512 * 512 * bits / 8 + 512 * 4))


def test_held_bytes_of_a_library_tensor_and_of_tied_weights():
    tied = nn.Linear(8, 4, bias=False)
    pair = nn.ModuleList([tied, nn.Linear(8, 4, bias=False)])
    assert held_bytes(pair) == 256
    pair[1].weight = tied.weight
    assert held_bytes(pair) == 128
    assert (
        held_bytes(BlockWeight(torch.randn(8, 8), "int4", QuantizationConfig(storage="int4", block_size=32))) == 32 + 8
    )
