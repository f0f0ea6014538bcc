"""Handwritten digits as a task of pictures."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.loading import load_tokenizer
from workbench.models.tokenizer import ImageTokenizer, image_tokenizer
from workbench.tasks import load_task
from workbench.tasks.tokenize import collate, tokenize


@pytest.fixture(scope="module")
def task():
    return load_task("digits")


def test_splits_are_apart_and_hold_every_digit(task):
    parts = (task.train, task.validation, task.test)
    assert [len(part) for part in parts] == [1257, 180, 360]
    assert sorted(index for part in parts for index in part.sample_ids) == list(range(1797))
    assert all(set(part.labels) == set(range(10)) for part in parts) and task.num_outputs == 10
    assert {len(image) for image in task.train.images} == {64} and max(max(image) for image in task.test.images) == 255


def test_a_batch_carries_patches(task):
    split = tokenize(task.test, load_tokenizer("tiny-vit"), max_length=4)
    assert set(split.lengths) == {17} and split.target_length == 0
    batch = collate(split, [3, 5, 8])
    assert batch.input_ids.shape == (3, 24, 4) and batch.input_ids.dtype == torch.uint8
    assert batch.attention_mask.sum(dim=1).tolist() == [17, 17, 17] and batch.input_ids[:, 0].eq(0).all()
    picture = torch.tensor(list(task.test.images[5])).view(8, 8)
    assert batch.input_ids[1, 2].tolist() == picture[:2, 2:4].flatten().tolist()
    assert batch.input_ids[1, 5].tolist() == picture[2:4, :2].flatten().tolist()
    assert collate(split, [0], length=17).input_ids.shape == (1, 17, 4)


def test_pictures_are_scaled_to_the_model(task):
    tokenizer = image_tokenizer({"image_size": [16, 16], "patch_size": 4})
    assert tokenizer == ImageTokenizer(image_size=16, patch_size=4, channels=3)
    (tokens,) = tokenizer.encode_images([bytes([200] * 64)])
    assert len(tokens) == 17 and tokens[1:] == [bytes([200] * 48)] * 16 and tokens[0] == bytes(48)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_task("digits", data="somewhere"), "scikit-learn"),
        (lambda: load_tokenizer("tiny-vit").encode(["a text"], max_length=8), "task 'digits'"),
        (lambda: load_tokenizer("tiny-vit").encode_images([bytes(7)]), "not square"),
        (lambda: image_tokenizer({"image_size": [8, 16]}), "8 x 16"),
    ],
)
def test_what_cannot_be_read(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
