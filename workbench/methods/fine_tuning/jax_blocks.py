"""Compute encoder blocks of BERT and DistilBERT with JAX: jit forward, vjp backward (Confidant, section 3.5).

Parameters and gradients stay in the torch layers, and JAX accesses them through DLPack.  Optimizer, snapshots and
stashed versions therefore remain the runtime's.  Import this module after `require_jax`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn

from workbench.models.cross_framework import from_torch, to_torch
from workbench.models.stack import BackboneStage
from workbench.models.techniques import TechniqueStage

_ACTIVATIONS = {"gelu": partial(jax.nn.gelu, approximate=False), "gelu_new": jax.nn.gelu, "relu": jax.nn.relu}
_ROLES = ("query", "key", "value", "output", "up", "down")
Weights = dict[str, jax.Array]


def load_compiler() -> None:
    """Compile a small function, so that a memory budget that begins later does not count XLA's threads
    and libraries.
    """
    jax.block_until_ready(jax.jit(jnp.sin)(jnp.zeros(1)))


class BlockShape(NamedTuple):
    """Constants for compilation.

    eps: the constants of the norms after attention and feed-forward.  lora_scale: alpha / r.
    """

    heads: int
    eps: tuple[float, ...]
    activation: str
    lora_scale: float


def _linear(weights: Weights, role: str, inputs: jax.Array, scale: float) -> jax.Array:
    output = inputs @ weights[f"{role}.weight"].T + weights[f"{role}.bias"]
    if f"{role}.lora_A" in weights:
        output = output + scale * ((inputs @ weights[f"{role}.lora_A"].T) @ weights[f"{role}.lora_B"].T)
    return output


def _norm(weights: Weights, number: int, inputs: jax.Array, eps: float) -> jax.Array:
    centred = inputs - inputs.mean(axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return scaled * weights[f"norm {number}.weight"] + weights[f"norm {number}.bias"]


def _block(shape: BlockShape, weights: Weights, hidden: jax.Array, bias: jax.Array) -> jax.Array:
    """Return a block's output (n, t, d).  bias: (n, 1, 1, t), added to the attention's scores."""
    linear = partial(_linear, weights, scale=shape.lora_scale)
    query, key, value = (linear(role, hidden).reshape(*hidden.shape[:2], shape.heads, -1) for role in _ROLES[:3])
    scores = jnp.einsum("nqhe,nkhe->nhqk", query, key) * query.shape[-1] ** -0.5 + bias
    attended = jnp.einsum("nhqk,nkhe->nqhe", jax.nn.softmax(scores), value).reshape(hidden.shape)
    hidden = _norm(weights, 0, hidden + linear("output", attended), shape.eps[0])
    return _norm(
        weights, 1, hidden + linear("down", _ACTIVATIONS[shape.activation](linear("up", hidden))), shape.eps[1]
    )


@partial(jax.jit, static_argnums=0)
def _forward(shape: BlockShape, trained: Weights, frozen: Weights, hidden: jax.Array, bias: jax.Array) -> Any:
    return jax.vjp(lambda trained, hidden: _block(shape, trained | frozen, hidden, bias), trained, hidden)


@jax.jit
def _backward(pullback: Any, gradient: jax.Array) -> Any:
    return pullback(gradient)


class _Block:
    """One layer's parameters by role.  activation, heads: the model's activation function and number of heads."""

    def __init__(self, layer: nn.Module, backbone: BackboneStage, *, activation: str, heads: int) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        scale = 0.0
        for role in _ROLES:
            module: Any = layer.get_submodule(backbone.family.weights[role])
            if hasattr(module, "base_layer"):  # from peft
                scale = module.scaling["default"]
                self._parameters |= {
                    f"{role}.{name}": getattr(module, name)["default"].weight for name in ("lora_A", "lora_B")
                }
                module = module.base_layer
            self._parameters |= {f"{role}.{name}": parameter for name, parameter in module.named_parameters()}
        norms: list[Any] = [layer.get_submodule(path) for path in backbone.family.norms]
        for number, norm in enumerate(norms):
            self._parameters |= {f"norm {number}.{name}": parameter for name, parameter in norm.named_parameters()}
        self._shape = BlockShape(heads, tuple(norm.eps for norm in norms), activation, scale)

    def forward(self, hidden: jax.Array, bias: jax.Array) -> tuple[jax.Array, Any]:
        weights: tuple[Weights, Weights] = {}, {}  # trainable, frozen
        for name, parameter in self._parameters.items():
            weights[not parameter.requires_grad][name] = from_torch(parameter.data, "jax")
        output: tuple[jax.Array, Any] = _forward(self._shape, *weights, hidden, bias)
        return output

    def backward(self, pullback: Any, gradient: jax.Array, *, adds: bool = True) -> jax.Array:
        """Return the input's gradient.  adds: whether to add the parameters' gradients to torch's."""
        gradients, gradient = _backward(pullback, gradient)
        jax.block_until_ready(gradient)
        for name, parameter_gradient in gradients.items() if adds else ():
            torch_gradient = self._parameters[name].grad
            assert torch_gradient is not None
            torch_gradient.add_(to_torch(parameter_gradient))
        return gradient


class JaxBlocks:
    """All blocks of a stage.  activation: name of the feed-forward activation function.  heads: number of attention
    heads.
    """

    def __init__(self, model: TechniqueStage, *, activation: str, heads: int) -> None:
        self._width = model.backbone.hidden_size
        self._blocks = [
            _Block(layer, model.backbone, activation=activation, heads=heads)
            for layer in model.backbone.layers.values()
        ]

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the output (n, t, d), and the pullbacks for `backward`.  hidden: (n, t, d).  attention_mask: (n, t), 1
        for real tokens.
        """
        lowest = torch.finfo(hidden.dtype).min
        bias = from_torch((1 - attention_mask[:, None, None, :]).to(hidden.dtype) * lowest, "jax")
        states, pullbacks = from_torch(hidden, "jax"), []
        for block in self._blocks:
            states, pullback = block.forward(states, bias)
            pullbacks.append(pullback)
        # JAX computes asynchronously and reads torch's memory.  Wait here, because torch may change the weights
        # afterwards.
        return to_torch(jax.block_until_ready(states)), pullbacks

    def backward(self, pullbacks: list[Any], gradient: Tensor) -> Tensor:
        """Add the trainable parameters' gradients, and return the input's gradient, (n, t, d).

        gradient: gradient of the output.
        """
        input_gradient = from_torch(gradient, "jax")
        for block, pullback in zip(reversed(self._blocks), reversed(pullbacks), strict=True):
            input_gradient = block.backward(pullback, input_gradient)
        return to_torch(input_gradient)

    def compile(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Compile for batches of these (samples, tokens).  All blocks share the compiled code."""
        for samples, tokens in sizes:
            hidden, bias = (
                from_torch(torch.zeros(shape), "jax")
                for shape in ((samples, tokens, self._width), (samples, 1, 1, tokens))
            )
            output, pullback = self._blocks[0].forward(hidden, bias)
            self._blocks[0].backward(pullback, output, adds=False)
