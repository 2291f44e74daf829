"""Growing one tree, level by level, for any drafter: ask for proposals, let the policy decide, go on.

This is the only growth loop. A drafter supplies ``expand(growth, nodes)``, which returns the children it would
propose for the given nodes of the tree so far; what becomes of them is the policy's business.

Where the rule wants drawn children, ``expand`` returns whole distributions and the policy is asked first, with the
children still unknown, how many each node gets; only then are they drawn. That order is what keeps ``rrs`` and its kin
exact, so it is enforced here: a policy that changes its mind once it sees the children is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from treespec.errors import PolicyError
from treespec.policies.base import Decision, Frontier, Policy
from treespec.proposals import Proposals
from treespec.sampling import Law, Sampler
from treespec.tree import Reason, TokenTree


class Growth:
    """A tree under construction: Python lists, appended level by level.

    Attributes:
        token, parent, depth: per node, the root first.
        sampler: draws the children, or None.
        laws: by node, what its children were drawn from.
        prune_seconds: time spent in the policy so far.
    """

    def __init__(self, root: int, sampler: Sampler | None = None) -> None:
        self.sampler = sampler
        self.laws: dict[int, Law] = {}
        self.token, self.parent, self.depth = [root], [-1], [0]
        self.prune_seconds = 0.0
        self._logp, self._log_path, self._rank, self._reason = [0.0], [0.0], [0], [int(Reason.KEPT)]
        self._entropy = [float("nan")]
        self._score = [0.0]  # what the policy ranks by
        self._ranks: dict[int, tuple[int, ...]] = {}  # of expanded nodes: sibling ranks from the root
        self._drawn: list[int] = []  # nodes expanded per level

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root (excluded) to ``node``."""
        out = []
        while node > 0:
            out.append(self.token[node])
            node = self.parent[node]
        return out[::-1]

    def add_level(self, policy: Policy, nodes: list[int], proposals: Proposals) -> list[int]:
        """Let the policy decide about the children of ``nodes``; returns the new nodes that grow on."""
        start = perf_counter()
        for node, bits in zip(nodes, proposals.entropy.tolist()):
            self._entropy[node] = bits
        self._drawn.append(len(nodes))
        for node in nodes:
            self._ranks[node] = (*self._ranks[self.parent[node]], self._rank[node]) if node else ()
        if self.sampler is not None:
            proposals = self._draw(self.sampler, policy, nodes, proposals)
        frontier = self._frontier(nodes, proposals.entropy, proposals.logp, proposals.token)
        decision = policy.decide(frontier)
        if self.sampler is not None and bool(
            ((decision.reason[0] == Reason.KEPT) != (proposals.logp > -torch.inf)).any()
        ):
            raise _looked(policy)
        grow_on = self._append(nodes, proposals, decision, frontier)
        self.prune_seconds += perf_counter() - start
        return grow_on

    def _frontier(self, nodes: list[int], entropy: Tensor, logp: Tensor, token: Tensor | None = None) -> Frontier:
        log_path = torch.tensor([[self._log_path[i] for i in nodes]], dtype=torch.float32)
        return Frontier(
            depth=self.depth[nodes[0]],
            log_path=log_path,
            entropy=entropy[None],
            child_logp=logp[None],
            alive=torch.ones_like(log_path, dtype=torch.bool),
            score=torch.tensor([[self._score[i] for i in nodes]], dtype=torch.float32),
            pool=self._pool(),
            ranks=torch.tensor([[self._ranks[i] for i in nodes]], dtype=torch.long),
            drawn=torch.tensor([self._drawn], dtype=torch.long),
            child_token=None if token is None else token[None],
        )

    def _draw(self, sampler: Sampler, policy: Policy, nodes: list[int], found: Proposals) -> Proposals:
        """Ask the policy for the widths, then draw that many children of every node."""
        law = found.law
        if law is None:
            raise PolicyError("the drafter does not say what its children are drawn from; use rule match or coupled")
        unseen = torch.zeros(len(nodes), min(policy.width, law.shape[1]))
        decision = policy.decide(self._frontier(nodes, found.entropy, unseen))
        widths = (decision.reason[0] == Reason.KEPT).sum(-1)  # [F]
        if int(widths.max()) == 0:
            return found
        columns = sampler.children(law, widths)  # [F, K]
        logp = law.gather(-1, columns.clamp(min=0)).log().masked_fill(columns < 0, -torch.inf).float().cpu()
        logp = logp.clamp(max=0.0).masked_fill(torch.arange(logp.shape[1]) >= widths[:, None], -torch.inf)
        columns = columns.cpu().clamp(min=0)
        token = columns if found.ids is None else found.ids[columns]
        self.laws.update((node, Law(row, found.ids)) for node, row in zip(nodes, law))
        return Proposals(token, logp, found.entropy)

    def _pool(self) -> Tensor:
        kept = [p for p, why in zip(self._score[1:], self._reason[1:]) if why == Reason.KEPT]
        return torch.tensor([kept], dtype=torch.float32)

    def _append(self, nodes: list[int], proposals: Proposals, decision: Decision, frontier: Frontier) -> list[int]:
        chosen = torch.nonzero(decision.reason.flatten() != Reason.NOT_PROPOSED).flatten()

        def picked(table: Tensor) -> list[Any]:
            return table.flatten().index_select(0, chosen).tolist()

        first, width = len(self.token), decision.reason.shape[-1]
        at, log_path = chosen.tolist(), picked(frontier.child_log_path())
        self.token += picked(proposals.token)
        self.parent += [nodes[i // width] for i in at]
        self.depth += [frontier.depth + 1] * len(at)
        self._logp += picked(proposals.logp)
        self._log_path += log_path
        self._score += log_path if decision.score is None else picked(decision.score)
        self._rank += [i % width for i in at]
        self._reason += picked(decision.reason)
        self._entropy += [float("nan")] * len(at)
        return [first + i for i, more in enumerate(picked(decision.expand)) if more]

    def finish(self, policy: Policy) -> TokenTree:
        """The tree with the policy's last word: what is over the budget is marked so."""
        start = perf_counter()
        tree = TokenTree(
            token=torch.tensor(self.token),
            parent=torch.tensor(self.parent),
            depth=torch.tensor(self.depth),
            logp=torch.tensor(self._logp, dtype=torch.float32),
            log_path=torch.tensor(self._log_path, dtype=torch.float32),
            entropy=torch.tensor(self._entropy, dtype=torch.float32),
            rank=torch.tensor(self._rank),
            reason=torch.tensor(self._reason, dtype=torch.uint8),
            laws=self.laws,
        )
        kept = tree.reason == Reason.KEPT
        stays = policy.trim(torch.tensor([self._score]), kept[None], torch.tensor([self._drawn], dtype=torch.long))[0]
        if self.sampler is not None and not torch.equal(kept, kept & stays):
            raise _looked(policy)
        tree.reason[kept & ~stays] = Reason.OVER_BUDGET
        self.prune_seconds += perf_counter() - start
        return tree


def _looked(policy: Policy) -> PolicyError:
    return PolicyError(
        f"policy {policy.spec()!r} says that it decides before it sees the drawn children, but it dropped some of them "
        "afterwards, which would bias the output; use rule match or coupled"
    )


Expand = Callable[[Growth, list[int]], Proposals]


def grow(
    policy: Policy, root: int, max_depth: int, expand: Expand, sampler: Sampler | None = None
) -> tuple[TokenTree, float]:
    """Grow a tree of at most ``max_depth`` levels under ``root``.

    Args:
        policy: decides about the children.
        root: the last committed token.
        max_depth: most levels, besides the policy's own.
        expand: what the drafter proposes for some nodes: their first children, or whole laws with ``sampler``.
        sampler: draws the children.

    Returns:
        The tree (pruned nodes included, each with its reason) and the seconds spent in the policy.

    Raises:
        PolicyError: with ``sampler``, if the policy lets drawn children go.
    """
    growth, nodes = Growth(root, sampler), [0]
    for _ in range(min(policy.levels, max_depth)):
        nodes = growth.add_level(policy, nodes, expand(growth, nodes))
        if not nodes:
            break
    return growth.finish(policy), growth.prune_seconds
