"""A picture of a chunk: one square a head and layer, coloured by the size of its values: a broken one stands out.

Needs Pillow. Colours are on a logarithmic scale from the part's smallest to its largest norm; magenta has no number in
it, red is framed where a digest does not match.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplayout.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # dark to light
_NO_NUMBER = (255, 0, 255)
_DAMAGED = (255, 0, 0)
_MARGIN, _LINE = 44, 14  # pixels: for numbers at the edges, a line of text
_MOST, _LEAST = 1600, 4  # pixels of a panel, of a square


def draw(
    path: str | Path,
    title: str,
    norms: Mapping[str, NDArray[Any]],
    layers: Sequence[int],
    damaged: Collection[tuple[int, int]] = (),
) -> None:
    """Write a PNG with one panel a part: heads from left to right, layers from top to bottom.

    norms: part -> [heads, layers]; damaged: (head, position of the layer). The file appears complete or not at all.
    Raises ConfigError without Pillow or if the file cannot be written.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ConfigError("--heatmap needs Pillow: pip install 'tplayout[heatmap]'") from None
    heads, count = next(iter(norms.values())).shape
    side = max(_LEAST, min(24, _MOST // max(heads, count)))
    panel = _MARGIN + max(heads * side, 110)
    width, height = panel * len(norms) + _MARGIN, 4 * _LINE + count * side + _MARGIN
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    pen.text((6, 4), title, fill="black")
    for index, (part, values) in enumerate(norms.items()):
        left, top = index * panel + _MARGIN, 4 * _LINE
        low, high = _limits(values)
        pen.text((left, 2 * _LINE - 6), f"{part}: rms {low:.3g} to {high:.3g}", fill="black")
        for head in range(heads):
            for row in range(count):
                x, y = left + head * side, top + row * side
                frame = _DAMAGED if (head, row) in damaged else None
                pen.rectangle(
                    (x, y, x + side - 1, y + side - 1), fill=colour(values[head, row], low, high), outline=frame
                )
        _label(pen, left, top, side, heads, layers)
    _write(Path(path), image)


def colour(value: float, low: float, high: float) -> tuple[int, int, int]:
    """The colour of a norm between the smallest and the largest."""
    if not math.isfinite(value):
        return _NO_NUMBER
    if value <= low or high <= low:
        return _SCALE[0] if value <= low < high else _SCALE[2]
    place = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (len(_SCALE) - 1)
    index = min(int(place), len(_SCALE) - 2)
    part = min(place - index, 1.0)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(_SCALE[index], _SCALE[index + 1], strict=True))
    return red, green, blue


def _limits(values: NDArray[Any]) -> tuple[float, float]:
    """Smallest and largest positive finite norm; zeros take the darkest colour."""
    positive = [float(value) for value in values.ravel() if math.isfinite(value) and value > 0]
    return (min(positive), max(positive)) if positive else (0.0, 0.0)


def _label(pen: Any, left: int, top: int, side: int, heads: int, layers: Sequence[int]) -> None:
    """Numbers of heads above and of layers beside, as many as there is room for."""
    step = max(1, -(-_LINE * 2 // side))
    for head in range(0, heads, step):
        pen.text((left + head * side + 1, top - _LINE), str(head), fill="gray")
    for row in range(0, len(layers), max(1, -(-_LINE // side))):
        pen.text((left - 26, top + row * side), str(layers[row]), fill="gray")
    pen.text((left, top + len(layers) * side + 6), "heads across, layers down", fill="gray")


def _write(path: Path, image: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            image.save(file, "PNG")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
