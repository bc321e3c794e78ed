"""What the native engine takes: a function of shape."""

from __future__ import annotations

from moestro.ops import native


def why_too_many(heads: int, groups: int) -> str | None:
    """Why so many heads cannot share so many groups of keys; None if they can. Their sums are kept together."""
    most = native.LIMITS["token_block"]
    return None if heads <= most * groups else f"{heads // groups} heads share keys, and it takes {most} at most"
