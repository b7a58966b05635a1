"""Running statistics of observations against numpy over all that was seen, however it was cut or sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.errors import ConfigError
from conduit_jax.examples import ppo
from conduit_jax.examples.worlds import make_world
from conduit_jax.normalization import (
    merge_observation_statistics,
    normalize_observations,
    observation_statistics_carry,
    update_observation_statistics,
)
from conduit_jax.testing import compiled_facts
from conduit_jax.types import Rollout

LANES = 4
_update = jax.jit(update_observation_statistics)


def stream(steps, seed, offset=50.0):
    """Observations far from 0, where a naive sum of squares would lose its digits, and bytes beside them."""
    rng = np.random.default_rng(seed)
    state = rng.normal(offset, [0.1, 3.0], (steps, LANES, 2)).astype(np.float32)
    return {"state": state, "pixels": rng.integers(0, 256, (steps, LANES, 2, 2), dtype=np.uint8)}


def rollout(observation, lengths=None) -> Rollout:
    flags = np.zeros(observation["state"].shape[:2], bool)
    return Rollout(observation, None, flags.astype(np.float32), flags, flags, lengths=lengths)


def part(observation, steps, lanes=slice(None)):
    return {key: leaf[steps, lanes] for key, leaf in observation.items()}


def check(statistics, rows):
    """``rows``: what was seen, leaves ``(n, ...)``."""
    assert float(statistics.seen) == len(rows["state"])
    for key, leaf in rows.items():
        wide = leaf.astype(np.float64)
        np.testing.assert_allclose(statistics.mean[key], wide.mean(0), rtol=1e-5)
        np.testing.assert_allclose(statistics.squares[key] / statistics.seen, wide.var(0), rtol=1e-3)


def flat(observation):
    return {key: leaf.reshape(-1, *leaf.shape[2:]) for key, leaf in observation.items()}


@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_they_are_those_of_all_observations_however_they_were_cut(cuts, seed):
    observation, start = stream(sum(cuts) + 1, seed), 0
    carry = observation_statistics_carry(rollout(observation))
    for length in [*cuts, 1]:
        carry = _update(carry, rollout(part(observation, slice(start, start + length))))
        start += length
    check(carry, flat(observation))


def test_steps_beyond_the_lengths_do_not_count_and_an_empty_rollout_changes_nothing():
    observation, lengths = stream(5, 1), np.array([5, 0, 2, 3], np.int32)
    real = np.arange(5)[:, None] < lengths
    observation["state"][~real] = np.nan
    carry = _update(observation_statistics_carry(rollout(observation)), rollout(observation, lengths))
    check(carry, {key: leaf[real] for key, leaf in observation.items()})
    same = _update(carry, rollout(observation, np.zeros(LANES, np.int32)))
    for old, new in zip(jax.tree.leaves(carry), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(old, new)


def test_shards_merged_are_the_whole_on_every_shard_after_one_small_gather():
    observation, shards = stream(24, 2), 2
    start = observation_statistics_carry(rollout(observation))
    each = [_update(start, rollout(part(observation, slice(None), slice(n * 2, n * 2 + 2)))) for n in range(shards)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    together = merge_observation_statistics(stacked)
    check(together, flat(observation))
    mesh = jax.make_mesh((shards,), ("data",), devices=jax.devices()[:shards])
    spec = PartitionSpec("data")
    stacked = jax.device_put(stacked, NamedSharding(mesh, spec))

    def of_shard(mine):
        merged = merge_observation_statistics(jax.tree.map(lambda leaf: leaf[0], mine), "data")
        return jax.tree.map(lambda leaf: leaf[None], merged)

    merge = jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=spec))
    for leaf, wanted in zip(jax.tree.leaves(jax.device_get(merge(stacked))), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(leaf[0], leaf[1])
        np.testing.assert_allclose(leaf[0], wanted, rtol=1e-6)
    assert dict(compiled_facts(merge, stacked).collectives) == {"all-gather": 1}


def test_normalized_observations_have_mean_0_and_variance_1_and_stay_within_the_clip():
    observation = stream(200, 3)
    start = observation_statistics_carry(rollout(observation))
    carry = _update(start, rollout(observation))
    normal = normalize_observations(carry, observation)
    for leaf in normal.values():
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(np.mean(leaf, (0, 1)), 0, atol=1e-3)
        np.testing.assert_allclose(np.var(leaf, (0, 1)), 1, atol=1e-3)
    assert np.abs(normalize_observations(carry, observation, clip=1.0)["state"]).max() == 1
    as_it_is = normalize_observations(start, {key: leaf / np.float32(100) for key, leaf in observation.items()})
    np.testing.assert_allclose(as_it_is["state"], observation["state"] / 100, rtol=1e-6)
    with pytest.raises(ConfigError, match="clip"):
        normalize_observations(carry, observation, clip=-1.0)


def test_an_element_that_never_differs_is_centred_and_stays_finite():
    observation = {key: np.ones_like(leaf) for key, leaf in stream(3, 4).items()}
    carry = _update(observation_statistics_carry(rollout(observation)), rollout(observation))
    for leaf in normalize_observations(carry, observation).values():
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_a_checkpoint_keeps_them(tmp_path):
    observation = stream(12, 5)

    def new_plane():
        plane = conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=1))

        @plane.register_ingestion(init_carry=observation_statistics_carry)
        def ingestion(carry, steps):
            carry = update_observation_statistics(carry, steps)
            return carry, {"seen": jnp.broadcast_to(carry.seen, steps.reward.shape)}

        return plane

    def one(plane, at):
        plane.push(rollout(part(observation, slice(4 * at, 4 * at + 4))))
        (batch,) = plane.epochs()
        return float(batch.data["seen"][0])

    plane = new_plane()
    assert [one(plane, 0), one(plane, 1)] == [16, 32]
    plane.save(tmp_path / "saved")
    again = new_plane()
    again.restore(tmp_path / "saved")
    assert one(again, 2) == 48


def ppo_pieces(**chosen):
    settings = ppo.settings_for("pendulum", lanes=LANES, rollout_length=8, steps=96, hidden=(8,), epochs=2, **chosen)
    return settings, *make_world(settings, lambda spec: ppo.make_ppo(spec, settings), jax.random.key(0))


def test_ppo_acts_stores_and_learns_by_the_statistics_before_its_iteration():
    settings, world, algorithm = ppo_pieces(normalize_observations=True)
    learner = algorithm.init(jax.random.key(1))
    hooks = ppo.make_hooks(settings, algorithm.value)
    actor, made = world.rollout(world.actor, algorithm.policy(learner), jax.random.key(2))
    carry, steps = jax.jit(hooks.ingestion)(hooks.init_carry(made), made, algorithm.policy(learner))
    np.testing.assert_allclose(steps.observation, made.observation, rtol=1e-6)  # nothing seen before: as they are
    assert float(carry.statistics.observations.seen) == made.reward.size
    after = ppo.Policy(learner.params, carry.statistics)
    _, following = world.rollout(actor, after, jax.random.key(3))
    carry, steps = jax.jit(hooks.ingestion)(carry, following, after)
    wanted = normalize_observations(after.statistics.observations, following.observation)
    np.testing.assert_allclose(steps.observation, wanted, rtol=1e-6)
    batch = hooks.finalize(steps)
    for leaf, newest in zip(jax.tree.leaves(batch.statistics), jax.tree.leaves(carry.statistics), strict=True):
        np.testing.assert_array_equal(leaf, np.broadcast_to(newest, leaf.shape))


def test_ppo_values_are_in_units_of_the_targets_before_their_iteration_and_in_rewards_to_whoever_asks():
    settings, world, algorithm = ppo_pieces(normalize_values=True, scale_rewards=False)
    learner = algorithm.init(jax.random.key(1))
    hooks = ppo.make_hooks(settings, algorithm.value)
    actor, made = world.rollout(world.actor, algorithm.policy(learner), jax.random.key(2))
    carry, steps = jax.jit(hooks.ingestion)(hooks.init_carry(made), made, algorithm.policy(learner))
    batch = hooks.finalize(steps)  # nothing seen before: the network is taught plain returns
    np.testing.assert_allclose(carry.statistics.targets.mean, np.mean(batch.target), rtol=1e-4)
    variance = carry.statistics.targets.squares / carry.statistics.targets.seen
    np.testing.assert_allclose(variance, np.var(batch.target), rtol=1e-3)
    after = ppo.Policy(learner.params, carry.statistics)
    plain = algorithm.value(algorithm.policy(learner), made.observation[0])
    in_rewards = carry.statistics.targets.mean + jnp.sqrt(variance) * plain
    np.testing.assert_allclose(algorithm.value(after, made.observation[0]), in_rewards, rtol=1e-4)
    _, following = world.rollout(actor, after, jax.random.key(3))
    newer, steps = jax.jit(hooks.ingestion)(carry, following, after)
    again = hooks.finalize(steps)
    known = (steps.reward, steps.value, steps.next_value, steps.terminated, steps.ended)
    taught = conduit.generalized_advantages(*known, discount=settings.discount, trace=settings.trace) + steps.value
    wanted = (taught - carry.statistics.targets.mean) / jnp.sqrt(variance)
    np.testing.assert_allclose(again.target, wanted, rtol=1e-3, atol=1e-4)
    assert float(newer.statistics.targets.seen) == 2 * made.reward.size
    np.testing.assert_array_equal(
        again.statistics.targets.mean, np.full(made.reward.shape, newer.statistics.targets.mean)
    )


@pytest.mark.slow
def test_a_ppo_run_has_seen_every_step_of_every_lane_once_and_images_are_refused():
    settings, _, _ = ppo_pieces(normalize_observations=True, evaluation_episodes=1)
    result = ppo.train(settings)
    assert float(result.learner.statistics.observations.seen) == result.env_steps == 96
    assert np.isfinite(result.evaluation_returns).all()
    with pytest.raises(ConfigError, match="Images"):
        ppo.make_ppo(envs.make("reach_128").spec, ppo.Settings(normalize_observations=True))


def test_a_plane_on_a_mesh_carries_the_statistics_of_all_lanes():
    observation = stream(8, 6)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    plane = conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=1), mesh=mesh)

    @plane.register_ingestion(init_carry=observation_statistics_carry)
    def ingestion(carry, steps):
        carry = update_observation_statistics(carry, steps)
        every_row = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*steps.reward.shape, *leaf.shape)), carry)
        return carry, {"statistics": every_row}

    for at in range(2):
        plane.push(rollout(part(observation, slice(4 * at, 4 * at + 4))))
        (batch,) = plane.epochs()
    rows = jax.device_get(batch.data["statistics"])
    check(jax.tree.map(lambda leaf: leaf[0], rows), flat(observation))
    for leaf in jax.tree.leaves(rows):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
