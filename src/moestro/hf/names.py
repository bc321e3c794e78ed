"""The keys of a checkpoint by the parameters of a model that they belong to.

The names come from Transformers' own table of conversions, which it loads every architecture by: a key is renamed as
Transformers would rename it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moestro.errors import unsupported


class NameMap:
    """The keys of a checkpoint by the parameters of a model that they belong to.

    Args:
        model: made of empty parameters.
        keys: the checkpoint's.
        more: names that the model has no parameter of, and a checkpoint may yet hold tensors for.
    """

    def __init__(self, model: Any, keys: Sequence[str], more: Iterable[str] = ()) -> None:
        mapping = get_model_conversion_mapping(model)
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        parameters = {**model.state_dict(), **dict.fromkeys(more, True)}
        self._keys: dict[str, dict[str | None, list[str]]] = {}
        for key in sorted(keys, key=dot_natural_key):
            renamed, pattern = rename_source_key(key, renamings, self._converters, model.base_model_prefix, parameters)
            if renamed not in parameters and key in parameters:
                renamed, pattern = key, None
            self._keys.setdefault(renamed, {}).setdefault(pattern, []).append(key)

    def single(self, name: str) -> str | None:
        """The key of a tensor that is stored as it is, under this name or one that is renamed to it."""
        found = self._keys.get(name, {}).get(None)
        return found[0] if found else None

    def keys(self, name: str) -> list[str]:
        """Every key that is renamed to this name, or that a parameter of this name is made of."""
        return [key for keys in self._keys.get(name, {}).values() for key in keys]

    def parts(self, parameter: str) -> list[tuple[str, ...]]:
        """The keys of what a parameter is concatenated of along its rows: each of one tensor, or of one an expert.

        Raises:
            UnsupportedError: Transformers does more than join its tensors.
        """
        found = self._keys.get(parameter, {})
        if None in found or not found:
            return [(key,) for key in found.get(None, [])[:1]]
        patterns = {p: c for c in self._converters for p in c.source_patterns if p in found}
        (converter,) = {id(c): c for c in patterns.values()}.values()
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
        if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            raise unsupported(
                "load",
                got=f"{parameter}, which Transformers converts by {', '.join(name for name, _ in steps)}",
                needs="experts stored as they are, one by one or stacked",
                fix="Load the model with Transformers, and call moestro.accelerate on it.",
            )
        return [tuple(found[p]) for p in converter.source_patterns if p in found]
