"""What a training run shows: a live panel on a terminal, plain lines elsewhere, and the latency table at the end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from conduit_jax.schedule.metrics import LatencyReport

_LINE_EVERY_S = 5.0


def microseconds(seconds: float) -> str:
    """Return ``seconds`` as microseconds for people; a dash where nothing was measured."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e6:,.0f} us"


class LiveDisplay:
    """Shows progress values as they come; a context manager. ``quiet`` shows nothing."""

    def __init__(self, console: Console, title: str, *, quiet: bool):
        self._console, self._quiet, self._last_line, self._title = console, quiet, 0.0, title
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(f"{title}: compiling", total=1)
        self._live = (
            Live(self._bar, console=console, refresh_per_second=4) if console.is_terminal and not quiet else None
        )

    def __enter__(self) -> LiveDisplay:
        if self._live is not None:
            self._live.start()
        elif not self._quiet:
            self._console.print(f"{self._title}: compiling", highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Any) -> None:
        """Show one progress value of an example."""
        if self._quiet:
            return
        if self._live is None:
            self._print_line(progress)
            return
        self._bar.update(self._task, description=self._title, completed=progress.iteration, total=progress.iterations)
        grid = Table.grid(padding=(0, 3))
        grid.add_row(*(f"[bold]{name}[/bold] {value}" for name, value in _figures(progress)))
        outer = Table.grid()
        outer.add_row(self._bar)
        outer.add_row(grid)
        self._live.update(outer)

    def _print_line(self, progress: Any) -> None:
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY_S or progress.iteration >= progress.iterations:
            self._last_line = now
            words = "  ".join(f"{name} {value}" for name, value in _figures(progress))
            self._console.print(
                f"iteration {progress.iteration}/{progress.iterations}  {words}", highlight=False, soft_wrap=True
            )


def _figures(progress: Any) -> list[tuple[str, str]]:
    def number(value: float, form: str) -> str:
        return "-" if math.isnan(value) else format(value, form)

    return [
        ("steps/s", f"{progress.steps_per_s:,.0f}"),
        ("return", number(progress.recent_return, ".1f")),
        ("loss", number(progress.loss, ".3g")),
        ("exposed path", microseconds(progress.latency.exposed_s)),
        ("draw staleness", str(progress.draw_staleness)),
    ]


def latency_table(report: LatencyReport) -> Table:
    """Return the table that splits an iteration into its stages, hidden and exposed."""
    samples = min(value.count for value in report.stages_s.values())
    title = f"Where an iteration goes (each stage timed alone, {samples} iterations)"
    table = Table("stage", "p50", "p99", "share", title=title)
    alone = sum(value.p50 for value in report.stages_s.values())
    for name, value in report.stages_s.items():
        share = "-" if not alone or math.isnan(alone) else f"{100 * value.p50 / alone:.0f} %"
        table.add_row(name, microseconds(value.p50), microseconds(value.p99), share)
    table.add_section()
    table.add_row(
        "iteration as it runs", microseconds(report.iteration_s.p50), microseconds(report.iteration_s.p99), ""
    )
    table.add_row("experience path, alone", microseconds(report.path_s), "", "")
    table.add_row("  of it hidden", microseconds(report.hidden_s), "", "")
    how = "by spans" if report.exposed is None else "by ablation"
    table.add_row(f"  of it exposed ({how})", microseconds(report.exposed_s), "", "")
    if not report.agrees():
        table.caption = f"the spans put the exposed part at {microseconds(report.exposed_by_spans_s)}"
    return table
