"""RLlib's PPO with conduit's packing, advantages and minibatches, in the learner. Imports no JAX before a learner is built."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ray.rllib.algorithms.ppo.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import ALL_MODULES, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)

from conduit_jax.adapters.rllib.mapping import check_mapping
from conduit_jax.adapters.rllib.options import CONDUIT_KEY, find_device
from conduit_jax.adapters.rllib.streaming import Stream, Trial, is_worth_it, sample_streamed
from conduit_jax.errors import ConfigError, SpecError, refuse

torch: Any = importlib.import_module("torch")
EXPOSED, VALUES, WAITED = "conduit_exposed_s", "conduit_value_forward_s", "conduit_value_wait_s"
COMPONENT_DRAWS = "conduit_draws"
_EXTRAS = ("action_logp", "action_dist_inputs")  # what PPO's loss reads beside actions


class ConduitPPOLearner(PPOTorchLearner):
    """RLlib's PPO learner, which makes its minibatches from chunks by itself: no connector pieces, no whole batch.

    Advantages are standardized over the real steps alone. Every epoch is shuffled, by ``config.debugging(seed=)``.
    """

    def build(self) -> None:
        """Build as RLlib does; ``ConfigError`` for modules with a state."""
        super().build()
        from conduit_jax.adapters.rllib import rollouts

        self._path = rollouts
        options = self.config.learner_config_dict[CONDUIT_KEY]
        self._cast, self._jax_device = options["observation_dtype"], find_device(options["backend"])
        self._ahead = options["prefetch"] != 0
        self._draws = np.random.default_rng(self.config.seed)
        self._stream: Stream | None = None
        self._worker = ThreadPoolExecutor(1, "conduit-path")
        for name, module in self.module._rl_modules.items():
            if module.is_stateful():
                got = f"module {name!r} with is_stateful() == True"
                refuse(ConfigError, "Recurrent modules are not served.", got=got, fix="leave attach() out")

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state, and the shuffles' random state."""
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(COMPONENT_DRAWS, components, not_components):
            state[COMPONENT_DRAWS] = pickle.dumps(self._draws.bit_generator.state)
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, RLlib's own too: that has no shuffles' state."""
        super().set_state(state)
        if COMPONENT_DRAWS in state:
            self._draws.bit_generator.state = pickle.loads(state[COMPONENT_DRAWS])

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
        self._seconds = dict.fromkeys((EXPOSED, VALUES, WAITED), 0.0)
        made = self._rollouts(training_data.episodes)
        counts = {name: rollout.packed.steps for name, rollout in made.items()}
        size = minibatch_size or max(counts.values(), default=1)
        draws = self._draws if shuffle_batch_per_epoch and num_epochs > 1 else None
        order = self._path.orders(counts, size, num_epochs, num_total_minibatches, draws) if made else {}
        self._seconds[EXPOSED] += time.perf_counter() - begin - self._seconds[WAITED]
        return self._minibatches(made, order, sum(len(episode) for episode in training_data.episodes))

    def begin_stream(self, expected: int, *, beside: bool = True) -> None:
        """Expect about ``expected`` steps of one iteration by ``stream``, and forget what came before.

        Chunks are packed as they come, and valued ``beside`` sampling or when the update begins, to the same bits.
        """
        self._stream = Stream(self._path.Packing(_EXTRAS, expected), self._values, self._worker, beside=beside)

    def stream(self, episodes: list[Any], group: int) -> None:
        """Begin to pack chunks of the iteration and to value them, on a thread of its own."""
        assert self._stream is not None
        self._stream.add(episodes, group)

    @property
    def waited(self) -> float:
        """Seconds the last update waited for values."""
        return self._seconds[WAITED]

    def _rollouts(self, episodes: list[Any]) -> dict[str, Any]:
        """Pack by module, unless streamed already, and estimate advantages."""
        stream, self._stream = self._stream, None
        packings, orders = {}, {}
        if stream is not None and stream.has(episodes):
            begin = time.perf_counter()
            self._seconds[VALUES] = stream.wait()
            self._seconds[WAITED] = time.perf_counter() - begin
            packings[DEFAULT_MODULE_ID], orders[DEFAULT_MODULE_ID] = stream.packing, stream.order(episodes)
        else:
            for name, chunks in self._by_module(episodes).items():
                packings[name] = packing = self._path.pack(chunks, _EXTRAS)
                begin = time.perf_counter()
                packing.value(self._values(name, packing, 0, packing.used))
                self._seconds[VALUES] += time.perf_counter() - begin
            self._seconds[WAITED] = self._seconds[VALUES]
        packed = {name: packing.finish(orders.get(name)) for name, packing in packings.items()}
        kinds = {"gamma": self.config.gamma, "lambda_": self.config.lambda_}
        return {
            name: self._path.Rollout(part, self._jax_device, self._cast, **kinds)
            for name, part in packed.items()
            if part is not None
        }

    def _by_module(self, episodes: list[Any]) -> dict[str, list[Any]]:
        parts: dict[str, list[Any]] = {}
        for episode in episodes:
            agents = getattr(episode, "agent_episodes", None)
            for part in (episode,) if agents is None else agents.values():
                name = DEFAULT_MODULE_ID if agents is None else part.module_id
                if name not in self.module:
                    want, fix = ", ".join(self.module.keys()), "correct policy_mapping_fn"
                    refuse(SpecError, "An episode belongs to an unknown module.", got=repr(name), want=want, fix=fix)
                if len(part) and self.should_module_be_updated(name, None):
                    parts.setdefault(name, []).append(part)
        return parts

    def _values(self, name: str, packing: Any, begin: int, end: int) -> np.ndarray:
        """Return what the value function says of packed rows, float32 ``(end - begin,)``."""
        module = self.module[name].unwrapped()
        with torch.no_grad():
            seen = (_moved(piece, self._device, self._cast) for piece in packing.tensors(begin, end))
            return torch.cat([module.compute_values({"obs": piece}) for piece in seen]).float().cpu().numpy()

    def _minibatches(self, made: dict[str, Any], order: dict[str, np.ndarray], steps: int) -> Iterator[Any]:
        if not made:
            return
        batches = self._path.minibatches(made, order, ahead=self._worker if self._ahead else None)
        while True:
            begin = time.perf_counter()
            columns = next(batches, None)
            if columns is None:
                break
            parts = {name: SampleBatch(_moved(module, self._device)) for name, module in columns.items()}
            batch = MultiAgentBatch(parts, steps)
            self._seconds[EXPOSED] += time.perf_counter() - begin
            yield batch
        for name, value in self._seconds.items():
            self.metrics.log_value((ALL_MODULES, name), value, window=1)


def _moved(tree: Any, device: Any, cast: str | None = None) -> Any:
    if isinstance(tree, dict):
        return {name: _moved(part, device, cast) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_moved(part, device, cast) for part in tree)
    return tree.to(device, getattr(torch, cast)) if cast is not None else tree.to(device)


def check_attached(config: Any) -> None:
    """Raise ``ConfigError`` where the learner was configured a second time after ``attach``."""
    learner, marked = config.learner_class, CONDUIT_KEY in config.learner_config_dict
    if not (issubclass(learner, ConduitPPOLearner) and marked and config._learner_connector is None):
        got = f"learner_class={learner.__name__}, learner_connector={config._learner_connector!r}"
        want = "what attach() set"
        if not marked:
            got = f"learner_config_dict={config.learner_config_dict}"
        refuse(ConfigError, "The learner was changed after attach().", got=got, want=want, fix="attach last")


class ConduitPPO(PPO):
    """RLlib's PPO with ``ConduitPPOLearner``; ``attach`` puts it into a ``PPOConfig``.

    With a local learner and large observations, chunks are packed while sampling goes on, and valued too where the first
    iterations show that this is quicker (``Trial``).
    """

    @classmethod
    def get_default_config(cls) -> PPOConfig:
        """Return RLlib's own defaults, for this class."""
        return PPOConfig(algo_class=cls)

    def setup(self, config: Any) -> None:
        """Set up as RLlib does; ``ConfigError`` for a changed learner, or agents mapped to modules that do not exist."""
        check_attached(config)
        super().setup(config)
        check_mapping(self)
        runner = self.env_runner
        space = getattr(getattr(runner, "env", None), "single_observation_space", None)
        space = self.spaces.get(INPUT_ENV_SINGLE_SPACES, (None,))[0] if space is None and self.spaces else space
        prefetch = self.config.learner_config_dict[CONDUIT_KEY]["prefetch"]
        worth = prefetch != 0 and space is not None and is_worth_it(self.config, space)
        self._trial = Trial(kept=None if prefetch is None else True)
        self._beside = self._trial.beside
        (learner,) = self.learner_group.foreach_learner(lambda one: one) if self.learner_group.is_local else (None,)
        self._streamed = learner.get() if worth and learner is not None else None

    def training_step(self) -> None:
        """Do RLlib's step, or the same with rollouts sampled in pieces."""
        learner = self._streamed
        if learner is None:
            return super().training_step()
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            begin = time.perf_counter()
            self._beside = self._trial.beside
            learner.begin_stream(self.config.total_train_batch_size, beside=self._beside)
            sampled = sample_streamed(self.env_runner_group, self.config, learner.stream)
            seconds = time.perf_counter() - begin
            if not sampled.episodes:
                return None
            self.metrics.aggregate(sampled.metrics, key=ENV_RUNNER_RESULTS)
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            lifetime: dict[str, tuple[str, ...]] = {
                NUM_ENV_STEPS_SAMPLED_LIFETIME: (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME),
                NUM_MODULE_STEPS_TRAINED_LIFETIME: (LEARNER_RESULTS, ALL_MODULES, NUM_MODULE_STEPS_TRAINED_LIFETIME),
            }
            results = self.learner_group.update(
                episodes=sampled.episodes,
                timesteps={name: self.metrics.peek(where, default=0) for name, where in lifetime.items()},
                num_epochs=self.config.num_epochs,
                minibatch_size=self.config.minibatch_size,
                shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
            )
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
        self._trial.enter((seconds + learner.waited) / sum(len(episode) for episode in sampled.episodes))
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                policies=set(results[0].keys()) - {ALL_MODULES},
                inference_only=True,
            )
        return None

    def step(self) -> dict[str, Any]:
        """Return RLlib's results, and the path's seconds of this iteration under ``conduit``."""
        results = super().step()
        found = results.get("learners", {}).get(ALL_MODULES, {})
        results[CONDUIT_KEY] = {
            name.removeprefix(f"{CONDUIT_KEY}_"): found[name] for name in (EXPOSED, VALUES, WAITED) if name in found
        }
        if self._streamed is not None:
            results[CONDUIT_KEY] |= {"valued_beside": self._beside, "trial_left": self._trial.left}
        return results


__all__ = ["ConduitPPO", "ConduitPPOLearner"]
