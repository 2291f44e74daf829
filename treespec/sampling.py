"""How the children of a node are drawn from the draft, and what the acceptance rule must know about it.

The rules that test p/q are exact only if q is the very distribution that the children were drawn from: after the same
temperature and top-p, on the same vocabulary, in the same rounding. So the probabilities that are drawn from are kept
on the tree as a :class:`Law` per expanded node, and nothing is computed twice. ALGORITHMS §2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treespec.chance import Chance
from treespec.proposals import top_k


@dataclass
class Law:
    """The distribution that a node's children were drawn from.

    Args:
        probability: ``[C]``, any float dtype; it need not sum to one exactly.
        ids: ``[C]`` token of each column; None for 0, 1, … C - 1.
    """

    probability: Tensor
    ids: Tensor | None = None

    def dense(self, like: Tensor) -> Tensor:
        """``[V]`` float64 probabilities over the vocabulary of ``like`` ``[V]``, on its device, normalised."""
        q = self.probability.to(like.device, torch.float64)
        out = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        if self.ids is None:
            out[: q.numel()] = q
        else:
            out[self.ids.to(like.device)] = q
        return out / out.sum()


class Sampler(Protocol):
    """Draws the children of a level."""

    def children(self, law: Tensor, widths: Tensor) -> Tensor:
        """Columns of ``law`` in the order of the children.

        Args:
            law: ``[F, C]`` probabilities.
            widths: ``[F]`` int64, how many children each node gets.

        Returns:
            ``[F, K]`` int64, K the largest width; -1 where a node has no such child. Columns from a node's width on
            mean nothing.
        """


class WithoutReplacement:
    """Children drawn one after another from q, none twice (``rrs``, ``traversal``; a single one for ``block``)."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    def children(self, law: Tensor, widths: Tensor) -> Tensor:
        """See :class:`Sampler`. The first w of k draws without replacement are w such draws."""
        return self.chance.ranking(law, int(widths.max()))


class TopAndOne:
    """The k - 1 most probable tokens, then one drawn from q off them (``hybrid``; Hu et al., arXiv 2502.18779)."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    def children(self, law: Tensor, widths: Tensor) -> Tensor:
        """See :class:`Sampler`."""
        top = top_k(law, int(widths.max()))
        last = (widths - 1).clamp(min=0)[:, None].to(law.device)  # the drawn child's place
        chosen = torch.arange(top.shape[1], device=law.device) < last
        off = law.scatter(-1, top, law.gather(-1, top).masked_fill(chosen, 0.0))
        return top.scatter(-1, last, self.chance.ranking(off, 1))
