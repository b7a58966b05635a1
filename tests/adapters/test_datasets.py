"""Episodes of data sets as experience: what was written is what a plane delivers, against a plain list of transitions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.adapters.minari import MinariEpisodes
from conduit_jax.adapters.rlds import RldsEpisodes
from tests.episode_files import TERMINATED, UNFLAGGED, Move, episodes_of, flat_record, moves_of, rlds_of, write_minari

GAMMA = 0.5


def by_lane(rollouts, length, lanes):
    """Read rollouts back, lane by lane, by what ``Rollout`` promises; a move's last entry is whether it ended."""
    read = [[] for _ in range(lanes)]
    for rollout in rollouts:
        assert rollout.reward.shape == (length, lanes)
        assert rollout.terminated.dtype == rollout.truncated.dtype == bool
        for lane in range(lanes):
            for t in range(int(rollout.lengths[lane])):
                ended = rollout.terminated[t, lane] or rollout.truncated[t, lane]
                last = t + 1 == rollout.lengths[lane]
                pick = lambda field, *at: {key: field[key][at] for key in ("pixels", "state")}  # noqa: E731
                now = pick(rollout.observation, t, lane)
                if ended:
                    after = pick(rollout.final_observation, t, lane)
                else:
                    after = (
                        pick(rollout.bootstrap_observation, lane) if last else pick(rollout.observation, t + 1, lane)
                    )
                flat = lambda tree: (tree["pixels"].tobytes(), tuple(tree["state"].tolist()))  # noqa: E731
                action, reward = int(rollout.action[t, lane]), float(rollout.reward[t, lane])
                move = Move(*flat(now), action, reward, bool(rollout.terminated[t, lane]), *flat(after))
                read[lane].append((move, bool(ended)))
    return read


def ends_of(read):
    return [move.reward for move, ended in read if ended]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


FORMATS = ["minari", "rlds"]


def opened(kind, folder, episodes, **options):
    if kind == "minari":
        return MinariEpisodes(write_minari(folder / "main_data.hdf5", episodes), **options)
    return RldsEpisodes(list(rlds_of(episodes)), **options)


@pytest.mark.parametrize("kind", FORMATS)
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6), length=st.integers(1, 9), lanes=st.integers(1, 3))
def test_every_transition_comes_once_and_each_lane_holds_whole_episodes_in_order(kind, folder, lengths, length, lanes):
    lengths = [*lengths, 3]  # one that has steps
    episodes = episodes_of(lengths)
    data = opened(kind, folder, episodes, length=length, lanes=lanes)
    read = by_lane(data, length, lanes)
    wanted = {episode.rewards[0]: moves_of(episode) for episode in episodes if len(episode.rewards)}
    seen = []
    for lane in read:
        moves = [move for move, _ in lane]
        while moves:
            whole = wanted[moves[0].reward]
            seen.append(moves[0].reward)
            assert moves[: len(whole)] == whole
            moves = moves[len(whole) :]
        mine = [whole for whole in wanted.values() if whole[0] in [move for move, _ in lane]]
        assert ends_of(lane) == [whole[-1].reward for whole in mine], (
            "an episode ends with its last step and nowhere else"
        )
    assert sorted(seen) == sorted(wanted)
    counts = data.counts
    assert (counts.episodes, counts.steps) == (len(wanted), sum(lengths))
    assert (counts.empty_episodes, counts.dropped_steps) == (lengths.count(0), 0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plane_delivers_what_was_written_and_traces_once(kind, folder):
    episodes = episodes_of([5, 1, 9, 4])
    data, traced = opened(kind, folder, episodes, length=4), []
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=19), replay=conduit.ReplayConfig(capacity=19), schedule="sequential"
    )

    @plane.register_ingestion
    def ingestion(rollout):
        traced.append(rollout.reward.shape)
        return conduit.n_step_transitions(rollout, n=1, discount=GAMMA)

    rollouts = iter(data)
    plane.push(next(rollouts))
    at_first = len(traced)
    for rollout in rollouts:
        plane.push(rollout)
    assert len(traced) == at_first
    wanted = {move.reward: move for episode in episodes for move in moves_of(episode)}
    delivered = {}
    for _ in range(20):
        batch = jax.device_get(plane.pull().data)
        assert batch.observation["pixels"].dtype == batch.next_observation["pixels"].dtype == np.uint8
        for i in range(19):
            flat = lambda seen: (seen["pixels"][i].tobytes(), tuple(seen["state"][i].tolist()))  # noqa: B023, E731
            action, reward = int(batch.action[i]), float(batch.reward[i])
            move = Move(*flat(batch.observation), action, reward, batch.discount[i] == 0, *flat(batch.next_observation))
            assert batch.discount[i] in (0, GAMMA)
            delivered[reward] = move
    assert delivered == wanted, "all of them, and truncation is not termination"
    plane.close()


def test_the_leaves_and_dtypes_are_those_of_the_file(folder):
    episodes = episodes_of([3])
    data = opened("minari", folder, episodes, length=2)
    assert (data.num_episodes, data.num_steps) == (1, 3)
    first, second = data
    assert first.observation["pixels"].dtype == np.uint8
    assert first.reward.dtype == np.float64
    assert second.lengths.tolist() == [1]
    assert [int(part.lengths[0]) for part in data] == [2, 1], "it can be read again"
    only = opened("minari", folder, episodes, length=2, observation_keys=("state",))
    assert set(next(iter(only)).observation) == {"state"}
    arrays = RldsEpisodes([flat_record()], length=4, extras=("discount",))
    (rollout,) = arrays
    np.testing.assert_array_equal(rollout.observation[:, 0], [[0, 0], [1, 1], [2, 2], [0, 0]])
    np.testing.assert_array_equal(rollout.extras["discount"][:, 0], [1, 1, 1, 0])


def test_episodes_in_files_are_read_in_the_order_of_their_numbers(folder):
    data = opened("minari", folder, episodes_of([1] * 12), length=12)
    (rollout,) = data
    np.testing.assert_array_equal(rollout.reward[:, 0], np.arange(12))


def test_a_file_that_stops_without_a_flag_is_truncated_there_and_counted(folder):
    data = opened("minari", folder, episodes_of([2, 3], [UNFLAGGED, TERMINATED]), length=5)
    (rollout,) = data
    assert rollout.truncated[:, 0].tolist() == [False, True, False, False, False]
    assert rollout.terminated[:, 0].tolist() == [False] * 4 + [True]
    assert data.counts.cut_episodes == 1


@pytest.mark.parametrize(("terminal", "kept"), [(True, 4), (False, 3)])
def test_where_the_last_step_acts_too_a_terminal_one_is_kept_and_a_truncated_one_is_only_what_followed(terminal, kept):
    data = RldsEpisodes([flat_record(is_terminal=terminal)], length=4, last_step="action")
    (rollout,) = data
    assert rollout.lengths.tolist() == [kept]
    assert rollout.reward[:kept, 0].tolist() == [10, 11, 12, 13][:kept]
    assert rollout.terminated[:kept, 0].tolist() == [False] * (kept - 1) + [terminal]
    assert rollout.truncated[:kept, 0].tolist() == [False] * (kept - 1) + [not terminal]
    np.testing.assert_array_equal(rollout.final_observation[kept - 1, 0], [3, 3])
    assert data.counts.dropped_steps == (0 if terminal else 1)


def test_lanes_are_dealt_over_the_partitions_of_a_mesh_and_nothing_is_lost(folder):
    episodes = episodes_of([3, 6, 2, 5, 4])
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=16), replay=conduit.ReplayConfig(capacity=32), mesh=mesh
    )

    @plane.register_ingestion
    def ingestion(rollout):
        return conduit.Records({"reward": rollout.reward}, rollout.lengths)

    for rollout in opened("minari", folder, episodes, length=4, lanes=2):
        plane.push(rollout)
    drawn = np.concatenate([jax.device_get(plane.pull().data["reward"]) for _ in range(16)])
    assert sorted(set(drawn.tolist())) == list(range(20))
    plane.close()
