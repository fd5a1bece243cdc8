"""The messages of a chat: from JSON, measured, to what templates know. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from disagg.api.errors import BadField
from disagg.api.json_parts import cut_fields, decoded, elements, read, small, without_nulls
from disagg.text.limits import MAX_MESSAGES
from disagg.types.errors import InvalidRequest
from disagg.types.plain import NAME_CHARS, one_line, quoted


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message of a chat. content: text, or a list of parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[dict[str, Any], ...]
    name: str = ""


_MESSAGE_FIELDS = tuple(field.name for field in msgspec.structs.fields(Message))


def read_messages(raw: bytes) -> list[Any]:
    """The messages of a chat as JSON has them, without their nulls; with their parts, at most so many."""
    cut = elements(raw, MAX_MESSAGES) if raw[:1] == b"[" else []
    if raw[:1] != b"[":
        raise BadField("messages must be a list of messages", "messages", "invalid_type")
    if cut is None:
        raise _too_many_messages()
    messages = []
    left = MAX_MESSAGES - len(cut)
    for at, element in enumerate(cut):
        message = _message(element, f"messages[{at}]", left)
        content = message.get("content")
        left -= len(content) if isinstance(content, list) else 0
        messages.append(message)
    return messages


def _too_many_messages() -> InvalidRequest:
    return InvalidRequest(f"messages holds more than {MAX_MESSAGES} messages and parts, which is the most", "messages")


def _message(raw: bytes, path: str, max_parts: int) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for name, value in cut_fields(raw, _MESSAGE_FIELDS, path, path).items():
        if value == b"null":
            continue
        if name == "content" and value[:1] == b"[":
            parts = elements(value, MAX_MESSAGES)
            if parts is None or len(parts) > max_parts:
                raise _too_many_messages()
            message[name] = [_part(part, f"{path}.content[{at}]") for at, part in enumerate(parts)]
        elif name == "content" and value[:1] == b'"':
            message[name] = read(value, str, f"{path}.content")
        else:
            message[name] = small(value, f"{path}.{name}")
    return message


class _Part(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


def _part(raw: bytes, path: str) -> Any:
    """A text part. Any other is refused later, by a name that needs to know it; so it is read if it is small."""
    try:
        return msgspec.to_builtins(decoded(raw, _Part))
    except msgspec.ValidationError:
        part = small(raw, path)
        return without_nulls(part) if isinstance(part, dict) else part


def for_template(index: int, message: Message) -> dict[str, str]:
    """The message as templates know it: text content, and "system" for what OpenAI now calls "developer"."""
    rendered = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content if isinstance(message.content, str) else _joined(index, message.content),
    }
    return {**rendered, "name": message.name} if message.name else rendered


def _joined(index: int, parts: tuple[dict[str, Any], ...]) -> str:
    """Text parts, a line each, as vLLM joins them for templates that take a string."""
    texts = []
    for i, part in enumerate(parts):
        path = f"messages[{index}].content[{i}]"
        if part.get("type") != "text":
            raise BadField(
                f"{path} is of type {_shown(part.get('type'))}; only text parts are served",
                f"{path}.type",
                "unsupported_value",
            )
        extra = sorted(part.keys() - {"type", "text"})
        if extra:
            unknown = f"{path}.{one_line(extra[0], NAME_CHARS)}"
            raise BadField(f"unknown field {unknown}", unknown, "unknown_parameter")
        if not isinstance(part.get("text"), str):
            raise BadField(f"{path}.text must be a string", f"{path}.text", "invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


def _shown(value: object) -> str:
    """A value of any JSON type for an error, without writing out what is in it."""
    return quoted(value) if isinstance(value, str) else f"a {type(value).__name__}"
