"""The checkpoint's tokenizer: text to ids, ids to bytes, ids to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from flashnext.errors import CheckpointError, InputError
from flashnext.paths import is_file, told

_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_IDS = 1 << 24  # rows that a model's head may have


def read_json(path: Path) -> Any:
    """Reads a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file is not readable or not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error


def read_text(path: Path) -> str:
    """Reads a text file of a checkpoint.

    Raises:
        CheckpointError: the file is not readable, not UTF-8, or stands for one that was not
            downloaded.
    """
    with told(f"{path}: not readable", CheckpointError):
        content = path.read_bytes()
    if content.startswith(_POINTER):
        raise CheckpointError(
            f"{path}: only a Git LFS pointer; download the file itself (git lfs pull)"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint that must hold an object.

    Raises:
        CheckpointError: it does not.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a JSON object")
    return content


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return table


class Tokenizer:
    """Byte-level tokenizer read from ``tokenizer.json`` and ``tokenizer_config.json``.

    Attributes:
        size: ids from ``size`` on do not exist in the tokenizer (padding rows of the head).
        config: contents of ``tokenizer_config.json`` (empty when absent).
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not is_file(path, CheckpointError):
            raise CheckpointError(
                f"{path} is missing: the tokenizer is part of a checkpoint; copy it there"
            )
        given = read_object(path).get("decoder")
        decoder = given.get("type") if isinstance(given, dict) else None
        if decoder != "ByteLevel":
            raise CheckpointError(
                f"{path}: decoder is {decoder!r}, and only byte-level tokenizers ('ByteLevel') "
                "belong to this architecture"
            )
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except BaseException as error:  # the library's panics are no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise CheckpointError(f"{path}: not a valid tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = folder / "tokenizer_config.json"
        self.config: dict[str, Any] = (
            read_object(config) if is_file(config, CheckpointError) else {}
        )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CheckpointError(f"{path}: the vocabulary is empty")
        self.size: int = max(vocabulary.values()) + 1
        if self.size > _MOST_IDS:
            raise CheckpointError(
                f"{path}: has the id {self.size - 1}, more than a model of {_MOST_IDS} rows has"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        alphabet = _byte_of_char()
        self._bytes: list[bytes] = [b""] * self.size
        for token, i in vocabulary.items():
            if i in added or not all(char in alphabet for char in token):
                self._bytes[i] = token.encode()
            else:
                self._bytes[i] = bytes(alphabet[char] for char in token)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``. Special tokens written in the text become their ids; none is added."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text holds lone surrogates, which are no text: {error}"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ``ids``. ``special=True`` keeps special tokens such as ``<|im_end|>``."""
        return b"".join(self.token_bytes(i, special=special) for i in ids).decode(
            "utf-8", errors="replace"
        )

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes that one id adds to the text (empty for special tokens and padding ids)."""
        if token >= self.size or (token in self._special and not special):
            return b""
        return self._bytes[token]

    def all_bytes(self) -> list[bytes]:
        """Bytes that each id adds to a text, by id."""
        return [self.token_bytes(i) for i in range(self.size)]

    def id_of(self, token: str) -> int | None:
        """Id of a token given as text, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def stop_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids that end an answer: ``eos_token_id`` of ``generation_config.json``.

    Without that file, the tokenizer's ``eos_token``, then ``eos_token_id`` of ``config.json``.
    """
    generation = folder / "generation_config.json"
    found: Any = None
    source = generation
    if is_file(generation, CheckpointError):
        found = read_object(generation).get("eos_token_id")
    if found is None and isinstance(token := special_text(tokenizer.config.get("eos_token")), str):
        found = tokenizer.id_of(token)
        source = folder / "tokenizer_config.json"
    if found is None:
        source = folder / "config.json"
        content = read_object(source)
        inner = content.get("text_config")
        found = (inner if isinstance(inner, dict) else content).get("eos_token_id")
    ids: Sequence[Any] = [] if found is None else found if isinstance(found, list) else [found]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < tokenizer.size:
            raise CheckpointError(
                f"{source}: stop id {i!r} is not an id of the tokenizer (0..{tokenizer.size - 1})"
            )
    return list(ids)


def special_text(token: Any) -> Any:
    """Text of a special token in ``tokenizer_config.json``: a string or an object with content."""
    return token.get("content") if isinstance(token, dict) else token
