"""The mode that the engine computes in, and products in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moestro.ops import gpu


@pytest.fixture(params=[True, False], ids=["same bits", "fastest"])
def either_mode(request: pytest.FixtureRequest) -> bool:
    """With and without `torch.use_deterministic_algorithms`: the engine may take other ways in the default mode.

    What torch.empty returns is poisoned only with it.
    """
    torch.use_deterministic_algorithms(request.param)
    return bool(request.param)


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, sums of products in the order of their terms, whatever else is multiplied.

    Its own are NumPy's, whose library adds in another order where there are more rows. A GPU's are left as they are.
    """
    if not gpu.interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        sums = d.data.copy()
        left, right = (t.data.astype(sums.dtype) for t in (a, b))
        for k in range(left.shape[1]):
            sums += left[:, k, None] * right[k]
        return TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
