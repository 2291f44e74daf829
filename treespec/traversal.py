"""Acceptance from the leaves up: ``traversal`` for trees, ``block`` for chains. ALGORITHMS §2.

A whole path is accepted or not, so a token that is unlikely after its parent can be carried by likely ones after it:
on average more is accepted than by testing one token after another. The price is that the target's scores are needed at
nodes whose path may then be rejected, so logits processors run on every node, each with its own prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespec.errors import PolicyError
from treespec.policies.base import Policy
from treespec.rejection import SampledRule, probabilities, residual, without
from treespec.tree import TokenTree

if TYPE_CHECKING:
    from treespec.verify import Scores


@dataclass
class _Stop:
    """A node on the path under test.

    Attributes:
        node: index in the tree.
        alpha: probability of accepting the path to here, given all that was rejected so far.
        p: ``[V]`` float64, what the target still has to emit here.
        q: ``[V]`` float64, what the draft could still have drawn here; None at a leaf.
        waiting: children not yet rejected, ``(token, node)`` in drawing order.
    """

    node: int
    alpha: float
    p: Tensor
    q: Tensor | None
    waiting: list[tuple[int, int]]

    def drop_first(self) -> None:
        """The first child was rejected: take out of p, q and alpha what it stood for."""
        assert self.q is not None
        token, _ = self.waiting.pop(0)
        rest, normalised = residual(self.alpha * self.p, self.q)
        self.q = without(self.q, torch.tensor([token], device=self.q.device))
        mass = float(normalised)
        if mass > 0:
            self.p, self.alpha = rest, mass / (mass + 1 - self.alpha)
        elif self.alpha < 1:  # at alpha = 1 only rounding leaves nothing, where p = q: the root must stay certain
            self.alpha = 0.0


class Traversal(SampledRule):
    """Take the leftmost leaf, accept its whole path or delete it, and go on (Weng et al. 2025, arXiv 2505.12398)."""

    name = "traversal"
    ahead = True

    def walk(self, tree: TokenTree, scores: Scores, position: int) -> Iterator[tuple[int, int | None]]:
        """See :class:`treespec.verify.Rule`; everything is decided before the first token is yielded."""
        children = tree.children()

        def stop(node: int, alpha: float) -> _Stop:
            p, waiting = probabilities(scores(node)), list(children[node].items())
            return _Stop(node, alpha, p, tree.laws[node].dense(p) if waiting else None, waiting)

        path = [stop(0, 1.0)]
        while True:
            last = path[-1]
            if last.waiting:
                token, child = last.waiting[0]
                assert last.q is not None
                ratio = float(last.p[token]) / float(last.q[token])
                path.append(stop(child, min(1.0, last.alpha * ratio)))
            elif len(path) == 1 or self.chance.coin(last.alpha):  # at the root alpha is one
                break
            else:
                path.pop()
                path[-1].drop_first()
        bonus = self.chance.token(path[-1].p)
        for step in path[1:]:
            yield int(tree.token[step.node]), step.node
        yield bonus, None


class Block(Traversal):
    """Block verification of a chain (Sun et al. 2024, arXiv 2403.10444): traversal where every node has one child.

    From the last position up, the block to i is accepted with probability h_γ at the end and s/(s + 1 - h_i) before
    it, s = Σ(h_i·p - q)+: exactly what deleting a chain's leaf leaves to its parent.
    """

    name = "block"

    def check(self, policy: Policy) -> None:
        """Chains only.

        Raises:
            PolicyError: for policies that look first, or that branch.
        """
        super().check(policy)
        if policy.width > 1:
            raise PolicyError(
                f"rule 'block' verifies chains, but policy {policy.spec()!r} gives a node {policy.width} children; "
                "use policy linear, or rule traversal, which is the same for trees"
            )
