"""Random numbers keyed by (seed, absolute position): the same noise for draft, target and plain decoding.

With Gumbel noise g keyed this way the sampled token y_t = argmax(log p + g_t) is a function of seed, position and
target alone (ALGORITHMS §2, ``coupled``). numpy's Philox is a counter-based generator, so position t costs the same
whether or not t-1 was drawn, and a CPU and a GPU see the same numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError


class PositionNoise:
    """Gumbel noise per position; the last few positions are remembered, since draft and target ask for the same.

    Args:
        seed: 0 <= seed < 2**64.
        vocabulary: tokens of the target.
    """

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed = check_seed(seed)
        self.vocabulary = vocabulary
        self._recent: dict[int, Tensor] = {}

    def gumbel(self, position: int) -> Tensor:
        """``[V]`` float32 standard Gumbel noise of an absolute position."""
        noise = self._recent.get(position)
        if noise is None:
            if len(self._recent) > 64:
                self._recent.clear()
            bits = np.random.Philox(key=self.seed, counter=[0, 0, 0, position])
            uniform = torch.from_numpy(np.random.Generator(bits).random(self.vocabulary))
            # 1 - u lies in (0, 1]: neither logarithm can meet a zero; -log1p(-u) is Exp(1)
            noise = -torch.log(-torch.log1p(-uniform).clamp(max=-1e-300)).float()
            self._recent[position] = noise
        return noise


def check_seed(seed: int) -> int:
    """The seed itself.

    Raises:
        InputError: if it is not a whole number in [0, 2**64).
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InputError(f"seed must be a whole number from 0 to 2**64 - 1; got {seed!r}")
    return seed
