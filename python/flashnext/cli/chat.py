"""``flashnext chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from flashnext.cli import common, offload
from flashnext.cli.generate import tell_cut, timing_line
from flashnext.errors import InputError
from flashnext.session import Session

_HELP = """\
/reset   forget the conversation
/stats   timings of the last answer, and what the cache of experts did since the start
/help    this list
/quit    leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation."""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "chat",
        help="talk with the model",
        description="A conversation in the terminal. Type /help there for what you can do.",
    )
    common.add_sampling_options(parser)
    common.add_model_options(parser)
    offload.add_options(parser)
    parser.add_argument(
        "--stats", action="store_true", help="print the timings of every answer on stderr"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    common.sampling_arguments(options)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history of input())
    with common.open_session(options, **offload.arguments(options)) as session:
        if not session.has_template:
            raise InputError(
                f"{session.path} has no chat template, so there is no conversation; flashnext "
                "generate continues a text, or add chat_template.jinja to the folder"
            )
        Conversation(session, options).loop()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, session: Session, options: argparse.Namespace) -> None:
        self._session = session
        self._options = options
        self._messages: list[dict[str, str]] = []
        self._last = "no answer yet"
        self._reset()

    def loop(self) -> None:
        """Reads lines until the end of input or /quit."""
        if sys.stdin.isatty():
            print(f"{self._session.path.name} on {self._session.device}. /help lists commands.")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(/quit or Ctrl-D leaves)")
                continue
            except UnicodeDecodeError as error:
                print(f"that line is not UTF-8: {error}", file=sys.stderr)
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _reset(self) -> None:
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def _command(self, line: str) -> bool:
        if line in ("/quit", "/exit"):
            return False
        if line == "/reset":
            self._reset()
            print("(the conversation starts anew)")
        elif line == "/stats":
            print(self._last, flush=True)
            offload.print_stats(self._session.stats())
        elif line == "/help":
            print(_HELP)
        else:
            print(f"no command {line!r}; /help lists them")
        return True

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        bar = common.new_bar(self._options)
        try:
            stream = self._session.generate(
                messages=self._messages,
                stream=True,
                on_prefill=bar.prefill,
                **common.sampling_arguments(self._options),
            )
        except InputError as error:
            self._messages.pop()
            print(f"{error}\n(/reset starts a new conversation)", file=sys.stderr)
            return
        try:
            for piece in stream:
                bar.close()
                sys.stdout.write(piece)
                sys.stdout.flush()
            print(flush=True)
        except KeyboardInterrupt:
            print("\n(stopped)", flush=True)
        finally:
            bar.close()
            stream.close()
        result = stream.result
        self._messages.append({"role": "assistant", "content": result.text})
        self._last = timing_line(result)
        if not self._options.quiet:
            tell_cut(result, self._session)
        if self._options.stats:
            print(self._last, file=sys.stderr)
