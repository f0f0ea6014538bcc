"""A model's facts are kept by its files: read again only when one has changed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from workbench.core.serial import from_json, to_json
from workbench.models import facts_cache
from workbench.models.configuration import ModelFacts, model_facts
from workbench.models.facts_cache import cached_facts
from workbench.models.sharding import LayoutFacts, layout_facts, model_layout


def test_facts_are_read_once_for_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_cache, "cache_folder", lambda: tmp_path / "cache")
    facts, results = model_facts("tiny-bert"), list[str]()
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")

    def find(name: str = str(model)) -> Any:
        return cached_facts(name, ModelFacts, lambda: (results.append(name), facts)[1])

    assert asdict(find()) == asdict(find()) == asdict(facts) and len(results) == 1
    (model / "config.json").write_text('{"hidden_size": 64}')
    assert find() == facts and len(results) == 2
    for file in (tmp_path / "cache" / "facts").iterdir():
        file.write_text("half a fi")
    assert find() == facts == find() and len(results) == 3
    assert find("shape:llama-7b") == find("shape:llama-7b") and len(results) == 4
    assert model_facts("tiny-bert") is facts  # its name says all
    layout = layout_facts("tiny-bert")
    assert cached_facts(str(model), LayoutFacts, lambda: layout) == layout
    assert find() == facts and len(results) == 4  # each kind has its file


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-t5"])
def test_planners_get_the_layouts_facts(name: str) -> None:
    layout, facts = model_layout(name), layout_facts(name)
    kept = from_json(to_json(facts), LayoutFacts, source="the facts")
    assert kept == facts and kept.has_decoder == layout.has_decoder
    assert (kept.stacks, kept.end_bytes, kept.max_length) == (layout.stacks, layout.end_bytes, layout.max_length)
