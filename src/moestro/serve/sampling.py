"""How the tokens of a request are picked: the model's own generation configuration, and what was asked for on top."""

from __future__ import annotations

from typing import Any

from moestro.hf.generate import completed
from moestro.hf.text_model import TextModel
from moestro.serve.fields import Asked
from moestro.serve.problem import refused

DEFAULT_NEW_TOKENS = 1024
LONGEST = 1 << 20
"""New tokens at most, of a model whose configuration does not say how long its context is."""

_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def configure(text_model: TextModel, asked: Asked, default_new_tokens: int = DEFAULT_NEW_TOKENS) -> Any:
    """Transformers' generation configuration for a request.

    A temperature of 0 takes the likeliest token. A temperature above it, or any of top_k, top_p and min_p, samples;
    without them the model's own way counts.
    """
    values = {name: value for name, value in vars(asked.sampling).items() if value is not None}
    for name in ("seed", "stop"):
        values.pop(name, None)
    do_sample = asked.do_sample
    if do_sample is None:
        wanted = any(name in values for name in _OF_SAMPLING)
        do_sample = wanted or bool(text_model.model.generation_config.do_sample)
    if values.get("temperature") == 0:
        do_sample = False
    if not do_sample:
        values = {**values, **dict.fromkeys(_OF_SAMPLING)}
    most = values.setdefault("max_new_tokens", default_new_tokens)
    values["max_new_tokens"] = min(most, text_model.context or LONGEST)
    config = completed(text_model, {**values, "do_sample": do_sample})
    if asked.logit_bias:
        config.sequence_bias = {(token,): bias for token, bias in _in_vocabulary(text_model, asked).items()}
    return config


def _in_vocabulary(text_model: TextModel, asked: Asked) -> dict[int, float]:
    size = text_model.config.get_text_config().vocab_size
    for token in asked.logit_bias:
        if token >= size:
            raise refused("logit_bias", got=f"token {token}", needs=f"tokens below {size}", fix="Leave it out.")
    return dict(asked.logit_bias)
