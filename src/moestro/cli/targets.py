"""Files that a command is to write: refused before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from moestro.errors import invalid_input


def check_writable(path: Path, operation: str) -> None:
    """Refuse a path that cannot be written. What is there is left as it is.

    Raises:
        InvalidInputError: a folder, or a file that cannot be opened for writing.
    """
    existed = path.exists()
    try:
        path.open("ab").close()
    except (OSError, ValueError) as error:
        raise invalid_input(
            operation,
            got=f"{str(path)!r} ({getattr(error, 'strerror', None) or error})",
            needs="a file that can be written",
            fix="Name a file in a folder that exists.",
        ) from None
    if not existed:
        path.unlink()
