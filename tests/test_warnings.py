"""Warnings are errors where the package or its tests cause them, and not where a library talks about itself."""

from __future__ import annotations

import warnings

import pytest


@pytest.mark.parametrize("module", ["moestro", "moestro.hf.load", "test_layer", "tests.hf.test_load", "torchlike"])
def test_our_own_are_errors(module: str) -> None:
    with pytest.raises(RuntimeWarning):
        warnings.warn_explicit("of ours", RuntimeWarning, "some.py", 1, module=module)


@pytest.mark.parametrize("module", ["torch", "torch._dynamo.guards", "transformers.utils.generic"])
def test_a_librarys_are_shown(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda *values, **named: shown.append(str(values[0])))
    monkeypatch.setattr(warnings, "_showwarnmsg", lambda said: shown.append(str(said.message)))
    warnings.warn_explicit("Guards may run slower on Python 3.13.0.", RuntimeWarning, "some.py", 1, module=module)
    assert shown == ["Guards may run slower on Python 3.13.0."]
