"""Tensors between PyTorch, NumPy and JAX: in one memory, and as the paper's four fields."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models import cross_framework
from workbench.models.cross_framework import FRAMEWORKS, from_torch, require_jax, to_torch
from workbench_studies.papers.confidant.four_fields import TYPES, Adapted

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed (pip install '.[jax]')")


def values(name: str) -> torch.Tensor:
    """Return (2, 3) values of a type, the largest that float16 has among them."""
    dtype = getattr(torch, name)
    return (
        torch.tensor([[0, 1, 2.5], [-3.25, 65504, 7]]).to(dtype)
        if dtype.is_floating_point
        else torch.arange(6).reshape(2, 3).to(dtype)
    )


@needs_jax
@pytest.mark.parametrize("form", ["binary", "json"])
@pytest.mark.parametrize("name", TYPES)
def test_a_message_is_the_same_tensor_in_every_framework(name: str, form: str) -> None:
    original = values(name)
    for sender in FRAMEWORKS:
        if sender == "jax" and name in ("float64", "int64"):
            with pytest.raises(ConfigError, match="32 bits"):
                from_torch(original, sender)
            continue
        fields = Adapted.of(from_torch(original, sender), MNN="NHWC")
        assert (fields.data.shape, fields.shape, TYPES[fields.type_number]) == ((6,), (2, 3), name)
        received = Adapted.read(fields.message(form), form)  # type: ignore[arg-type]
        assert received.info == {"MNN": "NHWC"}
        for receiver in FRAMEWORKS[: 2 if name in ("float64", "int64") else 3]:
            result = received.to(receiver)
            assert type(result).__module__.split(".")[0].removesuffix("lib") == receiver and str(result.dtype).endswith(
                name
            )
            assert torch.equal(to_torch(result), original)


@needs_jax
def test_one_memory_where_the_address_suits() -> None:
    """torch allocates at multiples of 64 bytes, which XLA asks for; one float further it gets a copy."""
    require_jax()
    reference = torch.arange(64.0)
    assert from_torch(reference, "jax").unsafe_buffer_pointer() == reference.data_ptr()
    assert (
        to_torch(from_torch(reference, "jax")).data_ptr()
        == reference.data_ptr()
        == to_torch(reference.numpy()).data_ptr()
    )
    odd = from_torch(reference[1:], "jax")
    assert odd.unsafe_buffer_pointer() != reference[1:].data_ptr() and torch.equal(to_torch(odd), reference[1:])


def test_small_and_empty_tensors() -> None:
    for tensor in (torch.tensor(2.5), torch.empty(0, 4), torch.ones(2, 3).t()):
        received = Adapted.read(Adapted.of(tensor).message()).to("torch")
        assert received.shape == tensor.shape and torch.equal(received, tensor)
    np.testing.assert_array_equal(Adapted.of(np.arange(3)).to("numpy"), np.arange(3))


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:3], lambda whole: whole[:-2], lambda whole: whole[:-4], lambda whole: b"\xff" + whole[1:]],
)
def test_a_damaged_message_is_refused(damage) -> None:
    with pytest.raises(ConfigError, match="was read as a tensor"):
        Adapted.read(bytearray(damage(bytes(Adapted.of(torch.ones(3)).message()))))


def test_without_jax_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_framework, "find_spec", lambda name: None)
    require_jax.cache_clear()
    with pytest.raises(ConfigError, match=r"'jax' is not installed.*pip install '\.\[jax\]'"):
        from_torch(torch.ones(2), "jax")
    with pytest.raises(ConfigError, match="torch, numpy, jax"):
        from_torch(torch.ones(2), "mnn")
