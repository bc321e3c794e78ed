"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from moestro.errors import invalid_input

_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*(?:([KMGT]?)(i?)B)?", re.IGNORECASE | re.ASCII)
_MOST = 1 << 60


def parse_bytes(operation: str, option: str, text: str, least: int = 0) -> int:
    """Bytes of "5GB" (5 * 10^9), "2GiB" (2^31) or "1000".

    Raises:
        InvalidInputError: another form, or a size out of range.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index((found[2] or " ").upper())
        if least <= size < _MOST:
            return int(size)
    needs = f"bytes of at least {least}" if least else "a number of bytes"
    raise invalid_input(operation, got=f"{option} {text!r}", needs=needs, fix="For instance 5GB, 2GiB or 1000.")


def shown_bytes(size: float) -> str:
    """A size as people read it: "61.3 GB", "20.1 MB", "400 bytes"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{int(size)} bytes"
