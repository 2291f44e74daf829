"""Exact laws of what a rule emits, by trying every random outcome: no sampling, no tolerance but rounding.

The rules, the samplers and the growth loop are the live ones. Only chance is replaced: instead of drawing, each random
question is answered in every possible way, and the answers' probabilities are multiplied. On vocabularies of three to
five tokens and trees of depth two or three that is some thousands of replays; the total variation from plain sampling
comes out at 1e-16 for an exact rule, and as the bias itself for a biased one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from treespec.chance import Chance
from treespec.drafters.growth import Growth, grow
from treespec.policies.base import Policy
from treespec.proposals import Proposals, propose, whole
from treespec.tree import TokenTree
from treespec.verify import Rule

Path = tuple[int, ...]
Table = Callable[[Path], Tensor]  # tokens after the root -> float64 probabilities [V] of the next one
MakeRule = Callable[[Chance], Rule]
GrowTree = Callable[[Chance], TokenTree]
T = TypeVar("T")


class Replay:
    """A :class:`treespec.chance.Chance` that follows a script and takes the first way out after its end.

    Args:
        script: which of the possible answers to give, question by question.

    Attributes:
        weight: probability of everything answered so far.
    """

    def __init__(self, script: list[int]) -> None:
        self.weight = 1.0
        self._script = script
        self._taken: list[tuple[int, int]] = []  # (answer, number of answers) where there was a choice

    def _choose(self, weights: list[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if len(possible) > 1:
            at = len(self._taken)
            answer = self._script[at] if at < len(self._script) else 0
            self._taken.append((answer, len(possible)))
            chosen = possible[answer]
        else:
            chosen = possible[0]
        self.weight *= weights[chosen] / sum(weights)
        return chosen

    def next_script(self) -> list[int] | None:
        """The script of the next outcome, depth first; None after the last."""
        for at in range(len(self._taken) - 1, -1, -1):
            answer, answers = self._taken[at]
            if answer + 1 < answers:
                return [a for a, _ in self._taken[:at]] + [answer + 1]
        return None

    def token(self, p: Tensor) -> int:
        """See :class:`treespec.chance.Chance`."""
        return self._choose(p.tolist())

    def coin(self, p: float) -> bool:
        """See :class:`treespec.chance.Chance`."""
        return self._choose([min(p, 1.0), max(1.0 - p, 0.0)]) == 0

    def ranking(self, law: Tensor, k: int) -> Tensor:
        """One draw after another, what was drawn taken out: equal in law to the live Gumbel top-k."""
        out = torch.full((len(law), k), -1)
        for row, weights in zip(out, law.tolist()):
            for place in range(min(k, sum(w > 0 for w in weights))):
                row[place] = chosen = self._choose(weights)
                weights[chosen] = 0.0
        return out


def outcomes(run: Callable[[Chance], T]) -> Iterator[tuple[float, T]]:
    """Every result of a random procedure, each with its probability; results may repeat.

    Args:
        run: the procedure; all its randomness must come from its argument.
    """
    script: list[int] | None = []
    while script is not None:
        chance = Replay(script)
        result = run(chance)
        yield chance.weight, result
        script = chance.next_script()


def drawn_tree(make_rule: MakeRule, policy: Policy, draft: Table, depth: int) -> GrowTree:
    """Growing a tree under a rule as the engine does it.

    Args:
        make_rule: the rule for a given chance; its sampler, if any, draws the children.
        policy: grows the tree.
        draft: the draft's distributions; sampled and tested in float64.
        depth: most levels.
    """

    def run(chance: Chance) -> TokenTree:
        sampler = make_rule(chance).sampler

        def expand(growth: Growth, nodes: list[int]) -> Proposals:
            law = torch.stack([draft(tuple(growth.path_tokens(node))) for node in nodes])
            if sampler is None:
                return propose(law.log(), policy.width)
            found = whole(law.log())
            found.law = law
            return found

        return grow(policy, 0, depth, expand, sampler)[0]

    return run


def emitted_law(make_rule: MakeRule, grow_tree: GrowTree, target: Table, length: int) -> dict[Path, float]:
    """Probability of every text of ``length`` tokens: one step, completed by plain sampling where it emits fewer.

    Args:
        make_rule: the rule for a given chance.
        grow_tree: the tree for a given chance.
        target: the target's distributions.
        length: tokens per text, at most what a step emits at most for the rule to show all of its bias.
    """
    law: dict[Path, float] = defaultdict(float)
    for tokens, weight in step_law(make_rule, grow_tree, target).items():
        for text, p in plain_law(target, length, tokens[:length]).items():
            law[text] += weight * p
    return dict(law)


def step_law(make_rule: MakeRule, grow_tree: GrowTree, target: Table) -> dict[Path, float]:
    """Probability of everything that one step can emit, bonus token included; arguments as in :func:`emitted_law`."""
    law: dict[Path, float] = defaultdict(float)
    for tree_weight, tree in outcomes(grow_tree):
        for weight, tokens in outcomes(_walk(make_rule, tree.kept()[0], target)):
            law[tokens] += tree_weight * weight
    return dict(law)


def _walk(make_rule: MakeRule, tree: TokenTree, target: Table) -> Callable[[Chance], Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist()):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return lambda chance: tuple(t for t, _ in make_rule(chance).walk(tree, lambda node: target(paths[node]).log(), 0))


def plain_law(target: Table, length: int, start: Path = ()) -> dict[Path, float]:
    """Probability of every text of ``length`` tokens that begins with ``start``, given ``start``."""
    if len(start) == length:
        return {start: 1.0}
    out: dict[Path, float] = {}
    for token, p in enumerate(target(start).tolist()):
        if p > 0:
            out.update((text, p * rest) for text, rest in plain_law(target, length, (*start, token)).items())
    return out


def total_variation(one: dict[Path, float], other: dict[Path, float]) -> float:
    """Half the summed absolute difference: the largest difference in the probability of any event."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())
