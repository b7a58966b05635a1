"""The tables of a plane, by name, and the seed that their draws derive from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conduit_jax.config.algorithms import Algorithm, BoundedLag, OffPolicy, OnPolicy
from conduit_jax.config.replay import ReplayConfig
from conduit_jax.errors import ConfigError, check_at_least, refuse

DEFAULT_TABLE = "experience"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several tables, drawn together: every batch has rows of each, as many as its part of ``proportions``.

    Those are any positive numbers, relative to each other; rows are whole, by largest remainder, alike in every batch.
    ``push(rollout, table=...)`` says where a rollout goes: to the table ``"experience"`` unless it does, which is that of a
    loop's. Each table is one of its own, with its sampler, limiter, items and placement; it has the rows it would deliver
    alone with its part of the batch. ``SampleInfo.table`` is the number of each row's table, in the order of ``tables``.
    """

    tables: Mapping[str, ReplayConfig]
    proportions: Mapping[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Mapping) or not isinstance(self.proportions, Mapping):
            got = f"{type(self.tables).__name__} and {type(self.proportions).__name__}"
            refuse(
                ConfigError, "A mixture's tables and proportions are named.", got=got, want="two dicts by table name"
            )
        if len(self.tables) < 2 or set(self.tables) != set(self.proportions):
            got = f"tables {', '.join(map(str, self.tables))}; proportions of {', '.join(map(str, self.proportions))}"
            refuse(
                ConfigError, "A mixture has a proportion for each of several tables.", got=got, want="the same names"
            )
        for name, proportion in self.proportions.items():
            check_at_least(f"Mixture(proportions=)[{name!r}]", proportion, 1e-6, fix="leave the table out")
            if proportion > 1e6:
                refuse(
                    ConfigError, f"Mixture(proportions=)[{name!r}] is out of range.", got=proportion, want="<= 10**6"
                )


def checked_seed(seed: object) -> int:
    """Return ``seed`` as an ``int``; ``ConfigError`` unless it is an integer of 32 bits, which is all that keys are made of."""
    index = getattr(seed, "__index__", None)  # numpy integers too
    if isinstance(seed, bool) or index is None or not 0 <= index() < 2**32:
        refuse(ConfigError, "A seed is out of range.", got=repr(seed), want="an integer, 0 <= seed < 2**32")
    return index()


def replay_tables(
    algorithm: Algorithm, replay: ReplayConfig | Mapping[str, ReplayConfig] | Mixture | None
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
    if isinstance(replay, Mixture) and not isinstance(algorithm, OffPolicy):
        got = type(algorithm).__name__
        refuse(
            ConfigError, "Experience of bounded lag comes from one queue.", got=f"{got}, a Mixture", want="OffPolicy"
        )
    if not isinstance(replay, ReplayConfig | Mapping | Mixture) or not replay:
        want = "a conduit.ReplayConfig(...), several by table name, or a conduit.Mixture(...) of them"
        refuse(ConfigError, "Off-policy experience needs a replay.", got=repr(replay), want=want)
    several = replay.tables if isinstance(replay, Mixture) else replay
    tables = {DEFAULT_TABLE: several} if isinstance(several, ReplayConfig) else dict(several)
    for name, config in tables.items():
        if not isinstance(name, str):
            refuse(ConfigError, "A table's name is not a string.", got=repr(name), want="a str")
        if not isinstance(config, ReplayConfig):
            refuse(ConfigError, f"Table {name!r} is not described by a ReplayConfig.", got=type(config).__name__)
        if not isinstance(replay, Mixture) and algorithm.batch_size > config.capacity:
            refuse(
                ConfigError,
                "A batch is larger than the replay.",
                got=f"batch_size={algorithm.batch_size}, capacity={config.capacity}",
                want="batch_size <= capacity",
            )
    return tables
