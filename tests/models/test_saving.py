"""A saved adapter is the same after it is loaded; a damaged one is refused."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.evaluation import calibrate, set_statistics
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.saving import DESCRIPTION, WEIGHTS, TrainedDescription, load_adapter, save_adapter

from .helpers import small_batch, small_config


@pytest.fixture
def saved(tmp_path):
    stack, batch = load_stack("tiny-gpt2"), small_batch()
    adapter = ParallelAdapter(small_config(stack))
    set_statistics(adapter, calibrate(stack, [batch]))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    description = TrainedDescription(config=adapter.config, model="tiny-gpt2")
    save_adapter(tmp_path / "adapter", adapter.state_dict(), description)
    return tmp_path / "adapter", adapter, description


def test_everything_comes_back(saved):
    folder, adapter, description = saved
    loaded, result = load_adapter(folder)
    assert result == description and not loaded.training
    assert all(torch.equal(tensor, adapter.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == [DESCRIPTION, WEIGHTS]


def test_half_an_adapter_is_not_saved(saved, tmp_path):
    _, adapter, description = saved
    with pytest.raises(ConfigError, match="do not fit"):
        save_adapter(tmp_path / "half", dict(list(adapter.state_dict().items())[:3]), description)
    assert not (tmp_path / "half").exists()


def _truncate(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])


def _mistype(folder):
    path = folder / DESCRIPTION
    path.write_text(path.read_text().replace('"reduction": 4', '"reduction": "four"'))


def _other_shape(folder):
    path = folder / DESCRIPTION
    path.write_text(path.read_text().replace('"reduction": 4', '"reduction": 8'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "damaged"),
        (_mistype, "reduction"),
        (_other_shape, "do not fit"),
        (lambda folder: (folder / WEIGHTS).unlink(), "No such file"),
        (lambda folder: (folder / DESCRIPTION).unlink(), "No such file"),
    ],
)
def test_damage_is_answered_in_one_line(saved, damage, message):
    damage(saved[0])
    with pytest.raises(ConfigError, match=message) as caught:
        load_adapter(saved[0])
    assert "\n" not in str(caught.value)
