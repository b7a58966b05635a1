"""The offline example on a file that is larger than the memory its plane may take: what the learner gets is what was written."""

from __future__ import annotations

import h5py
import jax
import numpy as np
import pytest

from conduit_jax.adapters.minari import MinariEpisodes
from conduit_jax.examples import offline

CACHE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("offline") / "main_data.hdf5"
    offline.write_demonstrations(path, 12)
    return path


def test_every_demonstration_ends_at_its_goal(path):
    with h5py.File(path) as file:
        assert len(file) == 12
        for episode in file.values():
            assert episode["observations"].dtype == np.uint8
            assert episode["observations"].shape[0] == episode["actions"].shape[0] + 1
            assert episode["rewards"][:].sum() == 1
            assert np.flatnonzero(episode["terminations"]).tolist() == [len(episode["actions"]) - 1]


def test_batches_from_the_disk_are_rows_of_the_file(path):
    data = MinariEpisodes(path, length=8)
    with h5py.File(path) as file:
        rows = [
            (seen.tobytes(), int(action))
            for name in file
            for seen, action in zip(file[name]["observations"][:-1], file[name]["actions"][:], strict=True)
        ]
    assert data.num_steps == len(rows)
    assert len(rows) * offline.ENV.spec.observation.size > 4 * CACHE_BYTES
    with offline.make_plane(data, CACHE_BYTES) as plane:
        for rollout in data:
            plane.push(rollout)
        batch = jax.device_get(plane.pull().data)
        assert batch.observation.dtype == np.uint8
        got = {(seen.tobytes(), int(action)) for seen, action in zip(batch.observation, batch.action, strict=True)}
        assert "disk" in plane.explain()
    assert got <= set(rows)
    assert len(got) > 20, "drawn over the whole file"


def test_a_few_updates_learn_what_was_shown(path):
    learner, loss = offline.train(path, 8, CACHE_BYTES)
    assert loss < np.log(5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner))
