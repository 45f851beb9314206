"""What a Session promises to its users: options, stops, batches, prefixes, scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flashnext

STORY = "Tell me a story about a fox and a lamp."
SUM = "Add 17 and 14."


def test_attributes(session: flashnext.Session, demo: Path) -> None:
    assert session.path == demo and session.device == "host"
    assert session.window == 4096 and session.lanes == 1  # the model's limit is below 32768
    assert session.vocab_size == 1536 and session.tokenizer.size == 1498
    assert session.stop_ids == [1495, 1493]
    assert session.shape["hidden"] == 256 and session.shape["layers"] == 8
    assert isinstance(session.stats(), dict) and session.stats()


def test_three_ways_to_ask(session: flashnext.Session) -> None:
    messages = [{"role": "user", "content": SUM}]
    expected = session.generate(SUM)
    assert expected.text == "17 + 14 = 31." and expected.finish_reason == "stop"
    assert session.generate(messages).tokens == expected.tokens
    assert session.generate(messages=messages).tokens == expected.tokens
    ids = session.tokenize(session.chat_template(messages))
    assert session.generate(ids).tokens == expected.tokens
    assert session.generate(np.array(ids)).tokens == expected.tokens
    assert session.generate(session.chat_template(messages), chat=False).tokens == expected.tokens
    assert session.generate(SUM, chat=True).tokens == expected.tokens
    assert expected.prompt_tokens == len(ids)


def test_what_a_generation_says(session: flashnext.Session) -> None:
    result = session.generate(STORY)
    assert session.detokenize(result.tokens) == result.text
    assert not set(result.tokens) & set(session.stop_ids)
    times = result.timings
    assert times.time_to_first_token is not None and times.time_to_first_token > 0
    assert times.decode_tokens_per_second is not None and times.decode_tokens_per_second > 0
    assert times.prefill_seconds >= 0 and times.decode_seconds > 0
    assert result.as_dict()["timings"]["decode_seconds"] == times.decode_seconds


def test_length_ends_an_answer(session: flashnext.Session) -> None:
    full = session.generate(STORY)
    for count in (1, 5):
        short = session.generate(STORY, max_new_tokens=count)
        assert short.finish_reason == "length"
        assert short.tokens == full.tokens[:count]


def test_stop_strings(session: flashnext.Session) -> None:
    full = session.generate(STORY).text
    assert ". " in full
    for stop in (". ", "lamp", full[20:33], ["nowhere to be found", "lamp"], full[:1]):
        wanted = min(full.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in full)
        result = session.generate(STORY, stop=stop)
        assert result.text == full[:wanted], stop
        assert result.finish_reason == "stop"
        stream = session.generate(STORY, stop=stop, stream=True)
        assert "".join(stream) == full[:wanted]
    untouched = session.generate(STORY, stop="nowhere to be found")
    assert untouched.text == full and untouched.finish_reason == "stop"


def test_on_token_sees_everything_and_may_cancel(session: flashnext.Session) -> None:
    full = session.generate(STORY)
    seen: list[tuple[int | None, str]] = []
    session.generate(STORY, on_token=lambda token, text: seen.append((token, text)))
    assert [token for token, _ in seen if token is not None] == full.tokens
    assert "".join(text for _, text in seen) == full.text
    count = iter(range(1000))
    result = session.generate(STORY, on_token=lambda token, text: next(count) == 4)
    assert result.finish_reason == "cancelled" and result.tokens == full.tokens[:5]
    assert session.generate(STORY).text == full.text


def test_on_prefill_counts_the_prompt(open_session: Callable[..., flashnext.Session]) -> None:
    session = open_session(chunk=16)
    calls: list[tuple[int, int]] = []
    result = session.generate(
        STORY * 5, max_new_tokens=1, on_prefill=lambda done, total: calls.append((done, total))
    )
    assert len(calls) > 2 and calls[-1] == (result.prompt_tokens, result.prompt_tokens)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_sampling_is_reproducible_and_depends_on_the_seed(
    session: flashnext.Session, open_session: Callable[..., flashnext.Session]
) -> None:
    options = {"temperature": 1.5, "max_new_tokens": 40}
    texts = {seed: session.generate(STORY, seed=seed, **options).text for seed in range(4)}
    assert len(set(texts.values())) > 1
    other = open_session(threads=1, seed=3)
    assert other.generate(STORY, seed=2, **options).text == texts[2]
    assert other.generate(STORY, **options).text == texts[3]
    greedy = session.generate(STORY, max_new_tokens=40).text
    assert session.generate(STORY, top_k=1, **options).text == greedy
    assert session.generate(STORY, min_p=1.0, **options).text == greedy


def test_padding_ids_are_never_sampled(session: flashnext.Session) -> None:
    # At this temperature every column of the head is about equally likely.
    result = session.generate(STORY, temperature=1e4, seed=5, max_new_tokens=200)
    assert len(result.tokens) > 20
    assert max(result.tokens) < session.tokenizer.size


def test_batches_equal_answers_one_by_one(open_session: Callable[..., flashnext.Session]) -> None:
    prompts = [SUM, STORY, "What is the opposite of up?", "Count from 7 to 16.", SUM]
    alone = [open_session().generate(prompt).tokens for prompt in prompts]
    for lanes in (1, 2, 4):
        batch = open_session(lanes=lanes).generate_batch(prompts)
        assert [answer.tokens for answer in batch] == alone, lanes
    sampled = open_session(lanes=3)
    options = {"temperature": 1.2, "seed": 9, "max_new_tokens": 30}
    assert [a.tokens for a in sampled.generate_batch(prompts, **options)] == [
        sampled.generate(prompt, **options).tokens for prompt in prompts
    ]


def test_a_batch_may_cancel_one_request(open_session: Callable[..., flashnext.Session]) -> None:
    session = open_session(lanes=2)
    full = session.generate(STORY)
    batch = session.generate_batch([STORY, SUM], on_token=lambda request, token, text: request == 0)
    assert batch[0].finish_reason == "cancelled" and batch[0].tokens == full.tokens[:1]
    assert batch[1].text == "17 + 14 = 31." and batch[1].finish_reason == "stop"


def test_prefixes_are_reused_bit_for_bit(open_session: Callable[..., flashnext.Session]) -> None:
    warm = open_session()
    messages = [{"role": "user", "content": " ".join([STORY] * 8)}]
    first = warm.generate(messages, max_new_tokens=40)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": SUM},
    ]
    second = warm.generate(messages)
    assert first.reused_tokens == 0
    assert second.reused_tokens >= 64
    cold = open_session().generate(messages)
    assert cold.reused_tokens == 0
    assert second.tokens == cold.tokens
    again = warm.generate(messages)
    assert again.tokens == cold.tokens
    none = open_session(prefix_snapshots=0)
    none.generate(messages)
    assert none.generate(messages).tokens == cold.tokens


def test_logits_and_scores(session: flashnext.Session) -> None:
    ids = session.tokenize("In a pond far away lived a shy fox called Felix.")
    logits = session.logits(ids)
    assert logits.shape == (len(ids), 1536) and logits.dtype == np.float32
    score = session.score(ids)
    assert score.shape == (len(ids),) and score.dtype == np.float32
    assert np.isnan(score[0]) and (score[1:] <= 0).all()
    wide = logits.astype(np.float64)
    norm = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    expected = [wide[t - 1, ids[t]] - norm[t - 1] for t in range(1, len(ids))]
    np.testing.assert_allclose(score[1:], expected, rtol=1e-5, atol=1e-6)
    # Likely text scores better than the same words shuffled.
    assert score[1:].sum() > session.score(ids[::-1])[1:].sum()


def test_greedy_follows_the_logits(session: flashnext.Session) -> None:
    ids = session.tokenize(session.chat_template([{"role": "user", "content": SUM}]))
    answer = session.generate(ids)
    logits = session.logits(ids + answer.tokens)[:, : session.tokenizer.size]
    chosen = logits[len(ids) - 1 :].argmax(1).tolist()
    assert chosen[:-1] == answer.tokens and chosen[-1] in session.stop_ids


def test_closing(demo: Path) -> None:
    with flashnext.Session(demo, device="host") as session:
        assert session.generate(SUM).text == "17 + 14 = 31."
    session.close()
    for call in (lambda: session.generate(SUM), lambda: session.logits([1]), session.stats):
        with pytest.raises(flashnext.InputError, match="closed"):
            call()
    session.cancel()


def test_progress_of_loading(demo: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    options = {"device": "host", "progress": lambda *args: calls.append(args)}
    flashnext.Session(demo, **options).close()
    assert calls and all(0 <= done <= total for _, done, total in calls)
    assert calls[-1][1] == calls[-1][2]
