"""Everything here needs Transformers; without it the folder is skipped."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
