"""``python -m conduit_jax`` is ``conduit-jax``."""

from conduit_jax.cli import main

main()
