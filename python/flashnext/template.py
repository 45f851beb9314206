"""Chat templates: the checkpoint's own jinja template, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flashnext.errors import CheckpointError, InputError
from flashnext.tokenizer import special_text

Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):
    """The template called ``raise_exception``."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja's own filter this one escapes nothing for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """Renders messages to the prompt text of one checkpoint.

    The template is ``chat_template.jinja`` if the folder has it, else ``chat_template`` of
    ``tokenizer_config.json`` (a text, or a list of named ones of which ``default`` is taken, or
    ``tool_use`` when tools are given).
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}"
                ) from error

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Reads the template of a checkpoint; None when it has none."""
        sources: dict[str, str] = {}
        own = config.get("chat_template")
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                sources["default"] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: not readable: {error}") from error
        elif isinstance(own, str):
            sources["default"] = own
        elif isinstance(own, list):
            for entry in own:
                if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                    raise CheckpointError(
                        f"{folder / 'tokenizer_config.json'}: an entry of chat_template has no "
                        "name or no template"
                    )
                sources[str(entry["name"])] = str(entry["template"])
        elif own is not None:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: chat_template is a {type(own).__name__}, "
                "expected a text or a list of named texts"
            )
        special = {
            key: text
            for key, value in config.items()
            if key.endswith("_token") and isinstance(text := special_text(value), str)
        }
        return cls(sources, special) if sources else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **arguments: Any,
    ) -> str:
        """Renders ``messages``; further arguments go to the template as they are.

        Raises:
            InputError: the messages are malformed, or the template refuses them.
        """
        checked = check_messages(messages)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            name = next(iter(self._templates))
        try:
            return self._templates[name].render(
                {
                    **self._special,
                    "messages": checked,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    **arguments,
                }
            )
        except _Refused as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"the chat template cannot render these messages: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as plain dicts.

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
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"message {i} is a {type(message).__name__}, expected "
                "{'role': ..., 'content': ...}"
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InputError(
                f"message {i} has role {role!r}, expected 'system', 'user', 'assistant' or 'tool'"
            )
        content = message.get("content")
        if content is None and "tool_calls" not in message:
            raise InputError(f"message {i} ({role}) has no content")
        if isinstance(content, list):
            _check_parts(i, content)
        elif content is not None and not isinstance(content, str):
            raise InputError(
                f"message {i} ({role}) has content of type {type(content).__name__}, expected a "
                "text"
            )
        checked.append(dict(message))
    return checked


def _check_parts(index: int, parts: list[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise InputError(
                f"message {index} has a part of type {kind!r}: this engine reads text only"
            )
