"""A picture of which experts a run used: layers as rows, experts as columns, uses as colours."""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
import numpy.typing as npt

from flashnext.paths import as_path, told

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)

_PAPER, _INK, _NEVER = (255, 255, 255), (40, 40, 48), (222, 222, 226)
# From the fewest uses to the most.
_COLOURS = np.array(
    [(52, 20, 96), (44, 84, 160), (30, 148, 140), (128, 206, 88), (252, 226, 64)], np.float64
)
_SCALE = 2  # pixels of a dot of a letter
_ADVANCE, _LETTER = 6 * _SCALE, 7 * _SCALE
_LEFT, _TOP, _BOTTOM, _RIGHT, _BAR = 70, 40, 50, 150, 18

# 5 x 7 dots each, row by row, for the words below and numbers.
_GLYPHS = {
    "0": ".###. #...# #..## #.#.# ##..# #...# .###.",
    "1": "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    "2": ".###. #...# ....# ...#. ..#.. .#... #####",
    "3": "##### ...#. ..#.. ...#. ....# #...# .###.",
    "4": "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "5": "##### #.... ####. ....# ....# #...# .###.",
    "6": "..##. .#... #.... ####. #...# #...# .###.",
    "7": "##### ....# ...#. ..#.. ..#.. ..#.. ..#..",
    "8": ".###. #...# #...# .###. #...# #...# .###.",
    "9": ".###. #...# #...# .#### ....# ...#. .##..",
    "a": "..... ..... .###. ....# .#### #...# .####",
    "e": "..... ..... .###. #...# ##### #.... .###.",
    "l": ".##.. ..#.. ..#.. ..#.. ..#.. ..#.. .###.",
    "n": "..... ..... #.##. ##..# #...# #...# #...#",
    "p": "..... ..... ####. #...# ####. #.... #....",
    "r": "..... ..... #.##. ##..# #.... #.... #....",
    "s": "..... ..... .#### #.... .###. ....# ####.",
    "t": ".#... .#... ###.. .#... .#... .#..# ..##.",
    "u": "..... ..... #...# #...# #...# #..## .##.#",
    "v": "..... ..... #...# #...# #...# .#.#. ..#..",
    "x": "..... ..... #...# .#.#. ..#.. .#.#. #...#",
    "y": "..... ..... #...# #...# .#### ....# .###.",
}


def png(pixels: Pixels) -> bytes:
    """A PNG file of an image."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter, none
    rows[:, 1:] = pixels.reshape(height, 3 * width)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def draw(uses: npt.NDArray[np.uint64]) -> Pixels:
    """Draws a map of uses.

    Args:
        uses: (layers, experts).

    Returns:
        The image: cells with axes, and a bar that explains the colours.
    """
    layers, experts = uses.shape
    cell_x = max(1, min(24, 1024 // experts))
    cell_y = max(6, min(24, 480 // layers))
    width, height = experts * cell_x, layers * cell_y
    height_all = _TOP + max(height, 5 * _LETTER) + _BOTTOM
    image = np.full((height_all, _LEFT + width + _RIGHT, 3), _PAPER, np.uint8)
    cells = np.repeat(np.repeat(colours(uses), cell_y, axis=0), cell_x, axis=1)
    image[_TOP : _TOP + height, _LEFT : _LEFT + width] = cells

    _write(image, "layer", _LEFT - 5 * _ADVANCE, _TOP - _LETTER - 12)
    every = _tick(cell_y, _LETTER + 6)
    for layer in range(0, layers, every):
        text = str(layer)
        y = _TOP + layer * cell_y + cell_y // 2
        image[y : y + 1, _LEFT - 6 : _LEFT] = _INK
        _write(image, text, _LEFT - 10 - len(text) * _ADVANCE, y - _LETTER // 2)
    below = _TOP + height
    every = _tick(cell_x, 4 * _ADVANCE + 6)
    for expert in range(0, experts, every):
        text = str(expert)
        x = _LEFT + expert * cell_x + cell_x // 2
        image[below : below + 6, x : x + 1] = _INK
        _write(image, text, x - len(text) * _ADVANCE // 2, below + 10)
    _write(image, "expert", _LEFT + width // 2 - 3 * _ADVANCE, below + 14 + _LETTER)
    _legend(image, int(uses.max()), _LEFT + width + 24, max(height, 5 * _LETTER))
    return image


def colours(uses: npt.NDArray[np.uint64]) -> Pixels:
    """The colours of counts on a logarithmic scale; grey: never."""
    most = np.log(max(2.0, float(uses.max())))
    share = np.log(np.maximum(uses, 1).astype(np.float64)) / most * (len(_COLOURS) - 1)
    low = np.minimum(share.astype(np.int64), len(_COLOURS) - 2)
    part = (share - low)[..., None]
    mixed = _COLOURS[low] * (1 - part) + _COLOURS[low + 1] * part
    return np.where((uses == 0)[..., None], _NEVER, np.rint(mixed)).astype(np.uint8)


def save(uses: npt.NDArray[np.uint64], path: str | os.PathLike[str]) -> None:
    """Writes the picture to a file.

    Raises:
        InputError: it cannot be written.
    """
    with told(f"cannot write {path}"):
        as_path("the picture", path).write_bytes(png(draw(uses)))


def _legend(image: Pixels, most: int, x: int, height: int) -> None:
    _write(image, "uses", x, _TOP - _LETTER - 12)
    bar = height - 2 * _LETTER
    top = max(2.0, float(most))
    counts = np.exp(np.linspace(np.log(top), 0, bar)).astype(np.uint64)
    image[_TOP : _TOP + bar, x : x + _BAR] = colours(counts)[:, None]
    ticks = [most] if most > 1 else []
    ticks += [10**power for power in range(len(str(most))) if 2 * 10**power <= most or power == 0]
    for count in ticks:
        y = _TOP + round((bar - 1) * (1 - np.log(count) / np.log(top)))
        image[y : y + 1, x + _BAR : x + _BAR + 6] = _INK
        _write(image, str(count), x + _BAR + 10, max(_TOP, y - _LETTER // 2))
    low = _TOP + height - _LETTER
    image[low : low + _LETTER, x : x + _BAR] = _NEVER
    _write(image, "never", x + _BAR + 10, low)


def _tick(cell: int, room: int) -> int:
    """The smallest round step whose ticks are `room` pixels apart."""
    for step in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if step * cell >= room:
            return step
    return 512


def _write(image: Pixels, text: str, x: int, y: int) -> None:
    for letter in text:
        dots = np.array([[dot == "#" for dot in row] for row in _GLYPHS[letter].split()])
        big = np.repeat(np.repeat(dots, _SCALE, axis=0), _SCALE, axis=1)
        place = image[max(y, 0) : y + big.shape[0], max(x, 0) : x + big.shape[1]]
        place[big[-place.shape[0] :, -place.shape[1] :]] = _INK
        x += _ADVANCE
