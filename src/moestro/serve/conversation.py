"""What was said in a chat: messages in OpenAI's form, kept in a file and read from it."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestro.errors import InvalidInputError, invalid_input

OPERATION = "chat"
ROLES = ("user", "assistant")

Message = dict[str, str]


@dataclass
class Conversation:
    """A system prompt, if any, and what the user and the model said in turn."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    @property
    def prompt(self) -> list[Message]:
        """All messages, that of the system first."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def ask(self, text: str) -> None:
        """The user said this."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The model said this. Where it said nothing, the question is taken back, so that the turns alternate."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def take_back_answer(self) -> bool:
        """Forget the last answer, to ask for another; False where nothing was asked."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return bool(self.messages)

    def save(self, path: Path) -> None:
        """Write all messages as JSON, whole or not at all.

        Raises:
            InvalidInputError: a file that cannot be written.
        """
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                temporary = Path(file.name)
                json.dump(self.prompt, file, ensure_ascii=False, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, ValueError) as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise _no_file(path, error, "a file that can be written") from None


def load_conversation(path: Path) -> Conversation:
    """Read what `Conversation.save` wrote, or other messages in OpenAI's form that are text.

    Raises:
        InvalidInputError: a file that cannot be read, or that holds something else.
    """
    try:
        found = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _no_file(path, error, "a file of messages in JSON") from None
    messages = [_message(path, index, message) for index, message in enumerate(_list(path, found))]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    return Conversation(system, messages)


def _list(path: Path, found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise _no_messages(path, f"{type(found).__name__} in the place of messages")
    return found


def _message(path: Path, index: int, message: Any) -> Message:
    allowed = ("system", *ROLES) if index == 0 else ROLES
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise _no_messages(path, f"no text in message {index + 1}")
    if message.get("role") not in allowed:
        raise _no_messages(path, f"role {message.get('role')!r} in message {index + 1}")
    if any("\ud800" <= character <= "\udfff" for character in message["content"]):
        raise _no_messages(path, f"no text in message {index + 1}")
    return {"role": message["role"], "content": message["content"]}


def _no_messages(path: Path, why: str) -> InvalidInputError:
    return invalid_input(
        OPERATION,
        got=f"{str(path)!r} ({why})",
        needs='a list of {"role", "content"}, of user and assistant, perhaps with system first',
        fix="Name a file that /save wrote.",
    )


def _no_file(path: Path, error: Exception, needs: str) -> InvalidInputError:
    why = getattr(error, "strerror", None) or " ".join(str(error).split())
    return invalid_input(OPERATION, got=f"{str(path)!r} ({why})", needs=needs, fix="Name another one.")
