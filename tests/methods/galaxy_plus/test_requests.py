"""Requests that a model cannot read are refused alike on every device."""

from __future__ import annotations

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.methods.galaxy_plus.prepare import Request, check_request
from workbench.models.sharding import model_layout


def text(length: int) -> torch.Tensor:
    return torch.ones(1, length, dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "request_", "words"),
    [
        ("tiny-bert-2", Request(length=0), "at least one token"),
        ("tiny-bert-2", Request(length=129), "128 positions"),
        ("tiny-bert-2", Request(length=5, ids=text(4)), r"shape \(1, 4\)"),
        ("tiny-bert-2", Request(length=17, ids=torch.zeros(1, 17, 4, dtype=torch.uint8)), r"shape \(1, 17, 4\)"),
        ("tiny-bert-2", Request(length=5, decoder_length=1), "no decoder"),
        ("tiny-t5-4", Request(length=5, ids=text(5)), "is given none"),
        ("tiny-vit-2", Request(length=5), "pixels"),
        ("tiny-vit-2", Request(length=17, ids=torch.zeros(1, 17, 7, dtype=torch.uint8)), r"given as \(1, 17, 7\)"),
    ],
)
def test_what_cannot_be_read(model: str, request_: Request, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_request(request_, model_layout(model))


def test_what_can_be_read() -> None:
    check_request(Request(length=128, ids=text(128)), model_layout("tiny-bert-2"))
    check_request(Request(length=200, decoder_length=3, ids=text(200), decoder_ids=text(3)), model_layout("tiny-t5-4"))
