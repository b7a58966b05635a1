"""What every training command can be told to keep: checkpoints to resume from, and figures in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

_FOLDER = click.Path(file_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--checkpoint-dir", type=_FOLDER, help="Keep the run's last checkpoint in this folder."),
    click.option(
        "--checkpoint-every",
        type=click.IntRange(min=1),
        help="Iterations between checkpoints; one is made at the end in any case.  [default: 500]",
    ),
    click.option("--resume", is_flag=True, help="Go on from the checkpoint in --checkpoint-dir, if there is one."),
    click.option("--log-dir", type=_FOLDER, help="Write metrics for TensorBoard (needs tensorboardX)."),
    click.option("--csv", "csv_path", type=click.Path(dir_okay=False, path_type=Path), help="Write metrics as CSV."),
)


def keeping_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextmanager
def kept(chosen: dict[str, Any]) -> Iterator[Any]:
    """Take the options out of ``chosen`` and yield them as a ``Keep`` of the examples, with sinks that are open in the block."""
    from conduit_jax.examples.running import Keep
    from conduit_jax.sinks import CsvSink, TensorBoardSink

    directory, every, resume, log_dir, csv_path = (
        chosen.pop(name) for name in ("checkpoint_dir", "checkpoint_every", "resume", "log_dir", "csv_path")
    )
    if directory is None and (resume or every):
        raise click.UsageError("--resume and --checkpoint-every need --checkpoint-dir.")
    with ExitStack() as open_sinks:
        sinks = [open_sinks.enter_context(CsvSink(csv_path))] if csv_path else []
        sinks += [open_sinks.enter_context(TensorBoardSink(log_dir))] if log_dir else []
        yield Keep(directory, (every or 500) if directory else None, resume, tuple(sinks))
