"""What is recorded at one position, and how: a tape in the drafter's place, and the policy that keeps whatever counts.

The target decodes plainly, by the one engine there is, with a :class:`Tape` as its drafter. Once the text is known the
tape is played to the real drafter, token by token with the hidden states that belong to them, and at every position
the drafter grows a :class:`Supertree`. So recorded probabilities are those that the live engine would see, but for the
rounding of float32 forwards over other numbers of rows; an n-gram draft has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from treespec.drafters.base import Drafted, Drafter, DraftRequest, FeatureDrafter
from treespec.policies.base import Decision, Frontier, Policy, over_budget, present_children, reasons
from treespec.trace.schema import MOST, Caps
from treespec.tree import TokenTree


@dataclass(frozen=True)
class Supertree(Policy):
    """All that a policy could ask for at one position.

    Kept are the children above the floor that are among the ``nodes`` most probable of the levels so far: the best
    nodes of *every* depth limit, and of several limits of children per node. Beside them, whatever their probability:
    the draft's first choices (so a chain is exact) and the true continuation. Everything that is kept is expanded.

    Args:
        caps: how far the tree reaches.
        truth: the tokens that follow the root.

    Attributes:
        offered: children that the draft had at each expanded node, in the order of the nodes; one tree per policy.
    """

    name: ClassVar[str] = "supertree"

    caps: Caps = field(default_factory=Caps)
    truth: tuple[int, ...] = ()
    offered: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _ranks: list[int] = field(default_factory=list, init=False, repr=False, compare=False)  # of the true nodes so far
    _pools: list[Tensor] = field(init=False, repr=False, compare=False)  # best nodes so far, by width

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pools", [torch.empty(1, 0) for _ in self.caps.widths])

    @property
    def levels(self) -> int:
        """Most levels."""
        return self.caps.depth

    @property
    def width(self) -> int:
        """Most children of a node."""
        return self.caps.width

    def decide(self, frontier: Frontier) -> Decision:
        """Keep, and go on from, what could matter to some policy."""
        self.offered.extend((frontier.child_logp > -torch.inf).sum(-1)[0].tolist())
        proposed = present_children(frontier, self.width)
        path = frontier.child_log_path()
        above = proposed & (path >= (math.log(self.caps.floor) if self.caps.floor > 0 else -math.inf))
        rank = torch.arange(path.shape[-1])
        kept = torch.zeros_like(proposed)
        for i, width in enumerate(self.caps.widths):
            inside = above & (frontier.ranks < width).all(-1, keepdim=True) & (rank < width)
            best = inside & ~over_budget(replace(frontier, pool=self._pools[i]), path, inside, self.caps.nodes)
            self._pools[i] = torch.cat([self._pools[i], path[best][None]], dim=-1)
            kept |= best
        kept[..., 0] |= (frontier.ranks == 0).all(-1) & proposed[..., 0]
        kept |= proposed & self._true(frontier)
        return Decision(reasons(kept), kept)

    def _true(self, frontier: Frontier) -> Tensor:
        """``[1, F, K]`` bool: the child that holds the next token of the text, if it is there."""
        depth = frontier.depth
        assert frontier.child_token is not None
        if len(self._ranks) < depth or depth >= len(self.truth):
            return torch.zeros_like(frontier.child_token, dtype=torch.bool)
        here = (frontier.ranks == torch.tensor(self._ranks[:depth], dtype=torch.long)).all(-1)  # [1, F]
        found = here[..., None] & (frontier.child_token == self.truth[depth]) & (frontier.child_logp > -torch.inf)
        self._ranks.extend(found.nonzero()[:1, 2].tolist())
        return found


@dataclass
class Turn:
    """What a drafter is told after one token of plain decoding, and how deep it may then guess."""

    token: int
    hidden: Tensor | None = None
    start: int | None = None
    room: int = 0


class Tape:
    """A drafter that guesses nothing and remembers what it was told."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def begin(self, request: DraftRequest) -> None:
        """Remember the request; its text goes on growing, so it is copied."""
        self.request = replace(request, ids=list(request.ids))

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Remember the token."""
        self.turns.append(Turn(tokens[0]))

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """Guess nothing."""
        self.turns[-1].room = min(max_depth, MOST)
        return Drafted(TokenTree.root_only(self.turns[-1].token))

    @property
    def depth_room(self) -> int:
        """No limit of its own."""
        return MOST

    def play(self, drafter: Drafter, caps: Caps, last: int) -> Iterator[tuple[TokenTree, int, list[int]]]:
        """The supertree, the room and the children offered to each expanded node, at every position.

        Args:
            drafter: the real one.
            caps: of the supertrees.
            last: the text's last token, after which nothing was committed.
        """
        drafter.begin(self.request)
        text = [turn.token for turn in self.turns] + [last]
        for i, turn in enumerate(self.turns):
            drafter.commit([], [turn.token])
            if turn.hidden is not None and hasattr(type(drafter), "read"):
                cast(FeatureDrafter, drafter).read(turn.hidden, turn.start)
            room = min(turn.room, drafter.depth_room)
            if room <= 0:
                yield TokenTree.root_only(turn.token), 0, []
                continue
            truth = tuple(text[i + 1 : i + 1 + caps.depth])
            policy = Supertree(caps, truth)
            yield drafter.grow(policy, min(room, caps.depth)).tree, room, policy.offered


class FeatureTape(Tape):
    """A tape for drafters that read the target's hidden states."""

    def read(self, hidden: Tensor, start: int | None = None) -> None:
        """Remember them."""
        self.turns[-1].hidden, self.turns[-1].start = hidden, start


@dataclass(frozen=True)
class Bottomless(Policy):
    """What the engine is told while a tape runs: as deep as it likes."""

    name: ClassVar[str] = "bottomless"

    @property
    def levels(self) -> int:
        """As many as there is room for."""
        return MOST

    @property
    def width(self) -> int:
        """Nothing is ranked."""
        return 1

    def decide(self, frontier: Frontier) -> Decision:
        """Never asked."""
        raise NotImplementedError
