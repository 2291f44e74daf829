"""Acceptance rules that test drawn children one by one, walking down: ``rrs`` and ``hybrid``. ALGORITHMS §2.

Both are exact if the children of every node were drawn by the rule's own sampler from the law that the tree carries,
and if how many there are was decided before they were seen.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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
    """One token at a time: a child is accepted and stepped into, or the bonus token ends the walk."""

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

    @abc.abstractmethod
    def choose(self, p: Tensor, q: Tensor, children: list[int]) -> int:
        """The emitted token, distributed as ``p``.

        Args:
            p: ``[V]`` float64 target probabilities at the node.
            q: ``[V]`` float64 draft probabilities, those that the children were drawn from; may be overwritten.
            children: tokens in drawing order, at least one.
        """


class Rrs(_Stepwise):
    """Recursive rejection over children drawn without replacement.

    SpecInfer's multi-step sampling (Miao et al. 2023, arXiv 2305.09781) with the without-replacement q of Sequoia
    (Chen et al. 2024, arXiv 2402.12374) and EAGLE-1.
    """

    name = "rrs"

    def choose(self, p: Tensor, q: Tensor, children: list[int]) -> int:
        """Each child in turn against what is left of p and q."""
        for token in children:
            if self.chance.coin(float(p[token]) / float(q[token])):
                return token
            p, _ = residual(p, q)
            q[token] = 0.0
            q /= q.sum().clamp(min=TINY)
        return self.chance.token(p)


class Hybrid(_Stepwise):
    """The k - 1 most probable children and one drawn off them: only the drawn one is tested by a coin.

    After Hu et al. 2025 (arXiv 2502.18779). The emitted token is accepted wherever it is a child, so a node's
    acceptance is p(S) + Σ over the others of min(p, q'), the most that one drawn child allows.
    """

    name = "hybrid"

    @property
    def sampler(self) -> Sampler:
        """Draws the last child only."""
        return TopAndOne(self.draft)

    def choose(self, p: Tensor, q: Tensor, children: list[int]) -> int:
        """Test the drawn child, which is the last; else draw from the residual."""
        *top, drawn = children
        q[top] = 0.0
        q /= q.sum()  # if the top has all of q's support, its last member counts as drawn, with certainty
        if self.chance.coin(float(p[drawn]) / float(q[drawn])):
            return drawn
        return self.chance.token(residual(p, q)[0])


TINY = 1e-300


def probabilities(scores: Tensor) -> Tensor:
    """``[V]`` float64, in which differences of probabilities keep their digits."""
    return scores.double().softmax(-1)


def residual(p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """norm((p - q)+) and the mass that was normalised; p itself where rounding leaves none."""
    rest = (p - q).clamp_(min=0.0)
    mass = float(rest.sum())
    return (rest / mass, mass) if mass > 0 else (p, 0.0)
