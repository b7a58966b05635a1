"""RLlib's PPO with conduit's packing, advantages and minibatches, in the learner. Imports no JAX before a learner is built."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from ray.rllib.algorithms.ppo.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import ALL_MODULES, DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from conduit_jax.adapters.rllib.options import CONDUIT_KEY
from conduit_jax.errors import ConfigError, SpecError, refuse

torch: Any = importlib.import_module("torch")
EXPOSED, VALUES = "conduit_exposed_s", "conduit_value_forward_s"
_EXTRAS = ("action_logp", "action_dist_inputs")  # what PPO's loss reads beside actions


class ConduitPPOLearner(PPOTorchLearner):
    """RLlib's PPO learner, which makes its minibatches from chunks by itself: no connector pieces, no whole batch.

    Advantages are standardized over the real steps alone. Every epoch is shuffled, by ``config.debugging(seed=)``.
    """

    def build(self) -> None:
        """Build as RLlib does; ``ConfigError`` for modules with a state."""
        super().build()
        from conduit_jax.adapters.rllib import rollouts

        jax = importlib.import_module("jax")
        self._path = rollouts
        options = self.config.learner_config_dict[CONDUIT_KEY]
        self._cast, self._jax_device = options["observation_dtype"], jax.devices(options["backend"])[0]
        self._draws = np.random.default_rng(self.config.seed)
        for name, module in self.module._rl_modules.items():
            if module.is_stateful():
                got = f"module {name!r} with is_stateful() == True"
                refuse(ConfigError, "Recurrent modules are not served.", got=got, fix="leave attach() out")

    def _create_iterator_if_necessary(
        self,
        *,
        training_data: Any,
        num_total_minibatches: int = 0,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool = False,
        **kwargs: Any,
    ) -> Any:
        if training_data.episodes is None:
            return super()._create_iterator_if_necessary(
                training_data=training_data,
                num_total_minibatches=num_total_minibatches,
                num_epochs=num_epochs,
                minibatch_size=minibatch_size,
                shuffle_batch_per_epoch=shuffle_batch_per_epoch,
                **kwargs,
            )
        begin = time.perf_counter()
        self._exposed, self._valued = 0.0, 0.0
        made = self._rollouts(training_data.episodes)
        counts = {name: rollout.packed.steps for name, rollout in made.items()}
        size = minibatch_size or max(counts.values(), default=1)
        draws = self._draws if shuffle_batch_per_epoch and num_epochs > 1 else None
        order = self._path.orders(counts, size, num_epochs, num_total_minibatches, draws) if made else {}
        self._exposed += time.perf_counter() - begin - self._valued
        return self._minibatches(made, order, sum(len(episode) for episode in training_data.episodes))

    def _rollouts(self, episodes: list[Any]) -> dict[str, Any]:
        """Pack by module and estimate advantages."""
        parts: dict[str, list[Any]] = {}
        for episode in episodes:
            agents = getattr(episode, "agent_episodes", None)
            for part in (episode,) if agents is None else agents.values():
                name = DEFAULT_MODULE_ID if agents is None else part.module_id
                if name not in self.module:
                    want, fix = ", ".join(self.module.keys()), "correct policy_mapping_fn"
                    refuse(SpecError, "An episode belongs to an unknown module.", got=repr(name), want=want, fix=fix)
                if self.should_module_be_updated(name, None):
                    parts.setdefault(name, []).append(part)
        made = {}
        for name, chunks in parts.items():
            packed = self._path.pack(chunks, _EXTRAS)
            if packed is not None:
                made[name] = self._path.Rollout(packed, self._jax_device, self._cast)
                self._estimate(name, made[name])
        return made

    def _estimate(self, name: str, rollout: Any) -> None:
        begin, module = time.perf_counter(), self.module[name].unwrapped()
        with torch.no_grad():
            seen = (_moved(piece, self._device, self._cast) for piece in rollout.observations())
            values = torch.cat([module.compute_values({"obs": piece}) for piece in seen]).float().cpu().numpy()
        self._valued += time.perf_counter() - begin
        rollout.estimate(values, self.config.gamma, self.config.lambda_)

    def _minibatches(self, made: dict[str, Any], order: dict[str, np.ndarray], steps: int) -> Iterator[Any]:
        if not made:
            return
        batches = self._path.minibatches(made, order)
        while True:
            begin = time.perf_counter()
            columns = next(batches, None)
            if columns is None:
                break
            parts = {name: SampleBatch(_moved(module, self._device)) for name, module in columns.items()}
            batch = MultiAgentBatch(parts, steps)
            self._exposed += time.perf_counter() - begin
            yield batch
        for name, value in ((EXPOSED, self._exposed), (VALUES, self._valued)):
            self.metrics.log_value((ALL_MODULES, name), value, window=1)


def _moved(tree: Any, device: Any, cast: str | None = None) -> Any:
    if isinstance(tree, dict):
        return {name: _moved(part, device, cast) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_moved(part, device, cast) for part in tree)
    return tree.to(device, getattr(torch, cast)) if cast is not None else tree.to(device)


class ConduitPPO(PPO):
    """RLlib's PPO with ``ConduitPPOLearner``; ``attach`` puts it into a ``PPOConfig``."""

    @classmethod
    def get_default_config(cls) -> PPOConfig:
        """Return RLlib's own defaults, for this class."""
        return PPOConfig(algo_class=cls)

    def step(self) -> dict[str, Any]:
        """Return RLlib's results, and the path's seconds of this iteration under ``conduit``."""
        results = super().step()
        found = results.get("learners", {}).get(ALL_MODULES, {})
        results[CONDUIT_KEY] = {
            name.removeprefix(f"{CONDUIT_KEY}_"): found[name] for name in (EXPOSED, VALUES) if name in found
        }
        return results


__all__ = ["ConduitPPO", "ConduitPPOLearner"]
