"""The tables of a plane, by name, and the seed that their draws derive from."""

from __future__ import annotations

from collections.abc import Mapping

from conduit_jax.config.algorithms import Algorithm, BoundedLag, OnPolicy
from conduit_jax.config.replay import ReplayConfig
from conduit_jax.errors import ConfigError, refuse

DEFAULT_TABLE = "experience"


def checked_seed(seed: object) -> int:
    """Return ``seed`` as an ``int``; ``ConfigError`` unless it is an integer of 32 bits, which is all that keys are made of."""
    index = getattr(seed, "__index__", None)  # numpy integers too
    if isinstance(seed, bool) or index is None or not 0 <= index() < 2**32:
        refuse(ConfigError, "A seed is out of range.", got=repr(seed), want="an integer, 0 <= seed < 2**32")
    return index()


def replay_tables(
    algorithm: Algorithm, replay: ReplayConfig | Mapping[str, ReplayConfig] | None
) -> dict[str, ReplayConfig]:
    """Return the tables a plane of ``algorithm`` has, by name; ``ConfigError`` for a combination that can never work."""
    if not isinstance(algorithm, Algorithm):
        refuse(ConfigError, "Unknown algorithm class.", got=repr(algorithm), want="OffPolicy, OnPolicy or BoundedLag")
    if isinstance(algorithm, OnPolicy):
        if replay is not None:
            refuse(
                ConfigError,
                "On-policy experience has no replay: it is dropped after its iteration.",
                got=repr(replay),
                want="replay=None",
            )
        return {DEFAULT_TABLE: ReplayConfig(capacity=1)}
    if replay is None and isinstance(algorithm, BoundedLag):
        return {DEFAULT_TABLE: ReplayConfig(capacity=1)}  # the queue's length is decided when the unit is known
    if replay is None:
        refuse(ConfigError, "Off-policy experience needs a replay.", want="replay=conduit.ReplayConfig(capacity=...)")
    if not isinstance(replay, ReplayConfig | Mapping) or not replay:
        want = "a conduit.ReplayConfig(...), or several by table name"
        refuse(ConfigError, "Off-policy experience needs a replay.", got=repr(replay), want=want)
    tables = {DEFAULT_TABLE: replay} if isinstance(replay, ReplayConfig) else dict(replay)
    for name, config in tables.items():
        if not isinstance(name, str):
            refuse(ConfigError, "A table's name is not a string.", got=repr(name), want="a str")
        if not isinstance(config, ReplayConfig):
            refuse(ConfigError, f"Table {name!r} is not described by a ReplayConfig.", got=type(config).__name__)
        if algorithm.batch_size > config.capacity:
            refuse(
                ConfigError,
                "A batch is larger than the replay.",
                got=f"batch_size={algorithm.batch_size}, capacity={config.capacity}",
                want="batch_size <= capacity",
            )
    return tables
