"""``python -m moestro`` is the `moestro` command."""

from moestro.cli import main

if __name__ == "__main__":
    main()
