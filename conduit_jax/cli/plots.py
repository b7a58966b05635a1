"""Learning curves as PNG, drawn with matplotlib; it is imported when a curve is drawn, and named where it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conduit_jax.errors import ConfigError, refuse

Curve = Sequence[tuple[float, float]]
FEW_POINTS = 10


def check_plot(path: Path | None) -> None:
    """Refuse, before a run begins, a plot that could not be drawn or written at its end."""
    if path is None:
        return
    if not path.parent.is_dir():
        refuse(ConfigError, "--plot names a folder that does not exist.", got=path.parent, want="an existing folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        refuse(ConfigError, "matplotlib is not installed.", fix="pip install 'conduit_jax[plot]'")


def draw_curves(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write the curves, (environment steps, return) by seed, as PNG: thin lines, and their mean where there are several.

    A point without any finished episode (NaN) is left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for curve in curves:
        steps, returns = zip(*curve, strict=True) if curve else ((), ())
        finite = sum(value == value for value in returns)
        marker = "." if finite <= FEW_POINTS else None  # a line through one point is not seen
        alpha = 1.0 if len(curves) == 1 else 0.35
        axes.plot(steps, returns, color="tab:blue", linewidth=1, alpha=alpha, marker=marker)
    if len(curves) > 1:
        steps = [point[0] for point in curves[0]]
        means = [sum(point[1] for point in points) / len(points) for points in zip(*curves, strict=True)]
        axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {len(curves)} seeds")
        axes.legend(frameon=False)
    axes.set(title=title, xlabel="environment steps", ylabel="return of recent episodes")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
