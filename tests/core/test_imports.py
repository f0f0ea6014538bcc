"""A library that is imported without another, and torch's compiler, which is imported when it is needed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.core.imports import hidden


def test_a_module_is_missing_only_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_for_it.py").write_text("try:\n    import heavy_module\nexcept ImportError:\n    heavy_module = None\n")
    (tmp_path / "heavy_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("heavy_module"):
        assert importlib.import_module("asks_for_it").heavy_module is None
    heavy = importlib.import_module("heavy_module")
    with hidden("heavy_module"):  # nothing is gained by then
        assert sys.modules["heavy_module"] is heavy
    assert sys.modules["heavy_module"] is heavy
    for name in ("asks_for_it", "heavy_module"):
        monkeypatch.delitem(sys.modules, name)


ENGINE = """
import sys
import workbench.models.imports_transformers
import torch
from transformers import BertConfig, BertModel
from workbench.models.lora import inject_lora
from workbench.models.optimization import backpropagate
from workbench.models.stack import LayerStack
model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9))
inject_lora(LayerStack(model).stage(0, 1), rank=2, alpha=4.0, dropout=0.1)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
hidden = model(torch.tensor([[1, 2, 3]]))[0]
hidden.square().sum().backward(retain_graph=True)
before = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
backpropagate(hidden, 2 * hidden.detach())
assert all(torch.allclose(model.get_parameter(name).grad, 2 * one) for name, one in before.items()) and any(map(torch.any, before.values()))
optimizer.step()
heavy = [name for name in ("torch._dynamo.utils", "sympy", "scipy", "torch.distributed.tensor") if name in sys.modules]
assert not heavy, heavy
"""
COMPILER = """
import torch._dynamo.utils, torch._dynamo.convert_frame
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo.utils.CompileTimeInstructionCounter is torch._dynamo.convert_frame.CompileTimeInstructionCounter
"""
COMPILED = """
model.eval()
compiled = torch.compile(lambda value: model(value)[0] + 1, backend="eager", fullgraph=True)
with torch.no_grad():
    assert torch.equal(compiled(torch.tensor([[1, 2, 3]])), model(torch.tensor([[1, 2, 3]]))[0] + 1)
import transformers.masking_utils, torch._dynamo._trace_wrapped_higher_order_op as alone
assert alone.TransformGetItemToIndex is transformers.masking_utils.TransformGetItemToIndex
"""


@pytest.mark.parametrize("needed", [COMPILER, COMPILED])
def test_an_engine_trains_without_the_compiler_which_comes_whole_when_it_is_needed(needed: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE + needed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
