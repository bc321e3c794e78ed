"""Which format the experts of a checkpoint get, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from moestro.errors import invalid_input
from moestro.formats import WeightFormat, find_format
from moestro.formats.encode import Search, check_search

OPERATION = "quantize"

METHOD = "moestro"
"""What Transformers knows the experts implementation and the quantisation by."""

VERSION = 1
"""Of the `quantization_config` that is written; one without a version was written before there were any."""

MARK = {"experts_implementation": METHOD}
"""What a config.json says, so that Transformers without moestro refuses the model: it skips a `quantization_config` of
a method that it does not know, and fills the experts with random numbers."""

KEYS = frozenset(("quant_method", "version", "format", "search", "overrides", "rest"))
"""Of the `quantization_config`."""


@dataclass(frozen=True)
class Scheme:
    """Which format each projection gets, and how its scales are chosen.

    Attributes:
        format: the name of the format of every projection that no override matches.
        overrides: patterns on a projection's full name in the model ("*.layers.0.*", "*down_proj"), as `fnmatch` reads
            them, and the name of the format of those that match; the last one that matches decides.
        search: "nearest" or "mse", as `moestro.formats.quantize` takes it.

    Raises:
        InvalidInputError: a format or a search of no such name.
    """

    format: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    search: Search = "nearest"

    def __post_init__(self) -> None:
        for name in (self.format, *self.overrides.values()):
            find_format(name)
        check_search(self.search, OPERATION)

    def format_of(self, target: str) -> WeightFormat:
        """The format of the projection of this full name."""
        return find_format(format_for(target, self.format, self.overrides) or self.format)

    def settled(self, targets: Iterable[str]) -> Scheme:
        """The same formats for these projections by overrides whose order does not matter."""
        return replace(self, overrides=in_any_order(list(targets), self.format, self.overrides))

    def as_config(self, rest: Any = None) -> dict[str, Any]:
        """The `quantization_config` of a config.json.

        Args:
            rest: how the source was quantised apart from its experts, as its own `quantization_config` says; or None.
        """
        config: dict[str, Any] = {
            "quant_method": METHOD,
            "version": VERSION,
            "format": find_format(self.format).name,
            "search": self.search,
            "overrides": {pattern: find_format(name).name for pattern, name in self.overrides.items()},
        }
        return config if rest is None else {**config, "rest": rest}


def format_for(target: str, usual: str | None, overrides: Mapping[str, str]) -> str | None:
    """The format's name of the projection of this full name: of the last override that matches, or the usual one."""
    found = usual
    for pattern, name in overrides.items():
        if fnmatchcase(target, pattern):
            found = name
    return found


def in_any_order(targets: Iterable[str], usual: str | None, overrides: Mapping[str, str]) -> dict[str, str]:
    """Overrides that give these projections the same formats, and whose order does not matter.

    Transformers sorts the keys of a configuration that it saves, which may put another override last.
    """
    by_name = dict(sorted(overrides.items()))
    chosen = {target: format_for(target, usual, overrides) for target in targets}
    if all(format_for(target, usual, by_name) == name for target, name in chosen.items()):
        return dict(overrides)
    return {target: name for target, name in chosen.items() if name is not None and name != usual}


def check_keys(config: Mapping[str, Any], operation: str) -> None:
    """Refuse a `quantization_config` of moestro with unknown keys, or of another version than those until now."""
    version = config.get("version", VERSION)
    unknown = sorted(str(key) for key in config if key not in KEYS)
    known = type(version) is int and 1 <= version <= VERSION
    if unknown or not known:
        raise invalid_input(
            operation,
            got=f"a quantization_config of moestro with {', '.join(unknown) if known else f'version {version!r}'}",
            needs=f"no other keys than {', '.join(sorted(KEYS))}" if known else f"version {VERSION}, or none",
            fix="Update moestro, or correct config.json.",
        )
