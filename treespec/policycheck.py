"""Is a policy of one's own sound, and is it any good? What the package promises of its own policies, asked of any.

For whoever writes a policy, before it meets a model. A finding says what was looked at and what was seen; whatever the
policy raises becomes a finding too. Passing is evidence, not proof: toys and one trace are looked at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from torch import Tensor

from treespec.cost import CostModel, load_cost
from treespec.exactness import drawn_tree, emitted_law, plain_law, total_variation
from treespec.pairs import load_pair
from treespec.policies import Policy
from treespec.policies.base import Frontier
from treespec.scoring import priced, score
from treespec.search import TRUNCATED
from treespec.trace import Trace, replay
from treespec.trace.grown import Grown
from treespec.trace.regrow import regrow
from treespec.tree import Reason
from treespec.verify import Match

PROMPTS = ("a dog ran", "the cat sat on the mat", "a tree")
NEW_TOKENS = 32
EXACT = 1e-12  # of a total variation: rounding
FEW = 24  # positions that are also grown one by one
DEPTH, VOCABULARY = 2, 3  # of the enumeration


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what, whether it is as it must be, and what was seen."""

    what: str
    passed: bool
    seen: str


@dataclass(frozen=True)
class Report:
    """All findings.

    Args:
        policy: its command-line form.
        findings: in order; a policy is sound if all passed.
        speedup: over plain decoding on the trace; None if it could not be replayed.
        best: the fastest rival's command-line form, and its speed-up.
    """

    policy: str
    findings: tuple[Finding, ...]
    speedup: float | None
    best: tuple[str, float]

    @property
    def sound(self) -> bool:
        """Whether all findings passed."""
        return all(found.passed for found in self.findings)

    def __str__(self) -> str:
        lines = [f"{'pass' if f.passed else 'FAIL'}  {f.what}: {f.seen}" for f in self.findings]
        return "\n".join([self.policy, *lines, self._standing()])

    def _standing(self) -> str:
        name, fastest = self.best
        if self.speedup is None:
            return "not replayed, so not compared"
        share = self.speedup / fastest
        return f"{self.speedup:.3f} times plain decoding, {share:.1%} of the best rival's {fastest:.3f} ({name})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✓ pass' if f.passed else '✗ FAIL'}</td>"
            f'<td style="text-align:left">{escape(f.what)}</td><td style="text-align:left">{escape(f.seen)}</td></tr>'
            for f in self.findings
        )
        return f"<p><b>{escape(self.policy)}</b></p><table>{rows}</table><p>{escape(self._standing())}</p>"


def check_policy(
    policy: Policy, trace: Trace, cost: CostModel | str = "measured", rivals: Sequence[Policy] = ()
) -> Report:
    """Look at a policy from all sides.

    Args:
        policy: with its parameters set.
        trace: it is replayed on.
        cost: seconds by nodes.
        rivals: to compare with, besides plain decoding.

    Returns:
        Soundness (:attr:`Report.sound`) and speed are separate: a slow policy may be sound.
    """
    at = priced(load_cost(cost) if isinstance(cost, str) else cost, trace)

    @functools.cache
    def grown() -> Grown:
        return replay(trace, policy, at).grown

    looks: dict[str, Callable[[], tuple[bool, str]]] = {
        "greedy text on the toy equals plain decoding's": lambda: _same_text(policy, do_sample=False),
        "coupled text on the toy equals plain decoding's": lambda: _same_text(
            policy, do_sample=True, rule="coupled", seed=3
        ),
        "the law of the text, every outcome enumerated": lambda: _law(policy),
        "the likelier of two siblings is kept first": lambda: _monotone(policy),
        "every node's parent is verified with it": lambda: _closed(grown(), trace),
        "the budget holds": lambda: _within_budget(policy, grown()),
        "a batch of trees is the same as one by one": lambda: _batched(policy, trace),
        "its trees lie inside the recording": lambda: _inside(grown()),
    }
    findings = tuple(Finding(what, *_attempt(look)) for what, look in looks.items())
    own = _attempt(lambda: (True, repr(score(trace, policy, at).speedup())))
    best = ("plain", 1.0)
    for rival in rivals:
        best = max(best, (rival.spec(), score(trace, rival, at).speedup()), key=lambda entry: entry[1])
    return Report(_spec(policy), findings, float(own[1]) if own[0] else None, best)


def _spec(policy: Policy) -> str:
    return policy.spec() if dataclasses.is_dataclass(policy) else repr(policy)


def _attempt(look: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    try:
        return look()
    except Exception as error:  # it is somebody's first draft: anything may go wrong in it, and is to be shown
        return False, f"{type(error).__name__}: {error}"


def _same_text(policy: Policy, **options: object) -> tuple[bool, str]:
    pair, drafted = load_pair("toy", "model"), 0
    for prompt in PROMPTS:
        plain = pair.generate(prompt, policy="plain", max_new_tokens=NEW_TOKENS, **options)
        own = pair.generate(prompt, policy=policy, max_new_tokens=NEW_TOKENS, **options)
        drafted += sum(len(step.tree) - 1 for step in own.steps)
        if own.tokens != plain.tokens:
            return False, f"another text after {prompt!r}"
    return True, f"{len(PROMPTS)} prompts × {NEW_TOKENS} tokens, {drafted} candidates grown"


def _table(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    def law(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 7919 + sum((t + 2) * 11**i for i, t in enumerate(path)))
        return (1.5 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)).softmax(-1)

    return law


def _law(policy: Policy) -> tuple[bool, str]:
    target, draft = _table(1), _table(2)
    grow = drawn_tree(Match, policy, draft, DEPTH)
    bias = total_variation(emitted_law(Match, grow, target, DEPTH + 1), plain_law(target, DEPTH + 1))
    return bias < EXACT, f"total variation {bias:.1e} from the target's own"


def _monotone(policy: Policy) -> tuple[bool, str]:
    generator = torch.Generator().manual_seed(0)
    width = max(policy.width, 1)
    for depth in range(min(policy.levels, 4)):
        shape = (8, 5)
        logp = torch.randn(*shape, width, generator=generator).log_softmax(-1).sort(-1, descending=True).values
        path = -2.0 * depth * torch.rand(shape, generator=generator)
        frontier = Frontier(
            depth=depth,
            log_path=path,
            entropy=4 * torch.rand(shape, generator=generator),
            child_logp=logp,
            alive=torch.ones(shape, dtype=torch.bool),
            score=path,
            pool=torch.empty(shape[0], 0),
            ranks=torch.zeros(*shape, depth, dtype=torch.long),
            drawn=torch.full((shape[0], depth + 1), shape[1]),
        )
        kept = policy.decide(frontier).reason == Reason.KEPT
        if bool((kept[..., 1:] & ~kept[..., :-1]).any()):
            return False, f"at depth {depth} a child was kept while a likelier sibling was not; a replay would be wrong"
    return True, "random levels, up to four deep"


def _closed(found: Grown, trace: Trace) -> tuple[bool, str]:
    kept = found.kept.numpy()
    step, place = np.nonzero(kept >= 0)
    node = kept[step, place]
    start = np.repeat(trace.root, np.diff(trace.root, append=len(trace.nodes["node"])))
    parent = start[node] + trace.nodes["parent"][node]
    total = len(trace.nodes["node"])
    there = np.isin(step * total + parent, step * total + node) | (trace.nodes["node"][parent] == 0)
    return bool(there.all()), f"{len(node):,} verified nodes, {int((~there).sum())} without their parent"


def _within_budget(policy: Policy, found: Grown) -> tuple[bool, str]:
    most = int(found.nodes.max()) - 1
    budget = getattr(policy, "budget", None)
    if budget is None:
        return True, f"it declares none; at most {most} candidates were verified"
    return most <= budget, f"at most {most} candidates were verified, {budget} are allowed"


def _batched(policy: Policy, trace: Trace) -> tuple[bool, str]:
    rows = torch.linspace(0, len(trace) - 1, min(FEW, len(trace))).long()
    together = regrow(trace.index, rows, policy)
    wrong = []
    for i, row in enumerate(rows):
        alone = regrow(trace.index, rows[i : i + 1], policy)
        if bool(together.at(torch.tensor([i])).differs(alone)):
            wrong.append(int(row))
    return not wrong, f"{len(rows)} positions" + (
        f", position {wrong[0]} differs: does it keep a state?" if wrong else ""
    )


def _inside(found: Grown) -> tuple[bool, str]:
    share = float(found.truncated.double().mean())
    return share <= TRUNCATED, f"{share:.1%} of the steps asked for more than was recorded"
