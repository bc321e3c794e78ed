"""What the `moestro` script runs: beside the package, whose import alone takes a second, so that Ctrl-C works then."""

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
    except ValueError as error:  # a variable of the environment, which is read at the import
        if type(error).__module__ != "moestro.errors":
            raise
        print(error, file=sys.stderr)
        sys.exit(2)
