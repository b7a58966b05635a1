"""What a user may choose about the replay that stands in for RLlib's, and what is read off RLlib's own configuration.

Plain values only: RLlib copies and pickles its configuration, and sends it to actors that never import JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from conduit_jax.errors import ConfigError, check_at_least, check_choice, check_integer, refuse

CONDUIT_KEY = "conduit"
_BUFFER_KEYS = frozenset(
    {"type", "capacity", "alpha", "beta", "batch_size_B", "batch_length_T", "replay_mode", "num_shards", CONDUIT_KEY}
)
_SMALL_BATCH_BYTES = 1 << 18


class Schedule(NamedTuple):
    """``granularity`` batches drawn a call, ``prefetch`` such calls ahead of the one in use."""

    granularity: int
    prefetch: int

    @property
    def staleness(self) -> int:
        """The most updates between drawing a batch and using it."""
        return (self.prefetch + 1) * self.granularity - 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``attach``.

    ``max_staleness``: the most updates between drawing a batch and using it, 0 for RLlib's own order of things.
    ``granularity`` batches are drawn a call and ``prefetch`` (0 or 1) calls made ahead; unless given, both follow from
    ``max_staleness`` and the size of a batch alone, so that equal seeds give equal batches on every machine. On-policy,
    ``prefetch=0`` values rollouts after sampling and gathers minibatches when they are needed, ``prefetch=1`` does both ahead;
    unless given, minibatches are gathered ahead, and rollouts valued while sampling goes on where that is seen to be quicker.
    ``observation_dtype`` casts observations at delivery (``"float32"``); they are stored as they come.
    ``backend`` names the JAX backend that keeps the replay (``"cpu"``, ``"gpu"``); JAX's default unless given.
    """

    max_staleness: int = 4
    granularity: int | None = None
    prefetch: int | None = None
    observation_dtype: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        check_integer("attach(max_staleness=)", self.max_staleness, 0)
        if self.granularity is not None:
            check_integer("attach(granularity=)", self.granularity, 1)
        if self.prefetch is not None:
            check_choice("attach(prefetch=)", str(self.prefetch), ("0", "1"))
        if self.observation_dtype is not None:
            check_choice("attach(observation_dtype=)", self.observation_dtype, ("float32", "float16", "bfloat16"))
        least = Schedule(self.granularity or 1, self.prefetch or 0).staleness
        if least > self.max_staleness:
            refuse(
                ConfigError,
                "Batches drawn this far ahead would be too stale.",
                got=f"(prefetch + 1) * granularity - 1 = {least}",
                want=f"at most max_staleness={self.max_staleness}",
                fix="attach(max_staleness=) higher, granularity= or prefetch= lower",
            )

    def schedule(self, batch_bytes: int) -> Schedule:
        """Return how batches of ``batch_bytes`` are drawn: small ones many a call, large ones ahead of the update."""
        prefetch = self.prefetch
        if prefetch is None:
            least = 2 * (self.granularity or 1) - 1
            prefetch = int(batch_bytes > _SMALL_BATCH_BYTES and least <= self.max_staleness)
        return Schedule(self.granularity or (self.max_staleness + 1) // (prefetch + 1), prefetch)


def make_options(given: Mapping[str, Any]) -> Options:
    """Return the options ``given``; ``ConfigError`` with the nearest name for one that does not exist."""
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else None
            refuse(ConfigError, f"attach() has no option {name!r}.", got=name, want=", ".join(known), fix=fix)
    return Options(**given)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What RLlib's ``replay_buffer_config`` asks for. ``alpha`` is ``None`` where draws are uniform."""

    capacity: int
    alpha: float | None
    beta: float

    def __post_init__(self) -> None:
        check_integer("replay_buffer_config['capacity']", self.capacity, 16)
        if self.alpha is not None:
            check_at_least("replay_buffer_config['alpha']", self.alpha, 0.0)
        check_at_least("replay_buffer_config['beta']", self.beta, 0.0)

    @property
    def exponent(self) -> float:
        """The power that turns priorities into weights."""
        return 1.0 if self.alpha is None else float(self.alpha)


def settings_of(buffer: Mapping[str, Any]) -> Settings:
    """Read a ``replay_buffer_config``; ``ConfigError`` for a kind of buffer or a setting that is not served."""
    kind = buffer.get("type")
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
    if not name.rsplit(".", 1)[-1].endswith("EpisodeReplayBuffer"):
        want = "'EpisodeReplayBuffer', 'PrioritizedEpisodeReplayBuffer' or their MultiAgent… forms"
        refuse(ConfigError, "This kind of replay buffer is not served.", got=name, want=want)
    unknown = sorted(set(buffer) - _BUFFER_KEYS)
    if unknown:
        refuse(
            ConfigError,
            "replay_buffer_config has settings that the replay does not know.",
            got=", ".join(unknown),
            want=", ".join(sorted(_BUFFER_KEYS - {CONDUIT_KEY})),
            fix="leave them out",
        )
    if buffer.get("replay_mode", "independent") != "independent":
        refuse(
            ConfigError,
            "Modules are replayed independently of each other.",
            got=f"replay_mode={buffer['replay_mode']!r}",
            want="'independent'",
        )
    prioritized, alpha, beta = "Prioritized" in name, buffer.get("alpha"), buffer.get("beta")
    default = 1.0 if alpha is None else alpha  # RLlib's own
    return Settings(
        capacity=buffer.get("capacity", 10_000),
        alpha=default if prioritized else None,
        beta=0.4 if beta is None else beta,
    )


def marked(buffer: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return ``buffer`` with the options and, to notice later changes, what was read off it."""
    settings = settings_of(buffer)
    return {**buffer, CONDUIT_KEY: {"options": asdict(options), "settings": asdict(settings)}}


def unmarked(buffer: Mapping[str, Any]) -> tuple[Settings, Options]:
    """Read back what ``marked`` kept; ``ConfigError`` where the buffer was configured a second time since."""
    fix = "configure the buffer first, attach last"
    if CONDUIT_KEY not in buffer:
        got, want = f"replay_buffer_config={dict(buffer)}", "one buffer configuration, given before attach()"
        refuse(ConfigError, "A second buffer was configured after attach().", got=got, want=want, fix=fix)
    kept, now = buffer[CONDUIT_KEY], settings_of(buffer)
    if asdict(now) != kept["settings"]:
        refuse(
            ConfigError,
            "The buffer's settings were changed after attach().",
            got=asdict(now),
            want=kept["settings"],
            fix=fix,
        )
    return now, Options(**kept["options"])


def find_device(backend: str | None) -> Any:
    """Return the first device of a JAX backend, of JAX's default for ``None``; ``ConfigError`` where there is no such backend."""
    jax = importlib.import_module("jax")
    try:
        return jax.devices(backend)[0]
    except RuntimeError:
        found = sorted({"cpu", *(device.platform for device in jax.devices())})
        refuse(
            ConfigError, "JAX has no such backend here.", got=f"attach(backend={backend!r})", want=" or ".join(found)
        )


def import_rllib() -> Any:
    """Return the module ``ray.rllib``; ``ConfigError`` that names the extra where it or torch is missing."""
    try:
        importlib.import_module("torch")
        return importlib.import_module("ray.rllib")
    except ModuleNotFoundError as error:
        raise ConfigError("This needs RLlib and torch: pip install 'conduit_jax[rllib]'") from error


__all__ = [
    "CONDUIT_KEY",
    "Options",
    "Schedule",
    "Settings",
    "find_device",
    "import_rllib",
    "make_options",
    "marked",
    "settings_of",
    "unmarked",
]
