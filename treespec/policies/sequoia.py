"""A static tree fitted to measured acceptance: Sequoia."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from treespec.errors import PolicyError
from treespec.files import read_json, reals
from treespec.policies.base import Decision, Frontier, Policy, present_children, reasons, whole
from treespec.policies.shape import StaticTree, best_tree
from treespec.policies.space import Space, Whole
from treespec.prompts import data_dir

EMBEDDED = "embedded"  # the acceptance vector in data/sequoia.json


def read_acceptance(where: str) -> tuple[float, ...]:
    """The acceptance vector of a JSON file with ``acceptance``, or of ``"embedded"``.

    Raises:
        InputError: if there is no such file or it is not JSON.
        PolicyError: if it holds no such list.
    """
    vector = read_json(data_dir() / "sequoia.json" if where == EMBEDDED else where).get("acceptance")
    try:
        return reals(vector)
    except TypeError:
        raise PolicyError(f"{where} must hold 'acceptance', a list of probabilities by rank") from None


@dataclass(frozen=True)
class Sequoia(Policy):
    """The static tree that is best for measured acceptance by rank (Chen et al. 2024, section 3).

    Assumes that a child's chance depends on its rank alone, not on depth, text or the draft's confidence; so the shape
    is fixed before the first token. The default vector is the shipped head's (``data/sequoia.json`` says how it was
    measured); :func:`treespec.policies.shape.best_size` finds the budget and depth that are fastest on a cost curve,
    the defaults here are only a middling size. A child that the draft does not have is left out with all below it.
    Cost per step: the tree's depth in draft forwards, over the nodes that have children; one target forward over at
    most budget + 1 nodes.

    Args:
        budget: most candidate nodes, root excluded.
        depth: most levels.
        acceptance: ``p[rank]``: a tuple, ``0.5/0.2/0.1`` on the command line, a JSON file with ``acceptance``, or
            ``"embedded"``.
    """

    name: ClassVar[str] = "sequoia"
    source: ClassVar[str] = "Chen et al. 2024 (Sequoia, section 3), arXiv 2402.12374"
    predictable: ClassVar[bool] = True
    space: ClassVar[Space] = {"budget": Whole(1, 64, log=True), "depth": Whole(1, 10)}

    budget: int = 16
    depth: int = 6
    acceptance: tuple[float, ...] | str = EMBEDDED
    tree: StaticTree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1, 1024)
        whole("depth", self.depth, 1, 64)
        given = self.acceptance
        if isinstance(given, str) and all(_is_number(part) for part in given.split("/")):
            given = tuple(map(float, given.split("/")))
        vector = read_acceptance(given) if isinstance(given, str) else tuple(given)
        if not vector or not all(math.isfinite(p) and 0 <= p <= 1 for p in vector) or sum(vector) > 1 + 1e-6:
            raise PolicyError(f"acceptance must be probabilities by rank that sum to at most 1; got {vector}")
        object.__setattr__(self, "acceptance", given if isinstance(given, str) else vector)
        object.__setattr__(self, "tree", best_tree(vector, self.budget, self.depth))

    @property
    def levels(self) -> int:
        """Levels of the best tree, which may be fewer than allowed."""
        return len(self.tree.drawn)

    @property
    def width(self) -> int:
        """Children of the widest node."""
        return self.tree.slots.shape[1]

    @property
    def shape(self) -> StaticTree:
        """The best tree."""
        return self.tree

    def decide(self, frontier: Frontier) -> Decision:
        """Follow every node's sibling ranks down the shape; its children there are kept."""
        slots = self.tree.slots.to(frontier.ranks.device)
        nowhere = len(slots) - 1
        here = torch.zeros(frontier.log_path.shape, dtype=torch.long, device=slots.device)  # [B, F], the root's slot
        for level in range(frontier.depth):
            here = slots[here, frontier.ranks[..., level]]
        below = slots[here]  # [B, F, width]
        missing = self.width - frontier.child_logp.shape[-1]  # of the vocabulary
        below = torch.nn.functional.pad(below, (0, -missing), value=nowhere)
        kept = present_children(frontier, self.width) & (below < nowhere)
        return Decision(reasons(kept), kept & (slots[below] < nowhere).any(-1))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
