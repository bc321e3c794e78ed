"""Everything here needs Transformers; without it the folder is skipped."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Small checkpoints in published layouts, each made once."""
    from hf.checkpoints import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
