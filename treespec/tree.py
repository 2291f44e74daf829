"""The token tree: flat arrays in topological order, alone or as a padded batch.

Node 0 is the *root*, the last committed token: it is verified but it is not a candidate. ``parent[i] < i`` for
every other node. Probabilities are the draft's; they are float32 whatever the models' dtype, because in bfloat16 a
child can round up to its parent's score and be kept as an orphan.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.errors import TreespecError, printable
from treespec.sampling import Law


class Reason(enum.IntEnum):
    """Why a candidate node is, or is not, part of the verification."""

    KEPT = 0
    BELOW_TAU = 1  # its cumulative confidence fell below tau
    ENTROPY_CAP = 2  # its parent was too uncertain to be expanded
    OVER_BUDGET = 3  # other nodes were more probable
    TOO_DEEP = 4  # beyond the depth its entropy allows
    NOT_PROPOSED = 255  # never became a node


ARRAYS = ("token", "parent", "depth", "logp", "log_path", "entropy", "rank", "reason")


@dataclass(eq=False)
class TokenTree:
    """A tree of candidate tokens under the root.

    Args:
        token: ``[n]`` int64 token ids.
        parent: ``[n]`` int64 index of the parent, -1 at the root.
        depth: ``[n]`` int64, 0 at the root.
        logp: ``[n]`` float32, draft log-probability (nats) of the node given its parent; 0 at the root.
        log_path: ``[n]`` float32, sum of ``logp`` from the root: log of the cumulative confidence.
        entropy: ``[n]`` float32, entropy in bits of the draft's distribution *at* the node; NaN if not expanded.
        rank: ``[n]`` int64, place among the node's siblings, 0 for the draft's first choice.
        reason: ``[n]`` uint8 of :class:`Reason`.
        labels: token texts for display, if known.
        tokenizer: decodes them when asked, otherwise; a step should not wait for texts nobody looks at.
        accepted: indices of the accepted nodes, for display; filled by the engine.
        laws: by node, what its children were drawn from, if they were drawn. The engine drops them once the tree is
            verified: they are as large as the vocabulary.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    logp: Tensor
    log_path: Tensor
    entropy: Tensor
    rank: Tensor
    reason: Tensor
    labels: list[str] | None = None
    tokenizer: Any = None
    accepted: list[int] = field(default_factory=list)
    laws: dict[int, Law] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("logp", "log_path", "entropy"):  # half precision would round a child above its parent
            value = getattr(self, name)
            if value.dtype != torch.float32 or value.requires_grad or value.device.type != "cpu":
                setattr(self, name, value.detach().float().cpu())

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """The tree of a step without speculation."""
        return cls.from_lists([token], [-1], [0.0])

    @classmethod
    def from_lists(
        cls,
        token: Sequence[int],
        parent: Sequence[int],
        logp: Sequence[float] | None = None,
        entropy: Sequence[float] | None = None,
        rank: Sequence[int] | None = None,
        reason: Sequence[int] | None = None,
    ) -> TokenTree:
        """Build a tree from plain lists; depth, path probability and sibling ranks are derived.

        Raises:
            TreespecError: if the lists differ in length or are not in topological order.
        """
        n = len(token)
        lists: list[Sequence[object] | None] = [parent, logp, entropy, rank, reason]
        if n == 0 or any(a is not None and len(a) != n for a in lists):
            raise TreespecError(f"a tree needs equally long lists with at least the root; got {n} tokens")
        logp = [0.0] * n if logp is None else list(logp)
        depth, log_path, ranks, seen = [0] * n, [0.0] * n, [0] * n, [0] * n
        for i, p in enumerate(parent):
            if (i == 0 and p != -1) or (i > 0 and not 0 <= p < i):
                raise TreespecError(f"node {i} has parent {p}; parents must come before their children, root -1")
            if i:
                depth[i] = depth[p] + 1
                log_path[i] = log_path[p] + logp[i]
                ranks[i], seen[p] = seen[p], seen[p] + 1
        return cls(
            token=torch.tensor(list(token), dtype=torch.long),
            parent=torch.tensor(list(parent), dtype=torch.long),
            depth=torch.tensor(depth, dtype=torch.long),
            logp=torch.tensor(logp, dtype=torch.float32),
            log_path=torch.tensor(log_path, dtype=torch.float32),
            entropy=torch.tensor(entropy if entropy is not None else [float("nan")] * n, dtype=torch.float32),
            rank=torch.tensor(list(rank) if rank is not None else ranks, dtype=torch.long),
            reason=torch.tensor(list(reason) if reason is not None else [0] * n, dtype=torch.uint8),
        )

    def __len__(self) -> int:
        return int(self.token.numel())

    @property
    def candidates(self) -> int:
        """Number of kept nodes without the root: what a budget counts."""
        return int((self.reason == Reason.KEPT).sum()) - 1

    def children(self) -> list[dict[int, int]]:
        """For every node, ``{token: index}`` of its children; of duplicate tokens the first wins."""
        out: list[dict[int, int]] = [{} for _ in range(len(self))]
        for i, (p, t) in enumerate(zip(self.parent.tolist(), self.token.tolist())):
            if p >= 0:
                out[p].setdefault(t, i)
        return out

    def path(self, node: int) -> list[int]:
        """Indices from the root to ``node``, both included."""
        parent = self.parent.tolist()
        out = [node]
        while parent[out[-1]] >= 0:
            out.append(parent[out[-1]])
        return out[::-1]

    def ancestors(self) -> np.ndarray:
        """``[n, n]`` bool: row i marks what node i may attend to, its ancestors and itself."""
        return ancestor_mask(self.parent.numpy())

    def positions(self, root: int) -> Tensor:
        """``[n]`` int64 absolute positions when the root stands at position ``root``."""
        return self.depth + root

    def kept(self) -> tuple[TokenTree, list[int]]:
        """The tree to verify (kept nodes only) and, for each of its nodes, the index in this tree."""
        if bool((self.reason == Reason.KEPT).all()):
            return self, list(range(len(self)))
        index = torch.nonzero(self.reason == Reason.KEPT).flatten()
        return self.select(index), index.tolist()

    def select(self, index: Tensor) -> TokenTree:
        """The subtree of the given node indices (ascending, ancestor-closed, root included).

        Raises:
            TreespecError: if a node is selected without its parent.
        """
        new = torch.full((len(self),), -1, dtype=torch.long)
        new[index] = torch.arange(index.numel())
        parent = torch.where(index > 0, new[self.parent[index].clamp(min=0)], -1)
        if index.numel() == 0 or index[0] != 0 or bool((parent[1:] < 0).any()):
            raise TreespecError("a subtree must hold the root and the parent of each of its nodes")
        rest = {name: getattr(self, name)[index] for name in ARRAYS if name != "parent"}
        labels = [self.labels[i] for i in index.tolist()] if self.labels else None
        laws = {int(new[i]): law for i, law in self.laws.items() if new[i] >= 0}
        return TokenTree(parent=parent, labels=labels, tokenizer=self.tokenizer, laws=laws, **rest)

    def __repr__(self) -> str:
        kept = self.candidates
        head = f"TokenTree({kept} candidates kept of {len(self) - 1}, depth {int(self.depth.max())})"
        return "\n".join([head, *self._lines()])

    def _lines(self, limit: int = 40) -> list[str]:
        kids: list[list[int]] = [[] for _ in range(len(self))]
        for i, p in enumerate(self.parent.tolist()):
            if p >= 0:
                kids[p].append(i)
        out: list[str] = []
        stack = [0]
        while stack and len(out) < limit:
            i = stack.pop()
            stack.extend(reversed(kids[i]))
            why = "" if self.reason[i] == Reason.KEPT else f"  ✗ {Reason(int(self.reason[i])).name.lower()}"
            mark = " ✓" if i in self.accepted else ""
            p = float(self.log_path[i].exp())
            out.append(f"{'  ' * int(self.depth[i])}{self.label(i)}  P={p:.3f}{mark}{why}")
        if len(self) > limit:
            out.append(f"… and {len(self) - limit} more nodes")
        return out

    def label(self, node: int) -> str:
        """The node's text with visible white space, or its id where no text is known."""
        if self.labels is not None:
            text = self.labels[node]
        elif self.tokenizer is not None:
            text = str(self.tokenizer.decode([int(self.token[node])]))
        else:
            return str(int(self.token[node]))
        return visible(text)

    def _repr_html_(self) -> str:
        from treespec.draw import tree_html  # drawing is never needed to decode

        return tree_html(self)


def visible(text: str) -> str:
    """Token text as it is shown: white space as signs, what cannot be printed as its escape."""
    return printable(text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥"))


def ancestor_mask(parent: np.ndarray) -> np.ndarray:
    """``[n, n]`` bool from parents by recurrence: a node sees what its parent sees, and itself."""
    visible: np.ndarray = np.eye(len(parent), dtype=bool)
    for i in range(1, len(parent)):
        visible[i] |= visible[parent[i]]
    return visible


@dataclass(eq=False)
class TreeBatch:
    """Trees padded to one size: every array of :class:`TokenTree` as ``[B, N]``, and ``present`` ``[B, N]`` bool."""

    token: Tensor
    parent: Tensor
    depth: Tensor
    logp: Tensor
    log_path: Tensor
    entropy: Tensor
    rank: Tensor
    reason: Tensor
    present: Tensor

    @classmethod
    def stack(cls, trees: Sequence[TokenTree]) -> TreeBatch:
        """Pad and stack; padding has parent -1, log-probability -inf and ``present`` False."""
        size = max(len(t) for t in trees)
        fill = {
            "parent": -1,
            "logp": -torch.inf,
            "log_path": -torch.inf,
            "entropy": torch.nan,
            "reason": Reason.NOT_PROPOSED,
        }

        def pad(name: str) -> Tensor:
            value = fill.get(name, 0)
            rows = [getattr(t, name) for t in trees]
            return torch.stack([torch.nn.functional.pad(r, (0, size - r.numel()), value=value) for r in rows])

        present = torch.stack([torch.arange(size) < len(t) for t in trees])
        return cls(present=present, **{name: pad(name) for name in ARRAYS})

    def trees(self) -> list[TokenTree]:
        """The single trees again, without padding."""
        counts = self.present.sum(-1).tolist()
        return [TokenTree(**{a: getattr(self, a)[b, :n].clone() for a in ARRAYS}) for b, n in enumerate(counts)]

    def ancestors(self) -> Tensor:
        """``[B, N, N]`` bool ancestor masks; padded nodes see only themselves, so no row is empty."""
        size = self.parent.shape[1]
        visible = torch.eye(size, dtype=torch.bool).repeat(self.parent.shape[0], 1, 1)
        at_depth = torch.where(self.present, self.depth, -1)
        for level in range(1, int(at_depth.max()) + 1):
            batch, node = torch.nonzero(at_depth == level, as_tuple=True)
            visible[batch, node] |= visible[batch, self.parent[batch, node]]
        return visible

    def positions(self, roots: Tensor) -> Tensor:
        """``[B, N]`` absolute positions for roots at ``roots`` ``[B]``."""
        return self.depth + roots[:, None]
