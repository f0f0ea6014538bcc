"""What a run has trained goes to a hub with huggingface_hub's own client, and comes back as a model that answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import call

from methods.fake_hub import FakeHub, fake_hub
from methods.test_result import saved
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.job import Job
from workbench.methods.common.sharing import from_pretrained, push_to_hub

SAMPLES = ["A warm and funny film.", "Two hours that never end."]
JOBS = {
    "prompted": Job(method="p_rge", model="tiny-llama", train_samples=8, validation_samples=4, test_samples=4),
    "adapter": Job(method="pac_plus", model="tiny-bert", train_samples=8, validation_samples=4, test_samples=4),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


@pytest.mark.parametrize("kind", JOBS)
def test_what_is_pushed_answers_as_before(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    before = saved(tmp_path / "run", JOBS[kind]).predict(SAMPLES)
    done = call("push", tmp_path / "run", "me/mine")
    assert done.exit_code == 0 and done.stdout.strip() == f"{hub.address}/me/mine", done.output
    assert hub.private == {"me/mine": True} and {"README.md", "result.json"} <= hub.files["me/mine"].keys()
    assert str(tmp_path).encode() not in b"".join(hub.files["me/mine"].values())
    card = hub.files["me/mine"]["README.md"].decode()
    assert (
        "cluster 'pair', emulated, kernel links" in card and "| accuracy | 0.5000 |" in card
    )  # with the label of the report
    assert from_pretrained("me/mine").predict(SAMPLES) == before
    assert from_pretrained(tmp_path / "run").predict(SAMPLES) == before
    assert push_to_hub(tmp_path / "run", "me/open", public=True) and hub.private["me/open"] is False


def test_what_cannot_be_pushed_is_refused_in_three_parts(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "run", JOBS["adapter"])
    with pytest.raises(ConfigError, match=r"to 'me/mine' was asked for\. There is no result\.json\. Give the folder"):
        push_to_hub(tmp_path, "me/mine")
    with pytest.raises(ConfigError, match="Name a repository as OWNER/NAME"):
        push_to_hub(tmp_path / "run", "a name")
    hub.allowed = False
    with pytest.raises(MissingDataError, match=r"The hub refused: .*403.*what your token may do"):
        push_to_hub(tmp_path / "run", "me/mine")
    with pytest.raises(MissingDataError, match="The hub refused"):
        from_pretrained("me/nothing")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="Nobody is logged in"):
        push_to_hub(tmp_path / "run", "me/mine")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for does in (lambda: push_to_hub(tmp_path / "run", "me/mine"), lambda: from_pretrained("me/mine")):
        with pytest.raises(MissingDataError, match="HF_HUB_OFFLINE is set"):
            does()
    result = tmp_path / "run" / "result.json"
    result.write_text(result.read_text().replace('"model": "tiny-bert"', f'"model": "{tmp_path}"'))
    with pytest.raises(ConfigError, match="a folder of this computer, which nobody else has"):
        push_to_hub(tmp_path / "run", "me/mine")
