"""After `import workbench` and a loaded model, no other library lacks a part, and none is replaced or changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

USES = {
    "compile": """
import torch
compiled = torch.compile(lambda ids: model(ids).last_hidden_state + 1, backend="aot_eager", fullgraph=True)
with torch.no_grad():
    torch.testing.assert_close(compiled(ids), model(ids).last_hidden_state + 1)
""",
    "tensors of a mesh": """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, expected = init_device_mesh("cpu", (1,)), model(ids).last_hidden_state
assert distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum().full_tensor() == 4
path = next(name for name, module in model.named_modules() if name.endswith("query"))
parallelize_module(model, mesh, {path: ColwiseParallel()})
assert isinstance(model.get_submodule(path).weight, DTensor)
torch.testing.assert_close(model(ids).last_hidden_state, expected)
import peft, transformers.modeling_utils
assert peft.tuners.tuners_utils._torch_supports_distributed and transformers.utils.is_torch_distributed_available()
dist.destroy_process_group()
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
model.zero_grad()
checkpoint(lambda ids: model(ids).last_hidden_state, ids, use_reentrant=False).sum().backward()
assert any(one.grad is not None and one.grad.any() for one in model.parameters())
model.gradient_checkpointing_enable()
model.train()(ids).last_hidden_state.square().sum().backward()
""",
    "peft": """
import importlib.util, sys
import peft
from peft.import_utils import is_bnb_available
assert "bitsandbytes" not in sys.modules  # it loads the compiler
assert is_bnb_available() == (importlib.util.find_spec("bitsandbytes") is not None)
adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
adapted(ids).last_hidden_state.square().sum().backward()
assert any("lora_B" in name and one.grad.any() for name, one in adapted.named_parameters() if one.grad is not None)
""",
    "importers": "import sys; assert not any(str(getattr(one, '__module__', '')).startswith('workbench') for one in "
    "sys.meta_path)",
    "modules": "import sys; assert not (bare := [name for name, module in sys.modules.items() if module is None]), "
    "bare",
    "functions": """
import sys, types
kinds = (types.FunctionType, type)
own = ("workbench", "__main__", "__mp_main__")
others = [(name, module) for name, module in list(sys.modules.items()) if not name.startswith(own)]
replaced = [
    f"{name}.{key}"
    for name, module in others
    for key, value in list(vars(module).items())
    if isinstance(value, kinds) and str(value.__module__).startswith("workbench")
]
assert not replaced, replaced
""",
}
LOADED = """
import json, os, sys, traceback
import workbench, workbench.experiment, workbench.widgets
import torch
from workbench.models.loading import load_stack
from workbench.models.lora import inject_lora
inject_lora(load_stack("tiny-bert").stage(0, 1), rank=2, alpha=4.0, dropout=0.1)
from transformers import BertConfig, BertModel
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 9}
model, ids = BertModel(BertConfig(**sizes)).eval(), torch.tensor([[1, 2, 3]])
for name, code in json.loads(sys.stdin.read()).items():
    sys.stdout.flush()
    child = os.fork()  # so that none of them finds what another has imported
    if child == 0:
        try:
            exec(code, {"model": model, "ids": ids})
            said = ""
        except BaseException:
            said = traceback.format_exc()
        print(json.dumps({name: said}), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
os._exit(0)
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Return what each use said in a new interpreter, nothing if it worked."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED], input=json.dumps(USES), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    messages: dict[str, str] = {}
    for line in done.stdout.splitlines():
        messages |= json.loads(line) if line.startswith("{") else {}
    return messages


@pytest.mark.parametrize("use", USES)
def test_the_interpreter_is_left_whole(failures: dict[str, str], use: str) -> None:
    assert failures.get(use, "it ended without an answer") == "", failures.get(use)
