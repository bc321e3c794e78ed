"""Several teams of threads in one process, none of which may turn on its cores while another one is timed.

OpenMP's threads look for more work for some milliseconds after a call before they sleep. A peer with threads of its own
waits for that, is timed in a process of its own, and has PyTorch's awake again for whoever comes next.
"""

from __future__ import annotations

import time

import torch

SETTLE_SECONDS = 0.03
_SOME = torch.zeros(1 << 18)


def settle() -> None:
    """Wait until PyTorch's threads have gone to sleep."""
    if torch.get_num_threads() > 1:
        time.sleep(SETTLE_SECONDS)


def wake_torch() -> None:
    """A call on all of PyTorch's threads, after which they look for more as they do between any two calls."""
    _SOME.add_(1.0)
