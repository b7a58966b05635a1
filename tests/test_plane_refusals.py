"""Bad input gets a clear error: what, got, wanted, fix; refused whole, and the plane goes on as if it had not happened."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit


def make_plane(**config: Any) -> conduit.ExperiencePlane:
    options = {"capacity": 64} | config
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(**options), schedule="sequential"
    )


def good(lanes: int = 8) -> dict[str, Any]:
    return {"observation": {"pixels": np.zeros((4, lanes, 3), np.uint8)}, "reward": np.zeros((4, lanes), np.float32)}


def changed(**leaves: Any) -> dict[str, Any]:
    return good() | leaves


PIXELS = r"\['observation'\]\['pixels'\]"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (changed(observation={"pixels": np.zeros((4, 8, 4), np.uint8)}), rf"{PIXELS} has another shape[\s\S]*8, 4\)[\s\S]*8, 3\)"),
        (changed(observation={"pixels": np.zeros((5, 8, 3), np.uint8)}), r"\['pixels'\] has another shape"),
        (changed(observation={"pixels": np.zeros((4, 8, 3), np.float32)}), rf"{PIXELS} has another dtype[\s\S]*astype\(uint8\)"),
        (changed(reward=np.zeros((4, 8), np.int32)), r"leaf \['reward'\] has another dtype"),
        (changed(extra=np.zeros((4, 8))), r"another tree[\s\S]*unexpected leaves \[\"\['extra'\]\"\]"),
        ({"reward": np.zeros((4, 8), np.float32)}, r"missing leaves[\s\S]*pixels"),
        (changed(reward="high"), r"leaf \['reward'\]|Leaf \['reward'\] is not an array"),
        (changed(reward=jnp.zeros((4, 8), jnp.bfloat16)), r"\['reward'\] has another dtype"),
    ],
)  # fmt: skip
def test_a_rollout_unlike_the_first_is_refused_naming_the_leaf_and_nothing_changes(bad: Any, match: str) -> None:
    plane = SHARED_PLANE
    before = plane.stats().tables["experience"]
    with pytest.raises(conduit.SpecError, match=match):
        plane.push(bad)
    assert plane.stats().tables["experience"] == before
    plane.push(good())


SHARED_PLANE = make_plane(sampler=conduit.Prioritized())


@pytest.fixture(autouse=True, scope="module")
def _shared_plane_is_built() -> None:
    SHARED_PLANE.push(good())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
def test_a_bad_host_priority_refuses_the_update_at_the_call(value: float) -> None:
    plane = SHARED_PLANE
    sample = plane.pull()
    priorities = np.ones(8, np.float32)
    priorities[5] = value
    control = plane._tables["experience"].pipeline.state.control
    with pytest.raises(conduit.ValueRefusedError, match=rf"{value} at index 5 \(1 bad of 8\)[\s\S]*abs\(\)"):
        plane.update_priorities(sample.info, priorities)
    assert plane._tables["experience"].pipeline.state.control is control


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_bad_device_priority_refuses_the_update_whole_and_is_raised_at_the_next_sync_point_once(value: float) -> None:
    plane = SHARED_PLANE
    sample = plane.pull()
    tree = np.asarray(plane._tables["experience"].pipeline.state.control.selector.tree.priorities)
    refused = plane.stats().tables["experience"].refused_updates
    assert int(plane.update_priorities(sample.info, jnp.full((8,), 9.0).at[2].set(value))[0]) == 0
    np.testing.assert_array_equal(
        np.asarray(plane._tables["experience"].pipeline.state.control.selector.tree.priorities), tree
    )
    assert plane.stats().tables["experience"].refused_updates == refused + 1
    with pytest.raises(conduit.ValueRefusedError, match="1 updates refused whole"):
        plane.flush()
    plane.flush()


@pytest.mark.parametrize("priorities", [np.ones(7, np.float32), np.ones((8, 1), np.float32), jnp.ones(9)])
def test_priorities_of_another_batch_are_refused(priorities: Any) -> None:
    with pytest.raises(conduit.ValueRefusedError, match=r"different batches[\s\S]*\(8,\)"):
        SHARED_PLANE.update_priorities(SHARED_PLANE.pull().info, priorities)


def test_bad_initial_priorities_become_the_maximum_and_are_raised_at_the_next_sync_point() -> None:
    plane = make_plane(sampler=conduit.Prioritized())
    plane.register_ingestion(lambda rollout: conduit.Records({"x": rollout["x"]}, priorities=rollout["p"]))
    plane.push({"x": jnp.ones((4, 8)), "p": jnp.full((4, 8), 3.0).at[0, 0].set(jnp.nan)})
    assert plane.stats().tables["experience"].replaced_priorities == 1
    with pytest.raises(conduit.ValueRefusedError, match="1 initial priorities replaced"):
        plane.flush()
    assert set(np.asarray(plane.pull().info.priority).tolist()) <= {3.0, 1.0}


# ---------------------------------------------------------------- hooks

BIG = np.ones(100_000, np.float32)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("register", ["register_ingestion", "register_delivery"])
def test_a_hook_that_closes_over_arrays_is_refused_naming_them(register: str, jitted: bool) -> None:
    table_of_values = jnp.asarray(BIG)

    def hook(data: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"x": data["x"] + table_of_values[0]}

    plane = make_plane()
    getattr(plane, register)(jax.jit(hook) if jitted else hook)
    with pytest.raises(
        conduit.HookError, match=r"hook[\s\S]*400,000 bytes captured \(table_of_values\)[\s\S]*context="
    ):
        plane.push({"x": jnp.ones((4, 8))})


def test_a_hook_may_close_over_a_few_constants() -> None:
    means = jnp.arange(8.0)
    plane = make_plane()
    plane.register_ingestion(lambda rollout: {"x": rollout["x"] - means})
    plane.push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize("register", ["register_ingestion", "register_delivery"])
def test_a_hook_that_raises_is_named_with_its_own_error_and_leaves_the_plane_open(register: str) -> None:
    plane = make_plane()

    def broken(data: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"x": data["missing"]}

    getattr(plane, register)(broken)
    with pytest.raises(conduit.HookError, match=r"broken' raised while it was traced: KeyError: 'missing'"):
        plane.push({"x": jnp.ones((4, 8))})
    getattr(plane, register)(lambda data: data)
    plane.push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize(
    ("register", "hook", "match"),
    [
        ("register_ingestion", lambda: None, r"another number of arguments[\s\S]*got:  0"),
        ("register_ingestion", lambda a, b, c: None, "pass init_carry="),
        ("register_delivery", lambda a, b, c, d: None, r"got:  4"),
        ("register_delivery", 3, "no readable signature|not callable|int"),
    ],
)
def test_a_hook_of_the_wrong_shape_is_refused_when_it_is_registered(register: str, hook: Any, match: str) -> None:
    with pytest.raises(conduit.HookError, match=match):
        getattr(make_plane(), register)(hook)


@pytest.mark.parametrize(
    ("register", "hook", "match"),
    [
        ("register_ingestion", lambda rollout: {"x": rollout["x"].sum()}, "do not share a leading"),
        ("register_ingestion", lambda rollout: {"x": rollout["x"], "y": rollout["x"][1:]}, "do not share a leading"),
        ("register_delivery", lambda data: {"mean": data["x"].mean(0)}, r"without the batch axis: \['mean'\]"),
    ],
)
def test_what_a_hook_returns_must_have_its_leading_axes(register: str, hook: Any, match: str) -> None:
    plane = make_plane()
    getattr(plane, register)(hook)
    with pytest.raises(conduit.HookError, match=match):
        plane.push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ({"priorities": lambda x: x[0]}, r"Records\(priorities=\)[\s\S]*shape \(4, 8\)"),
        ({"priorities": lambda x: x.astype(jnp.int32)}, r"Records\(priorities=\)[\s\S]*floats"),
        ({"lengths": lambda x: x[0]}, r"Records\(lengths=\)[\s\S]*integers"),
        ({"lengths": lambda x: jnp.zeros(3, jnp.int32)}, r"Records\(lengths=\)[\s\S]*shape \(\) or \(8,\)"),
    ],
)
def test_lengths_and_priorities_of_a_hook_must_fit_its_items(records: dict[str, Any], match: str) -> None:
    plane = make_plane()
    plane.register_ingestion(lambda unit: conduit.Records(unit, **{name: f(unit["x"]) for name, f in records.items()}))
    with pytest.raises(conduit.HookError, match=match):
        plane.push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize(
    ("carry", "changed_carry", "match"),
    [
        ({"seen": jnp.zeros(2)}, lambda carry: {"seen": carry["seen"][:1]}, r"leaf \['seen'\][\s\S]*float32\[1\]"),
        (0, lambda carry: carry + 0.5, r"leaf <root>[\s\S]*float32[\s\S]*int32"),
        ({"seen": 0}, lambda carry: carry | {"more": 0}, r"another structure"),
    ],
)
def test_a_carry_keeps_the_shape_it_began_with(carry: Any, changed_carry: Any, match: str) -> None:
    plane = make_plane()
    plane.register_ingestion(lambda carry, unit: (changed_carry(carry), unit), init_carry=lambda unit: carry)
    with pytest.raises(conduit.HookError, match=match):
        plane.push({"x": jnp.ones((4, 8))})


def test_an_init_carry_that_raises_is_named_with_its_own_error() -> None:
    plane = make_plane()
    plane.register_ingestion(lambda carry, unit: (carry, unit), init_carry=lambda unit: unit["missing"])
    with pytest.raises(conduit.HookError, match=r"init_carry of hook .* raised: KeyError: 'missing'"):
        plane.push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize(
    ("register", "endpoint"), [("register_ingestion", "ingestion"), ("register_delivery", "delivery")]
)
def test_a_second_hook_does_not_silently_replace_the_first(register: str, endpoint: str) -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=8), replay={"a": conduit.ReplayConfig(capacity=64)}
    )
    getattr(plane, register)(lambda data: data)
    getattr(plane, register)(lambda data: data, table="a")
    with pytest.raises(conduit.HookError, match=rf"second {endpoint} hook[\s\S]*fix"):
        getattr(plane, register)(lambda data: data)


@pytest.mark.parametrize(
    "options", [{"stage": "s", "init_carry": lambda unit: 0}, {"needs": ("x",)}, {"gives": ("x",)}]
)
def test_a_hook_is_one_function_or_a_stage(options: dict[str, Any]) -> None:
    with pytest.raises(conduit.HookError, match="one function or a stage"):
        make_plane().register_ingestion(lambda x: {"y": x}, **options)


X, FLAGS = jnp.ones((4, 8)), jnp.zeros((4, 8), bool)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"x": "high"}, r"Leaf \['x'\] is not an array"),
        ({"x": [[1.0, 2.0], [3.0, 4.0]]}, r"Leaf \['x'\]\[0\]\[0\] has no lane axis[\s\S]*np.asarray"),
        ({"x": 3}, r"Leaf \['x'\] has no lane axis"),
        ({"x": np.zeros((4, 0))}, r"Leaf \['x'\] has no steps or no lanes"),
        ({"x": np.zeros((0, 8))}, r"Leaf \['x'\] has no steps or no lanes"),
        ({"x": jax.random.split(jax.random.key(0), (4, 8))}, r"Leaf \['x'\] is a typed PRNG key"),
        ({"x": np.full((4, 8), "a")}, r"Leaf \['x'\] is not an array JAX can hold"),
        (conduit.Rollout(X, X, X, FLAGS, FLAGS, policy_version=jnp.zeros(8)), r"\.policy_version is one number"),
        (conduit.Rollout(X, X, X, FLAGS, FLAGS, bootstrap_value=1.0), r"\.bootstrap_value has no lane axis"),
    ],
)
def test_a_first_rollout_that_cannot_be_one_is_refused_by_leaf(bad: Any, match: str) -> None:
    with pytest.raises(conduit.SpecError, match=match):
        make_plane().push(bad)


def test_a_policy_version_may_be_a_plain_number() -> None:
    plane = make_plane()
    plane.register_ingestion(lambda rollout: {"x": rollout.reward})
    plane.push(conduit.Rollout(X, X, X, FLAGS, FLAGS, policy_version=3))
    assert set(np.asarray(plane.pull().info.policy_version).tolist()) == {3}


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [(np.int64, 2**40 + 7, "int32"), (np.int64, -(2**31) - 1, "int32"), (np.uint64, 2**32, "uint32")],
)
def test_integers_that_would_wrap_are_refused_by_leaf_with_their_range(kind: Any, value: int, stored: str) -> None:
    plane = make_plane()
    plane.push({"id": np.full((4, 8), 7, kind)})
    bad = np.full((4, 8), 7, kind)
    bad[2, 3] = value
    with pytest.raises(conduit.SpecError, match=rf"leaf \['id'\] holds integers that {stored} cannot[\s\S]*{value}"):
        plane.push({"id": bad})
    assert set(np.asarray(plane.pull().data["id"]).tolist()) == {7}


def test_a_rollout_inside_another_tree_keeps_its_lane_axes() -> None:
    plane = make_plane(partitions=4)
    rollout = conduit.Rollout(X, X, X, FLAGS, FLAGS, bootstrap_value=jnp.arange(8.0), policy_version=jnp.uint32(3))
    plane.register_ingestion(lambda unit: {"x": unit["inner"].reward + unit["inner"].bootstrap_value + unit["y"]})
    plane.push({"inner": rollout, "y": X})
    assert set(np.asarray(plane.pull().data["x"]).tolist()) <= set(np.arange(2.0, 10.0).tolist())


def test_a_rollout_cannot_be_stored_without_saying_what_of_it() -> None:
    x, none = jnp.ones((4, 8)), jnp.zeros((4, 8), bool)
    with pytest.raises(conduit.HookError, match=r"n_step_transitions"):
        make_plane().push(conduit.Rollout(x, x, x, none, none))


@pytest.mark.parametrize(
    ("source", "target"), [("Actr", "ExperienceBuffer"), ("Actor", "Learner"), ("Learner", "Actor")]
)
def test_an_unknown_endpoint_is_refused(source: str, target: str) -> None:
    with pytest.raises(conduit.HookError, match=r"did you mean 'Actor'|runs from Actor to ExperienceBuffer"):
        conduit.register_ingestion(input=source, output=target)


@pytest.mark.parametrize("writes", [0, 2])
def test_a_hook_of_the_papers_form_must_write_once(writes: int) -> None:
    @conduit.register_ingestion()
    def ingestion(actor_in: Any, exp_out: Any) -> None:
        for _ in range(writes):
            exp_out.write(actor_in.read())

    plane = make_plane()
    plane.register_ingestion(ingestion)
    with pytest.raises(conduit.HookError, match=rf"must write once[\s\S]*{writes} writes"):
        plane.push({"x": jnp.ones((4, 8))})


# ---------------------------------------------------------------- sizes and names


def test_a_batch_larger_than_the_replay_is_refused_when_it_is_configured() -> None:
    with pytest.raises(conduit.ConfigError, match=r"batch_size=65, capacity=64"):
        conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=65), replay=conduit.ReplayConfig(capacity=64))


def test_a_rollout_larger_than_the_replay_is_refused_with_the_capacity_it_needs() -> None:
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=16))
    with pytest.raises(conduit.ConfigError, match=r"4 steps x 8 lanes = 32 items, capacity=16[\s\S]*capacity >= 32"):
        plane.push({"x": jnp.ones((4, 8))})


def test_lanes_that_do_not_divide_over_partitions_are_refused_with_the_nearest_numbers() -> None:
    with pytest.raises(conduit.ConfigError, match=r"lanes[\s\S]*8 or 16"):
        make_plane(partitions=8).push({"x": jnp.ones((4, 12))})


@pytest.mark.parametrize("partitions", [1, 8])
def test_a_batch_that_does_not_divide_over_partitions_or_the_mesh_is_refused_with_the_nearest_numbers(
    partitions: int,
) -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=12),
        replay=conduit.ReplayConfig(capacity=64, partitions=partitions),
        mesh=jax.make_mesh((8,), ("data",)),
    )
    with pytest.raises(conduit.ConfigError, match=r"batch_size=12[\s\S]*batch_size=8 or 16"):
        plane.push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"placement": "devise"}, "did you mean 'device'"),
        ({"schedule": "overlapp"}, "did you mean 'overlap'"),
        ({"data_axis": "model"}, r"'model'"),
    ],
)
def test_an_unknown_choice_comes_with_a_suggestion(options: dict[str, str], match: str) -> None:
    mesh = {"mesh": jax.make_mesh((8,), ("data",))} if "data_axis" in options else {}
    with pytest.raises(conduit.ConduitError, match=match):
        conduit.ExperiencePlane(
            algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64), **options, **mesh
        ).push({"x": jnp.ones((4, 8))})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": conduit.OffPolicy(batch_size=8)}, "needs a replay"),
        ({"algorithm": "dqn", "replay": conduit.ReplayConfig(capacity=8)}, "Unknown algorithm class"),
        ({"algorithm": conduit.OffPolicy(batch_size=8), "replay": {"x": 3}}, "Table 'x'"),
    ],
)
def test_a_plane_that_can_never_work_is_refused_when_it_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(conduit.ConfigError, match=match):
        conduit.ExperiencePlane(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"placement": "devise"}, "did you mean 'device'"),
        ({"schedule": "overlapp"}, "did you mean 'overlap'"),
        ({"schedule": 3}, "no schedule"),
        ({"seed": -1}, "seed"),
        ({"algorithm": conduit.OffPolicy(batch_size=8, max_staleness=0), "schedule": "overlap"}, "max_staleness"),
        ({"algorithm": conduit.OnPolicy(num_minibatches=2), "replay": None, "placement": "devise"}, "'device'"),
    ],
)
def test_an_argument_that_can_never_work_is_refused_when_the_plane_is_made(options: Any, match: str) -> None:
    usual = {"algorithm": conduit.OffPolicy(batch_size=8), "replay": conduit.ReplayConfig(capacity=64)}
    with pytest.raises(conduit.ConfigError, match=match):
        conduit.ExperiencePlane(**usual | options)


def test_a_data_axis_needs_a_mesh_the_planes_or_the_learners() -> None:
    def plane() -> conduit.ExperiencePlane:
        return conduit.ExperiencePlane(
            algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64), data_axis="data"
        )

    with pytest.raises(conduit.ConfigError, match=r"data_axis='data'[\s\S]*mesh="):
        plane().push({"x": X})
    for devices in (1, 8):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        plane().build({"x": X}, jax.device_put(jnp.ones(3), replicated))


def test_a_sample_is_not_its_info() -> None:
    with pytest.raises(conduit.SpecError, match=r"got:  Sample\n[\s\S]*sample\.info"):
        SHARED_PLANE.update_priorities(SHARED_PLANE.pull(), np.ones(8, np.float32))


def test_where_no_table_is_the_default_one_it_has_to_be_named() -> None:
    tables = {name: conduit.ReplayConfig(capacity=64) for name in ("one", "two")}
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=tables)
    plane.push({"x": X}, table="one")
    info = plane.pull(table="one").info
    with pytest.raises(conduit.ConfigError, match=r"one, two[\s\S]*table='one'"):
        plane.update_priorities(info, np.ones(8, np.float32))
    with pytest.raises(conduit.ConfigError, match="did you mean 'two'"):
        plane.ready(table="twoo")
    assert not plane.ready(table="two")


def test_sampling_before_min_size_is_refused_with_both_numbers() -> None:
    plane = make_plane(min_size=48)
    plane.push(good())
    assert not plane.ready()
    with pytest.raises(conduit.NotReadyError, match=r"got:  32 items[\s\S]*min_size=48"):
        plane.pull()


def test_epochs_are_refused_off_policy() -> None:
    with pytest.raises(conduit.LifecycleError, match=r"plane.pull\(\)"):
        SHARED_PLANE.epochs()


def test_finalize_is_refused_off_policy() -> None:
    with pytest.raises(conduit.HookError, match="OnPolicy"):
        make_plane().register_finalize(lambda records: records)


def test_every_refusal_has_the_one_shape() -> None:
    with pytest.raises(conduit.ConduitError) as caught:
        SHARED_PLANE.push(changed(reward=np.zeros((4, 8), np.int32)))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["got", "want", "fix"]
