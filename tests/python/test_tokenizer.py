"""The tokenizer and the chat template, against the libraries that define them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

import flashnext
from flashnext.template import ChatTemplate
from flashnext.tokenizer import Tokenizer, stop_ids
from tensors import Edited

OWN = Tokenizer(flashnext.demo_path())
LIBRARY = Library.from_file(str(flashnext.demo_path() / "tokenizer.json"))


@given(st.text(max_size=80))
def test_text_survives_a_round_trip(text: str) -> None:
    ids = OWN.encode(text)
    assert ids == LIBRARY.encode(text, add_special_tokens=False).ids
    assert OWN.decode(ids, special=True) == text


@given(st.lists(st.integers(0, 1497), max_size=30))
def test_decoding_equals_the_library(ids: list[int]) -> None:
    for special in (False, True):
        expected = LIBRARY.decode(ids, skip_special_tokens=not special)
        assert OWN.decode(ids, special=special) == expected


def test_sizes_and_special_tokens() -> None:
    assert OWN.size == 1498
    assert OWN.encode("<|im_start|>user") == [1494, *OWN.encode("user")]
    assert OWN.decode([1495]) == "" and OWN.decode([1495], special=True) == "<|im_end|>"
    assert OWN.decode([1500]) == ""  # padding row of the head
    assert stop_ids(flashnext.demo_path(), OWN) == [1495, 1493]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(flashnext.InputError, match="surrogate"):
        OWN.encode("\ud800")


def test_stop_ids_without_a_generation_config(tmp_path: Path, demo: Path) -> None:
    edited = Edited(demo, tmp_path / "m")
    edited.json("generation_config.json", lambda c: {**c, "eos_token_id": 1495})
    assert stop_ids(edited.folder, OWN) == [1495]
    (edited.folder / "generation_config.json").unlink()
    assert stop_ids(edited.folder, Tokenizer(edited.folder)) == [1495]  # eos_token
    edited.json("tokenizer_config.json", lambda c: c.pop("eos_token") and None)
    assert stop_ids(edited.folder, Tokenizer(edited.folder)) == [1493]  # config.json


@pytest.mark.parametrize("bad", [[1498], [-1], ["1495"], [True]])
def test_bad_stop_ids_are_named(tmp_path: Path, demo: Path, bad: list[Any]) -> None:
    edited = Edited(demo, tmp_path / "m")
    edited.json("generation_config.json", lambda c: {**c, "eos_token_id": bad})
    with pytest.raises(flashnext.CheckpointError, match="stop id"):
        stop_ids(edited.folder, OWN)


def test_tokenizer_files_that_are_wrong(tmp_path: Path, demo: Path) -> None:
    edited = Edited(demo, tmp_path / "m")
    edited.json("tokenizer.json", lambda c: c.update(decoder={"type": "WordPiece"}))
    with pytest.raises(flashnext.CheckpointError, match="WordPiece"):
        Tokenizer(edited.folder)
    edited.own("tokenizer.json").write_text("{")
    with pytest.raises(flashnext.CheckpointError, match="not readable as JSON"):
        Tokenizer(edited.folder)
    edited.own("tokenizer.json").unlink()
    with pytest.raises(flashnext.CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer(edited.folder)


# ---- templates ---------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <b> 'q'"}]


def render(source: str, messages: Any = MESSAGES, **arguments: Any) -> str:
    template = ChatTemplate({"default": source}, {"eos_token": "<eos>"})
    return template.render(messages, **arguments)


def test_demo_template(session: flashnext.Session) -> None:
    text = session.chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = session.chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_what_templates_expect_of_their_environment() -> None:
    assert render("{{ messages[1].content }}{{ eos_token }}") == "Hi <b> 'q'<eos>"
    assert render("{{ messages[0] | tojson }}") == json.dumps(MESSAGES[0], ensure_ascii=False)
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert json.loads(render("{{ messages | tojson(indent=2) }}")) == MESSAGES
    assert (
        render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}")
        == "x"
    )
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% if true %}\n  a\n{% endif %}\n") == "  a\n"  # trim_blocks, lstrip_blocks
    assert render("{{ enable_thinking }}|{{ tools }}", enable_thinking=False) == "False|None"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    assert render("{{ x is defined }}") == "False"


def test_a_template_may_refuse() -> None:
    with pytest.raises(flashnext.InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(flashnext.InputError, match="cannot render"):
        render("{{ messages[7].content.x }}")


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(flashnext.InputError, match="cannot render"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(flashnext.InputError, match="cannot render"):
        render("{{ messages.append(1) }}")


def test_sources_of_a_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    template = ChatTemplate.from_folder(tmp_path, {"chat_template": named})
    assert template is not None
    assert template.render(MESSAGES) == "D"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    template = ChatTemplate.from_folder(tmp_path, {"chat_template": named})
    assert template is not None and template.render(MESSAGES) == "J"
    (tmp_path / "chat_template.jinja").unlink()
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    for bad in ({"chat_template": 3}, {"chat_template": [{"name": "x"}]}):
        with pytest.raises(flashnext.CheckpointError, match="chat_template"):
            ChatTemplate.from_folder(tmp_path, bad)
    with pytest.raises(flashnext.CheckpointError, match="line 1"):
        ChatTemplate.from_folder(tmp_path, {"chat_template": "{% if %}"})
