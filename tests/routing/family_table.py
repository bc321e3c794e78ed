"""Every router class of the installed Transformers, found by walking it, and the table of docs/reference/routers.md.

`python tests/routing/family_table.py` prints the table.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from routing.families import ROUTERS, Family

_IS_ROUTER = re.compile(r"(Router|TopKGating|MoEV1Gate|CDMoE)$")
_IS_MOE = re.compile(r"Experts|M[oO][eE]")


def discover() -> Iterator[tuple[str, str, list[str]]]:
    """(family, module, router classes) of every modeling file of the installed Transformers with experts in it."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    for path in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        classes = re.findall(r"^class (\w+)\((?:torch\.)?nn\.(?:Module|Linear)\):", path.read_text(), re.MULTILINE)
        routers = [c for c in classes if _IS_ROUTER.search(c)]
        if routers or any(_IS_MOE.search(c) for c in classes):
            yield path.parent.name, f"transformers.models.{path.parent.name}.{path.stem}", routers


def table() -> str:
    """The table of docs/reference/routers.md."""
    lines = ["| family | router | value | beside it |", "|---|---|---|---|"]
    for family, _, routers in discover():
        for name in routers:
            if name in ROUTERS:
                row = ROUTERS[name]
                notes = [n for n in ("correction bias" if row.correction else "", _groups_text(row), row.note) if n]
                lines.append(f"| {family} | {name} | `{row.text()}` | {'; '.join(notes)} |")
    return "\n".join(lines)


def _groups_text(family: Family) -> str:
    if family.groups is None:
        return ""
    return f"`GroupLimit({', '.join(f'{k}={v!r}' for k, v in family.groups.items())})`"


if __name__ == "__main__":
    print(table())
