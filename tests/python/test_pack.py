"""The Python side of a checkpoint: what a session refuses, inspect has told before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashnext
from helpers import run_cli
from tensors import Edited

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11422654\n"


def content(name: str, data: bytes) -> Callable[[Edited], None]:
    return lambda e: (e.folder / name).unlink(missing_ok=True) or _write(e.folder / name, data)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def key(name: str, **values: Any) -> Callable[[Edited], None]:
    return lambda e: e.json(name, lambda c: c.update(values))


def vocabulary(**ids: int) -> Callable[[Edited], None]:
    return lambda e: e.json("tokenizer.json", lambda c: c["model"]["vocab"].update(ids))


def folder(name: str) -> Callable[[Edited], None]:
    def change(e: Edited) -> None:
        (e.folder / name).unlink(missing_ok=True)
        (e.folder / name).symlink_to(e.folder / name)  # a circle: there, and not to be read

    return change


REFUSED: dict[str, tuple[Callable[[Edited], None], str]] = {
    "no tokenizer": (lambda e: (e.folder / "tokenizer.json").unlink(), "is missing"),
    "pointer": (content("tokenizer.json", POINTER), "Git LFS pointer"),
    "pointer of the config": (content("tokenizer_config.json", POINTER), "Git LFS pointer"),
    "pointer of the template": (content("chat_template.jinja", POINTER), "Git LFS pointer"),
    "pointer of stop ids": (content("generation_config.json", POINTER), "Git LFS pointer"),
    "empty": (content("tokenizer.json", b""), "not readable as JSON"),
    "half": (content("tokenizer.json", b'{"model": {'), "not readable as JSON"),
    "nested": (content("tokenizer.json", b"[" * 200_000), "not readable as JSON"),
    "long number": (content("tokenizer.json", b"9" * 10_000), "not readable as JSON"),
    "a list": (content("tokenizer.json", b"[]"), "holds a list"),
    "not UTF-8": (content("tokenizer_config.json", b"\xff\xfe"), "not UTF-8"),
    "not a tokenizer": (
        content("tokenizer.json", b'{"decoder": {"type": "ByteLevel"}}'),
        "not a valid tokenizer",
    ),
    "odd decoder": (key("tokenizer.json", decoder="ByteLevel"), "decoder is None"),
    "circle": (folder("tokenizer.json"), "tokenizer.json"),
    "circle of the template": (folder("chat_template.jinja"), "chat_template.jinja"),
    "config is a list": (content("tokenizer_config.json", b"[]"), "holds a list"),
    "stop ids are a list": (content("generation_config.json", b"[]"), "holds a list"),
    "stop id": (key("generation_config.json", eos_token_id=99999), "stop id 99999"),
    "stop text": (key("generation_config.json", eos_token_id="<end>"), "stop id '<end>'"),
    "template": (content("chat_template.jinja", b"{% if %}"), "line 1"),
    "template of bytes": (content("chat_template.jinja", b"\xff"), "not UTF-8"),
    "template number": (key("tokenizer_config.json", chat_template=3), "chat_template is a int"),
    "more ids than rows": (vocabulary(Zebra=5000), "belongs to another model"),
    "an id of billions": (vocabulary(Zebra=4_000_000_000), "4000000000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inspect_tells_what_a_session_refuses(name: str, demo: Path, tmp_path: Path) -> None:
    edited = Edited(demo, tmp_path / "m")
    change, word = REFUSED[name]
    change(edited)
    with pytest.raises(flashnext.CheckpointError) as caught:
        flashnext.Session(edited.folder, device="host")
    assert word in str(caught.value), str(caught.value)
    problems = flashnext.inspect(edited.folder)["problems"]
    assert str(caught.value) in problems


def test_inspect_on_the_command_line(demo: Path, tmp_path: Path) -> None:
    edited = Edited(demo, tmp_path / "m")
    content("tokenizer.json", POINTER)(edited)
    result = run_cli("inspect", str(edited.folder))
    assert result.returncode == 3 and "PROBLEM" in result.stdout and "LFS" in result.stdout


def test_all_problems_are_told_at_once(demo: Path, tmp_path: Path) -> None:
    edited = Edited(demo, tmp_path / "m")
    key("generation_config.json", eos_token_id=-1)(edited)
    content("chat_template.jinja", b"{% if %}")(edited)
    edited.own("model-00001-of-00004.safetensors").write_bytes(b"")
    assert len(flashnext.inspect(edited.folder)["problems"]) == 3


def test_a_sound_pack(demo: Path) -> None:
    report = flashnext.inspect(demo)
    assert report["problems"] == [] and report["chat_template"]
    assert report["tokenizer_size"] == 1498 and report["stop_ids"] == [1495, 1493]
    assert not any("template" in note or "stop id" in note for note in report["notes"])


# ---- no template, no stop id --------------------------------------------------------------------


@pytest.fixture
def plain(demo: Path, tmp_path: Path) -> Path:
    """The demo without a chat template."""
    edited = Edited(demo, tmp_path / "plain")
    (edited.folder / "chat_template.jinja").unlink(missing_ok=True)
    edited.json("tokenizer_config.json", lambda c: c.pop("chat_template", None) and None)
    return edited.folder


def test_a_pack_without_a_template_says_so(
    plain: Path, open_session: Callable[..., flashnext.Session]
) -> None:
    session = open_session(plain)
    assert not session.has_template
    assert any(note.startswith("no chat template") for note in session.notes)
    assert any(note.startswith("no chat template") for note in flashnext.inspect(plain)["notes"])
    text = "In a pond far away lived a"
    as_it_stands = session.generate(text, max_new_tokens=5, chat=False)
    assert session.generate(text, max_new_tokens=5).tokens == as_it_stands.tokens
    for arguments in (
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi", "chat": True},
    ):
        with pytest.raises(flashnext.InputError, match="no chat template"):
            session.generate(**arguments)
    session.close()
    assert any(note.startswith("no chat template") for note in session.notes)


def test_the_command_line_without_a_template(plain: Path) -> None:
    result = run_cli("generate", "Hi", "--model", str(plain), "--max-new-tokens", "2")
    assert result.returncode == 0 and "note: no chat template" in result.stderr
    result = run_cli("chat", "--model", str(plain), stdin="Hi\n")
    assert result.returncode == 2 and "no chat template" in result.stderr
    assert "note: no chat template" in run_cli("inspect", str(plain)).stdout


def test_a_pack_without_stop_ids_says_so(
    demo: Path, tmp_path: Path, open_session: Callable[..., flashnext.Session]
) -> None:
    edited = Edited(demo, tmp_path / "m")
    key("generation_config.json", eos_token_id=[])(edited)
    assert any(note.startswith("no stop id") for note in open_session(edited.folder).notes)


def test_a_template_that_cannot_render_is_noted(demo: Path, tmp_path: Path) -> None:
    edited = Edited(demo, tmp_path / "m")
    content("chat_template.jinja", b"{{ 1 / 0 }}")(edited)
    report = flashnext.inspect(edited.folder)
    assert report["problems"] == [] and any("division" in note for note in report["notes"])
