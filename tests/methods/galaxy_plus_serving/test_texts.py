"""Texts that are ordered while devices serve equal one process's, also after a device was lost within one."""

from __future__ import annotations

import pytest

from tests.methods.conftest import four_devices
from tests.methods.galaxy_plus.ranks import plans_for
from tests.waiting import wait_for
from workbench.core.errors import ConfigError
from workbench.methods.common.text_model import load_text_model
from workbench.methods.galaxy_plus.prepare import random_requests
from workbench.methods.galaxy_plus.profiles import made_up_host
from workbench.methods.galaxy_plus.serving.records import StreamSettings
from workbench.methods.galaxy_plus.serving.serve import serve, usual_length
from workbench.methods.galaxy_plus.serving.text_service import text_service
from workbench.models.generation import Sampling
from workbench.models.sharding import model_layout
from workbench.runtime.engines import EngineCluster
from workbench.server.panel import DevicePanel

SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=5))


@pytest.mark.parametrize("model", ["tiny-llama-2", "tiny-t5-4"])
def test_texts_of_mixed_lengths_equal_one_process_and_go_on_after_a_loss(model: str) -> None:
    local, layout = load_text_model(model), model_layout(model)
    prompts = [local.tokenizer.prompt(text) for text in ("hello", "a longer text about the sea", "x")]
    wanted = [(ids, sampling, number) for ids in prompts for number, sampling in zip((3, 24), SAMPLINGS, strict=True)]
    expected = [list(local.writer.write(ids, number, sampling)) for ids, sampling, number in wanted]
    first_plan = plans_for(layout)["overlapped tiles"]
    with text_service(model, four_devices(), "paced", ends=[], say=lambda text: None, first_plan=first_plan) as service:
        panel, policy = DevicePanel(service), service.policy
        assert [list(service.writer.write(ids, number, way)) for ids, way, number in wanted] == expected
        state = panel.state()
        assert "4 of 4 devices compute each token" in state["svg"] and all(one["up"] for one in state["devices"])
        found = []
        ids, sampling, number = wanted[3]
        for token in service.writer.write(ids, number, sampling):
            found.append(token)
            if len(found) == 2:
                panel.act(state["devices"][1]["name"], "kill")
        assert found == expected[3] and policy.num_again == 1
        wait_for(lambda: not panel.state()["devices"][1]["up"], "the loss is shown")
        assert list(service.writer.write(*wanted[0][:1], 3, SAMPLINGS[0])) == expected[0]
        stopped = service.writer.write(ids, 24, SAMPLINGS[1])
        assert next(stopped) == expected[3][0]
        stopped.close()  # the client is gone: the devices stop, and write the next text
        assert list(service.writer.write(*wanted[0][:1], 3, SAMPLINGS[0])) == expected[0]


@pytest.mark.parametrize("model", ["tiny-llama-2", "tiny-vit-2", "tiny-t5-4"])
def test_a_stream_is_served_for_models_without_a_limit_and_of_pictures(model: str, engines: EngineCluster) -> None:
    layout = model_layout(model)
    stream = StreamSettings(num_requests=3, length=usual_length(layout))
    report = serve(model, four_devices(), engines, made_up_host(model, 1e9), stream=stream)
    assert len(report.requests) == 3 and not report.num_wrong and not report.num_lost
    with pytest.raises(ConfigError, match="Its pictures have 17" if layout.family.reads_images else "one at least"):
        random_requests(layout, 0)
