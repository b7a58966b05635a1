"""Laws of hooks in a plane: every form that may be registered is applied, in order, to the right arguments."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit

LARGE = jnp.ones(100_000)


def make_plane(
    capacity: int = 64, batch_size: int = 8, *, schedule: str = "sequential", **config: Any
) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=batch_size),
        replay=conduit.ReplayConfig(capacity=capacity, **config),
        schedule=schedule,
    )


def columns(value: float = 1.0, lanes: int = 8) -> dict[str, jax.Array]:
    return {"x": jnp.full((4, lanes), value)}


def delivered(plane: conduit.ExperiencePlane, **context: Any) -> np.ndarray:
    plane.push(columns(3.0), **context)
    data = plane.pull(**context).data
    return np.unique(np.asarray(data["x"] if isinstance(data, dict) else data))


def test_ingestion_and_delivery_hooks_are_applied_in_this_order() -> None:
    plane = make_plane()

    @plane.register_ingestion
    def ingestion(rollout: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"x": (rollout["x"] + 1).astype(jnp.int8)}

    @plane.register_delivery
    def delivery(data: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"x": data["x"].astype(jnp.float32) * 10}

    assert delivered(plane).tolist() == [40.0]
    assert plane.stats().tables["experience"].bytes_per_item < 4 + 4 + 4, "the narrow dtype is what is stored"


def test_the_context_of_a_call_reaches_the_hooks_of_that_call() -> None:
    plane = make_plane(capacity=32)
    plane.register_ingestion(lambda rollout, scale: {"x": rollout["x"] * scale})
    plane.register_delivery(lambda data, key, scale: {"x": data["x"] + scale})
    assert delivered(plane, context=jnp.float32(2)).tolist() == [3 * 2 + 2]
    assert delivered(plane, context=jnp.float32(5)).tolist() == [3 * 5 + 5]


def test_a_delivery_hook_is_checked_with_the_context_of_its_first_use_on_every_partition() -> None:
    plane = make_plane(capacity=64, partitions=4)
    plane.register_delivery(lambda data, key, context: {"x": data["x"] * context["scale"]})
    plane.push(columns(3.0))
    with pytest.raises(conduit.HookError, match=r"raised while it was traced: TypeError"):
        plane.pull()
    assert np.unique(np.asarray(plane.pull(context={"scale": 3}).data["x"])).tolist() == [9]


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        (lambda data, key, context: {"x": data["x"].mean() + context}, "without its leading axes: ['x']"),
        (lambda data, key, context: {"x": data["x"] + context + LARGE[0]}, "closes over arrays"),
    ],
)
def test_at_its_first_use_a_hook_is_checked_like_one_without_a_context(hook: Any, match: str) -> None:
    plane = make_plane()
    plane.register_delivery(hook)
    plane.push(columns())
    with pytest.raises(conduit.HookError, match=re.escape(match)):
        plane.pull(context=1.0)


def test_a_finalize_hook_gets_the_context_of_epochs_and_gives_delivery_what_it_adds() -> None:
    plane = conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=2))
    plane.register_finalize(lambda records, context: records | {"y": records["x"] * context["scale"]})
    plane.register_delivery(lambda data: {"y": data["y"] + 1})
    plane.push(columns(3.0))
    for sample in plane.epochs(context={"scale": 2.0}):
        assert np.unique(np.asarray(sample.data["y"])).tolist() == [7]
    plane.push(columns(3.0))
    with pytest.raises(conduit.HookError, match="KeyError"):
        next(plane.epochs(context={"scales": 2.0}))


def test_a_context_may_live_on_another_device_or_be_overwritten_on_the_host() -> None:
    plane = make_plane(capacity=32, schedule="overlap")
    plane.register_ingestion(lambda rollout, scale: {"x": rollout["x"] * scale})
    scale = np.full((1,), 2, np.float32)
    plane.push(columns(3.0), context=scale)
    scale[:] = 99  # the unit is still waiting to be inserted
    assert np.unique(
        np.asarray(plane.pull(context=jax.device_put(jnp.ones(1), jax.devices()[5])).data["x"])
    ).tolist() == [6]


def test_stages_run_in_the_order_of_their_needs_whatever_the_order_of_registration() -> None:
    plane = make_plane()
    plane.register_ingestion(lambda scaled: {"x": scaled + 1}, stage="shift", needs=("scaled",), gives=("x",))
    plane.register_ingestion(lambda x: {"scaled": x * 2}, stage="scale", needs=("x",), gives=("scaled",))
    with pytest.raises(conduit.HookError, match="wait for each other"):
        plane.push(columns())
    plane = make_plane()
    plane.register_ingestion(
        lambda scaled: {"shifted": scaled + 1}, stage="shift", needs=("scaled",), gives=("shifted",)
    )
    plane.register_ingestion(lambda x: {"scaled": x * 2}, stage="scale", needs=("x",), gives=("scaled",))
    plane.push(columns(3.0))
    data = plane.pull().data
    assert {name: float(leaf[0]) for name, leaf in data.items()} == {"x": 3.0, "scaled": 6.0, "shifted": 7.0}


def test_the_papers_own_form_is_the_same_hook() -> None:
    @conduit.register_ingestion(input="Actor", output="ExperienceBuffer")
    def ingestion(actor_in: Any, exp_out: Any) -> None:
        exp_out.write({"x": actor_in.read()["x"] + 1})

    @conduit.register_delivery(input="ExperienceBuffer", output="Learner")
    def delivery(exp_in: Any, learner_out: Any) -> None:
        learner_out.write({"x": exp_in.read()["x"] * 10})

    plane = make_plane()
    plane.register_ingestion(ingestion)
    plane.register_delivery(delivery)
    assert delivered(plane).tolist() == [40.0]


def test_a_carry_is_kept_by_partition_and_flows_from_push_to_push() -> None:
    plane = make_plane(capacity=256, batch_size=256, partitions=4)

    def counting(carry: jax.Array, rollout: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return carry + rollout["x"].sum(), {"before": jnp.broadcast_to(carry, rollout["x"].shape), "x": rollout["x"]}

    plane.register_ingestion(counting, init_carry=lambda rollout: jnp.float32(0))
    for number in range(3):
        plane.push({"x": jnp.full((4, 8), number + 1.0)})
    data = plane.pull().data
    assert set(zip(np.asarray(data["x"]).tolist(), np.asarray(data["before"]).tolist(), strict=True)) == {
        (1, 0),
        (2, 8),
        (3, 24),
    }
