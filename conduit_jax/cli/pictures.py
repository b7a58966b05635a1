"""Pictures of the pure-JAX worlds, drawn with numpy: as RGB arrays for a GIF, or as letters for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from conduit_jax.errors import ConfigError, refuse

WHITE, GREY, RED, BLUE, GREEN = (250, 250, 250), (130, 130, 130), (200, 60, 50), (50, 90, 180), (60, 160, 80)
SHADES = " .:-=+*#%@"


class Canvas:
    """An RGB picture with coordinates of its own: x from ``-half`` to ``half`` rightwards, y upwards, the middle at 0."""

    def __init__(self, width: int, height: int, half: float):
        columns = (np.arange(width) + 0.5 - width / 2) / (width / 2) * half
        rows = -(np.arange(height) + 0.5 - height / 2) / (width / 2) * half
        self._x, self._y = columns[None, :], rows[:, None]
        self.pixels = np.full((height, width, 3), WHITE, np.uint8)

    def line(self, start: Any, end: Any, width: float, colour: tuple[int, int, int]) -> None:
        """Draw a thick segment with round ends; a disc where both ends are one point."""
        (ax, ay), (bx, by) = start, end
        length = max((bx - ax) ** 2 + (by - ay) ** 2, 1e-9)
        share = np.clip(((self._x - ax) * (bx - ax) + (self._y - ay) * (by - ay)) / length, 0, 1)
        away = np.hypot(self._x - ax - share * (bx - ax), self._y - ay - share * (by - ay))
        self.pixels[away <= width / 2] = colour

    def disc(self, middle: Any, radius: float, colour: tuple[int, int, int]) -> None:
        """Draw a disc."""
        self.line(middle, middle, 2 * radius, colour)


def _cartpole(state: Any, canvas: Canvas | None = None, height: float = 0.0, playing: bool = True) -> np.ndarray:
    canvas = canvas or Canvas(240, 120, 2.6)
    x, angle = float(state.position), float(state.angle)
    canvas.line((-2.6, height - 0.5), (2.6, height - 0.5), 0.03, GREY)
    canvas.line((x - 0.2, height - 0.4), (x + 0.2, height - 0.4), 0.2, BLUE if playing else GREY)
    top = (x + np.sin(angle), height - 0.35 + np.cos(angle))
    canvas.line((x, height - 0.35), top, 0.09, RED if playing else GREY)
    return canvas.pixels


def _multi_agent_cartpole(state: Any) -> np.ndarray:
    parts = []
    for agent in range(state.playing.shape[0]):
        pole = type(state.poles)(*(np.asarray(leaf)[agent] for leaf in state.poles))
        parts.append(_cartpole(pole, playing=bool(state.playing[agent])))
    return np.concatenate(parts, axis=0)


def _mountain_car(state: Any) -> np.ndarray:
    canvas = Canvas(240, 160, 1.0)

    def hill(position: float) -> tuple[float, float]:
        return (position + 0.3) / 0.9, 0.45 * np.sin(3 * position)

    places = np.linspace(-1.2, 0.6, 60)
    for left, right in pairwise(places):
        canvas.line(hill(left), hill(right), 0.02, GREY)
    x, y = hill(0.5)
    canvas.line((x, y), (x, y + 0.2), 0.03, GREEN)
    x, y = hill(float(state.position))
    canvas.disc((x, y + 0.06), 0.06, RED)
    return canvas.pixels


def _pendulum(state: Any) -> np.ndarray:
    canvas, angle = Canvas(160, 160, 1.3), float(state.angle)
    canvas.line((0, 0), (-np.sin(angle), np.cos(angle)), 0.16, RED)
    canvas.disc((0, 0), 0.05, GREY)
    return canvas.pixels


def _acrobot(state: Any) -> np.ndarray:
    canvas = Canvas(180, 180, 2.2)
    first, both = float(state.angle), float(state.angle) + float(state.second_angle)
    elbow = np.array([np.sin(first), -np.cos(first)])
    tip = elbow + np.array([np.sin(both), -np.cos(both)])
    canvas.line((-2.2, 1), (2.2, 1), 0.03, GREEN)
    canvas.line((0, 0), elbow, 0.15, BLUE)
    canvas.line(elbow, tip, 0.15, RED)
    return canvas.pixels


def _reach(state: Any) -> np.ndarray:
    from conduit_jax.envs.reach import render

    return np.asarray(render(state, 128))


_PICTURES: dict[str, Callable[[Any], np.ndarray]] = {
    "acrobot": _acrobot,
    "cartpole": _cartpole,
    "mountain_car": _mountain_car,
    "mountain_car_continuous": _mountain_car,
    "multi_agent_cartpole": _multi_agent_cartpole,
    "pendulum": _pendulum,
    "reach_128": _reach,
    "reach_256": _reach,
    "reach_continuous": _reach,
}


def painter(env: str) -> Callable[[Any], np.ndarray]:
    """Return ``state -> uint8 (height, width, 3)`` for a world of that name; ``ConfigError`` where it has no picture."""
    if env not in _PICTURES:
        refuse(ConfigError, f"There is no picture of {env}.", want=f"{', '.join(_PICTURES)}, or gymnasium:<id>")
    return _PICTURES[env]


def as_letters(picture: np.ndarray, columns: int = 72) -> str:
    """Return the picture as lines of characters, the more a spot differs from the corner's colour the denser."""
    height, width, _ = picture.shape
    rows = max(1, columns * height // (2 * width))  # a character is about twice as high as it is wide
    differs = np.abs(picture.astype(np.int16) - picture[0, 0].astype(np.int16)).sum(axis=-1) / 400
    down, across = (np.linspace(0, size, count + 1).astype(int) for size, count in ((height, rows), (width, columns)))
    lines = []
    for top, bottom in pairwise(down):
        cells = [
            differs[top : max(bottom, top + 1), left : max(right, left + 1)].max() for left, right in pairwise(across)
        ]
        lines.append("".join(SHADES[min(int(cell * len(SHADES)), len(SHADES) - 1)] for cell in cells).rstrip())
    return "\n".join(lines)


def save_gif(path: Any, pictures: list[np.ndarray], milliseconds: int = 40) -> None:
    """Write the pictures as an animated GIF that repeats; ``ConfigError`` naming what is missing where Pillow is."""
    try:
        from PIL import Image
    except ImportError:
        refuse(ConfigError, "Pillow is not installed.", fix="pip install 'conduit_jax[plot]'")
    first, *others = [Image.fromarray(picture) for picture in pictures]
    first.save(path, format="GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
