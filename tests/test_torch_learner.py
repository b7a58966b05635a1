"""The torch example is run small: it trains on the plane's batches, shares their memory, and repeats with its seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

from conduit_jax.examples import torch_learner  # noqa: E402
from conduit_jax.examples.dqn import Settings, settings_for  # noqa: E402


def small() -> Settings:
    settings = settings_for("cartpole", steps=1000, sampler="prioritized")
    return replace(settings, min_size=200, updates_per_rollout=3, evaluation_episodes=4)


def test_it_trains_without_a_copy_and_repeats() -> None:
    losses: list[list[float]] = [[], []]
    first, second = (torch_learner.train(small(), lambda _, loss, run=run: run.append(loss)) for run in losses)
    assert losses[0][-1] == losses[1][-1] > 0
    np.testing.assert_array_equal(first.returns, second.returns)
    assert first.returns.shape == (4,)
    assert first.updates == 3 * sum(loss == loss for loss in losses[0])
    assert first.source["copied"] == {}
    assert first.source["shared"] == 7 * first.updates
    table = first.source["stats"].tables["experience"]
    assert table.delivered_batches == table.priority_updates == first.updates
