"""Atari games as lanes of a ``GymnasiumActor``, seen as in Mnih et al. (2015): grey frames of 84 x 84, every fourth one.

actor = GymnasiumActor("ALE/Qbert-v5", 8, 16, lane=atari_lane("ALE/Qbert-v5"), stack=4)   # each frame once
conduit-jax train dqn --env gymnasium:ALE/Qbert-v5                                         # four frames an observation
"""

from __future__ import annotations

import functools
from typing import Any

from conduit_jax.adapters.gymnasium_lanes import Lane, registered
from conduit_jax.adapters.optional import required
from conduit_jax.errors import check_integer

__all__ = ["atari_lane"]

STACK = 4
FRAME_SKIP = 4


def atari_lane(env_id: str, *, stack: int = 1) -> Lane:
    """Return how a lane of a game is built: 30 no-ops at most at its start, four frames a step, the brighter of the last two.

    Actions repeat with a quarter's probability, as version 5 of the games declares (Machado et al. 2018). Rewards are the
    game's own. Observations are uint8 ``(84, 84)``, or ``(stack, 84, 84)``.

    Raises:
        ConfigError: ale-py or OpenCV is missing, or there is no such game.
    """
    check_integer("stack", stack, 1)
    registered(env_id)
    required("cv2", "OpenCV", "atari")
    return Lane(functools.partial(_make, env_id, stack), None)


def _make(env_id: str, stack: int, **options: Any) -> Any:
    registered(env_id)  # in a worker, too, ale-py has to be imported
    from gymnasium import make
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    game = AtariPreprocessing(make(env_id, frameskip=1, **options), frame_skip=FRAME_SKIP)
    return game if stack == 1 else FrameStackObservation(game, stack)
