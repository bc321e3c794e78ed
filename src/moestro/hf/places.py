"""Where a model is that somebody named: a folder here, or an id of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from moestro.errors import invalid_input

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def find_model(name: str | Path, operation: str) -> str:
    """The folder, or the hub id, that a user named; "~" stands for a home folder.

    Raises:
        InvalidInputError: a folder without config.json, or a path where there is no folder.
    """
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # "~name" of nobody here
        folder = Path(name)
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.exists():
        raise invalid_input(
            operation,
            got=f"{name}, which holds no config.json",
            needs="a folder written by save_pretrained",
            fix="Name the folder that holds config.json and the weights.",
        )
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise invalid_input(
            operation,
            got=f"model {str(name)!r}, where there is no folder",
            needs="a folder that exists, or a hub id such as allenai/OLMoE-1B-7B-0924",
            fix="Check the path.",
        )
    return name
