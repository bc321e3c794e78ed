"""How much memory the experts of a model may take, and how it is used."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.errors import invalid_input
from moestro.memory.amounts import parse_bytes
from moestro.memory.policy import policy_named
from moestro.memory.reader import MOST_THREADS, OPERATION, THREADS


@dataclass(frozen=True)
class MemoryBudget:
    """What `moestro.load(memory=...)` is given: a size, or this.

    Attributes:
        nbytes: of the slots of all expert layers together.
        policy: the name of the one that decides which experts stay: "expected", "lru", "lfu" or "layer_lfu".
        threads: that read from files, 1 to 8.
        prefetch: whether experts of the next layer are read before it asks for them, where that makes steps shorter.

    Raises:
        InvalidInputError: a size, a policy or a number of threads that there is not; prefetch that is neither True nor
            False.
    """

    nbytes: int
    policy: str = "expected"
    threads: int = THREADS
    prefetch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.nbytes, bool) or not isinstance(self.nbytes, int) or self.nbytes < 1:
            raise invalid_input(
                OPERATION,
                got=f"a budget of {self.nbytes!r}",
                needs="a number of bytes above 0",
                fix='For instance memory="8GB", or memory=8_000_000_000.',
            )
        policy_named(OPERATION, self.policy)
        if isinstance(self.threads, bool) or self.threads not in range(1, MOST_THREADS + 1):
            raise invalid_input(
                OPERATION,
                got=f"{self.threads!r} reading threads",
                needs=f"1 to {MOST_THREADS}",
                fix=f"Leave it at {THREADS}.",
            )
        if not isinstance(self.prefetch, bool):
            raise invalid_input(
                OPERATION, got=f"prefetch={self.prefetch!r}", needs="True or False", fix="Leave it out for False."
            )

    @classmethod
    def of(cls, value: object) -> MemoryBudget:
        """A budget of "8GB", "4GiB" or a number of bytes; one of these stays what it is."""
        if isinstance(value, cls):
            return value
        return cls(parse_bytes(OPERATION, "memory", value) if isinstance(value, str) else value)  # type: ignore[arg-type]
