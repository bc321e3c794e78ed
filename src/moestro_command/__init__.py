"""What the `moestro` script runs. It lies beside the package, whose import takes the first second: Ctrl-C works then."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback."""
    try:
        from moestro.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
