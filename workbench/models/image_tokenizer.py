"""Turn grey pictures into the patches that a vision transformer reads (Dosovitskiy et al., ICLR 2021, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokenizer:
    """Cuts pictures into patches, one token each, behind a class token without a picture.

    image_size, patch_size: pixels of a side.  channels: a grey picture is repeated so many times.
    """

    image_size: int
    patch_size: int
    channels: int
    pad_id: int = 0
    separator_id: None = None
    start_id: None = None

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Raise ConfigError: texts are none of this model's business."""
        raise ConfigError("Texts were given to a model of pictures.", "It reads patches.", "Choose a model of text, or the task 'digits'.")

    def encode_images(self, images: Sequence[bytes]) -> list[list[bytes]]:
        """Return each picture's tokens: `channels` x patch x patch values of a byte each, the class token's all zero.

        images: square grey pictures, row by row, a byte for each pixel; scaled to the model's size.
        """
        encoded = []
        for image in images:
            side = math.isqrt(len(image))
            if side < 1 or side * side != len(image):
                raise ConfigError(f"A picture of {len(image)} pixels was given.", "It is not square.", "Give square pictures.")
            pixels = torch.frombuffer(bytearray(image), dtype=torch.uint8).view(1, 1, side, side)
            if side != self.image_size:
                size = (self.image_size, self.image_size)
                scaled = F.interpolate(pixels.float(), size=size, mode="bilinear", antialias=True, align_corners=False)
                pixels = scaled.round().clamp(0, 255).to(torch.uint8)
            patch, grid = self.patch_size, self.image_size // self.patch_size
            blocks = pixels[0, 0, : grid * patch, : grid * patch].view(grid, patch, grid, patch).transpose(1, 2).reshape(-1, patch * patch)
            tokens = [row.numpy().tobytes() * self.channels for row in blocks]
            encoded.append([bytes(self.channels * patch * patch), *tokens])
        return encoded


def image_tokenizer(settings: Mapping[str, Any]) -> ImageTokenizer:
    """Return what a vision transformer's configuration asks for.  Raises ConfigError unless pictures and patches are square."""
    sides = []
    for name, usual in (("image_size", 224), ("patch_size", 16)):
        side = settings.get(name, usual)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        if height != width:
            raise ConfigError("A vision transformer was asked for.", f"Its {name} is {height} x {width}.", "Choose one of squares.")
        sides.append(int(height))
    return ImageTokenizer(image_size=sides[0], patch_size=sides[1], channels=settings.get("num_channels", 3))
