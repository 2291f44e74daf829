"""Acceptance rules: from the target's scores at the nodes to the accepted path and the bonus token.

A rule *walks*: it yields the emitted tokens one by one, each with the tree node that held it (None for the bonus).
Scores are asked for node by node along the walk, so logits processors run exactly once per emitted token with exactly
the emitted prefix, as in plain decoding: stateful processors stay right, and rejected branches cost nothing. The
engine stops the walk at a stop token, so nothing behind one is ever computed, let alone emitted. Rules that look
``ahead`` are the exception: they need every node's scores before the first token is out.

Here are the rules that take any tree, ``match`` and ``coupled``; those that test children drawn from the draft are in
:mod:`treespec.rejection` and :mod:`treespec.traversal`. ALGORITHMS §2; greedy is the limit T -> 0 of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from treespec.chance import Chance, Draws
from treespec.errors import InputError
from treespec.noise import PositionNoise, check_seed
from treespec.policies.base import Policy
from treespec.rejection import Hybrid, Rrs, SampledRule
from treespec.sampling import Sampler
from treespec.traversal import Block, Traversal
from treespec.tree import TokenTree

Scores = Callable[[int], Tensor]  # node index -> processed float32 scores [V] for the token after it


class Rule(Protocol):
    """How target scores and a tree become tokens.

    Attributes:
        name: on the command line.
        ahead: the scores of all nodes, each with its own prefix, are needed before the first token is emitted.
    """

    name: str
    ahead: bool

    def walk(self, tree: TokenTree, scores: Scores, position: int) -> Iterator[tuple[int, int | None]]:
        """Yield ``(token, node holding it or None)``; None ends the walk.

        Args:
            tree: the verified tree.
            scores: processed target scores by node, asked for in walking order.
            position: absolute position of the first token to emit.
        """

    @property
    def noise(self) -> Callable[[int], Tensor] | None:
        """Gumbel noise by position that the draft should rank its children with, if any."""

    @property
    def sampler(self) -> Sampler | None:
        """Draws the children of every node; None leaves the draft's first ones."""

    def check(self, policy: Policy) -> None:
        """Refuse a policy that would bias the output.

        Raises:
            PolicyError: saying why.
        """


class TableRule(Rule, Protocol):
    """A rule that does not look ahead: what it does at a node depends on that node and on chance alone."""

    def table(self, tree: TokenTree, scores: Tensor, position: int) -> Tensor:
        """What :meth:`choose_from` needs of every node, ``[n, C]`` float64, computed where the scores lie.

        Nothing is read off the device here.

        Args:
            tree: n nodes, the root first.
            scores: ``[n, V]`` float32, processed.
            position: absolute position of the token after the root.
        """

    def choose_from(self, row: list[float], children: list[int]) -> int:
        """The token at a node, from its row of the table and the tokens of its children, in drawing order."""


def follow(tree: TokenTree, token_at: Callable[[int, int], int], position: int) -> Iterator[tuple[int, int | None]]:
    """Walk down a tree along known choices: see :meth:`Rule.walk`.

    Args:
        tree: the verified tree.
        token_at: (node, absolute position) -> the token there.
        position: of the first token.
    """
    children, node = tree.children(), 0
    while True:
        token = token_at(node, position)
        child = children[node].get(token)
        yield token, child
        if child is None:
            return
        node, position = child, position + 1


class Match:
    """Draw y from the target at the node; descend if a child holds y, else y is the bonus token.

    Exact for any tree that was built without looking at the target's randomness. Greedy when ``chance`` is None.

    Args:
        chance: the target's draws, or None for greedy decoding.
    """

    name = "match"
    ahead = False

    def __init__(self, chance: Chance | None) -> None:
        self.chance = chance

    def choose(self, scores: Tensor, position: int) -> int:
        """The target's token."""
        return int(scores.argmax()) if self.chance is None else self.chance.token(scores.softmax(-1))

    def walk(self, tree: TokenTree, scores: Scores, position: int) -> Iterator[tuple[int, int | None]]:
        """Follow the target's own choices through the tree."""
        return follow(tree, lambda node, at: self.choose(scores(node), at), position)

    def table(self, tree: TokenTree, scores: Tensor, position: int) -> Tensor:
        """The tokens at all nodes; those of one walk are independent of the others."""
        if self.chance is None:
            return scores.argmax(-1, keepdim=True).double()
        return self.chance.ranking(scores.double().softmax(-1), 1).double()

    def choose_from(self, row: list[float], children: list[int]) -> int:
        """The token that was chosen on the device."""
        return int(row[0])

    @property
    def noise(self) -> Callable[[int], Tensor] | None:
        """None: the draft must not know the target's draws."""
        return None

    @property
    def sampler(self) -> Sampler | None:
        """None: children that are not drawn are as good."""
        return None

    def check(self, policy: Policy) -> None:
        """Any policy may build the tree."""


class Coupled(Match):
    """y_t = argmax(log p + g_t) with Gumbel noise g keyed by (seed, absolute position t).

    The emitted text is a function of seed, position and target alone: the same for every policy, drafter and budget,
    and for plain decoding. The draft ranks its children with the same noise, so the two tend to agree.

    Args:
        seed: 0 <= seed < 2**64.
        vocabulary: tokens of the target.
        greedy: ignore the noise.
    """

    name = "coupled"

    def __init__(self, seed: int, vocabulary: int, greedy: bool = False) -> None:
        super().__init__(None)
        self._noise = None if greedy else PositionNoise(seed, vocabulary)

    def choose(self, scores: Tensor, position: int) -> int:
        """The token of largest perturbed score; a constant shift of the scores changes nothing."""
        if self._noise is not None:
            scores = scores + self._noise.gumbel(position).to(scores.device)
        return int(scores.argmax())

    def table(self, tree: TokenTree, scores: Tensor, position: int) -> Tensor:
        """The tokens at all nodes; those of one depth share their noise."""
        if self._noise is not None:
            most = int(tree.depth.max())
            noise = torch.stack([self._noise.gumbel(position + depth) for depth in range(most + 1)])  # [depths, V]
            scores = scores + noise.to(scores.device)[tree.depth.to(scores.device)]
        return scores.argmax(-1, keepdim=True).double()

    @property
    def noise(self) -> Callable[[int], Tensor] | None:
        """The very noise that the target is perturbed with."""
        return None if self._noise is None else self._noise.gumbel


SAMPLED: dict[str, type[SampledRule]] = {cls.name: cls for cls in (Rrs, Hybrid, Block, Traversal)}
RULES = ("match", "coupled", *SAMPLED)


def check_rules(names: Sequence[str]) -> None:
    """Refuse names that are no rules, or none.

    Raises:
        InputError: naming them.
    """
    unknown = [name for name in names if name not in RULES]
    if unknown or not names:
        raise InputError(f"unknown acceptance rule {', '.join(unknown) or '(none)'!r}; known: {', '.join(RULES)}")


def make_rule(name: str, *, sample: bool, seed: int | None, vocabulary: int) -> Rule:
    """A rule by name.

    Args:
        name: one of :data:`RULES`.
        sample: draw from the target; False is greedy, where all rules are one.
        seed: of the draws; None takes one from torch's global generator, as transformers' own sampling does.
        vocabulary: tokens of the target.

    Raises:
        InputError: for an unknown rule or a bad seed.
    """
    check_rules([name])
    if seed is not None:
        check_seed(seed)
    if not sample:
        return Coupled(0, vocabulary, greedy=True) if name == "coupled" else Match(None)
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    if name == "coupled":
        return Coupled(seed, vocabulary)
    chance = Draws(seed)
    return SAMPLED[name](chance, Draws(seed, stream=1)) if name in SAMPLED else Match(chance)
