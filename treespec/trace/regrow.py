"""Growing a policy's trees again out of recorded supertrees, for thousands of positions at once.

The policy's own ``decide`` and ``trim`` are asked, level by level, as the live engine asks them for one tree. A child
that the draft offered but that was not recorded is shown as a *phantom*: with the largest probability that it can
have (:mod:`treespec.trace.index`). If the policy does not even keep that, the true one would not have been kept
either, and the tree is exact. Where a phantom was kept, the tree is grown once more without any. If a policy expands or
verifies a phantom, or the two trees differ, then what it would have done depends on nodes beyond the recording's caps:
the position is *truncated*, and its figures are those of the recorded nodes alone.

This takes for granted what all policies here keep: they are monotone, a less probable child is never treated better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treespec.policies.base import Frontier, Policy
from treespec.trace.fixed import fits, lay
from treespec.trace.grown import NONE, Grown
from treespec.trace.index import Index
from treespec.tree import Reason

CHUNK = 4096  # positions grown at once; bounds the memory
NARROW = 16  # up to this width all phantoms are shown at once, beyond it one per node first
GAP = 2e-6  # relative: a phantom stays below its mark in float32 too
WORTH = 500_000  # padded children that pay for growing some rows apart
TABLES = ("active", "pool", "ids", "drawn", "front", "score", "ranks")  # of the trees under way
PHANTOM = -2  # instead of a node, as NONE is


def regrow(index: Index, rows: Tensor, policy: Policy) -> Grown:
    """The policy's trees at the positions ``rows`` ``[B]``; exact except where ``truncated`` says so.

    A static tree is counted whole; its nodes that were not recorded are not among ``kept``.
    """
    tree = policy.shape
    if tree is not None and fits(index, tree):
        return Grown.stack([Grown(*lay(index, part, tree, policy.levels)) for part in rows.split(CHUNK)])
    return Grown.stack([_resolved(index, part, policy) for part in rows.split(CHUNK)])


def _resolved(index: Index, rows: Tensor, policy: Policy) -> Grown:
    """Grow with phantoms; where they were kept, find out whether they matter."""
    narrow = policy.width <= NARROW
    grown, touched = _Growing(index, rows, policy, policy.width if narrow else 1).run()
    at = touched.nonzero().flatten()
    if len(at):
        some = rows[at]
        full = grown.at(at)
        if not narrow:
            full, _ = _Growing(index, some, policy, policy.width).run()
        known, _ = _Growing(index, some, policy, 0).run()
        known.truncated |= full.truncated | full.differs(known)
        grown.put(at, known)
    return grown


class _Growing:
    """Trees of one chunk under way. Rows leave as they finish; the others' tables stay as small as they can be.

    Args:
        index: the supertrees.
        rows: positions.
        policy: decides.
        phantoms: how many are shown beyond a node's last recorded child; 0 shows none at all.
    """

    def __init__(self, index: Index, rows: Tensor, policy: Policy, phantoms: int) -> None:
        self.index, self.policy, self.phantoms = index, policy, phantoms
        count = len(rows)
        self.limit = index.room[rows].clamp(max=policy.levels)
        self.mark = index.mark[:, rows]
        self.touched = torch.zeros(count, dtype=torch.bool)
        self.beyond = torch.zeros(count, dtype=torch.bool)
        self.done: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, kept, drawn
        self.active = torch.arange(count)
        self.pool = torch.empty(count, 0)  # scores of kept candidates
        self.ids = torch.empty(count, 0, dtype=torch.long)  # which they are
        self.drawn = torch.empty(count, 0, dtype=torch.long)
        self.front = index.root[rows][:, None]  # nodes that are expanded next, NONE for padding
        self.score = torch.zeros(count, 1)
        self.ranks = torch.empty(count, 1, 0, dtype=torch.long)

    def run(self) -> tuple[Grown, Tensor]:
        """The trees, and ``[B]`` bool where a phantom had been kept at some time."""
        self._retire(self.limit > 0)
        waiting = [(0, self._rows(torch.ones(len(self.active), dtype=torch.bool)))]
        while waiting:
            depth, tables = waiting.pop()
            vars(self).update(tables)
            while len(self.active):
                wide = self._split()
                if wide is not None:
                    waiting.append((depth, wide))
                self._level(depth)
                depth += 1
                self._retire((self.front != NONE).any(-1) & (self.limit[self.active] > depth))
        return self._finished(), self.touched

    def _split(self) -> dict[str, Tensor] | None:
        """Set the largest rows apart if padding all others to their size costs more than growing them later."""
        there = self.front != NONE
        width = there.sum(-1)
        last = self._last(self.front.clamp(min=0)).masked_fill(~there, -1)
        ranks = (last.amax(-1) + 1 + self.phantoms).clamp(1, max(self.policy.width, 1))
        order = (width * ranks).argsort()
        count = len(order)
        size = width[order].cummax(0).values * ranks[order].cummax(0).values  # of the padded table of so many rows
        going = torch.arange(1, count + 1)
        cost = going * size + (count - going) * size[-1]
        best = int(cost.argmin())
        if count * int(size[-1]) - int(cost[best]) < WORTH:
            return None
        narrow = torch.zeros(count, dtype=torch.bool).index_fill_(0, order[: best + 1], True)
        wide = self._rows(~narrow)
        vars(self).update(self._rows(narrow))
        return wide

    def _last(self, own: Tensor) -> Tensor:
        """The highest recorded rank of the nodes' children, -1 where there are none."""
        count = self.index.count[own].long()
        last = self.index.rank[self.index.first[own].long() + (count - 1).clamp(min=0)].long()
        return torch.where(count > 0, last, -1)

    def _rows(self, some: Tensor) -> dict[str, Tensor]:
        """The tables of some rows, as small as they can be."""
        tables = {name: getattr(self, name)[some] for name in TABLES}
        width = int((tables["front"] != NONE).sum(-1).max()) if len(tables["front"]) else 0
        used = (tables["ids"] != NONE).any(0)
        for name in ("front", "score", "ranks"):
            tables[name] = tables[name][:, :width]
        for name in ("pool", "ids"):
            tables[name] = tables[name][:, used]
        return tables

    def _level(self, depth: int) -> None:
        alive = self._known(depth)
        children, logp = self._children(depth, alive)  # [A, F, K]
        own = self.front.clamp(min=0)
        self.drawn = torch.cat([self.drawn, alive.sum(-1, keepdim=True)], dim=-1)
        frontier = Frontier(
            depth=depth,
            log_path=self.index.log_path[own],
            entropy=self.index.entropy[own],
            child_logp=logp,
            alive=alive,
            score=self.score,
            pool=self.pool,
            ranks=self.ranks,
            drawn=self.drawn,
        )
        decision = self.policy.decide(frontier)
        score = decision.score if decision.score is not None else frontier.child_log_path()
        kept = decision.reason == Reason.KEPT
        phantom = children == PHANTOM
        self.touched[self.active] |= (kept & phantom).flatten(1).any(-1)
        self.beyond[self.active] |= (decision.expand & phantom).flatten(1).any(-1)
        grow_on = decision.expand & ~phantom
        self._append(kept, children, score)
        self._advance(grow_on, children, score)

    def _known(self, depth: int) -> Tensor:
        """``[A, F]`` bool: living nodes of the frontier; those the recorder did not expand end here."""
        alive = self.front != NONE
        asked = self.index.offered[self.front.clamp(min=0)] >= 0
        self.beyond[self.active] |= (alive & ~asked).any(-1)
        return alive & asked

    def _children(self, depth: int, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes ``[A, F, K]`` by rank (NONE, PHANTOM) and their log-probabilities."""
        index, own = self.index, self.front.clamp(min=0)
        count = index.count[own].long() * alive
        first = index.first[own].long()
        last = self._last(own).masked_fill(~alive, -1)
        width = max(1, min(self.policy.width, int(last.max()) + 1 + self.phantoms))
        slot = torch.arange(min(width, max(int(count.max()), 1)))
        child = first[..., None] + slot
        there = slot < count[..., None]
        rank = index.rank[child.clamp(max=len(index.rank) - 1)].long()
        children = torch.full((*own.shape, width + 1), NONE)  # the last column takes what is ranked too low
        children.scatter_(-1, torch.where(there & (rank < width), rank, width), torch.where(there, child, NONE))
        children = children[..., :width]
        known = children >= 0
        logp = index.logp[children.clamp(min=0)].masked_fill(~known, -torch.inf)
        if self.phantoms:
            shown = self._shown(last, width) & ~known & alive[..., None] & self._offered(own, width)
            at = shown.nonzero(as_tuple=True)
            children[at] = PHANTOM
            logp[at] = self._bound(depth, own[at[:2]], at[0], at[2])
        return children, logp

    def _shown(self, last: Tensor, width: int) -> Tensor:
        """``[A, F, K]`` bool: ranks whose phantoms are shown: so many behind the last recorded child, and those from
        which a narrower tree's mark no longer holds; between these ranks the bound does not change.
        """
        rank = torch.arange(width)
        return (rank <= last[..., None] + self.phantoms) | torch.isin(rank, torch.tensor(self.index.caps.narrow))

    def _offered(self, own: Tensor, width: int) -> Tensor:
        """``[A, F, K]`` bool: the draft had a child of this rank; from the recorder's width on, it may have had."""
        offered = self.index.offered[own].long()[..., None]
        rank = torch.arange(width)
        return (rank < offered) | ((rank >= self.index.caps.width) & (offered == self.index.caps.width))

    def _bound(self, depth: int, own: Tensor, tree: Tensor, rank: Tensor) -> Tensor:
        """``[n]`` log-probabilities that unrecorded children cannot reach.

        Args:
            depth: of their parents.
            own: ``[n]`` the parents' nodes.
            tree: ``[n]`` rows.
            rank: ``[n]`` of the children.
        """
        index, bound = self.index, self.index.rest[own]
        most, count = torch.maximum(index.most[own], rank), index.count[own].long()
        for mark, limit in zip(self.mark, index.caps.widths):
            inside = most < limit
            if index.ranked and limit == index.caps.width:
                # what the recorder was not shown is no more probable than what it was shown and left out, if it did
                inside |= count < limit
            at = mark[self.active[tree], min(depth + 1, mark.shape[1] - 1)]
            below = at - GAP * at.abs().clamp(min=1) - index.log_path[own]
            bound = torch.where(inside, torch.minimum(bound, below), bound)
        if index.ranked:  # none is more probable than the last one that is known
            last = index.first[own].long() + (count - 1).clamp(min=0)
            behind = (count > 0) & (rank > index.rank[last])
            bound = torch.where(behind, torch.minimum(bound, index.logp[last]), bound)
        return bound.clamp(max=0.0)

    def _append(self, kept: Tensor, children: Tensor, score: Tensor) -> None:
        """The level's kept nodes join the pool."""
        place = _Packed(kept.flatten(1))
        self.ids = torch.cat([self.ids, place.pack(children, NONE)], dim=-1)
        self.pool = torch.cat([self.pool, place.pack(score, -torch.inf)], dim=-1)

    def _advance(self, grow_on: Tensor, children: Tensor, score: Tensor) -> None:
        """The next frontier."""
        place = _Packed(grow_on.flatten(1))
        width = grow_on.shape[-1]
        above = place.column // width
        ranks = torch.cat([self.ranks[place.row, above], (place.column % width)[:, None]], dim=-1)
        new = torch.zeros(*place.shape, ranks.shape[-1], dtype=torch.long)
        new[place.row, place.slot] = ranks
        self.front, self.score, self.ranks = place.pack(children, NONE), place.pack(score, 0.0), new

    def _retire(self, going: Tensor) -> None:
        """Rows whose tree is grown leave."""
        if bool(going.all()):
            return
        gone = ~going
        score = torch.nn.functional.pad(self.pool[gone], (1, 0), value=0.0)  # the root in front
        ids, drawn = self.ids[gone], self.drawn[gone]
        kept = torch.nn.functional.pad(ids != NONE, (1, 0), value=True)
        if drawn.shape[1]:  # without a draft forward the live engine asks no policy
            kept = self.policy.trim(score, kept, drawn)
        self.done.append((self.active[gone], ids.masked_fill(~kept[:, 1:], NONE), drawn))
        vars(self).update({name: getattr(self, name)[going] for name in TABLES})

    def _finished(self) -> Grown:
        rows = torch.cat([r for r, _, _ in self.done])
        most = max(int((k != NONE).sum(-1).max()) for _, k, _ in self.done if len(k))
        deepest = max(d.shape[1] for _, _, d in self.done)
        count = len(self.beyond)
        kept, widths = torch.full((count, most), NONE), torch.zeros(count, deepest, dtype=torch.long)
        for own, ids, drawn in self.done:
            packed = _Packed(ids != NONE).pack(ids, NONE)
            kept[own, : packed.shape[1]] = packed
            widths[own, : drawn.shape[1]] = drawn
        assert len(rows) == count
        verified = kept != NONE
        accepted = (self.index.is_true[kept.clamp(min=0)] & (kept >= 0)).sum(-1)
        truncated = self.beyond | (kept == PHANTOM).any(-1)
        return Grown(accepted, 1 + verified.sum(-1), widths, truncated, kept)


class _Packed:
    """Entries of a mask ``[A, C]`` moved to the left of their rows."""

    def __init__(self, mask: Tensor) -> None:
        self.row, self.column = mask.nonzero(as_tuple=True)
        count = mask.sum(-1)
        self.slot = torch.arange(len(self.row)) - (count.cumsum(0) - count)[self.row]
        self.shape = (len(mask), int(count.max()) if len(mask) else 0)

    def pack(self, table: Tensor, fill: float) -> Tensor:
        """``[A, M]`` of a table ``[A, C]`` or ``[A, F, K]``."""
        out = torch.full(self.shape, fill, dtype=table.dtype)
        out[self.row, self.slot] = table.flatten(1)[self.row, self.column]
        return out
