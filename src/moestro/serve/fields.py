"""What a request's body may hold: every field is served, accepted because it asks for nothing else, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moestro.errors import InvalidInputError
from moestro.hf.generate import Sampling
from moestro.hf.text_stream import check_stops
from moestro.serve import messages
from moestro.serve.problem import refused

Check = Callable[[str, Any], Any]
"""Takes a field's name and value; returns what is asked for by it, or raises an `ApiError`."""

MOST_STOPS = 16
MOST_LOGPROBS = 20
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Asked:
    """A body that was checked.

    Attributes:
        body: what Transformers' handlers read.
        sampling: how tokens are picked, as far as the body says.
        do_sample: whether tokens are sampled; None leaves the model's own way.
        logit_bias: by token, added to its logit.
        stops: texts to end before.
        top_logprobs: how many of the likeliest tokens are told; None for no logprobs.
        include_usage: whether a stream ends with the counts of tokens.
        effort: what is handed to the chat template as reasoning_effort.
        schema: of the JSON that the answer is to be; None for any text.
    """

    body: dict[str, Any]
    sampling: Sampling
    do_sample: bool | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    include_usage: bool = False
    effort: str | None = None
    schema: dict[str, Any] | None = None


def number(least: float = -math.inf, most: float = math.inf, integer: bool = False) -> Check:
    """A finite number within bounds."""
    kind = "an integer" if integer else "a number"
    bounds = "" if math.isinf(least) else f", {least:g} to {most:g}" if most < _MOST else f" of at least {least:g}"

    def check(name: str, value: Any) -> Any:
        right = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
        # Compared before anything turns it into a float: an integer of JSON may be too large for one.
        if not right or not (least <= value <= most) or (isinstance(value, float) and not math.isfinite(value)):
            raise refused(name, got=f"{name}={_shown(value)}", needs=kind + bounds, fix="Change it, or leave it out.")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refused(name, got=f"{name}={_shown(value)}", needs="true or false", fix="Change it, or leave it out.")
    return value


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise refused(name, got=f"{name}={_shown(value)}", needs="a string", fix="Change it.")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise refused(name, got=f"{name}={_shown(value)}", needs="an object", fix="Change it, or leave it out.")
    return value


def only(*allowed: Any, fix: str = "Leave it out.") -> Check:
    """Nothing but values that ask for what is done anyway."""

    def check(name: str, value: Any) -> Any:
        if any(type(value) is type(one) and value == one for one in allowed) or (value == 0 and 0 in allowed):
            return value
        needs = " or ".join(json.dumps(one) for one in allowed) or "it left out, since it is not served"
        raise refused(name, got=f"{name}={_shown(value)}", needs=needs, fix=fix, code="unsupported_value")

    return check


_BOUNDS = {"repetition_penalty": (0.01, 100), "temperature": (0, 100), "no_repeat_ngram_size": (0, 64)}
"""Closer than those of `Sampling`: a larger n makes each token compare n times the text."""


def sampled(name: str) -> Check:
    """What `Sampling` holds under this name, by its own rules."""
    whole = name in ("top_k", "no_repeat_ngram_size", "seed")
    bounds = _BOUNDS.get(name, (-math.inf, 2**63 - 1))

    def check(given: str, value: Any) -> Any:
        number(*bounds, integer=whole)(given, value)
        try:
            Sampling(**{name: value})
        except InvalidInputError as error:
            raise refused(
                given,
                got=f"{given}={_shown(value)}",
                needs=str(error).partition("; needs ")[2].partition(". ")[0],
                fix="Change it, or leave it out.",
            ) from None
        return value

    return check


def stop(name: str, value: Any) -> tuple[str, ...]:
    """A string or a list of them."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(one, str) for one in stops):
        needs = f"a string, or a list of at most {MOST_STOPS}"
        raise refused(name, got=f"{name}={_shown(value)}", needs=needs, fix="Change it, or leave it out.")
    try:
        return check_stops(stops)
    except InvalidInputError:
        needs = "strings of at least one character"
        raise refused(name, got=f"{name}={_shown(value)}", needs=needs, fix="Leave empty ones out.") from None


def logit_bias(name: str, value: Any) -> dict[int, float]:
    """Numbers from -100 to 100 by token id."""
    found = {}
    for key, bias in mapping(name, value).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise refused(name, got=f"the token {_shown(key)}", needs="ids of tokens", fix="Change it.")
        found[int(key)] = float(number(-100, 100)(f"{name}.{key}", bias))
    return found


def stream_options(name: str, value: Any) -> bool:
    """Whether a stream ends with the counts of tokens."""
    for key, inner in mapping(name, value).items():
        if key not in ("include_usage", "include_obfuscation"):
            raise refused(name, got=f"{name}.{_shown(key)}", needs="include_usage", fix="Leave it out.")
        if inner is not None:
            (flag if key == "include_usage" else only(False))(f"{name}.{key}", inner)
    return bool(value.get("include_usage"))


def reasoning(name: str, value: Any) -> str | None:
    """The effort, which is all that is taken of it."""
    for key, inner in mapping(name, value).items():
        if key != "effort" and inner is not None:
            raise refused(name, got=f"{name}.{_shown(key)}", needs="effort alone", fix="Leave it out.")
    effort = value.get("effort")
    return None if effort is None else text(f"{name}.effort", effort)


_OF_SCHEMA: dict[str, Check] = {"name": text, "description": text, "schema": mapping, "strict": flag}
_OF_FORMAT: dict[str, tuple[str, ...]] = {"text": (), "json_object": ("schema",), "json_schema": tuple(_OF_SCHEMA)}


def response_format(name: str, value: Any) -> dict[str, Any] | None:
    """The schema that a format asks for: any object for "json_object" without one; None for text."""
    held = dict(mapping(name, value))
    kind = held.pop("type", None)
    if not isinstance(kind, str) or kind not in _OF_FORMAT:
        needs = " or ".join(json.dumps(one) for one in _OF_FORMAT)
        raise refused(f"{name}.type", got=f"{name}.type={_shown(kind)}", needs=needs, fix="Change it.")
    if kind == "json_schema" and "json_schema" in held:  # /v1/responses has its parts beside the type
        held = dict(mapping(f"{name}.json_schema", held["json_schema"]))
    for key, inner in held.items():
        if key not in _OF_FORMAT[kind]:
            needs = f"nothing but {', '.join(('type', *_OF_FORMAT[kind]))}"
            raise refused(name, got=f"{name} with {_shown(key)}", needs=needs, fix="Leave it out.")
        if inner is not None:
            _OF_SCHEMA[key](f"{name}.{key}", inner)
    if kind == "json_schema" and held.get("schema") is None:
        raise refused(
            name, got=f"{name} without a schema", needs="a JSON schema", fix='Add it, or ask for "json_object".'
        )
    return held.get("schema") if kind != "json_object" else held.get("schema", {"type": "object"})


def text_format(name: str, value: Any) -> dict[str, Any] | None:
    """The format alone, as /v1/responses has it."""
    for key, inner in mapping(name, value).items():
        if key != "format" and inner is not None:
            raise refused(name, got=f"{name}.{_shown(key)}", needs="format alone", fix="Leave it out.")
    given = value.get("format")
    return None if given is None else response_format(f"{name}.format", given)


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size", "seed")
_IN_GENERATION_CONFIG: dict[str, Check] = {
    "max_new_tokens": number(1, _MOST, integer=True),
    "do_sample": flag,
    **{name: sampled(name) for name in _SAMPLED if name != "seed"},
}
_OF_TRANSFORMERS = ("transformers_version", "_from_model_config")


def generation_config(name: str, value: Any) -> dict[str, Any]:
    """Transformers' configuration as JSON in a string, which its own clients send."""
    try:
        held = json.loads(text(name, value))
    except (ValueError, RecursionError):
        raise refused(name, got=_shown(value), needs="JSON in a string", fix="Leave it out.") from None
    found = {}
    for key, inner in mapping(name, held).items():
        if key in _OF_TRANSFORMERS or inner is None:
            continue
        if key not in _IN_GENERATION_CONFIG:
            needs = ", ".join(_IN_GENERATION_CONFIG)
            raise refused(name, got=f"{name} with {_shown(key)}", needs=f"nothing but {needs}", fix="Leave it out.")
        found[key] = _IN_GENERATION_CONFIG[key](f"{name}.{key}", inner)
    return found


_OF_SAMPLED_ONLY = ("temperature", "top_p", "top_k", "min_p")
_TOKENS = number(1, _MOST, integer=True)
_PENALTY = only(0, fix="Leave it out; repetition_penalty is served.")
_EVERYWHERE: dict[str, Check] = {
    "model": text,
    "stream": flag,
    "user": text,
    "generation_config": generation_config,
    **{name: sampled(name) for name in _SAMPLED},
}
_OF_TEXT: dict[str, Check] = {
    "stop": stop,
    "max_tokens": _TOKENS,
    "logit_bias": logit_bias,
    "stream_options": stream_options,
    "n": only(1, fix="Send the request n times."),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}
_OF_MESSAGES: dict[str, Check] = {
    "metadata": mapping,
    "store": only(False, fix="Leave it out; nothing is stored."),
    "tools": messages.check_tools,
    "tool_choice": only("auto", "none"),
    "parallel_tool_calls": flag,
    "chat_template_kwargs": messages.check_template_variables,
    "service_tier": only("auto", "default"),
    "safety_identifier": text,
    "prompt_cache_key": text,
}

FIELDS: dict[str, dict[str, Check]] = {
    "chat": {
        **_EVERYWHERE,
        **_OF_TEXT,
        **_OF_MESSAGES,
        "messages": messages.check_messages,
        "max_completion_tokens": _TOKENS,
        "logprobs": flag,
        "top_logprobs": number(0, MOST_LOGPROBS, integer=True),
        "reasoning_effort": text,
        "response_format": response_format,
        "modalities": only(["text"]),
    },
    "completions": {
        **_EVERYWHERE,
        **_OF_TEXT,
        "prompt": messages.check_prompt,
        "logprobs": number(0, MOST_LOGPROBS, integer=True),
        "best_of": only(1),
        "echo": only(False),
    },
    "responses": {
        **_EVERYWHERE,
        **_OF_MESSAGES,
        "input": messages.check_input,
        "instructions": text,
        "max_output_tokens": _TOKENS,
        "reasoning": reasoning,
        "text": text_format,
        "truncation": only("disabled"),
        "background": only(False),
        "include": only([]),
        "top_logprobs": only(0, fix="Leave it out; /v1/chat/completions tells logprobs."),
    },
}
"""By endpoint, the check of each field. What is in none of these is refused by its name."""

_NEEDED = {"chat": "messages", "completions": "prompt", "responses": "input"}
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def read(endpoint: str, body: Any) -> Asked:
    """Check a body, field by field; a field that is null counts as left out.

    Raises:
        ApiError: naming the field.
    """
    body = {name: value for name, value in mapping("body", body).items() if value is not None}
    checks = FIELDS[endpoint]
    for name in body:
        if name not in checks:
            needs = "fields that this endpoint serves"
            raise refused(name[:80], got=f"the field {_shown(name)}", needs=needs, fix="Leave it out.")
    if _NEEDED[endpoint] not in body:
        needed = _NEEDED[endpoint]
        raise refused(needed, got=f"a body without {needed}", needs=needed, fix="Add it.")
    found = {name: checks[name](name, value) for name, value in body.items()}
    if "instructions" in found and messages.begins_with_system(found["input"]):
        got = "instructions and a system message first"  # which Transformers would put in its place
        raise refused("instructions", got=got, needs="one of them", fix="Leave one out.")
    if found.get("tool_choice") == "none":
        found.pop("tools", None)
    if found.get("tools") and found.get("parallel_tool_calls") is False:
        needs = "true, since nothing here keeps a model from several calls"
        raise refused("parallel_tool_calls", got="parallel_tool_calls=false", needs=needs, fix="Leave it out.")
    asked = _asked(endpoint, found)
    if asked.schema is not None and asked.body.get("tools"):
        needs = "one of them: what is held to a schema cannot call tools"
        raise refused(
            "tools", got="tools and a format of JSON", needs=needs, fix='Leave one out, or set tool_choice="none".'
        )
    return asked


def _asked(endpoint: str, found: dict[str, Any]) -> Asked:
    held = found.pop("generation_config", {})
    lengths = {name: found[name] for name in _LENGTHS if name in found}
    if len(set(lengths.values())) > 1:
        got, needs = " and ".join(f"{name}={value}" for name, value in lengths.items()), "one length"
        raise refused(next(iter(lengths)), got=got, needs=needs, fix="Leave one out.")
    values = {**held, **{name: found.pop(name) for name in _SAMPLED if name in found}}
    do_sample = values.pop("do_sample", None)
    if lengths:
        values["max_new_tokens"] = next(iter(lengths.values()))
    if do_sample is False and values.get("temperature") != 0:
        for name in _OF_SAMPLED_ONLY:
            if name in values:
                got, needs = f"{name} with do_sample=false", "do_sample=true, or the likeliest token"
                raise refused(name, got=got, needs=needs, fix="Leave one of them out.")
    found.setdefault("stream", False)  # Transformers streams what does not say, unlike OpenAI
    return Asked(
        body=found,
        sampling=Sampling(**values),
        do_sample=do_sample,
        logit_bias=found.pop("logit_bias", {}),
        stops=found.pop("stop", ()),
        top_logprobs=_top_logprobs(endpoint, found),
        include_usage=found.pop("stream_options", False),
        effort=found.pop("reasoning_effort", None) or found.pop("reasoning", None),
        schema=found.pop("text" if endpoint == "responses" else "response_format", None),
    )


def _top_logprobs(endpoint: str, found: dict[str, Any]) -> int | None:
    top, logprobs = found.pop("top_logprobs", None), found.pop("logprobs", None)
    if endpoint == "completions":
        return logprobs  # type: ignore[no-any-return]
    if top and not logprobs:
        raise refused("top_logprobs", got="top_logprobs alone", needs="logprobs=true too", fix="Add it.")
    return (top or 0) if logprobs else None


def _shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    try:
        shown = json.dumps(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or lists in lists
        shown = type(value).__name__
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
