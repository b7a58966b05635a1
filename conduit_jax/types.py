"""The field's nouns: what flows along actor -> ingestion -> replay -> delivery -> learner.

Everything here is a pytree (a NamedTuple of arrays), so it passes through ``jit``, ``vmap`` and ``scan`` unchanged.
Fields that do not apply are ``None``, which is the empty pytree and costs nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.packed import Packed, packed

PyTree = Any
Array = jax.Array
Key = jax.Array
Device = Any  # jax.Device: jax binds it as a variable, which type checkers refuse in an annotation


class Transition(NamedTuple):
    """One step, or one n-step jump, that stands on its own.

    ``reward`` is the (discounted) sum of rewards from ``observation`` up to ``next_observation`` and ``discount`` what
    multiplies the value of ``next_observation``: 0 after termination, never 0 merely because of a time limit.
    """

    observation: PyTree
    action: PyTree
    reward: Array
    discount: Array
    next_observation: PyTree


class Trajectory(NamedTuple):
    """A time-major stretch of one episode: leaves are ``(T, ...)``; ``mask`` is False on padding."""

    observation: PyTree
    action: PyTree
    reward: Array
    discount: Array
    mask: Array | None = None


class Rollout(NamedTuple):
    """One rollout unit: what a single call of the actor yields, time-major ``(T, lanes, ...)``.

    ``observation[t]`` is what the policy saw when it chose ``action[t]``. Where an episode ended at ``t`` (``terminated``
    or ``truncated``) the environment has reset itself, so ``observation[t + 1]`` belongs to the next episode and the last
    observation of the old one stands in ``final_observation[t]``; elsewhere ``final_observation`` may hold anything.
    ``bootstrap_observation`` ``(lanes, ...)`` is what followed the last step. ``bootstrap_value`` ``(lanes,)`` may stand
    in for it where values, not observations, are stored. ``lengths`` ``int32 (lanes,)`` says how many leading steps of a
    lane are real (``None``: all). ``policy_version`` is the version of the parameters that acted, a scalar. ``extras``
    holds anything else an algorithm records per step (log-probabilities, values), ``(T, lanes, ...)``.
    """

    observation: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: PyTree = None
    bootstrap_observation: PyTree = None
    bootstrap_value: Array | None = None
    extras: PyTree = None
    lengths: Array | None = None
    policy_version: Array | None = None


class Records(NamedTuple):
    """What an ingestion hook may return where plain items ``(T, lanes, ...)`` do not say enough.

    ``lengths`` int32: how many leading steps are real, ``()`` for all lanes alike or ``(lanes,)`` where they differ.
    ``priorities`` float32 ``(T, lanes)``: initial priorities instead of the highest seen so far.
    """

    items: PyTree
    lengths: Array | None = None
    priorities: Array | None = None


@packed(
    slot=np.int32,
    generation=np.uint32,
    probability=np.float32,
    priority=np.float32,
    table_size=np.int32,
    age=np.int32,
    policy_version=np.uint32,
    times_sampled=np.int32,
    weight=np.float32,
    valid=np.bool_,
    table=np.int32,
    optional=("times_sampled", "weight", "valid", "table"),
)
class SampleInfo(Packed):
    """Where every item of a batch came from, as of its draw; columns are ``(batch,)``, in one array (``Packed``).

    ``slot`` (int32, counted over all partitions) and ``generation`` (uint32, how often that slot had been written) name
    an item for ever: an update for a slot that has been overwritten since is recognised and ignored. ``probability``
    is that of one draw, the factor 1/partitions included. ``priority`` is the item's own, before the exponent.
    ``table_size`` is the number of live items in the partition it was drawn from, ``age`` how many newer
    steps its lane holds, ``policy_version`` (uint32) the version that acted. ``times_sampled`` is ``None`` unless the
    replay counts it. ``weight`` and ``valid`` are those of the ``Sample`` it belongs to, which keeps them here. ``table`` is
    the number of its table in a plane's ``Mixture``, ``None`` without one.
    """

    __slots__ = ()
    slot: Array
    generation: Array
    probability: Array
    priority: Array
    table_size: Array
    age: Array
    policy_version: Array
    times_sampled: Array | None = None
    weight: Array | None = None
    valid: Array | None = None
    table: Array | None = None


@jax.tree_util.register_pytree_with_keys_class
class Sample:
    """A training-ready batch: ``data`` leaves are ``(batch, ...)``.

    ``weights`` (float32) are importance weights, 1 where draws are uniform. ``mask`` marks real steps of padded windows
    and is ``None`` for single transitions. ``valid`` (bool) is all False when the replay could not serve the batch:
    then ``data`` holds zeros or old rows, never invented experience to train on.

    It is read, unpacked, numbered and ``_replace``d like a NamedTuple of these five. A replay's own samples keep weights
    and ``valid`` as columns of ``info`` (``packed``): two arrays fewer leave a compiled draw, a tenth of its time (jax
    0.10.2 on CPU). Reading them is free inside ``jit``, and an operation outside it. What a user puts in stands apart, as
    it is: bits in a column have no gradient.
    """

    __slots__ = ("_apart", "data", "info", "mask")
    _fields = __match_args__ = ("data", "info", "weights", "mask", "valid")
    data: PyTree
    info: SampleInfo
    mask: Array | None
    _apart: tuple[Array, Array] | None

    def __init__(self, data: PyTree, info: SampleInfo, weights: Array, mask: Array | None, valid: Array):
        self.data, self.info, self.mask, self._apart = data, info, mask, (weights, valid)

    @classmethod
    def packed(cls, data: PyTree, info: SampleInfo, weights: Array, mask: Array | None, valid: Array) -> Sample:
        """Return the sample with ``weights`` float32 and ``valid`` bool among the columns of ``info``, whose shape they have."""
        return cls._made(data, info._replace(weight=weights, valid=valid), mask, None)

    @classmethod
    def described(cls, data: PyTree, info: SampleInfo, mask: Array | None) -> Sample:
        """Return the sample whose weights and ``valid`` are among the columns of ``info`` already."""
        return cls._made(data, info, mask, None)

    @classmethod
    def _made(cls, data: PyTree, info: SampleInfo, mask: Array | None, apart: tuple[Array, Array] | None) -> Sample:
        made = object.__new__(cls)
        made.data, made.info, made.mask, made._apart = data, info, mask, apart
        return made

    @property
    def weights(self) -> Array:
        """Importance weights, float32."""
        return self.info.weight if self._apart is None else self._apart[0]  # type: ignore[return-value]

    @property
    def valid(self) -> Array:
        """Whether the replay could serve the batch, bool."""
        return self.info.valid if self._apart is None else self._apart[1]  # type: ignore[return-value]

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def _replace(self, **changes: Any) -> Sample:
        info = changes.get("info", self.info)
        whole = self._apart is not None or (isinstance(info, SampleInfo) and {"weight", "valid"} <= {*info.present})
        if not whole or not set(changes) <= {"data", "info", "mask"}:
            return Sample(**(self._asdict() | changes))
        kept = {"data": self.data, "info": self.info, "mask": self.mask, "apart": self._apart}
        return self._made(**(kept | changes))

    def __iter__(self) -> Any:
        return iter(self._asdict().values())

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __repr__(self) -> str:
        named = zip(self.tree_flatten()[1], self.tree_flatten()[0], strict=True)
        return f"Sample({', '.join(f'{name}={part!r}' for name, part in named)})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Return the parts it is made of and their names."""
        if self._apart is None:
            return (self.data, self.info, self.mask), ("data", "info", "mask")
        return (self.data, self.info, self.mask, *self._apart), ("data", "info", "mask", "weights", "valid")

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[str, ...]]:
        parts, names = self.tree_flatten()
        return tuple(zip(map(jax.tree_util.GetAttrKey, names), parts, strict=True)), names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], parts: Any) -> Sample:
        data, info, mask, *apart = parts
        return cls._made(data, info, mask, tuple(apart) if apart else None)


@packed(counts=True, added=np.int32, evicted=np.int32, replaced=np.uint32)
class AddInfo(Packed):
    """What an insert did: items ``added``, live items ``evicted``, and bad priorities ``replaced`` by the maximum."""

    __slots__ = ()

    added: Array
    evicted: Array
    replaced: Array


def rollout_lane_axes(rollout: PyTree) -> PyTree:
    """Return the tree of ``rollout``'s structure that names each leaf's lane axis (``-1``: the leaf has none).

    A ``Rollout``, at the root or inside another tree, keeps lanes on axis 1 of its time-major fields, on axis 0 of
    bootstraps and lengths, and has none on a scalar ``policy_version``. Every other leaf is ``(T, lanes, ...)``.
    """
    axis = {"bootstrap_observation": 0, "bootstrap_value": 0, "lengths": 0, "policy_version": -1}

    def of_field(name: str, field: PyTree) -> PyTree:
        return jax.tree.map(lambda _: axis[name], field) if name in axis else rollout_lane_axes(field)

    def of_node(node: PyTree) -> PyTree:
        if not isinstance(node, Rollout):
            return 1
        return Rollout(**{name: of_field(name, field) for name, field in node._asdict().items()})

    return jax.tree.map(of_node, rollout, is_leaf=lambda node: isinstance(node, Rollout))


def next_observations(rollout: Rollout) -> PyTree:
    """Return the observation that really followed each step, ``(T, lanes, ...)``: across resets the final one.

    ``o'[t] = final_observation[t]`` where the episode ended at ``t``, else ``observation[t + 1]``, and
    ``bootstrap_observation`` after the last step (of each lane, where ``lengths`` says that they differ).
    """
    ended = rollout.terminated | rollout.truncated
    steps, lengths = rollout.reward.shape[0], rollout.lengths
    last = None if lengths is None else jnp.arange(steps)[:, None] == lengths - 1

    def shift(observation: Array, final: Array, bootstrap: Array) -> Array:
        def where(mask: Array, chosen: Array, other: Array) -> Array:
            return jnp.where(mask.reshape(mask.shape + (1,) * (observation.ndim - 2)), chosen, other)

        following = jnp.concatenate([observation[1:], bootstrap[None]], axis=0)
        following = following if last is None else where(last, bootstrap[None], following)
        return where(ended, final, following)

    return jax.tree.map(shift, rollout.observation, rollout.final_observation, rollout.bootstrap_observation)
