"""Configurations are hashable values that refuse at once what can never work, and say what would."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.config import checked_seed, replay_tables
from conduit_jax.errors import ConduitError, ConfigError, check_choice, check_fraction, explain

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: conduit.ReplayConfig(capacity=0), "capacity="),
        (lambda: conduit.ReplayConfig(capacity=-5), "capacity="),
        (lambda: conduit.ReplayConfig(capacity=1e6), "capacity="),
        (lambda: conduit.ReplayConfig(capacity=True), "capacity="),
        (lambda: conduit.ReplayConfig(capacity=NAN), "capacity="),
        (lambda: conduit.ReplayConfig(capacity=8, min_size=0), "min_size="),
        (lambda: conduit.ReplayConfig(capacity=8, min_size=NAN), "min_size="),
        (lambda: conduit.ReplayConfig(capacity=8, min_size=9), "min_size=9, capacity=8"),
        (lambda: conduit.ReplayConfig(capacity=8, partitions=0), "partitions="),
        (lambda: conduit.ReplayConfig(capacity=8, sampler="uniform"), "Unknown sampler"),
        (lambda: conduit.ReplayConfig(capacity=8, sampler=conduit.Uniform), "Unknown sampler"),
        (lambda: conduit.Prioritized(exponent=-0.1), "exponent="),
        (lambda: conduit.Prioritized(exponent=NAN), "exponent="),
        (lambda: conduit.Prioritized(exponent=INF), "exponent="),
        (lambda: conduit.Prioritized(exponent="0.6"), "exponent="),
        (lambda: conduit.Prioritized(importance_exponent=-1), "importance_exponent="),
        (lambda: conduit.Prioritized(importance_exponent=NAN), "importance_exponent="),
        (lambda: conduit.Prioritized(importance_exponent=INF), "importance_exponent="),
        (lambda: conduit.Prioritized(importance_normalization="batches"), "did you mean 'batch'"),
        (lambda: conduit.OffPolicy(batch_size=0), "batch_size="),
        (lambda: conduit.OffPolicy(batch_size=32.0), "batch_size="),
        (lambda: conduit.OffPolicy(batch_size=32, updates_per_rollout=0), "updates_per_rollout="),
        (lambda: conduit.OffPolicy(batch_size=32, max_staleness=-1), "max_staleness="),
        (lambda: conduit.OffPolicy(batch_size=32, max_staleness=INF), "max_staleness="),
        (lambda: conduit.OnPolicy(num_minibatches=0), "num_minibatches="),
        (lambda: conduit.OnPolicy(num_minibatches=4, num_epochs=0), "num_epochs="),
        (lambda: conduit.OnPolicy(num_minibatches=4, units_per_iteration=-1), "units_per_iteration="),
        (lambda: conduit.BoundedLag(batch_size=0, max_policy_lag=1), "batch_size="),
        (lambda: conduit.BoundedLag(batch_size=8, max_policy_lag=-1), "max_policy_lag="),
        (lambda: conduit.BoundedLag(batch_size=8, max_policy_lag=NAN), "max_policy_lag="),
        (lambda: conduit.BoundedLag(batch_size=8, max_policy_lag=1, updates_per_rollout=0), "updates_per_rollout="),
    ],
)
def test_what_can_never_work_is_refused_by_name_with_got_and_want(make: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    text = str(caught.value)
    assert named in text
    assert "got:" in text
    assert "want:" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: conduit.ReplayConfig(capacity=8, min_size=8),
        lambda: conduit.ReplayConfig(capacity=1),
        lambda: conduit.ReplayConfig(capacity=8, partitions=3, sampler=conduit.Prioritized(exponent=0)),
        lambda: conduit.Prioritized(exponent=0.0, importance_exponent=0.0, importance_normalization="none"),
        lambda: conduit.OffPolicy(batch_size=1, max_staleness=0),
        lambda: conduit.OnPolicy(num_minibatches=1),
        lambda: conduit.BoundedLag(batch_size=1, max_policy_lag=0),
    ],
)
def test_the_edges_of_what_works_are_accepted_and_equal_values_hash_alike(make: Any) -> None:
    one, other = make(), make()
    assert one == other
    assert hash(one) == hash(other)
    assert one is not other


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        (conduit.ReplayConfig, {"capacity": 8}),
        (conduit.Prioritized, {}),
        (conduit.OffPolicy, {"batch_size": 8}),
        (conduit.OnPolicy, {"num_minibatches": 4}),
        (conduit.BoundedLag, {"batch_size": 8, "max_policy_lag": 1}),
    ],
)
def test_configurations_are_frozen_and_keyword_only(kind: Any, required: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(*required.values(), 0.5)
    value = kind(**required)
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, 1)


def test_a_replaced_field_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="min_size=9"):
        dataclasses.replace(conduit.ReplayConfig(capacity=20, min_size=9), capacity=8)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, "0", None])
def test_a_seed_is_an_integer_of_32_bits(seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"0 <= seed < 2\*\*32"):
        checked_seed(seed)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, np.int64(7)])
def test_a_seed_of_32_bits_is_taken_as_it_is(seed: Any) -> None:
    assert checked_seed(seed) == seed
    assert type(checked_seed(seed)) is int


@pytest.mark.parametrize("replay", [{}, [], "replay", 3, {1: conduit.ReplayConfig(capacity=8)}])
def test_a_replay_is_a_config_or_several_by_name(replay: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs a replay|name is not a string"):
        replay_tables(conduit.OffPolicy(batch_size=8), replay)


def test_a_refusal_is_also_the_builtin_error_a_caller_would_expect() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, ConduitError)


def test_messages_have_one_shape_in_one_order() -> None:
    assert explain("What.", got=1, want=2, fix="do") == "What.\n  got:  1\n  want: 2\n  fix:  do"
    assert explain("What.", got=0) == "What.\n  got:  0"


@pytest.mark.parametrize("value", [-0.1, 1.1, NAN, True, "1"])
def test_a_fraction_lies_between_zero_and_one(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        check_fraction("discount", value)


def test_an_unknown_word_is_answered_with_the_nearest_one_where_there_is_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        check_choice("placement", "uato", ("auto", "host"))
    with pytest.raises(ConfigError) as caught:
        check_choice("placement", "zzz", ("auto", "host"))
    assert "fix" not in str(caught.value)
    assert "want: auto, host" in str(caught.value)
