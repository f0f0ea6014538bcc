"""Count one transformer layer's FLOPs, and the bytes that PyTorch's autograd keeps of it (PAC+, Table I, Fig. 3).

FLOPs: 2 for each weight and token, 4 x tokens x tokens x width for the attention's two products; norms and activations not counted.
Bytes: fp32, eager attention, dropout on, as torch.autograd.graph.saved_tensors_hooks counts them (a test compares the two for T5 and
BART); Korthikanti et al., 'Reducing Activation Recomputation in Large Transformer Models' (2022), section 4, count likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.profiler.descriptions import FP32_BYTES, ModelDescription

MASK_BYTES = 1
"""Of each element of a dropout's mask (native_dropout keeps bool)."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one sample: `per_token` of the input sequence plus `per_sample` (what a decoder's own tokens take)."""

    per_token: float = 0.0
    per_sample: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        """Return the sum."""
        return Bytes(self.per_token + other.per_token, self.per_sample + other.per_sample)


class LayerShape:
    """One layer of the stack at one sequence length."""

    def __init__(self, model: ModelDescription, layer: int, sequence_length: int) -> None:
        self.model, self.sequence_length = model, sequence_length
        self.decoder = model.is_decoder_layer(layer)
        self.own_tokens = model.target_tokens if self.decoder else sequence_length
        self.key_tokens = sequence_length if self.decoder else 0
        """Tokens of the encoder that the decoder's cross-attention sees."""
        self.attentions = 2 if self.decoder else 1

    def own(self, nbytes: float) -> Bytes:
        """Return the bytes of something that each of the layer's own tokens has."""
        return Bytes(per_sample=self.own_tokens * nbytes) if self.decoder else Bytes(per_token=nbytes)

    def keys(self, nbytes: float) -> Bytes:
        """Return the bytes of something that each of the encoder's tokens has in the cross-attention; none without one."""
        return Bytes(per_token=nbytes) if self.decoder else Bytes()

    @property
    def product_flops(self) -> float:
        """Return the forward FLOPs of the weights, for one sample."""
        model = self.model
        flops = 2.0 * self.own_tokens * (model.matrices_of_attention + model.matrices_of_feed_forward)
        if self.decoder:  # q and o see the decoder's tokens, k and v the encoder's
            flops += 4.0 * model.hidden * (self.own_tokens * model.query_width + self.key_tokens * model.kv_width)
        return flops

    @property
    def attention_flops(self) -> float:
        """Return the forward FLOPs of the products of activations with activations, for one sample."""
        return 4.0 * self.own_tokens * (self.own_tokens + self.key_tokens) * self.model.query_width

    def kept(self, *, trained_norms: bool) -> Bytes:
        """Return what the backward pass needs whatever is trained: gradients flow through everything.

        Inputs of the norms (with a trained weight an eager RMSNorm keeps its normalised input too), q, k, v; of the scores the softmax's
        result, its dropout's mask and result; the feed-forward's activation and the mask behind it; the masks of the other dropouts.
        """
        model = self.model
        norm = 2 if trained_norms and model.norm_vectors == 1 else 1
        scores = model.heads * (2 * FP32_BYTES + MASK_BYTES)
        per_own = (
            (self.attentions + 1) * (norm * FP32_BYTES + MASK_BYTES) * model.hidden
            + FP32_BYTES * (self.attentions * model.query_width + 2 * model.kv_width)
            + scores * self.own_tokens
            + model.feed_forward * (FP32_BYTES * (2 if model.gated else 1) + MASK_BYTES)
        )
        return self.own(per_own) + self.keys(FP32_BYTES * 2 * model.kv_width + scores * self.own_tokens)

    def weight_inputs(self) -> Bytes:
        """Return what the gradients of all the layer's matrices need: inputs of q, k, v, of o, and of the feed-forward's matrices.

        The cross-attentions' k and v share the encoder's output, which its last layer counts.
        """
        model = self.model
        return self.own(FP32_BYTES * (self.attentions * (model.hidden + model.query_width) + model.hidden + model.feed_forward))

    def lora_params(self, rank: int) -> int:
        """Return the parameters of A and B on q and v of every attention."""
        return self.attentions * rank * (2 * self.model.hidden + self.model.query_width + self.model.kv_width)

    def lora_flops(self, rank: int) -> float:
        """Return the forward FLOPs of A and B, for one sample."""
        q = rank * (self.model.hidden + self.model.query_width)
        v = rank * (self.model.hidden + self.model.kv_width)
        return 2.0 * (self.own_tokens * (self.attentions * q + v) + self.key_tokens * v)

    def lora_inputs(self, rank: int, *, dropout: bool) -> Bytes:
        """Return what the gradients of A and B need: their inputs, which a dropout in front of A makes anew for each."""
        hidden = self.model.hidden
        if dropout:
            each = (FP32_BYTES + MASK_BYTES) * hidden + FP32_BYTES * rank
            return self.own((self.attentions + 1) * each) + self.keys(each)
        return self.own(FP32_BYTES * (self.attentions * hidden + (self.attentions + 1) * rank)) + self.keys(FP32_BYTES * rank)

    def output(self) -> Bytes:
        """Return what the next layer needs: in the decoder the encoder's output travels on."""
        return self.own(FP32_BYTES * self.model.hidden) + self.keys(FP32_BYTES * self.model.hidden)

    def workspace(self) -> Bytes:
        """Return the largest scratch of the forward pass: residual, normalised input, the feed-forward's width twice, scores twice."""
        model = self.model
        per_own = 2 * (model.hidden + model.feed_forward * (2 if model.gated else 1) + model.heads * self.own_tokens)
        return self.own(FP32_BYTES * per_own) + self.keys(FP32_BYTES * 2 * model.heads * self.own_tokens)
