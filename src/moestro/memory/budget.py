"""How much memory the experts of a model may take, and how it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moestro.errors import invalid_input, unsupported
from moestro.memory.amounts import parse_bytes
from moestro.memory.policy import policy_named
from moestro.memory.reader import MOST_THREADS, OPERATION, THREADS

ON_MISS = ("copy", "compute", "auto")


@dataclass(frozen=True)
class DeviceMemory:
    """What `moestro.load(device_memory=...)` is given: a size, or this.

    Attributes:
        nbytes: of the slots of all expert layers together, in the memory of the device.
        on_miss: what decoding does with an expert that is in the host's memory only: "copy" it and compute on the
            device; "compute" it by the CPU's engine while it is copied for the next time, which rounds as the CPU does;
            "auto" to compare the two while running, and do what takes less time.
        device: the one that computes, whose memory this is; None for where `load` puts the model.

    Raises:
        InvalidInputError: a size or an `on_miss` that there is not.
    """

    nbytes: int
    on_miss: str = "copy"
    device: str | None = None

    def __post_init__(self) -> None:
        check_size("device_memory", self.nbytes)
        if self.on_miss not in ON_MISS:
            needs = ", ".join(map(repr, ON_MISS))
            raise invalid_input(OPERATION, got=f"on_miss={self.on_miss!r}", needs=needs, fix='Leave it at "copy".')

    @classmethod
    def of(cls, value: object, on_miss: str = "copy") -> DeviceMemory:
        """Of "8GB", "4GiB" or a number of bytes; one of these stays what it is."""
        if isinstance(value, cls):
            return value
        size = parse_bytes(OPERATION, "device_memory", value) if isinstance(value, str) else value
        return cls(size, on_miss)  # type: ignore[arg-type]


def check_size(name: str, value: object) -> None:
    """Refuse what is no number of bytes above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid_input(
            OPERATION,
            got=f"a budget of {value!r}",
            needs="a number of bytes above 0",
            fix=f'For instance {name}="8GB", or {name}=8_000_000_000.',
        )


@dataclass(frozen=True)
class MemoryBudget:
    """What `moestro.load(memory=...)` is given: a size, or this.

    Attributes:
        nbytes: of the slots of all expert layers together, in the host's memory.
        policy: the name of the one that decides which experts stay: "expected", "lru", "lfu" or "layer_lfu".
        threads: that read from files, 1 to 8.
        prefetch: whether experts of the next layer are read before it asks for them, where that makes steps shorter.
        device_memory: of a GPU that computes, beside it; None where the CPU does.

    Raises:
        InvalidInputError: a size, a policy or a number of threads that there is not; prefetch that is neither True nor
            False.
        UnsupportedError: prefetch and device_memory together.
    """

    nbytes: int
    policy: str = "expected"
    threads: int = THREADS
    prefetch: bool = False
    device_memory: DeviceMemory | None = None

    def __post_init__(self) -> None:
        check_size("memory", self.nbytes)
        policy_named(OPERATION, str(self.policy))
        if type(self.threads) is not int or not 1 <= self.threads <= MOST_THREADS:
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
        if self.prefetch and self.device_memory is not None:
            raise unsupported(
                OPERATION,
                got="prefetch and device_memory",
                needs="one of them: what is predicted is read into the memory that computes",
                fix="Leave prefetch out.",
            )

    @classmethod
    def of(cls, value: object, device_memory: object = None) -> MemoryBudget:
        """A budget of "8GB", "4GiB" or a number of bytes, one of these too, and what a device has beside it.

        Raises:
            InvalidInputError: device_memory alone; as for the class.
        """
        if value is None:
            raise invalid_input(
                OPERATION,
                got=f"device_memory={device_memory!r} without memory",
                needs="the part of the host too, which the device's is filled from",
                fix='For instance memory="20GB", device_memory="6GB".',
            )
        size = parse_bytes(OPERATION, "memory", value) if isinstance(value, str) else value
        found = size if isinstance(size, cls) else cls(size)  # type: ignore[arg-type]
        return found if device_memory is None else replace(found, device_memory=DeviceMemory.of(device_memory))
