"""Every name of Transformers' server that is imported here, and that Transformers does not promise to keep.

`moestro.serve.handlers` and `moestro.serve.service` override methods of these classes too, private ones among them.
"""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    GenerationState,
    Modality,
    ReasoningText,
    ToolCall,
    _StreamError,
    response_events_to_chunks,
)

StreamError = _StreamError
"""In a queue of pieces of a response: the error that ends it."""


def begins_in(parser: Any, prompt: str) -> bool:
    """Whether a parser of answers finds in a prompt where the answer begins."""
    return parser._spec.start_anchor_re.search(prompt) is not None


__all__ = [
    "BaseGenerateManager",
    "ChatCompletionHandler",
    "CompletionHandler",
    "GenerationState",
    "Modality",
    "ModelManager",
    "ReasoningText",
    "ResponseHandler",
    "StreamError",
    "ToolCall",
    "begins_in",
    "response_events_to_chunks",
]
