"""Forward passes by oneDNN give what they give by PyTorch's own choice; the choice is forced, so that any x86 processor
tries it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.methods.p_rge.zeroth_order import Prge, TrainableConfig, ZerothOrderConfig, load_causal_model
from workbench.methods.pac_plus.fast_side import multiplies_bfloat16
from workbench.models import matmul
from workbench.models.matmul import ForwardLinear, filled_length, is_even, linear, use_fastest

from .zeroth_order.prompts import perturb, prompts

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="PyTorch without oneDNN",
)


@pytest.fixture
def by_onednn(monkeypatch):
    """Choose oneDNN, and count the products that it made."""
    results = []
    plain = torch.ops.mkldnn._linear_pointwise

    def counted(*arguments):
        results.append(tuple(arguments[0].shape))
        return plain(*arguments)

    monkeypatch.setattr(matmul, "prefers_onednn", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return results


@needs_onednn
def test_the_library_is_named(monkeypatch):
    monkeypatch.setattr(matmul, "prefers_onednn", lambda: False)
    assert matmul.matmul_backend() == "PyTorch's choice"
    monkeypatch.setattr(matmul, "prefers_onednn", lambda: True)
    assert matmul.matmul_backend() == "oneDNN"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD Ryzen 5", "avx512_f": False}, False),
        ({"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True}, False),
        ({}, False),
    ],
)
def test_only_amds_processors_with_avx512_prefer_it(found, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None, raising=False)
    assert matmul.prefers_onednn.__wrapped__() is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert matmul.prefers_onednn.__wrapped__() is False and not multiplies_bfloat16()  # an older PyTorch does not tell


def test_few_numbers_of_rows_are_even():
    assert [rows for rows in range(30, 70) if is_even(rows)] == [30, 32, 36, 40, 44, 48, 52, 56, 60, 64]
    assert all(is_even(rows) for rows in range(1, 17))
    for power in range(4, 14):
        assert sum(is_even(rows) for rows in range(1 << power, 2 << power)) == 8


@needs_onednn
@pytest.mark.parametrize("rows", [17, 31, 100, 129, 1000])
def test_rows_are_filled_up_by_an_eighth_at_most(rows, by_onednn):
    inputs, layer = torch.randn(2, rows, 24), nn.Linear(24, 40)
    with torch.inference_mode():
        torch.testing.assert_close(linear(inputs, layer.weight, layer.bias), layer(inputs))
        torch.testing.assert_close(linear(inputs[1], layer.weight, layer.bias), layer(inputs[1]))
    for (made, _), asked in zip(by_onednn, (2 * rows, rows), strict=True):
        assert is_even(made)
        assert asked <= made <= 1.125 * asked


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_product_is_that_of_pytorch(bias, by_onednn):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(48, 40, bias=bias)
    wide = torch.randn(4, 6, 100, generator=generator)
    for inputs in (
        wide[..., :48].contiguous(),
        wide[..., 3:51],
        wide[..., :48].transpose(0, 1),
        wide[0, 0, :48],
        wide[:0, :, :48],
    ):
        with torch.inference_mode():
            torch.testing.assert_close(linear(inputs, layer.weight, layer.bias), layer(inputs))
    assert len(by_onednn) == 4  # all but the empty one


@needs_onednn
def test_what_others_compute_stays_as_it_is(by_onednn):
    weight = torch.randn(8, 16, requires_grad=True)
    linear(torch.ones(4, 16), weight).sum().backward()
    assert weight.grad is not None
    with torch.inference_mode():
        linear(torch.ones(4, 16, dtype=torch.float64), weight.double())
        linear(torch.ones(4, 16, dtype=torch.bfloat16), weight.bfloat16())
        linear(torch.ones(4, 16, device="meta"), weight.to("meta"))
        torch._C._set_mkldnn_enabled(False)
        try:
            linear(torch.ones(4, 16), weight)
        finally:
            torch._C._set_mkldnn_enabled(True)
        assert not by_onednn
        linear(torch.ones(4, 16), weight)
    assert by_onednn == [(4, 16)]


@needs_onednn
def test_exported_programs_have_the_plain_product(by_onednn):
    layer = nn.Sequential(nn.Linear(16, 8)).eval()
    use_fastest(layer)
    with torch.no_grad():
        program = torch.export.export(layer, (torch.ones(4, 16),))
    assert not by_onednn
    assert any("linear" in str(node.target) and "mkldnn" not in str(node.target) for node in program.graph.nodes)


def test_layers_stay_what_they_are():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.LayerNorm(4))
    names = list(module.state_dict())
    use_fastest(module)
    assert [type(part) for part in module] == [ForwardLinear, Own, nn.LayerNorm]
    assert list(module.state_dict()) == names
    inputs = torch.randn(3, 4)
    assert torch.equal(module[0](inputs), F.linear(inputs, module[0].weight, module[0].bias))


@needs_onednn
def test_rows_are_filled_up_where_that_is_little(by_onednn):
    def filled(count, length):
        return filled_length(torch.empty(count, length, 8))

    assert filled(1, 17) == 17  # with autograd
    with torch.inference_mode():
        assert [filled(1, length) for length in (16, 17, 33, 100, 129)] == [16, 18, 36, 104, 144]
        assert [filled(8, length) for length in (17, 64)] == [18, 64]
        assert filled(3, 37) == 40
        assert filled(17, 20) == 20  # never even
        assert filled_length(torch.empty(1, 17, 8, dtype=torch.float64)) == 17


@needs_onednn
@pytest.mark.parametrize(
    ("family", "lengths"),
    list(itertools.product(("llama", "gpt2", "opt", "t5", "bert"), [(13, 19, 18), (3, 37, 5, 4), (17,)])),
)
def test_losses_are_those_without(family, lengths, by_onednn, monkeypatch):
    """Batches that are filled up, packed ones among them.  Of GPT-2, whose layers are no nn.Linear, the head."""
    model, batch = (
        load_causal_model(f"tiny-{family}-2", TrainableConfig(rank=4, num_outputs=3)),
        prompts(family, lengths=lengths),
    )
    perturb(model)
    results = {}
    for execution in ("sequential", "both"):
        estimator = Prge(model, ZerothOrderConfig(queries=2, execution=execution))
        results[execution] = estimator.losses(batch, 3)
        logits = model.logits_at(batch)
    assert by_onednn
    by_onednn.clear()
    monkeypatch.setattr(matmul, "prefers_onednn", lambda: False)
    for execution, losses in results.items():
        estimator = Prge(model, ZerothOrderConfig(queries=2, execution=execution))
        torch.testing.assert_close(losses, estimator.losses(batch, 3), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, model.logits_at(batch), rtol=1e-4, atol=1e-5)
    assert not by_onednn
