"""The one family of errors a user can meet.

Every message has the same four parts: the operation, what it got, what it needs, and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable


class MoestroError(Exception):
    """Base of every error moestro raises on purpose."""


class InvalidInputError(MoestroError, ValueError):
    """An argument has the wrong shape, dtype, device or value."""


class UnsupportedError(MoestroError, NotImplementedError):
    """What was asked for is well formed, but nothing here can run it."""


class CollectiveError(MoestroError, RuntimeError):
    """Ranks of a process group do not agree, or one of them did not answer."""


def invalid_input(operation: str, *, got: str, needs: str, fix: str) -> InvalidInputError:
    """Build an `InvalidInputError` whose text names the operation, the got, the needed and the way out."""
    return InvalidInputError(f"[{operation}] got {got}; needs {needs}. {fix}")


def not_one_of(
    operation: str, name: str, value: object, allowed: Iterable[str], fix: str = "Pick one of these."
) -> InvalidInputError:
    """The error for an argument that is none of the names that it may be."""
    return invalid_input(operation, got=f"{name} {value!r}", needs=f"one of {', '.join(allowed)}", fix=fix)


def several_devices(operation: str, **tensors: object) -> InvalidInputError:
    """The error for tensors on several devices: that of each, by its name."""
    got = ", ".join(f"{name} on {device}" for name, device in tensors.items())
    return invalid_input(operation, got=got, needs="one device", fix="Move them to one with .to(device).")


def unsupported(operation: str, *, got: str, needs: str, fix: str) -> UnsupportedError:
    """Build an `UnsupportedError` with the same four parts as `invalid_input`."""
    return UnsupportedError(f"[{operation}] got {got}; needs {needs}. {fix}")


def no_answer(operation: str, *, got: str, needs: str, fix: str) -> CollectiveError:
    """Build a `CollectiveError` with the same four parts as `invalid_input`."""
    return CollectiveError(f"[{operation}] got {got}; needs {needs}. {fix}")
