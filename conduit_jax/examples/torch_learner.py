"""A DQN whose learner is torch, on an Experience Data Plane: acting, updates and losses are torch's, the path is the plane's.

    python -m conduit_jax.examples.torch_learner [--steps 100000] [--seed 0]

The world is pure JAX and steps all lanes in one call; observations and batches reach torch through dlpack, without a copy.
The plane is the one of ``examples/dqn.py``: n-step transitions in, uniform or prioritized batches out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.adapters.torch import TorchBatch, to_torch
from conduit_jax.examples import command_line
from conduit_jax.examples.dqn import Settings, make_plane, settings_for

Act = Callable[[Any], np.ndarray]


class Lanes:
    """``count`` lanes of a pure-JAX world that a torch policy acts in."""

    def __init__(self, name: str, count: int, seed: int):
        world = envs.autoreset(envs.make(name))
        keys = jax.random.split(jax.random.key(seed), count)
        self.spec, self._step = world.spec, jax.jit(jax.vmap(world.step))
        self._state, self.observation = jax.jit(jax.vmap(world.reset))(keys)

    def step(self, act: Act) -> tuple[Any, np.ndarray, Any]:
        """Act once in every lane; return what was seen, what was done and what came of it."""
        seen, action = self.observation, act(to_torch(self.observation))
        self._state, came = self._step(self._state, action)
        self.observation = came.observation
        return seen, action, came

    def rollout(self, act: Act, length: int) -> conduit.Rollout:
        """Act for ``length`` steps; time-major, on the device."""
        seen, actions, came = zip(*(self.step(act) for _ in range(length)), strict=True)
        steps = jax.tree.map(lambda *leaves: jnp.stack(leaves), *came)
        return conduit.Rollout(
            observation=jnp.stack(seen),
            action=np.stack(actions),
            reward=steps.reward,
            terminated=steps.terminated,
            truncated=steps.truncated,
            final_observation=steps.final_observation,
            bootstrap_observation=self.observation,
        )

    def returns(self, act: Act, steps: int) -> np.ndarray:
        """Return what one episode of at most ``steps`` steps comes to in every lane, float32 ``(lanes,)``."""
        total, going = 0.0, True
        for _ in range(steps):
            _, _, came = self.step(act)
            total = total + np.where(going, came.reward, 0)
            going = going & ~np.asarray(came.terminated | came.truncated)
        return np.asarray(total, np.float32)


class QNetwork(torch.nn.Module):
    """Action values of scaled observations: an MLP."""

    def __init__(self, spec: envs.EnvironmentSpec, settings: Settings):
        super().__init__()
        widths = [int(np.prod(spec.observation.shape)), *settings.hidden, spec.num_actions or 1]
        layers: list[Any] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers[:-1])
        scale = settings.observation_scale or (1.0,) * widths[0]
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, observation: Any) -> Any:
        return self.layers(observation * self.scale)


class DQN:
    """Double Q-learning on n-step transitions with a Polyak-averaged target and a learning rate that decays to zero."""

    def __init__(self, spec: envs.EnvironmentSpec, settings: Settings):
        torch.manual_seed(settings.seed)
        self.settings, self.updates = settings, 0
        self._actions = spec.num_actions or 1
        self.network, self.target = QNetwork(spec, settings), QNetwork(spec, settings)
        self.target.load_state_dict(self.network.state_dict())
        self._optimizer = torch.optim.Adam(self.network.parameters(), settings.learning_rate)
        decay = lambda update: max(0.0, 1 - update / settings.updates)  # noqa: E731
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, decay)

    @torch.no_grad()
    def act(self, observation: Any) -> np.ndarray:
        """Return an action a lane, int32: greedy, or random with a probability that falls from 1."""
        explored = self.settings.exploration_fraction * self.settings.updates
        epsilon = max(self.settings.epsilon_final, 1 - (1 - self.settings.epsilon_final) * self.updates / explored)
        random = torch.randint(self._actions, (observation.shape[0],))
        explore = torch.rand(observation.shape[0]) < epsilon
        return torch.where(explore, random, self.network(observation).argmax(-1)).int().numpy()

    @torch.no_grad()
    def act_greedily(self, observation: Any) -> np.ndarray:
        """Return the best action a lane, int32."""
        return self.network(observation).argmax(-1).int().numpy()

    def update(self, batch: TorchBatch) -> tuple[float, Any]:
        """Take one step on a batch; return the loss and new priorities."""
        data = batch.data
        with torch.no_grad():
            chosen = self.network(data.next_observation).argmax(-1, keepdim=True)
            bootstrap = self.target(data.next_observation).gather(-1, chosen)[:, 0]
            goal = self.settings.reward_scale * data.reward + data.discount * bootstrap
        values = self.network(data.observation).gather(-1, data.action.long()[:, None])[:, 0]
        error = values - goal
        loss = (batch.weights * error.square()).mean() / 2
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.gradient_clip)
        self._optimizer.step()
        self._schedule.step()
        with torch.no_grad():
            for own, learned in zip(self.target.parameters(), self.network.parameters(), strict=True):
                own.lerp_(learned, self.settings.polyak)
        self.updates += 1
        return float(loss.detach()), error.detach().abs() + 1e-3


class PlaneSource:
    """Experience through a plane: rollouts in, batches of tensors out. Another source with these calls may stand in for it."""

    def __init__(self, settings: Settings):
        self._plane = make_plane(settings)
        self._batches: Any = self._plane.torch_batches()
        self._prioritized = settings.sampler == "prioritized"

    def push(self, rollout: conduit.Rollout, version: int) -> None:
        """Take one rollout of the policy after ``version`` updates."""
        self._plane.push(rollout, version=version)

    def ready(self) -> bool:
        """Whether there is enough for a batch."""
        return self._plane.ready()

    def pull(self) -> TorchBatch:
        """Return the next batch."""
        return next(self._batches)

    def update(self, batch: TorchBatch, priorities: Any) -> None:
        """Give a batch's items new priorities, where the sampler has use for them."""
        if self._prioritized:
            batch.update_priorities(priorities)

    def close(self) -> dict[str, Any]:
        """Return what is to be said about it."""
        stats, handovers = self._plane.stats(), self._batches.handovers
        self._plane.close()
        return {"stats": stats, "shared": handovers.shared, "copied": dict(handovers.copied)}


class Result(NamedTuple):
    """What a run came to: ``returns`` of the final policy, greedy; seconds by iteration, and those in the source's calls."""

    returns: np.ndarray
    updates: int
    iteration_s: np.ndarray
    path_s: np.ndarray
    source: dict[str, Any]


def train(
    settings: Settings, report: Callable[[int, float], None] = lambda iteration, loss: None, source: Any = None
) -> Result:
    """Train for ``settings.steps`` environment steps, then evaluate in fresh lanes."""
    lanes = Lanes(settings.env, settings.lanes, settings.seed)
    dqn, source = DQN(lanes.spec, settings), source or PlaneSource(settings)
    iteration_s, path_s = np.zeros(settings.iterations), np.zeros(settings.iterations)

    def timed(call: Callable[..., Any], *values: Any) -> Any:
        before = time.perf_counter()
        result = call(*values)
        path_s[iteration] += time.perf_counter() - before
        return result

    for iteration in range(settings.iterations):
        start = time.perf_counter()
        timed(source.push, lanes.rollout(dqn.act, settings.rollout_length), dqn.updates)
        loss = float("nan")
        for _ in range(settings.updates_per_rollout if timed(source.ready) else 0):
            batch = timed(source.pull)
            loss, priorities = dqn.update(batch)
            timed(source.update, batch, priorities)
        iteration_s[iteration] = time.perf_counter() - start
        report(iteration, loss)
    fresh = Lanes(settings.env, settings.evaluation_episodes, settings.seed + 1_000_003)
    returns = fresh.returns(dqn.act_greedily, lanes.spec.max_steps or 1000)
    return Result(returns, dqn.updates, iteration_s, path_s, source.close())


def main() -> None:
    """Train from the command line."""
    parser = command_line.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="cartpole")
    parser.add_argument("--steps", type=command_line.count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=("uniform", "prioritized"), default="uniform")
    settings = settings_for(**vars(parser.parse_args()))

    def report(iteration: int, loss: float) -> None:
        if iteration % 100 == 0:
            print(f"iteration {iteration}/{settings.iterations}  loss {loss:.3g}")

    torch.set_num_threads(1)  # networks this small are slower on several
    result = train(settings, report)
    print(
        f"evaluation return {result.returns.mean():.1f} over {len(result.returns)} episodes, {result.updates} updates"
    )
    print(f"arrays shared with torch: {result.source['shared']}, copied: {result.source['copied'] or 'none'}")
    iteration, path = (np.median(one) * 1e3 for one in (result.iteration_s, result.path_s))
    print(f"an iteration takes {iteration:.2f} ms, {path:.2f} ms of them in the experience path's calls (medians)")


if __name__ == "__main__":
    command_line.run(main)
