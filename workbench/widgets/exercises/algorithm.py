"""Checks about Parallel Adapters, their activation cache and quantization (PAC+, section IV)."""

from __future__ import annotations

from workbench.widgets.exercises.verdict import Verdict, number_verdict


def check_trainable_share(answer: float | None, trainable: int, frozen: int) -> Verdict:
    """Which share of all parameters is trained?"""
    return number_verdict(
        answer,
        trainable / (trainable + frozen),
        tolerance=0.05,
        hint="Trained parameters divided by all parameters, the frozen ones included; 0.01 is one per cent.",
        right=f"{trainable:,} of {trainable + frozen:,} parameters: {trainable / (trainable + frozen):.2%}.",
    )


def check_cache_bytes(answer: int | None, *, tokens: int, num_layers: int, hidden_size: int, itemsize: int) -> Verdict:
    """How many bytes does the activation cache take for a sample?"""
    expected = tokens * hidden_size * (num_layers + 1) * itemsize
    return number_verdict(
        answer,
        expected,
        tolerance=0.001,
        hint=f"s x h x (l + 1) values for s = {tokens} tokens (section V-B): b_0 counts as well. How many bytes has a value?",
        right=f"{tokens} x {hidden_size} x {num_layers + 1} x {itemsize} = {expected:,} bytes.",
    )


def check_backward_share(answer: float | None, forward_s: float, backward_s: float) -> Verdict:
    """Which share of a step (forward and backward) is the backward pass?"""
    return number_verdict(
        answer,
        backward_s / (forward_s + backward_s),
        hint="Backward divided by forward and backward together, both in the table; 0.5 is one half.",
        right=f"{backward_s * 1e3:.0f} ms of {(forward_s + backward_s) * 1e3:.0f} ms: {backward_s / (forward_s + backward_s):.0%}.",
    )


def check_side_layer_width(answer: int | None, *, hidden_size: int, reduction: int) -> Verdict:
    """How wide is the side network's hidden state?"""
    return number_verdict(
        answer,
        hidden_size // reduction,
        tolerance=0.0,
        hint=f"The backbone is {hidden_size} wide, the side network r = {reduction} times narrower.",
        right=f"{hidden_size} / {reduction} = {hidden_size // reduction}.",
    )


def check_down_projection(answer: int | None, *, hidden_size: int, reduction: int) -> Verdict:
    """How many weights has one down-projection (its bias left out)?"""
    expected = hidden_size * hidden_size // reduction
    return number_verdict(
        answer,
        expected,
        tolerance=0.001,
        hint="W_down maps the backbone's width d to the side network's d / r (section IV-A).",
        right=f"{hidden_size} x {hidden_size // reduction} = {expected:,}.",
    )


def check_quantization_step(answer: float | None, *, absmax: float) -> Verdict:
    """By how much may a weight of a block be off after INT8 (Eq. 1-2)?"""
    bound = absmax / 127 / 2
    return number_verdict(
        answer,
        bound,
        tolerance=0.03,
        hint="Eq. 1 rounds 127 / absmax times the weight to a whole number. Rounding is off by at most one half; undo the factor.",
        right=f"1/2 x {absmax:g} / 127 = {bound:.2e}.",
    )


def check_quantized_bytes(answer: float | None, *, bits: int, block_size: int) -> Verdict:
    """How many bytes does a weight take, its block's share of the float32 constant included?"""
    expected = bits / 8 + 4 / block_size
    return number_verdict(
        answer,
        expected,
        tolerance=0.01,
        hint=f"{bits} bits for the code, and each block of {block_size} weights keeps one constant of 4 bytes.",
        right=f"{bits} / 8 + 4 / {block_size} = {expected:g} bytes.",
    )
