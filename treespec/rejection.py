"""Acceptance rules that test drawn children one by one, walking down: ``rrs`` and ``hybrid``. ALGORITHMS §2.

Both are exact if the children of every node were drawn by the rule's own sampler from the law that the tree carries,
and if how many there are was decided before they were seen.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespec.chance import Chance
from treespec.errors import PolicyError
from treespec.policies.base import Policy
from treespec.sampling import Sampler, TopAndOne, WithoutReplacement
from treespec.tree import TokenTree

if TYPE_CHECKING:
    from treespec.verify import Scores


class SampledRule(abc.ABC):
    """What rules over drawn children share.

    Args:
        chance: the target's coins and draws.
        draft: the draft's draws; independent of the target's.
    """

    name = ""
    ahead = False

    def __init__(self, chance: Chance, draft: Chance) -> None:
        self.chance, self.draft = chance, draft

    @property
    def noise(self) -> Callable[[int], Tensor] | None:
        """None: the draft must not know the target's draws."""
        return None

    @property
    def sampler(self) -> Sampler:
        """Draws the children."""
        return WithoutReplacement(self.draft)

    def check(self, policy: Policy) -> None:
        """Refuse policies that look at a drawn child before they keep it.

        Raises:
            PolicyError: saying why.
        """
        if not policy.predictable:
            raise PolicyError(
                f"rule {self.name!r} would be biased with policy {policy.spec()!r}: the policy looks at the children "
                "that were drawn before it decides which of them stay, so what stays is no sample of the draft; use "
                "rule match or coupled, or a policy that fixes the shape first, such as linear or uniform"
            )

    @abc.abstractmethod
    def walk(self, tree: TokenTree, scores: Scores, position: int) -> Iterator[tuple[int, int | None]]:
        """See :class:`treespec.verify.Rule`."""


class _Stepwise(SampledRule):
    """One token at a time: a child is accepted and stepped into, or the bonus token ends the walk.

    What a child is tested with does not depend on chance, only how far the tests go. So the same steps serve one node,
    as far as they are needed, and all nodes at once.

    Attributes:
        last_only: only the last child was drawn and is tested; the others are left out of q.
    """

    last_only = False

    def walk(self, tree: TokenTree, scores: Scores, position: int) -> Iterator[tuple[int, int | None]]:
        """See :class:`treespec.verify.Rule`; scores are asked for exactly the emitted prefix."""
        children, node = tree.children(), 0
        while True:
            p, found = probabilities(scores(node)), children[node]
            token = self.choose(p, tree.laws[node].dense(p), list(found)) if found else self.chance.token(p)
            child = found.get(token)
            yield token, child
            if child is None:
                return
            node = child

    def choose(self, p: Tensor, q: Tensor, children: list[int]) -> int:
        """The emitted token, distributed as ``p``.

        Args:
            p: ``[V]`` float64 target probabilities at the node.
            q: ``[V]`` float64 draft probabilities, those that the children were drawn from.
            children: tokens in drawing order, at least one.
        """
        tokens = torch.tensor([children], device=p.device)
        p, q = p[None], self._drawn_from(q[None], tokens)
        for i in range(self._first(len(children)), len(children)):
            if self.chance.coin(float(ratio(p, q, tokens[:, i]))):
                return children[i]
            p, q = rejected(p, q, tokens[:, i])
        return self.chance.token(p[0])

    def table(self, tree: TokenTree, scores: Tensor, position: int) -> Tensor:
        """``[n, 1 + K]``: a token of what is left where all children are rejected, then each child's test."""
        found = [list(tokens) for tokens in tree.children()]
        p = probabilities(scores)
        table = p.new_ones(len(found), 1 + max(map(len, found)))
        for count in sorted(set(map(len, found))):  # nodes with as many children are tested together
            mine = [i for i, tokens in enumerate(found) if len(tokens) == count]
            index = torch.tensor(mine, device=p.device)
            left = p[index]
            if count:
                tokens = torch.tensor([found[i] for i in mine], device=p.device)
                q = self._drawn_from(torch.stack([tree.laws[i].dense(p[i]) for i in mine]), tokens)
                for i in range(self._first(count), count):
                    table[index, 1 + i] = ratio(left, q, tokens[:, i])
                    left, q = rejected(left, q, tokens[:, i])
            table[index, 0] = self.chance.ranking(left, 1)[:, 0].to(table)
        return table

    def choose_from(self, row: list[float], children: list[int]) -> int:
        """See :class:`treespec.verify.Rule`; the coins are thrown here, as far as they are needed."""
        for i in range(self._first(len(children)), len(children)):
            if self.chance.coin(row[1 + i]):
                return children[i]
        return int(row[0])

    def _first(self, children: int) -> int:
        """The first child that is tested."""
        return max(children - 1, 0) if self.last_only else 0

    def _drawn_from(self, q: Tensor, tokens: Tensor) -> Tensor:
        """The law of the children that are tested; if the others have all of q's support, the last is certain."""
        first = self._first(tokens.shape[1])
        return without(q, tokens[:, :first]) if first else q


class Rrs(_Stepwise):
    """Recursive rejection over children drawn without replacement: each in turn against what is left of p and q.

    SpecInfer's multi-step sampling (Miao et al. 2023, arXiv 2305.09781) with the without-replacement q of Sequoia
    (Chen et al. 2024, arXiv 2402.12374) and EAGLE-1.
    """

    name = "rrs"


class Hybrid(_Stepwise):
    """The k - 1 most probable children and one drawn off them: only the drawn one is tested by a coin.

    After Hu et al. 2025 (arXiv 2502.18779). The emitted token is accepted wherever it is a child, so a node's
    acceptance is p(S) + Σ over the others of min(p, q'), the most that one drawn child allows.
    """

    name = "hybrid"
    last_only = True

    @property
    def sampler(self) -> Sampler:
        """Draws the last child only."""
        return TopAndOne(self.draft)


TINY = 1e-300


def probabilities(scores: Tensor) -> Tensor:
    """``[V]`` float64, in which differences of probabilities keep their digits."""
    return scores.double().softmax(-1)


def ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """``[R]``: p over q ``[R, V]`` at a token of each row ``[R]``."""
    at = tokens[:, None]
    return (p.gather(-1, at) / q.gather(-1, at))[:, 0]


def rejected(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of p and q ``[R, V]`` after a token of each row ``[R]`` was rejected."""
    return residual(p, q)[0], without(q, tokens[:, None])


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """norm(q off the tokens), ``[..., V]`` and ``[..., K]``."""
    q = q.scatter(-1, tokens, 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=TINY)


def residual(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """norm((p - q)+) ``[..., V]`` and its mass ``[..., 1]`` before; p itself where rounding leaves none."""
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p), mass
