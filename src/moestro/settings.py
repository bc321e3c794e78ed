"""What a process may set: the only reader of os.environ in the package."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from torch.compiler import is_dynamo_compiling

IMPLEMENTATION_VARIABLE = "MOESTRO_IMPLEMENTATION"
STRATEGY_VARIABLE = "MOESTRO_STRATEGY"
BENCH_PEERS_VARIABLE = "MOESTRO_BENCH_PEERS"
MASK_VARIABLE = "MOESTRO_WITHOUT_FEATURES"
API_KEY_VARIABLE = "MOESTRO_API_KEY"
MEASURE_VARIABLE = "MOESTRO_MEASURE"


@dataclass(frozen=True)
class Settings:
    """What is forced by name. None leaves the choice to the priority list (or to the shape)."""

    implementation: str | None = None
    strategy: str | None = None


# Either variable, set but empty, names nothing.
_PROCESS = Settings(os.environ.get(IMPLEMENTATION_VARIABLE) or None, os.environ.get(STRATEGY_VARIABLE) or None)
_Blocks = tuple[Settings, ...]

# The blocks that are open, and what they come to.
_context: ContextVar[tuple[_Blocks, Settings]] = ContextVar("moestro.settings", default=((), _PROCESS))


class _Thread(threading.local):
    """The same for a thread, in a place that torch.compile can read and guard. It can do neither with a ContextVar."""

    def __init__(self) -> None:
        self.blocks: _Blocks = ()
        self.settings = _PROCESS


_thread = _Thread()


def current() -> Settings:
    """The settings in force."""
    return _thread.settings if is_dynamo_compiling() else _context.get()[1]


MASKED = tuple(os.environ.get(MASK_VARIABLE, "").replace(",", " ").split())
"""Features of the processor that the engine is to do without, as Linux calls them ("avx512f", "amx_tile")."""


MEASURES = os.environ.get(MEASURE_VARIABLE) != "0"
"""Whether implementations may be chosen by what is timed on this machine."""


def bench_peers() -> str | None:
    """The folder of peers that the benchmark may run beside those of PyTorch and Transformers; read when asked."""
    return os.environ.get(BENCH_PEERS_VARIABLE) or None


def cache_folder() -> Path:
    """Where what was measured on this machine is kept: moestro in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moestro"


def api_keys() -> str | None:
    """The keys that open `moestro serve`, separated by commas; read when asked, and "" where the variable is empty."""
    return os.environ.get(API_KEY_VARIABLE)


@contextmanager
def use(implementation: str | None = None, strategy: str | None = None) -> Iterator[None]:
    """Force an implementation or a strategy by name while the block is open, in this thread and task only.

    ``with moestro.use(implementation="reference"): ...``. An implementation that does not exist, or
    cannot run the arguments it meets, raises `UnsupportedError` at the call, and an unknown strategy
    `InvalidInputError`: there is no silent fallback. The environment variables MOESTRO_IMPLEMENTATION and
    MOESTRO_STRATEGY set the same two values for a whole process.

    The setting is kept in a `contextvars.ContextVar`: threads that are started inside the block do not have it, asyncio
    tasks that are made inside it do. Blocks may overlap; what the last one still open names counts.

    Args:
        implementation: a name from `moestro.explain`, or None to leave it.
        strategy: "grouped", "blockwise", "selective" or "all_experts", or None to leave it.
    """
    block = Settings(implementation, strategy)
    _change(lambda blocks: (*blocks, block))
    try:
        yield
    finally:
        _change(lambda blocks: tuple(other for other in blocks if other is not block))


def _change(edit: Callable[[_Blocks], _Blocks]) -> None:
    _thread.blocks = edit(_thread.blocks)
    _thread.settings = _merged(_thread.blocks)
    if not is_dynamo_compiling():
        blocks = edit(_context.get()[0])
        _context.set((blocks, _merged(blocks)))


def _merged(blocks: _Blocks) -> Settings:
    merged = _PROCESS
    for block in blocks:
        merged = Settings(block.implementation or merged.implementation, block.strategy or merged.strategy)
    return merged
