"""Files and records that are no episodes are refused, with the episode and the leaf by name."""

from __future__ import annotations

import json
import sys
from typing import Any

import h5py
import numpy as np
import pytest

from conduit_jax.adapters.minari import MinariEpisodes
from conduit_jax.adapters.rlds import RldsEpisodes
from conduit_jax.errors import ConfigError, SpecError, ValueRefusedError
from tests.episode_files import episodes_of, flat_record, write_minari


def test_a_minari_folder_is_opened_by_its_root_and_another_format_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text(json.dumps({"data_format": "arrow"}))
    with pytest.raises(ConfigError, match=r"main_data\.hdf5"):
        MinariEpisodes(tmp_path, length=1)
    write_minari(tmp_path / "data" / "main_data.hdf5", episodes_of([2]))
    assert MinariEpisodes(tmp_path, length=1).num_steps == 2


def broken(change) -> Any:
    def make(path):
        write_minari(path, episodes_of([3, 4]))
        with h5py.File(path, "r+") as file:
            change(file)

    return make


def replaced(name, value):
    def change(file):
        del file[name]
        file[name] = value

    return broken(change)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda path: path.write_bytes(b"no HDF5 at all"), ConfigError, "not an HDF5 file"),
        (broken(lambda file: [file.pop(name) for name in list(file)]), SpecError, "no episodes"),
        (broken(lambda file: file.pop("episode_1/rewards")), SpecError, r"episode_1[\s\S]*rewards"),
        (replaced("episode_1/observations/state", np.zeros((4, 2), np.float32)), SpecError, r"state[\s\S]*want: *5"),
        (replaced("episode_1/actions", np.zeros(3)), SpecError, r"actions[\s\S]*got: *3[\s\S]*want: *4"),
        (replaced("episode_1/actions", np.zeros(4)), SpecError, r"episode_1[\s\S]*float64[\s\S]*int64"),
        (replaced("episode_1/actions", np.zeros((4, 2), int)), SpecError, r"episode_1[\s\S]*\(2,\)"),
        (broken(lambda file: file.pop("episode_1/observations/state")), SpecError, r"episode_1[\s\S]*state"),
        (replaced("episode_0/observations/state", [b"text"] * 4), SpecError, "observation_keys"),
        (replaced("episode_1/terminations", np.eye(4, dtype=bool)[1]), ValueRefusedError, "goes on after its end"),
        (replaced("episode_1/rewards", np.zeros((4, 1), np.float32)), SpecError, "one number a step"),
        (replaced("episode_1/truncations", np.zeros(4)), SpecError, r"truncations[\s\S]*float64"),
    ],
)
def test_wrong_files_are_refused_by_name(make, kind, words, tmp_path):
    path = tmp_path / "main_data.hdf5"
    make(path)
    with pytest.raises(kind, match=words):
        list(MinariEpisodes(path, length=2))


def test_a_file_that_was_cut_is_refused_and_a_damaged_chunk_is_named(tmp_path):
    path = tmp_path / "main_data.hdf5"
    write_minari(path, episodes_of([3, 4]))
    with h5py.File(path, "r+") as file:
        del file["episode_1/actions"]
        actions = file["episode_1"].create_dataset("actions", data=np.arange(4), chunks=(4,), fletcher32=True)
        place = actions.id.get_chunk_info(0).byte_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    with pytest.raises(ConfigError, match="episode_1: action cannot be read from step 0"):
        list(MinariEpisodes(path, length=2))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="damaged"):
        MinariEpisodes(path, length=2)


def steps_with(number, **fields):
    record = flat_record()
    record["steps"][number] |= fields
    return record


@pytest.mark.parametrize(
    ("record", "kind", "words"),
    [
        ({"observation": 1}, SpecError, "steps"),
        ({"steps": {"observation": np.zeros((3, 2))}}, SpecError, "iterable of steps"),
        (steps_with(0, is_first=False), ValueRefusedError, "is_first"),
        (steps_with(2, is_first=True), ValueRefusedError, "is_first"),
        (steps_with(1, is_last=True), ValueRefusedError, "is_last"),
        (steps_with(3, is_last=False), ValueRefusedError, "is_last"),
        (steps_with(1, is_terminal=True), ValueRefusedError, "is_terminal"),
        (steps_with(1, reward=np.float64(1)), SpecError, r"reward[\s\S]*float64[\s\S]*float32"),
        (steps_with(1, observation=np.zeros(3, np.float32)), SpecError, r"observation[\s\S]*\(3,\)"),
        (steps_with(0, action=b"left"), SpecError, "action"),
        ({"steps": [{"observation": 0}]}, SpecError, "action"),
        ({"steps": []}, SpecError, "no steps"),
    ],
)
def test_wrong_records_are_refused_by_name(record, kind, words):
    with pytest.raises(kind, match=words):
        list(RldsEpisodes([record], length=2))


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 1, "lanes": 0}, {"length": 1, "last_step": "none"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        RldsEpisodes([], **options)
    with pytest.raises(SpecError, match="no steps"):
        list(RldsEpisodes([], length=1))


def test_h5py_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"conduit_jax\[hdf5\]"):
        MinariEpisodes(tmp_path / "main_data.hdf5", length=1)
