"""The garbage collector comes back as it was."""

from __future__ import annotations

import gc

import pytest

from workbench.core.schedule import paused_collector


def test_it_comes_back_on_after_an_error() -> None:
    """Off inside, on after, also when nested and when something fails."""
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()
