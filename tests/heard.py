"""Who listens to a request in tests."""

from __future__ import annotations

import threading


class Heard:
    """A listener that keeps what it is told, and can end the request, fail, or hold up the engine's thread."""

    def __init__(self, stop_after=None, fail=False, gate=None):
        self.tokens, self.ended, self._done = [], None, threading.Event()
        self.stop_after, self.fail, self.gate = stop_after, fail, gate
        self.begun = threading.Event()

    def token(self, token):
        assert self.ended is None
        self.begun.set()
        if self.gate is not None:
            self.gate.wait(60)
        if self.fail:
            raise ValueError("a listener that fails")
        self.tokens.append(token)
        return len(self.tokens) == self.stop_after

    def end(self, ended):
        assert self.ended is None
        self.ended = ended
        self._done.set()

    def wait(self):
        assert self._done.wait(60)
        return self

    @property
    def ids(self):
        return [token.id for token in self.tokens]
