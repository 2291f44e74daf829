"""What a policy does at one recorded position, node by node: the tree that the live engine would show, with reasons.

A replay keeps which nodes are verified, for thousands of positions at once. Here the policy's own ``decide`` and
``trim`` go through the live engine's bookkeeping (:class:`treespec.drafters.growth.Growth`) for one tree, with the
recorded children in the draft's place, so that every candidate has its reason. Both keep the same nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from treespec.drafters.growth import Growth
from treespec.policies import Policy
from treespec.proposals import Proposals
from treespec.trace.regrow import regrow
from treespec.trace.store import Trace
from treespec.tree import Reason, TokenTree


@dataclass(frozen=True)
class Explained:
    """One position under one policy.

    Args:
        tree: what the draft proposed within the policy's limits, each node with its reason; ``accepted`` is filled.
        bonus: the target's own token behind the accepted ones; None at the end of a text.
        truncated: the policy wanted nodes that were not recorded; the tree is what it does without them.
    """

    tree: TokenTree
    bonus: int | None
    truncated: bool


def explain(trace: Trace, row: int, policy: Policy, tokenizer: Any = None) -> Explained:
    """Grow a policy's tree at a position again, out of what was recorded there.

    Args:
        trace: recorded supertrees.
        row: number of the position in the trace.
        policy: in the state it has there (adaptive policies: :attr:`treespec.trace.Replay.policies`).
        tokenizer: for the nodes' labels.
    """
    start, index = int(trace.root[row]), trace.index
    known = _Recorded(trace, row)
    growth, nodes = Growth(int(trace.nodes["token"][start])), [0]
    for _ in range(min(policy.levels, int(index.room[row]))):
        nodes = [node for node in nodes if known.asked(growth, node)]  # what the recorder did not expand ends here
        if not nodes:
            break
        nodes = growth.add_level(policy, nodes, known.expand(growth, nodes, policy.width))
    tree = growth.finish(policy)
    tree.tokenizer = tokenizer
    true = trace.nodes["is_true"][start:]
    kept = [i for i in range(1, len(tree)) if int(tree.reason[i]) == Reason.KEPT]
    tree.accepted = [i for i in kept if true[known.node(growth, i)]]
    truncated = bool(regrow(index, torch.tensor([row]), policy).truncated[0])
    return Explained(tree, _bonus(trace, row, len(tree.accepted)), truncated)


def _bonus(trace: Trace, row: int, accepted: int) -> int | None:
    left, prompt = int(trace.left[row]), int(trace.prompt[row])
    if accepted >= left:
        return None
    text = trace.tokens(prompt)
    return int(text[len(text) - left + accepted])


class _Recorded:
    """The supertree of one position in the draft's place."""

    def __init__(self, trace: Trace, row: int) -> None:
        self.start = int(trace.root[row])
        size = int(trace.index.size[row])
        self.columns = {name: values[self.start : self.start + size] for name, values in trace.nodes.items()}
        self.children: list[dict[int, int]] = [{} for _ in range(size)]  # by token
        for i in range(1, size):
            self.children[self.columns["parent"][i]][int(self.columns["token"][i])] = i

    def node(self, growth: Growth, node: int) -> int:
        """The recorded node that a node of the growing tree stands for."""
        at = 0
        for token in growth.path_tokens(node):
            at = self.children[at][token]
        return at

    def asked(self, growth: Growth, node: int) -> bool:
        """Whether the draft was asked what follows the node."""
        return int(self.columns["offered"][self.node(growth, node)]) >= 0

    def expand(self, growth: Growth, nodes: list[int], width: int) -> Proposals:
        """The recorded children of some nodes, by rank, -inf where there is none; at most ``width``."""
        own = [self.node(growth, node) for node in nodes]
        found = [(f, i) for f, at in enumerate(own) for i in self.children[at].values()]
        ranks = [int(self.columns["rank"][i]) for _, i in found]
        columns = max(1, min(width, max(ranks, default=0) + 1))
        token = torch.zeros(len(own), columns, dtype=torch.long)
        logp = torch.full((len(own), columns), -torch.inf)
        for (f, i), rank in zip(found, ranks):
            if rank < columns:
                token[f, rank] = int(self.columns["token"][i])
                logp[f, rank] = float(self.columns["logp"][i])
        return Proposals(token, logp, torch.from_numpy(self.columns["entropy"][own].copy()))
