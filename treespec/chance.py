"""Where chance enters: every random choice of a sampled rule goes through one small object.

The live engine draws with :class:`Draws`; the enumerator (:mod:`treespec.exactness`) hands the very same rules an
object that answers every question in every possible way, each with its probability.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treespec.proposals import top_k


class Chance(Protocol):
    """Answers random questions, independently of each other."""

    def token(self, p: Tensor) -> int:
        """An index of ``p`` ``[V]``, drawn in proportion to it."""

    def coin(self, p: float) -> bool:
        """True with probability ``p``; never at 0, always from 1 on."""

    def ranking(self, law: Tensor, k: int) -> Tensor:
        """``[F, k]`` int64 columns of ``law`` ``[F, C]``: per row a sample without replacement, in drawing order.

        -1 where a row has fewer than k columns of positive probability. Rows are independent.
        """


class Draws:
    """Draws from torch generators, one for each device that is asked for.

    Args:
        seed: 0 <= seed < 2**64.
        stream: draws of different streams are independent. Draft and target must not share one: with the same numbers
            on both sides what the draft proposes is no longer independent of whether it is accepted.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        # a whole-number entropy is hashed by SeedSequence; stream 0 is the seed itself, torch's own convention
        spread = int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])
        self._seed = (seed if stream == 0 else spread) % 2**63
        self._generators: dict[torch.device, torch.Generator] = {}

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device=device)
            found.manual_seed(self._seed)
        return found

    def token(self, p: Tensor) -> int:
        """See :class:`Chance`."""
        return int(torch.multinomial(p, 1, generator=self._generator(p.device)))

    def coin(self, p: float) -> bool:
        """See :class:`Chance`."""
        generator = self._generator(torch.device("cpu"))
        return float(torch.rand((), dtype=torch.float64, generator=generator)) < p

    def ranking(self, law: Tensor, k: int) -> Tensor:
        """Gumbel top-k (Kool et al. 2019, arXiv 1903.06059) in its form as a race of exponentials.

        log(q / E) = log q + Gumbel noise for E ~ Exp(1). In float64: float32 exponentials lie on a grid of 6e-8, as
        coarse as many a token's probability.
        """
        race = torch.empty(law.shape, dtype=torch.float64, device=law.device)
        race = law / race.exponential_(generator=self._generator(law.device))
        columns = top_k(race, k)
        return columns.masked_fill(~(race.gather(-1, columns) > 0), -1)
