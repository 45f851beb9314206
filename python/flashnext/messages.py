"""Messages of a conversation, as people and other programs write them, in the shape templates want.

What is taken beyond ``{"role": ..., "content": ...}`` is the shape of OpenAI's interface: lists of
text parts, the role ``developer``, tool calls whose arguments are a JSON text, null fields.
Every error names the message and what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flashnext.errors import InputError

Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as plain dicts in one shape: contents are texts, arguments mappings.

    Raises:
        InputError: names the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(
            f"messages is a {type(messages).__name__}, expected a list of "
            "{'role': ..., 'content': ...}"
        )
    if not messages:
        raise InputError("messages is empty: give at least one {'role': 'user', 'content': ...}")
    return [_checked(i, message) for i, message in enumerate(messages)]


def _checked(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(
            f"message {index} is a {type(message).__name__}, expected "
            "{'role': ..., 'content': ...}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(
            f"message {index} has role {role!r}, expected 'system', 'user', 'assistant' or 'tool'"
        )
    where = f"message {index} ({role})"
    # A field that is null is one that is not there; templates ask whether fields are defined.
    checked = {key: value for key, value in message.items() if value is not None}
    if role == "developer":
        checked["role"] = "system"
    if "tool_calls" in checked:
        checked["tool_calls"] = _calls(where, checked["tool_calls"])
        if not checked["tool_calls"]:
            del checked["tool_calls"]
    content = checked.get("content")
    if content is None and "tool_calls" not in checked:
        raise InputError(f"{where} has no content")
    checked["content"] = "" if content is None else _text(where, content)
    return checked


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InputError(
            f"{where} has content of type {type(content).__name__}, expected a text or a list of "
            "text parts"
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise InputError(f"{where} has a part of type {kind!r}: this engine reads text only")
        if not isinstance(part.get("text"), str):
            raise InputError(
                f"{where} has a part of type 'text' whose text is {part.get('text')!r}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InputError(f"{where} has tool_calls of type {type(calls).__name__}, expected a list")
    return [_call(f"{where}, tool call {i}", call) for i, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    """One call, either ``{"function": {"name", "arguments"}}`` or the inner part alone."""
    inner = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(inner, Mapping):
        raise InputError(
            f"{where} is {call!r:.60}, expected {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where} has the function name {name!r}, expected a text")
    plain = {**inner, "arguments": _arguments(f"{where} ({name})", inner.get("arguments"))}
    return {**call, "function": plain} if inner is not call else plain


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} has arguments that are no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise InputError(
            f"{where} has arguments of type {type(arguments).__name__}, expected an object of "
            "names and values, or its JSON text"
        )
    return dict(arguments)
