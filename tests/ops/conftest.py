"""The mode that the engine computes in."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[True, False], ids=["same bits", "fastest"])
def either_mode(request: pytest.FixtureRequest) -> bool:
    """With and without `torch.use_deterministic_algorithms`: the engine may take other ways in the default mode.

    What torch.empty returns is poisoned only with it.
    """
    torch.use_deterministic_algorithms(request.param)
    return bool(request.param)
