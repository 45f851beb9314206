"""Wrong requests: each a clear error that names the thing, its value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext

USER = [{"role": "user", "content": "Hi"}]

# (arguments of generate, words that the message must have)
BAD_REQUESTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompt": ""}, ["empty"]),
    ({"prompt": None}, ["no prompt"]),
    ({"prompt": []}, ["empty"]),
    ({"prompt": np.zeros(0, np.int64)}, ["empty"]),
    ({"prompt": [5, 1536]}, ["1536", "position 1", "0..1535"]),
    ({"prompt": [-1]}, ["-1", "position 0"]),
    ({"prompt": [1.5]}, ["1.5"]),
    ({"prompt": [True]}, ["True"]),
    ({"prompt": [2**70]}, [str(2**70)]),
    ({"prompt": 7}, ["int", "list of whole numbers"]),
    ({"prompt": ["a", "b"]}, ["generate_batch"]),
    ({"prompt": [[1], [2]]}, ["generate_batch"]),
    ({"prompt": "a", "messages": USER}, ["both"]),
    ({"messages": []}, ["messages is empty"]),
    ({"messages": "Hi"}, ["messages", "str"]),
    ({"messages": [{"content": "Hi"}]}, ["message 0", "role"]),
    ({"messages": [*USER, {"role": "user"}]}, ["message 1", "no content"]),
    ({"messages": [{"role": "user", "content": 5}]}, ["message 0", "int"]),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["image", "text only"]),
    ({"messages": ["Hi"]}, ["message 0", "str"]),
    ({"prompt": "a", "max_new_tokens": 0}, ["max_new_tokens", "0", "at least 1"]),
    ({"prompt": "a", "max_new_tokens": -3}, ["max_new_tokens", "-3"]),
    ({"prompt": "a", "max_new_tokens": 2.5}, ["max_new_tokens", "2.5", "whole number"]),
    ({"prompt": "a", "max_new_tokens": 5000}, ["5000", "window of 4096", "max_new_tokens"]),
    ({"prompt": [1] * 4096}, ["4096", "4097", "window"]),
    ({"prompt": "a", "temperature": -0.1}, ["temperature", "-0.1"]),
    ({"prompt": "a", "temperature": float("nan")}, ["temperature", "nan"]),
    ({"prompt": "a", "temperature": "hot"}, ["temperature", "hot"]),
    ({"prompt": "a", "temperature": None}, ["temperature", "None"]),
    ({"prompt": "a", "top_p": 0}, ["top_p", "more than 0"]),
    ({"prompt": "a", "top_p": 1.01}, ["top_p", "1.01"]),
    ({"prompt": "a", "top_k": -1}, ["top_k", "-1"]),
    ({"prompt": "a", "min_p": 1.5}, ["min_p", "1.5"]),
    ({"prompt": "a", "seed": -1}, ["seed", "-1"]),
    ({"prompt": "a", "seed": 2**64}, ["seed", str(2**64)]),
    ({"prompt": "a", "seed": "x"}, ["seed", "'x'"]),
    ({"prompt": "a", "stop": ""}, ["stop", "empty string"]),
    ({"prompt": "a", "stop": ["x", ""]}, ["stop", "empty string"]),
    ({"prompt": "a", "stop": [3]}, ["stop", "list of strings"]),
    ({"prompt": "a", "stop": 3}, ["stop", "3"]),
    ({"prompt": "a", "temprature": 1}, ["temprature", "did you mean temperature"]),
    ({"prompt": "a", "zzz": 1}, ["zzz", "known:", "max_new_tokens"]),
    ({"prompt": "\ud800"}, ["surrogate"]),
    ({"prompt": "a", "stop": ["b", "\ud800"]}, ["stop", "surrogates"]),
    ({"prompt": "a", "on_token": 5}, ["on_token", "5", "function"]),
    ({"prompt": "a", "on_prefill": "x"}, ["on_prefill", "'x'", "function"]),
    ({"prompt": np.array(5)}, ["list of whole numbers"]),
    ({"prompt": b"abc"}, ["bytes"]),
    ({"prompt": "a", "temperature": 10**400}, ["temperature", "inf"]),
    ({"prompt": "a", "chat": "no"}, ["chat", "'no'", "True or False"]),
    ({"prompt": "a", "enable_thinking": "no"}, ["enable_thinking", "'no'"]),
    ({"prompt": "a", "add_generation_prompt": 0}, ["add_generation_prompt", "True or False"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(
    session: flashnext.Session, arguments: dict[str, Any], words: list[str], stream: bool
) -> None:
    with pytest.raises(flashnext.InputError) as caught:
        session.generate(**arguments, stream=stream)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_session_lives_on_after_bad_requests(session: flashnext.Session) -> None:
    for arguments, _ in BAD_REQUESTS:
        with pytest.raises(flashnext.InputError):
            session.generate(**arguments)
    assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."


def test_bad_batches(session: flashnext.Session) -> None:
    for bad in ([], "text", {"a": 1}, 5, None):
        with pytest.raises(flashnext.InputError, match="list with at least one prompt"):
            session.generate_batch(bad)  # type: ignore[arg-type]
    with pytest.raises(flashnext.InputError, match="empty"):
        session.generate_batch(["a", ""])
    with pytest.raises(flashnext.InputError, match="did you mean max_new_tokens"):
        session.generate_batch(["a"], max_new_token=3)


@pytest.mark.parametrize("ids", [None, 5, iter([1]), {1, 2}, np.array(5)])
@pytest.mark.parametrize("method", ["logits", "score", "detokenize"])
def test_what_is_no_list_of_ids(session: flashnext.Session, method: str, ids: Any) -> None:
    with pytest.raises(flashnext.InputError, match="expected a list of whole numbers"):
        getattr(session, method)(ids)


@pytest.mark.parametrize("method", ["logits", "score"])
def test_bad_sequences(session: flashnext.Session, method: str) -> None:
    for ids, word in [([], "empty"), ([1536], "1536"), ([1] * 4097, "4097 tokens"), ("a", "str")]:
        with pytest.raises(flashnext.InputError, match=word):
            getattr(session, method)(ids)


def test_the_whole_window_may_be_used(session: flashnext.Session) -> None:
    result = session.generate([1] * 4095)
    assert result.finish_reason in ("length", "stop") and len(result.tokens) <= 1


# (arguments of Session, words that the message must have)
BAD_SESSIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"window": 5000}, ["5000", "4096"]),
    ({"window": 0}, ["window", "0"]),
    ({"window": 1.5}, ["window", "1.5"]),
    ({"lanes": 0}, ["lanes", "0"]),
    ({"threads": -1}, ["threads", "-1"]),
    ({"levels": 100}, ["levels", "100", "32258", "127"]),
    ({"device": "tpu"}, ["tpu", "host"]),
    ({"device": 3}, ["device", "3"]),
    ({"device": "cuda:x"}, ["cuda:x"]),
    ({"isa": "mmx"}, ["mmx"]),
    ({"chunk": -1}, ["chunk", "-1"]),
    ({"seed": -1}, ["seed", "-1"]),
    ({"prefix_snapshots": -1}, ["prefix_snapshots", "-1"]),
    ({"widow": 5}, ["widow", "did you mean window"]),
    ({"device": "ho\0st"}, ["device", "no word"]),
    ({"isa": "\ud800"}, ["isa", "no word"]),
    ({"policy": "\ud800"}, ["policy", "no word"]),
    ({"graphs": "no"}, ["graphs", "'no'", "True or False"]),
    ({"progress": 5}, ["progress", "5", "function"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_SESSIONS)
def test_bad_sessions(demo: Path, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(flashnext.InputError) as caught:
        flashnext.Session(demo, **arguments)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.skipif(flashnext.build_info()["cuda"], reason="this build has CUDA")
def test_cuda_is_never_replaced_silently(demo: Path) -> None:
    for device in ("cuda", "cuda:0"):
        with pytest.raises(flashnext.Error, match=r"(?i)cuda"):
            flashnext.Session(demo, device=device)
    with flashnext.Session(demo, device="auto") as session:
        assert session.device == "host"


def test_a_memory_limit_names_what_does_not_fit(demo: Path) -> None:
    with pytest.raises(flashnext.OutOfMemory) as caught:
        flashnext.Session(demo, device="host", memory_limit=100_000)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.bytes > 0 and caught.value.space


def test_kinds_of_errors() -> None:
    assert issubclass(flashnext.CheckpointError, flashnext.InputError)
    assert issubclass(flashnext.InputError, ValueError)
    assert issubclass(flashnext.OutOfMemory, MemoryError)
    assert issubclass(flashnext.DeviceError, RuntimeError)
    assert issubclass(flashnext.LogicError, RuntimeError)
    for kind in ("InputError", "OutOfMemory", "DeviceError", "LogicError"):
        assert issubclass(getattr(flashnext, kind), flashnext.Error)
