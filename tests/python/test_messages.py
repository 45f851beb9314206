"""Messages in the shapes that other programs write, and templates that fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

import flashnext
from flashnext.messages import check_messages
from flashnext.template import ChatTemplate

USER = {"role": "user", "content": "Hi"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


def arguments_of(message: dict[str, Any]) -> Any:
    return check_messages([USER, message])[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": 1, "b": ["é"]}', {"a": 1, "b": ["é"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ("{}", {}),
        (None, {}),
        (' {"a": null}\n', {"a": None}),
    ],
)
def test_arguments_of_tool_calls(given: Any, expected: Any) -> None:
    assert arguments_of(call(given)) == expected
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": given}]}
    assert check_messages([flat])[0]["tool_calls"] == [{"name": "f", "arguments": expected}]


def test_other_fields_of_a_call_stay() -> None:
    message = call("{}")
    message["tool_calls"][0]["id"] = "call_7"
    assert check_messages([message])[0]["tool_calls"][0]["id"] == "call_7"
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"  # the caller's is not changed


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Hi", "Hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", {"type": "text", "text": "\n"}], "a\n"),
        (({"type": "text", "text": "a"},), "a"),
        ([], ""),
    ],
)
def test_contents_become_texts(content: Any, expected: str) -> None:
    assert check_messages([{"role": "user", "content": content}]) == [
        {"role": "user", "content": expected}
    ]


def test_roles_and_null_fields() -> None:
    messages = [
        {"role": "developer", "content": "Be kind.", "name": None},
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "tool", "content": "5", "tool_call_id": "call_7"},
    ]
    assert check_messages(messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "5", "tool_call_id": "call_7"},
    ]
    assert check_messages([call("{}", content=None)])[0]["content"] == ""


def test_shapes_of_one_conversation_are_one_prompt(session: flashnext.Session) -> None:
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Add 1 and 2."}]
    other = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}], "name": None},
        {"role": "user", "content": [{"type": "text", "text": "Add 1 "}, "and 2."]},
    ]
    assert session.chat_template(other) == session.chat_template(plain)
    assert session.generate(other).tokens == session.generate(plain).tokens


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (call("{"), ["message 1 (assistant), tool call 0 (add)", "no JSON"]),
        (call("[1]"), ["message 1", "tool call 0", "list"]),
        (call(7), ["message 1", "int"]),
        (call("[" * 100000), ["message 1", "no JSON"]),
        ({"role": "assistant", "tool_calls": "f()"}, ["message 1", "str", "list"]),
        ({"role": "assistant", "tool_calls": ["f()"]}, ["message 1", "tool call 0", "'f()'"]),
        (
            {"role": "assistant", "tool_calls": [{"function": None}]},
            ["message 1", "'function': None"],
        ),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, ["message 1", "name None"]),
        ({"role": "assistant", "tool_calls": []}, ["message 1", "no content"]),
        ({"role": "assistant", "content": None}, ["message 1", "no content"]),
        ({"role": "user", "content": {"type": "text"}}, ["message 1", "dict"]),
        ({"role": "user", "content": b"x"}, ["message 1", "bytes"]),
        ({"role": "user", "content": [5]}, ["message 1", "'int'"]),
        ({"role": "user", "content": [{"type": "text"}]}, ["message 1", "None"]),
        ({"role": "user", "content": [{"type": "image_url"}]}, ["message 1", "reads text only"]),
        ({"role": 3, "content": "x"}, ["message 1", "role 3"]),
        ({"role": "", "content": "x"}, ["message 1", "role ''"]),
        (None, ["message 1", "NoneType"]),
    ],
)
def test_errors_name_the_message(
    session: flashnext.Session, message: Any, words: list[str]
) -> None:
    for attempt in (check_messages, session.generate, session.chat_template):
        with pytest.raises(flashnext.InputError) as caught:
            attempt([USER, message])
        for word in words:
            assert word in str(caught.value), str(caught.value)


# ---- templates ----------------------------------------------------------------------------------

FAILURES = {
    "{{ 1 / 0 }}": "division",
    "{{ range(10 ** 9) | list }}": "OverflowError",
    "{{ 2.0 ** 99999 }}": "OverflowError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "too deeply",
    "{{ 'x' * 10 ** 17 }}": "memory",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{{ messages[9].content.x }}": "UndefinedError",
    "{{ messages | nosuchthing }}": "nosuchthing",
    "{{ messages + 1 }}": "TypeError",
    "{{ nosuch() }}": "UndefinedError",
    "{{ '%d' | format('x') }}": "TypeError",
    "{{ raise_exception('no thanks') }}": "no thanks",
    "{% include 'other' %}": "",
    "{{ messages | tojson(indent='x' * 3, separators=3) }}": "",
    "{{ strftime_now(3) }}": "",
    "{{ {}['a']['b'] }}": "",
}


@pytest.mark.parametrize("source", FAILURES)
def test_templates_that_fail(source: str) -> None:
    with pytest.raises(flashnext.InputError, match="chat template") as caught:
        ChatTemplate({"default": source}, {}).render([USER])
    assert FAILURES[source] in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x }}", "{% for x in y %}", "{{ " + "(" * 5000])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(flashnext.CheckpointError, match="chat template 'default'"):
        ChatTemplate({"default": source}, {})


def test_values_that_a_template_cannot_write(session: flashnext.Session) -> None:
    template = ChatTemplate({"default": "{{ tools | tojson }}"}, {})
    with pytest.raises(flashnext.InputError, match="set is not JSON"):
        template.render([USER], tools=[{"name": {1, 2}}])
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(flashnext.InputError, match="Circular"):
        template.render([USER], tools=[loop])
    with pytest.raises(flashnext.InputError, match="surrogate"):
        session.generate([{"role": "user", "content": "\ud800"}])
    assert json.loads(template.render([USER], tools=[{"name": "f"}])) == [{"name": "f"}]
