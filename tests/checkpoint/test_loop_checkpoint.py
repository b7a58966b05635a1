"""Laws of a loop's checkpoints: the run that is resumed ends where the uninterrupted one does, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit

STEPS, LANES = 4, 8


class Learner(NamedTuple):
    weights: jax.Array
    target: jax.Array
    key: jax.Array


class Actor(NamedTuple):
    made: jax.Array
    key: jax.Array
    calls: int
    noise: np.ndarray


def new_learner() -> Learner:
    weights = jnp.zeros((3, 1))
    return Learner(weights, weights, jax.random.key(5))


def new_actor() -> Actor:
    return Actor(jnp.int32(0), jax.random.key(1), 0, np.zeros(3, np.float32))


def rollout(actor: Actor, policy: Any, key: jax.Array) -> tuple[Actor, dict[str, jax.Array]]:
    x = jax.random.normal(jax.random.fold_in(key, actor.calls), (STEPS, LANES, 3)) + actor.noise
    y = x @ jnp.array([[1.0], [-2.0], [0.5]]) + 0.1 * jnp.sum(policy["weights"])
    own, actor_key = jax.random.split(actor.key)
    noise = np.asarray(jax.random.uniform(own, (3,)))
    return Actor(actor.made + 1, actor_key, actor.calls + 1, noise), {"x": x, "y": y}


def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array], jax.Array]:
    key, own = jax.random.split(learner.key)
    keep = jax.random.bernoulli(own, 0.8, sample.weights.shape)
    error = (sample.data["x"] @ learner.weights - sample.data["y"])[:, 0]
    gradient = sample.data["x"].T @ (error * sample.weights * keep)[:, None] / error.size
    weights = learner.weights - 0.1 * gradient
    return Learner(weights, 0.9 * learner.target + 0.1 * weights, key), {"loss": jnp.mean(error**2)}, jnp.abs(error)


def on_policy_step(learner: Learner, sample: conduit.Sample) -> Any:
    return train_step(learner, sample)[:2]


def make_loop(kind: str) -> conduit.Loop:
    on_policy = kind == "on_policy"
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OnPolicy(num_minibatches=2, num_epochs=2, units_per_iteration=3)
        if on_policy
        else conduit.OffPolicy(batch_size=16, updates_per_rollout=2),
        replay=None if on_policy else conduit.ReplayConfig(capacity=160, min_size=64, sampler=conduit.Prioritized()),
        schedule="sequential" if on_policy else kind,
    )

    @plane.register_ingestion(init_carry=lambda rollout: jnp.zeros((), jnp.float32))
    def ingestion(carry: Any, rollout: Any, context: Any) -> Any:
        mean = 0.9 * carry + 0.1 * jnp.mean(rollout["x"])
        return mean, {"x": rollout["x"] - mean, "y": rollout["y"] + context["shift"]}

    return conduit.wrap(
        on_policy_step if on_policy else train_step,
        rollout=rollout,
        policy=lambda learner: {"weights": learner.weights},
        context=lambda learner: {"shift": 0.01 * learner.target[0, 0]},
        plane=plane,
        publish_every=3,
    )


def bits(tree: Any) -> list[Any]:
    def of(leaf: Any) -> bytes:
        typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if typed else leaf).tobytes()

    return [(type(leaf).__mro__[-2], of(leaf)) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("cut", [1, 7])
@pytest.mark.parametrize("kind", ["sequential", "overlap", "on_policy"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, kind: str, cut: int) -> None:
    want = make_loop(kind).run(new_learner(), new_actor(), 11)
    make_loop(kind).run(new_learner(), new_actor(), cut, checkpoint_dir=tmp_path, checkpoint_every=4, resume=True)
    loop = make_loop(kind)
    got = loop.run(new_learner(), new_actor(), 11, checkpoint_dir=tmp_path, resume=True)
    assert loop.iteration == 11
    assert bits(got) == bits(want)
    again = make_loop(kind)
    assert bits(again.run(new_learner(), new_actor(), 11, checkpoint_dir=tmp_path, resume=True)) == bits(want)


def test_a_run_that_failed_is_resumed_from_its_last_checkpoint(tmp_path: Path) -> None:
    want = make_loop("overlap").run(new_learner(), new_actor(), 10)

    def fail(state: conduit.LoopState) -> None:
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        make_loop("overlap").run(
            new_learner(), new_actor(), 10, every={6: fail}, checkpoint_dir=tmp_path, checkpoint_every=4
        )
    loop = make_loop("overlap")
    seen: list[int] = []
    got = loop.run(
        new_learner(),
        new_actor(),
        10,
        every={1: lambda state: seen.append(state.iteration)},
        checkpoint_dir=tmp_path,
        resume=True,
    )
    assert seen == [5, 6, 7, 8, 9, 10]
    assert bits(got) == bits(want)


def test_another_runs_checkpoint_is_not_replaced_and_another_learner_is_told(tmp_path: Path) -> None:
    make_loop("sequential").run(new_learner(), new_actor(), 2, checkpoint_dir=tmp_path)
    with pytest.raises(conduit.CheckpointError, match="another run"):
        make_loop("sequential").run(new_learner(), new_actor(), 2, checkpoint_dir=tmp_path)
    wider = new_learner()._replace(target=jnp.zeros((3, 2)))
    with pytest.raises(conduit.ConfigError, match=r"learner\.target: saved 'float32\[3, 1\]', here 'float32\[3, 2\]'"):
        make_loop("sequential").run(wider, new_actor(), 2, checkpoint_dir=tmp_path, resume=True)
    with pytest.raises(conduit.ConfigError, match="checkpoint_dir="):
        make_loop("sequential").run(new_learner(), new_actor(), 2, resume=True)


def test_a_planes_own_checkpoint_is_not_a_loops_but_a_loops_is_a_planes(tmp_path: Path) -> None:
    loop = make_loop("overlap")
    loop.run(new_learner(), new_actor(), 5, checkpoint_dir=tmp_path / "loop")
    other = make_loop("overlap")
    other.plane.restore(tmp_path / "loop", context={"shift": jnp.float32(0)})
    context = {"shift": jnp.float32(0)}
    assert bits(other.plane.pull(context=context)) == bits(loop.plane.pull(context=context))
    loop.plane.save(tmp_path / "plane")
    with pytest.raises(conduit.CheckpointError, match="a plane alone"):
        make_loop("overlap").run(new_learner(), new_actor(), 9, checkpoint_dir=tmp_path / "plane", resume=True)


class HostActor:
    """An actor of plain Python."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "past": [np.arange(self.count)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        assert state["past"][0].tolist() == list(range(self.count))


def test_a_host_object_is_saved_by_its_own_word_or_refused(tmp_path: Path) -> None:
    def acting(actor: HostActor, policy: Any, key: jax.Array) -> Any:
        actor.count += 1
        x = np.full((STEPS, LANES, 3), actor.count, np.float32)
        return actor, {"x": x, "y": x[..., :1]}

    def loop_of() -> conduit.Loop:
        loop = make_loop("sequential")
        loop._rollout = acting
        return loop

    want = loop_of().run(new_learner(), HostActor(), 8)
    loop_of().run(new_learner(), HostActor(), 3, checkpoint_dir=tmp_path)
    got = loop_of().run(new_learner(), HostActor(), 8, checkpoint_dir=tmp_path, resume=True)
    assert got[1].count == want[1].count == 8
    assert bits(got[0]) == bits(want[0])
    with pytest.raises(conduit.CheckpointError, match=r"state_dict\(\)"):
        loop_of().run(new_learner(), (lambda: 0), 0, checkpoint_dir=tmp_path / "other")
