"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from treespec.policies.base import Policy
from treespec.sampling import Sampler
from treespec.tree import TokenTree

Shape = Callable[[Tensor, Tensor], Tensor]  # (ids [F, L], logits [F, V]) -> logits [F, V]
Noise = Callable[[int], Tensor]  # absolute position -> Gumbel noise [V]


@dataclass
class DraftRequest:
    """How one text is to be drafted.

    Args:
        ids: prompt token ids, padding removed.
        capacity: tokens to make room for at the start, those of one tree included; a longer text makes room as it goes.
        vocabulary: the target's; ids from it on are never proposed.
        shape: logits processors to apply to the draft's logits, or None.
        noise: Gumbel noise by absolute position for ``coupled``, or None.
        sampler: draws the children of every node, for rules that test p/q; None takes the draft's first ones. Only
            given to drafters with an attribute ``samples`` that is true: they keep the law of every expanded node on
            the tree.
    """

    ids: list[int]
    capacity: int
    vocabulary: int
    shape: Shape | None = None
    noise: Noise | None = None
    sampler: Sampler | None = None


@dataclass
class Drafted:
    """One grown tree, and what it cost: seconds of each draft forward, seconds in the policy."""

    tree: TokenTree
    forwards: list[float] = field(default_factory=list)
    prune_seconds: float = 0.0


class Drafter(Protocol):
    """Guesses trees. The text starts with ``begin`` and grows by ``commit``; ``grow`` changes nothing visible."""

    def begin(self, request: DraftRequest) -> None:
        """Start a new text; forget the old one."""

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Append tokens to the text.

        Args:
            path: indices (in the last grown tree) of the accepted nodes, root excluded; their tokens come first.
            tokens: everything that was appended: the accepted tokens, then the bonus token.
        """

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """Grow a tree whose root is the text's last token."""

    @property
    def depth_room(self) -> int:
        """Levels that the draft's own context still allows."""


class FeatureDrafter(Drafter, Protocol):
    """A drafter that also reads the target's last hidden states, those of the verification itself."""

    def read(self, hidden: Tensor, start: int | None = None) -> None:
        """Take hidden states of committed tokens, in order, after each ``commit``: those of every token but the last.

        Args:
            hidden: ``[n, H]``.
            start: index of the first of these tokens, at the first call: earlier ones are unknown (their keys and
                values came from an earlier turn).
        """
