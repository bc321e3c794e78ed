"""The processes of these tests end with them."""

from __future__ import annotations

import pytest


def test_they_end_with_this_folder(request: pytest.FixtureRequest) -> None:
    """Where this folder is no package, pytest keeps what is of a package until all tests have run."""
    packages = [node.name for node in request.node.iter_parents() if isinstance(node, pytest.Package)]
    assert packages == ["parallel"]
