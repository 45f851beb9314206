"""Options that contradict each other, mean nothing, or ask for too much: all are told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashnext
from helpers import run_cli

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": "a", "chat": False, "tools": TOOLS}, ["tools", "chat is False"]),
        ({"prompt": "a", "chat": False, "enable_thinking": True}, ["enable_thinking", "chat is"]),
        ({"prompt": "a", "chat": False, "template_arguments": {"x": 1}}, ["x", "chat is False"]),
        (
            {"prompt": "a", "chat": False, "add_generation_prompt": False},
            ["add_generation_prompt", "chat is False"],
        ),
        ({"prompt": [5], "tools": TOOLS}, ["tools", "token ids"]),
        ({"prompt": [5], "enable_thinking": False}, ["enable_thinking", "token ids"]),
        ({"prompt": [5], "chat": True}, ["chat=True", "token ids"]),
        ({"prompt": USER, "chat": False}, ["chat=False", "messages"]),
        ({"messages": USER, "chat": False}, ["chat=False", "messages"]),
        ({"prompt": "a", "template_arguments": {"messages": []}}, ["'messages'"]),
        ({"prompt": "a", "template_arguments": {3: 1}}, ["name 3"]),
        ({"prompt": "a", "template_arguments": [1]}, ["template_arguments", "list"]),
        (
            {"prompt": "a", "enable_thinking": True, "template_arguments": {"enable_thinking": 0}},
            ["enable_thinking is given twice"],
        ),
        ({"prompt": "a", "tools": "add"}, ["tools", "str"]),
        ({"prompt": "a", "tools": {"name": "f"}}, ["tools", "dict"]),
        ({"prompt": "a", "tools": [len]}, ["tool 0", "builtin_function"]),
    ],
)
def test_arguments_that_clash(
    session: flashnext.Session, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(flashnext.InputError) as caught:
        session.generate(**arguments)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_arguments_that_go_together(session: flashnext.Session) -> None:
    for arguments in (
        {"prompt": "a", "tools": TOOLS},
        {"prompt": USER, "enable_thinking": False, "template_arguments": {"x": 1}},
        {"prompt": "a", "chat": True, "add_generation_prompt": False},
        {"prompt": [5], "chat": False},
        {"prompt": "a", "chat": False, "tools": None, "template_arguments": {}},
    ):
        session.generate(**arguments, max_new_tokens=1)
    batch = session.generate_batch(["a", "b"], template_arguments={"x": 1}, max_new_tokens=1)
    assert len(batch) == 2
    with pytest.raises(flashnext.InputError, match="chat is False"):
        session.generate_batch(["a"], template_arguments={"x": 1}, chat=False)


def test_raw_text_and_thinking() -> None:
    result = run_cli("generate", "x", "--raw", "--think")
    assert result.returncode == 2 and "--think needs the chat template" in result.stderr


@pytest.mark.parametrize("value", [True, 1, "x", [0]])
def test_any_true_value_cancels(session: flashnext.Session, value: Any) -> None:
    answer = session.generate("Tell me a story.", on_token=lambda token, text: value)
    assert answer.finish_reason == "cancelled" and len(answer.tokens) == 1


@pytest.mark.parametrize("value", [None, False, 0, ""])
def test_no_false_value_cancels(session: flashnext.Session, value: Any) -> None:
    answer = session.generate("Add 17 and 14.", on_token=lambda token, text: value)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cache_lines": 8}, "cache_lines"),
        ({"cpu_misses": 2}, "cpu_misses"),
        ({"cpu_misses": "off"}, "cpu_misses"),
        ({"cpu_threads": 1}, "cpu_threads"),
        ({"ram_gb": 1}, "ram_gb"),
        ({"policy": "static"}, "policy"),
        ({"lockstep": True}, "lockstep"),
    ],
)
def test_options_of_a_cache_that_is_not_there(
    open_session: Callable[..., flashnext.Session], options: dict[str, Any], name: str
) -> None:
    for experts in ("resident", "auto"):
        notes = open_session(experts=experts, **options).notes
        assert f"experts are resident: {name} changed nothing" in notes
    assert not any("changed nothing" in note for note in open_session(experts="auto").notes)


def test_idle_options_are_told_on_the_command_line() -> None:
    result = run_cli("generate", "Add 17 and 14.", "--lines", "8", "--cpu-misses", "off")
    assert result.returncode == 0
    assert "note: experts are resident: cache_lines, cpu_misses changed nothing" in result.stderr


@pytest.mark.parametrize("lines", [1, 33, 2**31 - 1])
def test_the_remedy_for_cache_lines_is_taken(demo: Path, lines: int) -> None:
    with pytest.raises(flashnext.InputError) as caught:
        flashnext.Session(demo, device="host", experts="offload", cache_lines=lines)
    message = str(caught.value)
    assert str(lines) in message and "leave cache_lines out" in message and "or 0" not in message


def test_errors_of_the_library_are_of_the_ladder(session: flashnext.Session) -> None:
    window = 2**31 - 1
    with pytest.raises((flashnext.InputError, flashnext.OutOfMemory)):
        flashnext.Session(flashnext.demo_path(), device="host", lanes=window)
    with pytest.raises((flashnext.InputError, flashnext.OutOfMemory)):
        flashnext.Session(flashnext.demo_path(), device="host", prefix_snapshots=window)
    with pytest.raises((flashnext.InputError, flashnext.OutOfMemory)):
        flashnext.Session(flashnext.demo_path(), device="host", chunk=window)
    with pytest.raises((flashnext.InputError, flashnext.OutOfMemory)):
        flashnext.Trace.synthetic(2**31 - 1, 2**31 - 1, 2**31 - 1)


LITTLE_MEMORY = """
import resource, sys
import flashnext

session = flashnext.Session(flashnext.demo_path(), device="host")
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
for attempt in (
    lambda: flashnext.Trace.synthetic(64, 512, 8, steps=200_000),
    lambda: flashnext.Session(flashnext.demo_path(), device="host"),
):
    try:
        attempt()
    except flashnext.OutOfMemory as error:
        print("OutOfMemory", error.space)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(session.generate("Add 17 and 14.").text)
"""


def test_what_does_not_fit_is_out_of_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "", done
    assert [line.split()[0] for line in lines[:-1]] == ["OutOfMemory"] * 2, done
    assert lines[-1] == "17 + 14 = 31."
