"""Batches drawn ahead in one program, and the two one-sided tests that compare what is learned with them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drawn_ahead import train
from benchmarks.equivalence import MARGIN, compare
from conduit_jax.examples import dqn


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_every_seed_trains_on_batches_of_any_age(sampler):
    settings = dqn.settings_for(
        "cartpole",
        steps=1_000,
        min_size=300,
        hidden=(16,),
        sampler=sampler,
        evaluation_episodes=2,
        updates_per_rollout=2,
    )
    fresh, stale = (train(dqn.make_dqn, dqn, settings, 2, staleness) for staleness in (0, 4))
    for trained in (fresh, stale):
        assert trained.returns.shape == (2, 2)
        assert np.isfinite(trained.curve).all()
    assert not np.array_equal(fresh.curve, stale.curve)
    assert not np.array_equal(fresh.curve[0], fresh.curve[1]), "seeds differ"


def test_equivalence_is_claimed_within_the_margin_and_not_without_evidence():
    pytest.importorskip("rliable.library", reason="extra bench: rliable")
    draws = np.random.default_rng(0)
    same = compare(100 + draws.normal(size=24), 100 + draws.normal(size=20), resamples=500)
    assert same["equivalent"]
    assert same["margin"] == pytest.approx(MARGIN * same["iqm_direct"])
    assert same["difference_low"] < 0 < same["difference_high"]
    assert not compare(100 + draws.normal(size=24), 120 + draws.normal(size=24), resamples=500)["equivalent"]
    spread = compare(100 + 50 * draws.normal(size=6), 100 + 50 * draws.normal(size=6), resamples=500)
    assert not spread["equivalent"], "what is not known is not equivalent"
