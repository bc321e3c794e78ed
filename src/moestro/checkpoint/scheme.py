"""Which format the experts of a checkpoint get, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, get_args

from moestro.errors import invalid_input
from moestro.formats import WeightFormat, find_format
from moestro.formats.encode import Search

SEARCHES = get_args(Search)

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
        if self.search not in SEARCHES:
            raise invalid_input(
                OPERATION,
                got=f"search {self.search!r}",
                needs=" or ".join(SEARCHES),
                fix="mse takes longer, and errs less.",
            )

    def format_of(self, target: str) -> WeightFormat:
        """The format of the projection of this full name."""
        found = self.format
        for pattern, name in self.overrides.items():
            if fnmatchcase(target, pattern):
                found = name
        return find_format(found)

    def settled(self, targets: Iterable[str]) -> Scheme:
        """The same formats for these projections by overrides whose order does not matter.

        Transformers sorts the keys of a configuration that it saves, which may put another override last.
        """
        targets = list(targets)
        by_name = Scheme(self.format, dict(sorted(self.overrides.items())), self.search)
        if all(by_name.format_of(t) == self.format_of(t) for t in targets):
            return self
        chosen = {t: self.format_of(t) for t in targets}
        usual = find_format(self.format)
        return Scheme(self.format, {t: f.name for t, f in chosen.items() if f != usual}, self.search)

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


def check_keys(config: Mapping[str, Any], operation: str) -> None:
    """Refuse a `quantization_config` of moestro that says what this version does not know.

    Raises:
        InvalidInputError: unknown keys, or another version than those until now.
    """
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
