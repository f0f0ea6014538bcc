"""Weights by name, compared with those of another run."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def same_weights(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    rtol: float = 1e-5,
    atol: float = 1e-5,
    *,
    noise: str | tuple[str, ...] = (),
) -> None:
    """Compare all tensors but those whose gradient is float noise: softmax, for one, does not see the keys' bias.

    noise: how their names end.
    """
    torch.testing.assert_close(
        *({name: one.detach() for name, one in each.items() if not name.endswith(noise)} for each in (found, expected)),
        rtol=rtol,
        atol=atol,
    )
