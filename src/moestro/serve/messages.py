"""What the model is to answer: prompts, messages, tools, and what their chat template makes of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from moestro.hf.models import first_sentence
from moestro.serve.problem import ApiError, refused

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("text", "input_text", "output_text")
_OF_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal")
_OF_ITEM = ("role", "content", "type", "id", "status", "phase")
_NO_VARIABLES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages",
    "load_audio_from_video",
}


def check_prompt(name: str, value: Any) -> str:
    """A text, alone or in a list."""
    prompt = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(prompt, str) or not prompt:
        got = f"{len(value)} prompts or tokens" if isinstance(value, list) else f"{name}={json.dumps(value)[:60]}"
        raise refused(name, got=got, needs="one text that is not empty", fix="Send one request for each text.")
    return prompt


def check_messages(name: str, value: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, none of whose parts would get lost."""
    if not isinstance(value, list) or not value:
        raise refused(name, got=_kind(value), needs="a list of at least one message", fix="Write a message.")
    for index, message in enumerate(value):
        _check_message(f"{name}[{index}]", message)
    return value


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        got = f"the role {message.get('role')!r:.60}" if isinstance(message, dict) else _kind(message)
        raise refused(where, got=got, needs=f"an object with a role: {', '.join(ROLES)}", fix="Change it.")
    for key in message:
        if key not in _OF_MESSAGE:
            raise refused(f"{where}.{key[:80]}", got=f"{key[:80]!r}", needs=", ".join(_OF_MESSAGE), fix="Leave it out.")
    for key in ("name", "tool_call_id", "reasoning_content", "refusal"):
        if not isinstance(message.get(key), str | None):
            raise refused(f"{where}.{key}", got=_kind(message[key]), needs="a string", fix="Change it.")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(f"{where}.tool_calls", calls)
    content = message.get("content")
    if content is None and not calls and message["role"] != "assistant":
        raise refused(f"{where}.content", got="no content", needs="a text", fix="Write one.")
    if content is not None:
        _check_content(f"{where}.content", content)


def _check_content(where: str, content: Any) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise refused(where, got=_kind(content), needs="a string, or a list of texts", fix="Change it.")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        if not isinstance(part, dict) or kind not in _TEXTS or not isinstance(part.get("text"), str):
            needs = "parts of type text, with their text: images, sound and files are not served"
            raise refused(where, got=f"a part of type {kind!r:.60}", needs=needs, fix="Leave it out.")


def _check_calls(where: str, calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(where, got=_kind(call), needs="calls with a function and its name", fix="Change it.")
        _arguments(where, function.get("arguments"))
    if not isinstance(calls, list):
        raise refused(where, got=_kind(calls), needs="a list of calls", fix="Put it in a list.")


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call, which templates go through by their names."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    except (ValueError, RecursionError):
        found = arguments
    if not isinstance(found, dict):
        raise refused(where, got=_kind(arguments), needs="arguments that are a JSON object", fix="Change them.")
    return found


def check_tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Functions with their names, as chat completions or responses write them."""
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        right = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not right or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else _kind(tool)
            raise refused(name, got=f"a tool of type {kind!r:.60}", needs="functions with names", fix="Leave it out.")
    if not isinstance(value, list):
        raise refused(name, got=_kind(value), needs="a list of functions", fix="Put it in a list.")
    return value


def check_template_variables(name: str, value: Any) -> dict[str, Any]:
    """Variables of the chat template, and nothing that would say how the template is applied."""
    if not isinstance(value, dict):
        raise refused(name, got=_kind(value), needs="an object", fix="Change it.")
    for key in value:
        if key in _NO_VARIABLES:
            raise refused(name, got=repr(key), needs="variables of the chat template", fix="Leave it out.")
    return value


def check_input(name: str, value: Any) -> str | list[dict[str, Any]]:
    """What the responses endpoint answers: a text, a list of texts, or messages and calls with their results."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise refused(name, got=_kind(value), needs="a text, or a list of messages", fix="Write a message.")
    if isinstance(value[0], dict) and value[0].get("type") in _TEXTS:
        _check_content(name, value)
        return value
    if not isinstance(value[0], dict) or "role" not in value[0]:
        raise refused(f"{name}[0]", got=_kind(value[0]), needs="a message first", fix="Add its role.")
    for index, item in enumerate(value):
        _check_item(f"{name}[{index}]", item)
        if item.get("type") == "reasoning" and not _assistant_follows(value[index + 1 :]):
            needs = "the assistant's message that it belongs to after it"
            raise refused(f"{name}[{index}]", got="reasoning alone", needs=needs, fix="Leave it out.")
    return value


def _assistant_follows(items: list[Any]) -> bool:
    """Whether a message of the assistant comes next, perhaps behind its calls."""
    others = (item for item in items if not isinstance(item, dict) or item.get("type") != "function_call")
    following = next(others, None)
    return isinstance(following, dict) and following.get("role") == "assistant"


def begins_with_system(value: str | list[dict[str, Any]]) -> bool:
    """Whether an input begins with a system message."""
    return isinstance(value, list) and value[0].get("role") == "system"


def _check_item(where: str, item: Any) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else _kind(item)
    if not isinstance(item, dict) or ("role" in item) != (kind == "message"):
        raise refused(where, got=f"an item of type {kind!r:.60}", needs="messages, calls and results", fix="Change it.")
    if kind == "message":
        for key in item:
            if key not in _OF_ITEM:
                raise refused(
                    f"{where}.{key[:80]}", got=f"{key[:80]!r}", needs=", ".join(_OF_ITEM), fix="Leave it out."
                )
        _check_message(where, {key: item[key] for key in ("role", "content") if key in item})
        return
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
    if kind == "reasoning":
        content = item.get("content") or []
        if not isinstance(content, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            raise refused(where, got=_kind(content), needs="a list of texts", fix="Leave it out.")
        return
    if kind not in needed:
        needs = "message, reasoning, function_call or function_call_output"
        raise refused(where, got=f"an item of type {kind!r:.60}", needs=needs, fix="Leave it out.")
    for key in needed[kind]:
        if not isinstance(item.get(key), str):
            raise refused(f"{where}.{key}", got=_kind(item.get(key)), needs="a string", fix="Change it.")
    if kind == "function_call":
        _arguments(where, item["arguments"])


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: one text each, and arguments of calls as objects."""
    found = []
    for message in messages:
        content = message.get("content") or ""
        kept = {key: inner for key, inner in message.items() if inner is not None and key != "refusal"}
        kept["content"] = content if isinstance(content, str) else " ".join(part["text"] for part in content)
        if "tool_calls" in kept:
            kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
        found.append(kept)
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments("tool_calls", function.get("arguments"))
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


class Prompts:
    """Stands where Transformers' handlers expect a processor: makes token ids of a prompt or of messages.

    Args:
        tokenizer: whose own chat template is used.
        effort: the template's reasoning_effort.
    """

    def __init__(self, tokenizer: Any, effort: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._effort = effort

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> Any:
        """As the tokenizer, but what the template cannot take is refused in words, and so is what it passes over."""
        options.pop("load_audio_from_video", None)
        template = self._template(tools)
        used: Mapping[str, tuple[bool, str]] = {
            "tools": (bool(tools), "tools"),
            "tool": (any(m["role"] == "tool" or m.get("tool_calls") for m in messages), "messages"),
            "reasoning_effort": (self._effort is not None, "reasoning_effort"),
        }
        for word, (asked, name) in used.items():
            if asked and word not in template:
                got = f"{name} for a model whose chat template has no {word}"
                raise refused(name, got=got, needs="a model that was made for it", fix="Leave it out.")
        if self._effort is not None:
            options["reasoning_effort"] = self._effort
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _refused_by_template(error) from error

    def _template(self, tools: Any) -> str:
        if not self.tokenizer.chat_template:
            got, needs = "messages for a model whose tokenizer has no chat template", "an instruction-tuned model"
            raise refused("messages", got=got, needs=needs, fix="Use /v1/completions to continue a text.")
        return str(self.tokenizer.get_chat_template(tools=tools))


def _refused_by_template(error: Exception) -> ApiError:
    got = f"messages that the model's chat template refuses ({first_sentence(error).rstrip('.')})"
    return refused("messages", got=got, needs="messages that it takes", fix="Change their roles or their order.")


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(type(value), repr(value)[:60])
