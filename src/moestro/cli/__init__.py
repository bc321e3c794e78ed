"""The command line: argument parsing and printing only. What a command needs is imported when it runs."""

from __future__ import annotations

from moestro.cli.app import app, main

__all__ = ["app", "main"]
