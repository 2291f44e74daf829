"""The tree that gives the most tokens per second on a cost curve. ALGORITHMS §1.2."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from treespec.calibration import Calibration
from treespec.cost import CostModel, load_cost
from treespec.errors import PolicyError
from treespec.policies.base import (
    Decision,
    Frontier,
    Observation,
    Policy,
    largest,
    number,
    over_budget,
    present_children,
    reasons,
    top_nodes,
    whole,
)
from treespec.policies.price import NodePrice
from treespec.policies.space import Choice, Space, Whole


@dataclass(frozen=True)
class Throughput(Policy):
    """Verify, and draft, as long as it pays: the largest expected tokens over seconds of a step.

    With P^ the calibrated path probabilities, the n largest of them give E = 1 + their sum expected tokens for
    T = drafted levels + verify(1 + n) + overhead seconds. All n are compared by one pass over prefix sums, which is
    exact for what was drafted, steps of the curve included; so the answer may be a bushy tree, a chain, or nothing.
    Before another level is drafted, its children are unknown; each node's best child is expected to keep the share
    that best children kept on the level just seen, and the level is drafted, over the best w nodes, if the choice
    among what is there and what is expected beats the choice among what is there. This looks one level ahead.
    If a draft that is right as often as it can be (``hit_rates`` of the calibration, always without one) would not pay
    at all, no draft forward is made.

    Assumes that P^ is calibrated and that the curve is this machine's. The largest E / T of every step is not quite
    the largest sum of tokens over sum of seconds of a text: with ``rate`` > 0 each step takes the largest
    E - rate * T, which is, when ``rate`` is the throughput reached (Dinkelbach).
    Cost per step: up to ``max_depth`` draft forwards, one target forward over at most budget + 1 nodes.

    Args:
        cost: a cost model, or the name or file of one (:func:`treespec.cost.load_cost`).
        calibration: a calibration or its file; ``"none"`` takes the draft's probabilities as they are.
        max_depth: most draft levels.
        budget: most candidate nodes that the search may answer, root excluded.
        width: most children of a node.
        rate: tokens per second that a second is worth; 0 lets every step maximise its own ratio; ``"auto"`` takes the
            recent steps' measured rate.
        spread: a soft width limit: a node of H bits gets at most ceil(spread * 2^H) children; 0 is off.
    """

    name: ClassVar[str] = "throughput"
    source: ClassVar[str] = (
        "this project; the ratio by Dinkelbach 1967, the prefix of largest P as in DySpec and OPT-Tree"
    )
    space: ClassVar[Space] = {
        "max_depth": Whole(1, 10),
        "budget": Whole(1, 64, log=True),
        "width": Whole(1, 16),
        "spread": Choice((0.0, 0.0, 0.5, 1.0, 2.0)),
    }

    cost: CostModel | str = "measured"
    calibration: Calibration | str = "none"
    max_depth: int = 8
    budget: int = 64
    width: int = 16
    rate: float | str = 0.0
    spread: float = 0.0
    # [budget + 1] seconds of a step without its draft, by candidates; [budget + 1] seconds of a draft forward, by nodes
    _verify: Tensor = field(init=False, repr=False, compare=False)
    _draft: Tensor = field(init=False, repr=False, compare=False)
    _map: Calibration = field(init=False, repr=False, compare=False)
    _levels: int = field(init=False, repr=False, compare=False)
    _seen: NodePrice = field(default_factory=NodePrice, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole("max_depth", self.max_depth, 1, 64)
        whole("budget", self.budget, 1, 1024)
        whole("width", self.width, 1, 1024)
        if self.rate != "auto":
            if isinstance(self.rate, str):
                raise PolicyError(
                    f"rate must be a number of tokens per second, 0 or more, or 'auto'; got {self.rate!r}"
                )
            number("rate", self.rate, 0, 1e9)
        number("spread", self.spread, 0, 64)
        cost = load_cost(self.cost) if isinstance(self.cost, str) else self.cost
        plain = Calibration() if self.calibration == "none" else self.calibration
        sizes = range(self.budget + 1)
        verify = [cost.verify(1 + n) + cost.overhead for n in sizes]
        object.__setattr__(self, "_verify", torch.tensor(verify, dtype=torch.float64))
        draft = [cost.draft(w) if w else 0.0 for w in sizes]  # a batch's tree that has stopped expands nothing
        object.__setattr__(self, "_draft", torch.tensor(draft, dtype=torch.float64))
        object.__setattr__(self, "_map", Calibration.load(plain) if isinstance(plain, str) else plain)
        object.__setattr__(self, "_levels", self.max_depth if self._can_pay() else 0)

    def _can_pay(self) -> bool:
        """Whether some chain that is right as often as a tree can be beats plain decoding."""
        expected, reach = [1.0], 1.0
        for depth in range(min(self.max_depth, self.budget)):
            reach *= self._map.hit_rate(depth)
            expected.append(expected[-1] + reach)
        chain = torch.tensor(expected, dtype=torch.float64)
        seconds = self._verify[: len(expected)] + self._draft[1] * torch.arange(len(expected))
        return int(self._worth(chain, seconds).argmax()) > 0

    @property
    def levels(self) -> int:
        """Most draft levels; 0 where drafting cannot pay."""
        return self._levels

    @property
    def current_rate(self) -> float:
        """Tokens that a second is worth; 0 where every step maximises its own ratio."""
        return self._seen.rate if isinstance(self.rate, str) else float(self.rate)

    def _worth(self, tokens: Tensor, seconds: Tensor) -> Tensor:
        """What a step is to maximise."""
        return tokens - self.current_rate * seconds if self.current_rate > 0 else tokens / seconds

    def _best(self, score: Tensor, drafting: Tensor) -> tuple[Tensor, Tensor]:
        """The best prefix of the most probable nodes.

        Args:
            score: ``[..., N]`` log of P^ in any order, -inf where none.
            drafting: ``[...]`` seconds of the draft forwards.

        Returns:
            ``[...]`` worth, and ``[...]`` number of candidates; of equals the smallest.
        """
        most = min(self.budget, score.shape[-1])
        best = score.double().topk(most, dim=-1).values.exp()
        tokens = torch.nn.functional.pad(1 + best.cumsum(-1), (1, 0), value=1.0)  # [..., most + 1]
        worth = self._worth(tokens, drafting[..., None] + self._verify[: most + 1].to(score.device))
        found = worth.max(-1)
        return found.values, found.indices

    def decide(self, frontier: Frontier) -> Decision:
        """Pool the children that could be verified; go on from the best of them while another level should pay."""
        proposed = present_children(frontier, self._limit(frontier))
        calibrated = self._map.apply(frontier.depth + 1, frontier.child_logp, frontier.entropy[..., None])
        score = frontier.score[..., None] + calibrated  # [B, F, K]
        over = over_budget(frontier, score, proposed, self.budget)
        kept = proposed & ~over
        return Decision(reasons(proposed, over_budget=over), self._go_on(frontier, score, kept), score)

    def _limit(self, frontier: Frontier) -> Tensor | int:
        if self.spread == 0:
            return self.width
        soft = torch.nan_to_num(self.spread * frontier.entropy.exp2(), posinf=self.width)
        return soft.ceil().clamp(1, self.width)[..., None]

    def _go_on(self, frontier: Frontier, score: Tensor, kept: Tensor) -> Tensor:
        """``[B, F, K]`` bool: the nodes of the next draft forward, none where it should not pay."""
        if frontier.depth + 1 >= self._levels:
            return torch.zeros_like(kept)
        drafting, draft = self._drafting(frontier.drawn), self._draft.to(score.device)
        score = score.masked_fill(~kept, -torch.inf)
        new = score.flatten(1)
        pool = torch.cat([frontier.pool, new], dim=-1)  # [B, N]
        level = new.topk(min(self.budget, new.shape[-1]), dim=-1).values  # [B, M], best first
        expected = level + self._kept_share(frontier, score)
        # W widths of the next forward; more of them find hardly better ones
        width = torch.tensor(sorted({min(4**i, level.shape[1]) for i in range(6)}, reverse=True), device=score.device)
        within = torch.arange(level.shape[1], device=score.device) < width[:, None]  # [W, M]
        count = (level > -torch.inf).sum(-1, keepdim=True).minimum(width)  # [B, W]
        shown = expected[:, None].masked_fill(~within, -torch.inf)
        both = torch.cat([pool[:, None].expand(-1, len(width), -1), shown], dim=-1)  # [B, W, N + M]
        worth, size = self._best(both, drafting[:, None] + draft[count])
        # of equals the widest, which comes first: it costs nothing more, and one of its nodes may surprise
        worth, at = worth.masked_fill(size == 0, -torch.inf).max(-1)
        size, both = size.gather(-1, at[:, None]), both[torch.arange(len(at)), at]  # [B, 1], [B, N + M]
        edge = both.sort(dim=-1, descending=True).values.gather(-1, (size - 1).clamp(min=0))
        pays = (worth > self._best(pool, drafting)[0])[:, None]
        # a node that would not be verified has no children that would
        going = largest(new, kept.flatten(1), width[at][:, None]) & (new >= edge) & pays
        return going.view_as(kept)

    def _kept_share(self, frontier: Frontier, score: Tensor) -> Tensor:
        """``[B, 1]`` log of the share of the frontier's P^ that its best children kept."""
        above = frontier.score.masked_fill(~frontier.alive, -torch.inf).logsumexp(-1, keepdim=True)
        share = (score.amax(-1).logsumexp(-1, keepdim=True) - above).clamp(max=0.0)
        return share.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a tree of the batch that has stopped

    def _drafting(self, drawn: Tensor) -> Tensor:
        """``[B]`` seconds of the draft forwards so far."""
        return self._draft.to(drawn.device)[drawn.clamp(max=self.budget)].sum(-1)

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """The prefix of largest P^ that is worth most, now that the draft forwards are paid for."""
        candidates = score.masked_fill(~kept, -torch.inf)[:, 1:]
        _, size = self._best(candidates, self._drafting(drawn))
        return top_nodes(score, kept, size[:, None])

    def after_step(self, seen: Observation) -> Throughput:
        """With ``rate="auto"``: learn what a second is worth from the step just measured."""
        if not isinstance(self.rate, str):
            return self
        new = copy.copy(self)
        object.__setattr__(new, "_seen", self._seen.learn(seen))
        return new
