"""Noise keyed by (seed, position)."""

import pytest
import torch
from scipy import stats

from treespec.errors import InputError
from treespec.noise import PositionNoise


def test_same_key_same_noise_in_any_order():
    a, b = PositionNoise(7, 50), PositionNoise(7, 50)
    forth = [a.gumbel(t).clone() for t in range(100)]
    back = [b.gumbel(t).clone() for t in reversed(range(100))][::-1]
    assert all(torch.equal(x, y) for x, y in zip(forth, back))


def test_other_keys_other_noise():
    base = PositionNoise(7, 50)
    assert not torch.equal(base.gumbel(3), base.gumbel(4))
    assert not torch.equal(base.gumbel(3), PositionNoise(8, 50).gumbel(3))


def test_a_longer_vocabulary_begins_with_the_shorter_ones_noise():
    """A draft with a padded head must see the target's noise on the shared ids."""
    assert torch.equal(PositionNoise(1, 40).gumbel(5), PositionNoise(1, 64).gumbel(5)[:40])


def test_noise_is_gumbel_and_finite():
    noise = torch.cat([PositionNoise(s, 4000).gumbel(0) for s in range(10)])
    assert bool(torch.isfinite(noise).all())
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True])
def test_bad_seeds(seed):
    with pytest.raises(InputError, match="seed"):
        PositionNoise(seed, 8)


def test_the_largest_seed_works():
    assert PositionNoise(2**64 - 1, 8).gumbel(0).shape == (8,)
