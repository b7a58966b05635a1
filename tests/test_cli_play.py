"""Playing a trained policy: what is drawn, and that a checkpoint's own policy acts."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.cli.pictures import RED, as_letters, painter, save_gif
from conduit_jax.cli.plots import draw_curves
from conduit_jax.envs.cartpole import CartPoleState
from conduit_jax.errors import ConfigError
from conduit_jax.examples import dqn
from conduit_jax.examples.running import Keep
from conduit_jax.examples.worlds import make_world
from conduit_jax.resumption import saved_learner

pytestmark = pytest.mark.slow


def play(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conduit_jax", "play", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A learner of a few updates, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    settings = dqn.settings_for("cartpole", steps=600, min_size=200, updates_per_rollout=2)
    world, algorithm = make_world(settings, lambda spec: dqn.make_dqn(spec, settings), jax.random.key(0))
    loop = conduit.wrap(
        algorithm.train_step, rollout=world.rollout, policy=algorithm.policy, plane=dqn.make_plane(settings)
    )
    learner = jax.jit(algorithm.init)(jax.random.key(1))
    return algorithm, loop.run(learner, world.actor, 6, checkpoint_dir=folder)[0], folder


def test_a_saved_learner_comes_back_bit_for_bit(trained):
    algorithm, learner, folder = trained
    back = saved_learner(folder, jax.jit(algorithm.init)(jax.random.key(5)))
    for one, other in zip(jax.tree.leaves(learner), jax.tree.leaves(back), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_episode_of_the_saved_policy_becomes_a_gif(trained, tmp_path):
    _, _, folder = trained
    path = tmp_path / "episode.gif"
    done = play("dqn", "--env", "cartpole", "--checkpoint", str(folder), "--gif", str(path))
    assert done.returncode == 0, done.stderr
    with Image.open(path) as animation:
        frames = animation.n_frames
        assert animation.size == (240, 120)
    assert frames > 5
    assert f"in {int(done.stdout.split(' steps')[0].split()[-1])} steps" in done.stdout


def test_where_there_is_no_terminal_the_last_picture_is_printed_as_letters(trained):
    done = play("dqn", "--env", "cartpole", "--checkpoint", str(trained[2]))
    assert done.returncode == 0, done.stderr
    assert "return" in done.stdout
    assert len(done.stdout.splitlines()) > 10
    assert "\x1b[" not in done.stdout


def test_a_world_of_gymnasium_draws_itself(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "episode.gif"
    name = "gymnasium:CartPole-v1"
    settings = dqn.settings_for(name, steps=600, min_size=200)
    dqn.train(settings, keep=Keep(folder))
    done = play("dqn", "--env", name, "--checkpoint", str(folder), "--gif", str(path))
    assert done.returncode == 0, done.stderr
    with Image.open(path) as animation:
        assert animation.size == (600, 400)
        assert animation.n_frames > 5


def test_a_gif_in_a_folder_that_is_not_there_and_a_misspelt_world_are_refused_before_anything_is_played(trained):
    done = play("dqn", "--env", "cartpole", "--checkpoint", str(trained[2]), "--gif", "no/such/folder/x.gif")
    assert (done.returncode, "no/such/folder" in done.stderr) == (2, True)
    done = play("dqn", "--env", "cartpol", "--checkpoint", str(trained[2]))
    assert (done.returncode, "did you mean 'cartpole'" in done.stderr) == (2, True)


def test_another_learner_is_refused_by_its_leaves(trained):
    done = play("ppo", "--env", "cartpole", "--checkpoint", str(trained[2]))
    assert done.returncode == 2
    assert "another learner" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(set(envs.ENVIRONMENTS) - {"synthetic"}))
def test_every_world_has_a_picture(name):
    state, _ = envs.make(name).reset(jax.random.key(0))
    picture = painter(name)(jax.device_get(state))
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= 3
    assert as_letters(picture).strip()


def test_a_pole_that_leans_right_is_drawn_leaning_right():
    def reds(angle):
        picture = painter("cartpole")(CartPoleState(0.0, 0.0, angle, 0.0, 0))
        return np.nonzero((picture == RED).all(axis=-1))[1].mean()

    assert reds(-0.5) < 120 < reds(0.5)


def test_a_world_without_a_picture_is_refused():
    with pytest.raises(ConfigError, match="no picture of synthetic"):
        painter("synthetic")


def test_a_gif_holds_every_picture(tmp_path):
    pictures = [np.full((8, 8, 3), shade, np.uint8) for shade in (0, 100, 200)]
    save_gif(tmp_path / "x.gif", pictures)
    with Image.open(tmp_path / "x.gif") as animation:
        assert animation.n_frames == 3


def test_a_curve_of_one_point_is_seen(tmp_path):
    def drawn(curve):
        draw_curves(tmp_path / "curve.png", "title", [curve])
        with Image.open(tmp_path / "curve.png") as picture:
            return (np.asarray(picture.convert("RGB")).astype(int) @ [-1, 0, 1] > 60).sum()

    assert drawn([(100, 5.0)]) > 5
    assert drawn([(100, float("nan"))]) == 0
