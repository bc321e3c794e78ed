"""One priority list of implementations per operation; the first that supports the arguments runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moestro import settings
from moestro.errors import unsupported


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        name: what `moestro.use` forces and `moestro.explain` prints.
        supports: maps the operation's arguments to None, or to the sentence why it cannot run them.
        call: the computation, with the operation's own signature.
        excludes: where given, true for arguments that `supports` would refuse, and found out in less time.
    """

    name: str
    supports: Callable[..., str | None]
    call: Callable[..., Any]
    excludes: Callable[..., bool] | None = None


@dataclass(frozen=True)
class Candidate:
    """One line of an explanation: an implementation and why it would not run (None if it would)."""

    name: str
    reason: str | None


_LISTS: dict[str, list[Implementation]] = {}


def register(operation: str, implementations: list[Implementation]) -> None:
    """Set the priority list of an operation, best first."""
    _LISTS[operation] = implementations


def operations() -> list[str]:
    """The names of all registered operations."""
    return sorted(_LISTS)


def implementations(operation: str) -> list[Implementation]:
    """The priority list of an operation, best first."""
    return list(_LISTS[operation])


def candidates(operation: str, *args: Any) -> list[Candidate]:
    """Every implementation in order of priority, with the reason why it cannot run these arguments."""
    return [Candidate(i.name, i.supports(*args)) for i in _LISTS[operation]]


def select(operation: str, *args: Any) -> Implementation:
    """The forced implementation, or the first of the list that supports the arguments.

    Raises:
        UnsupportedError: the forced name does not exist or cannot run the arguments, or nothing can.
    """
    entries = _LISTS[operation]
    forced = settings.current().implementation
    if forced is not None:
        named = [i for i in entries if i.name == forced]
        # A name that only other operations know does not concern this one.
        if not named and not any(i.name == forced for entries in _LISTS.values() for i in entries):
            raise unsupported(
                operation,
                got=f"implementation={forced!r}",
                needs=f"one of {', '.join(i.name for i in entries)}",
                fix=f"See moestro.use and the variable {settings.IMPLEMENTATION_VARIABLE}.",
            )
        entries = named or entries
    for entry in entries:
        if (entry.excludes is None or not entry.excludes(*args)) and entry.supports(*args) is None:
            return entry
    raise unsupported(
        operation,
        got="arguments that no allowed implementation runs",
        needs="; ".join(f"{entry.name}: {entry.supports(*args)}" for entry in entries),
        fix="Drop the forced implementation, or change what the sentence names.",
    )
