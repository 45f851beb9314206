"""``flashnext generate``: one answer to one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from flashnext.cli import common, offload
from flashnext.errors import InputError
from flashnext.generation import Generation
from flashnext.session import Session


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate",
        help="answer one prompt",
        description="Answers one prompt. The answer streams to stdout; progress goes to stderr.",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the prompt; '-' or nothing reads it from stdin",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it stands, without the chat template",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with text, tokens, finish_reason and timings, no streaming",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="print the timings on stderr, and what the cache of experts did",
    )
    common.add_sampling_options(parser)
    common.add_model_options(parser)
    offload.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    prompt = _prompt(options)
    if options.raw and options.system is not None:
        raise InputError("--system needs the chat template, and --raw leaves it out; drop one")
    if options.raw and options.think is not None:
        raise InputError("--think needs the chat template, and --raw leaves it out; drop one")
    arguments = common.sampling_arguments(options)
    if options.raw:
        arguments["chat"] = False
    with common.open_session(options, **offload.arguments(options)) as session:
        if options.system is not None:
            arguments["messages"] = [
                {"role": "system", "content": options.system},
                {"role": "user", "content": prompt},
            ]
        else:
            arguments["prompt"] = prompt
        bar = common.new_bar(options)
        try:
            if options.json:
                result = session.generate(on_prefill=bar.prefill, **arguments)
                print(json.dumps(_as_json(session, result)))
            else:
                result = _stream(session, bar, arguments)
        finally:
            bar.close()
        if not (options.json or options.quiet):
            tell_cut(result, session)
        if options.stats:
            print(timing_line(result), file=sys.stderr)
            offload.print_stats(session.stats())


def _stream(session: Session, bar: common.Bar, arguments: dict[str, Any]) -> Generation:
    stream = session.generate(stream=True, on_prefill=bar.prefill, **arguments)
    wrote = False
    try:
        for piece in stream:
            bar.close()
            sys.stdout.write(piece)
            sys.stdout.flush()
            wrote = not piece.endswith("\n")
    finally:
        stream.close()
        if wrote:
            print(flush=True)
    return stream.result


def _prompt(options: argparse.Namespace) -> str:
    given: str | None = options.prompt
    if given is None and sys.stdin.isatty():
        raise InputError('there is no prompt: flashnext generate "What is 20 - 6?"')
    if given is None or given == "-":
        try:
            given = sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"the prompt on stdin is not UTF-8: {error}") from error
    return given


def _as_json(session: Session, result: Generation) -> dict[str, Any]:
    return {**result.as_dict(), "model": str(session.path), "device": session.device}


def tell_cut(result: Generation, session: Session) -> None:
    """Says on stderr that an answer was cut, which its text alone does not show."""
    if result.finish_reason != "length":
        return
    count = len(result.tokens)
    full = result.prompt_tokens + count >= session.window
    why = (
        f"the window of {session.window} tokens is full; --window gives more"
        if full
        else "--max-new-tokens gives more"
    )
    print(f"note: the answer was cut after {count} tokens; {why}", file=sys.stderr)


def timing_line(result: Generation) -> str:
    """One line for people about where the time went."""
    times = result.timings
    parts = [f"{result.prompt_tokens} prompt tokens ({result.reused_tokens} reused)"]
    parts.append(f"{len(result.tokens)} new ({result.finish_reason})")
    if times.time_to_first_token is not None:
        parts.append(f"first token after {times.time_to_first_token:.3f} s")
    if times.prefill_tokens_per_second is not None:
        parts.append(f"prefill {times.prefill_tokens_per_second:.1f} tokens/s")
    if times.decode_tokens_per_second is not None:
        parts.append(f"decode {times.decode_tokens_per_second:.1f} tokens/s")
    return ", ".join(parts)
