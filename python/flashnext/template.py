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

from flashnext import checks
from flashnext.errors import CheckpointError, InputError
from flashnext.messages import Message, check_messages
from flashnext.paths import is_file
from flashnext.tokenizer import read_text, special_text


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
            except Exception as error:  # nested too deeply, or a limit of the compiler
                raise CheckpointError(
                    f"chat template {name!r} cannot be compiled: {_words(error)}"
                ) from error

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Reads the template of a checkpoint; None when it has none."""
        sources: dict[str, str] = {}
        own = config.get("chat_template")
        path = folder / "chat_template.jinja"
        if is_file(path, CheckpointError):
            sources["default"] = read_text(path)
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
            InputError: the messages are malformed, or the template refuses them or fails.
        """
        checked = check_messages(messages)
        tools = None if tools is None else check_tools(tools)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            name = next(iter(self._templates))
        try:
            return self._templates[name].render(
                {
                    **self._special,
                    "messages": checked,
                    "tools": tools or None,
                    "add_generation_prompt": add_generation_prompt,
                    **arguments,
                }
            )
        except _Refused as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise InputError(
                f"the chat template cannot render these messages: {_words(error)}"
            ) from error


def _words(error: Exception) -> str:
    """An error of a template for people."""
    kind = type(error).__name__
    if isinstance(error, RecursionError):
        return "it calls itself, or the messages are nested, too deeply"
    if isinstance(error, MemoryError):
        return "it makes a text that does not fit into memory"
    return f"{error} ({kind})" if str(error) else kind


def prompt_arguments(
    *,
    chat: bool | None,
    prompt: Any,
    has_template: bool,
    add_generation_prompt: Any = True,
    enable_thinking: Any = None,
    tools: Any = None,
    arguments: Any = None,
) -> dict[str, Any]:
    """The arguments that go to the template with a prompt.

    Args:
        chat: the option of that name.
        prompt: a text, messages or token ids; only the kind matters.
        has_template: whether the checkpoint has a chat template.
        add_generation_prompt: the option of that name.
        enable_thinking: the option of that name.
        tools: the option of that name.
        arguments: further ones by name.

    Raises:
        InputError: an option is of the wrong type, stands twice, or would change nothing since no
            template is applied to this prompt.
    """
    if arguments is not None and not isinstance(arguments, Mapping):
        raise InputError(
            f"template_arguments is a {type(arguments).__name__}, expected a dict of names and "
            "values"
        )
    found = dict(arguments or {})
    for name in found:
        if not isinstance(name, str):
            raise InputError(f"template_arguments has the name {name!r}, expected a text")
        if name == "messages":
            raise InputError("template_arguments has 'messages', which are the prompt's own")
    for name, value in (("chat", chat), ("enable_thinking", enable_thinking)):
        if value is not None:
            checks.flag(name, value)
    checks.flag("add_generation_prompt", add_generation_prompt)
    options = {
        "enable_thinking": enable_thinking,
        "tools": None if tools is None else check_tools(tools),
        "add_generation_prompt": None if add_generation_prompt else False,
    }
    for name, value in options.items():
        if value is None:
            continue
        if name in found:
            raise InputError(f"{name} is given twice: as an option and in template_arguments")
        found[name] = value
    why = _not_applied(chat, prompt, has_template)
    if why is not None and found:
        raise InputError(
            f"{', '.join(found)}: there for the chat template, which is not applied: {why}"
        )
    return found


def _not_applied(chat: bool | None, prompt: Any, has_template: bool) -> str | None:
    """Why no template is applied to a prompt; None when one is."""
    off = chat is not None and not chat
    if checks.is_messages(prompt):
        if off:
            raise InputError("chat=False is for a text prompt; messages need the chat template")
        return None
    if not isinstance(prompt, str):
        if chat:
            raise InputError("chat=True is for a text prompt; token ids are taken as they are")
        return "token ids are taken as they are"
    if off:
        return "chat is False"
    return None if chat or has_template else "the checkpoint has none"


def check_tools(tools: Any) -> list[Any]:
    """Returns descriptions of tools as a list.

    Raises:
        InputError: names the tool that is no description.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InputError(f"tools is a {type(tools).__name__}, expected a list of descriptions")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InputError(
                f"tool {i} is a {type(tool).__name__}, expected a description such as "
                "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
    return list(tools)
