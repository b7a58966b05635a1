"""Laws of the examples' convolutions written as matrix products: flax's own on pictures of any size, gradients too."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax.examples.networks import ActorCritic, patches, windows
from conduit_jax.examples.sac import Torso


@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [((16, 16, 5), 4, 2), ((9, 12, 3), 4, 2), ((7, 7, 2), 3, 2), ((5, 6, 1), 5, 1), ((6, 5, 2), 2, 4)],
)
def test_a_dense_layer_on_windows_is_flaxs_convolution(shape: tuple[int, ...], size: int, stride: int) -> None:
    _compare(shape, size, stride, lambda images: windows(images, size, stride))


@pytest.mark.parametrize(("shape", "size"), [((32, 32, 3), 2), ((84, 84, 1), 5), ((10, 21, 3), 4)])
def test_a_dense_layer_on_patches_is_flaxs_convolution(shape: tuple[int, ...], size: int) -> None:
    _compare(shape, size, size, lambda images: patches(images, size))


def _compare(shape: tuple[int, ...], size: int, stride: int, seen) -> None:
    images = jax.random.normal(jax.random.key(0), (3, *shape))
    convolution, dense = nn.Conv(4, (size, size), (stride, stride)), nn.Dense(4)
    given = convolution.init(jax.random.key(1), images)["params"]
    same = {"kernel": given["kernel"].reshape(-1, 4), "bias": given["bias"]}

    def by_convolution(images: jax.Array, parameters: dict) -> jax.Array:
        return jnp.sin(convolution.apply({"params": parameters}, images)).sum()  # type: ignore[union-attr]

    def by_product(images: jax.Array, parameters: dict) -> jax.Array:
        return jnp.sin(dense.apply({"params": parameters}, seen(images))).sum()  # type: ignore[arg-type]

    out = dense.apply({"params": same}, seen(images))
    np.testing.assert_allclose(out, convolution.apply({"params": given}, images), atol=1e-5)  # type: ignore[arg-type]
    ours, theirs = jax.grad(by_product, (0, 1))(images, same), jax.grad(by_convolution, (0, 1))(images, given)
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-4)
    np.testing.assert_allclose(ours[1]["kernel"], theirs[1]["kernel"].reshape(-1, 4), atol=1e-3)


@pytest.mark.parametrize("shape", [(84, 84, 3), (96, 60, 1), (8, 8, 3)])
def test_networks_see_pictures_whose_sides_are_no_multiple_of_their_patches(shape: tuple[int, ...]) -> None:
    images = jnp.zeros((2, *shape), jnp.uint8)
    for network in (Torso((8,)), ActorCritic(3, (8,))):
        shapes = jax.eval_shape(network.init_with_output, jax.random.key(0), images)[0]
        assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(shapes))
