"""The command ``conduit-jax``: train, envs, plan, profile. Arguments are click's business; what is printed is rich's."""

from __future__ import annotations

import sys

import click

from conduit_jax import __version__
from conduit_jax.cli.environments import environments
from conduit_jax.cli.planning import plan_placement, profile_machine
from conduit_jax.cli.play import play
from conduit_jax.cli.training import train
from conduit_jax.errors import ConduitError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="conduit-jax")
def command() -> None:
    """An Experience Data Plane for reinforcement learning in JAX."""


command.add_command(train)
command.add_command(play)
command.add_command(environments)
command.add_command(plan_placement)
command.add_command(profile_machine)


def main() -> None:
    """Run the command line; a refused configuration exits with code 2, like a wrong option."""
    try:
        command()
    except ConduitError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
