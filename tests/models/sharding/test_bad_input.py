"""What cannot be cut, or does not fit, is said in words."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.core.errors import ConfigError
from workbench.models.configuration import model_config, model_from_config
from workbench.models.sharding import model_layout, weights_of

from .builders import hybrid, run_plan, shards_of, tiny_case


def test_more_devices_than_heads_work_if_some_get_none():
    case = tiny_case("llama")  # two groups of heads
    plan = hybrid(case, (1, 0, 1, 0), (16, 16, 16, 16), (0.25,) * 4, (1,))
    assert run_plan(plan, shards_of(case, plan), case.ids).shape == (3, 13, 32)


def test_families_without_support():
    with pytest.raises(ConfigError, match="Known families are bert"):
        model_layout(SimpleNamespace(config=SimpleNamespace(model_type="mamba")))
    config = model_config("tiny-bert")
    config.is_decoder = True
    with pytest.raises(ConfigError, match="Only its use as an encoder"):
        model_layout(model_from_config(config))
    with pytest.raises(ConfigError, match="Known are"):
        model_layout("tiny-mamba")
    with pytest.raises(ConfigError, match="meta device"), torch.device("meta"):
        weights_of(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 10, 4, dtype=torch.uint8), r"A picture of 16 patches of 4 values.*\(1, 10, 4\)"),
        (torch.zeros(1, 9, dtype=torch.int64), "A picture of 16 patches"),
    ],
)
def test_pictures_that_do_not_fit(ids, message):
    case = tiny_case("vit")
    plan = hybrid(case, (4,), (64,), (1.0,), (1,))
    with pytest.raises(ConfigError, match=message):
        run_plan(plan, shards_of(case, plan), ids)
