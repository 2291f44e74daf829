"""The one visual language of every picture: what a mark means, its colour (Okabe-Ito) and its shape, and where it goes.

Static SVG (:mod:`treespec.draw`) and live figures (:mod:`treespec.plots`) draw from here. Every meaning has a colour
*and* a shape, so that no reader has to tell colours apart; inks are middling, so that they read in light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass

import igraph
import numpy as np
from torch import Tensor

from treespec.policies.base import Policy
from treespec.tree import Reason, TokenTree, visible

GREY, BLUE, GREEN = "#999999", "#3B8FD0", "#009E73"
VERMILION, PURPLE, ORANGE, LIGHT = "#D55E00", "#CC79A7", "#E69F00", "#BBBBBB"
SKY, YELLOW, OCHRE, DARK = "#56B4E9", "#F0E442", "#B09E00", "#444444"
LABELS_UP_TO = 80  # nodes; beyond, the text is on hover only
CUT = 10  # characters of a label


@dataclass(frozen=True)
class Mark:
    """How a thing is drawn.

    Args:
        sign: in running text and SVG.
        symbol: plotly's name of the shape.
        colour: of the mark, or of its outline where it is hollow.
        words: what it means.
    """

    sign: str
    symbol: str
    colour: str
    words: str

    @property
    def ink(self) -> str:
        """The colour for signs in text, where there is no outline to hold a light one."""
        return OCHRE if self.colour == YELLOW else self.colour


ROOT = Mark("■", "square", GREY, "root: the last committed token")
KEPT = Mark("○", "circle-open", BLUE, "verified, not accepted")
ACCEPTED = Mark("●", "circle", GREEN, "accepted")
BONUS = Mark("★", "star", YELLOW, "bonus: the target's own token")
DEAD = {
    Reason.BELOW_TAU: Mark("×", "x-thin", VERMILION, "below τ"),
    Reason.ENTROPY_CAP: Mark("━", "line-ew", PURPLE, "parent too uncertain"),
    Reason.OVER_BUDGET: Mark("▽", "triangle-down", ORANGE, "over budget"),
    Reason.TOO_DEEP: Mark("•", "circle", LIGHT, "too deep"),
    Reason.NOT_PROPOSED: Mark("·", "circle", LIGHT, "never asked for"),
}

# one colour and shape per strategy, in every figure of every notebook; what the article does not name is a rival
STRATEGIES = {
    "plain": Mark("■", "square", GREY, "plain decoding"),
    "linear": Mark("▲", "triangle-up", SKY, "A: a chain"),
    "uniform": Mark("▼", "triangle-down", ORANGE, "B: uniform tree"),
    "threshold": Mark("◆", "diamond", PURPLE, "C: fixed threshold"),
    "dynamic": Mark("●", "circle", GREEN, "D: entropy and threshold"),
    "bestfirst": Mark("⬟", "pentagon", BLUE, "best-first"),
    "throughput": Mark("★", "star", VERMILION, "throughput (ours)"),
    "eagle2": Mark("⬢", "hexagon", YELLOW, "EAGLE-2"),
    "opttree": Mark("✚", "cross", YELLOW, "OPT-Tree"),
    "sequoia": Mark("⬣", "hexagon2", YELLOW, "Sequoia"),
    "specinfer": Mark("⬡", "octagon", YELLOW, "SpecInfer"),
}
OTHER = Mark("◇", "diamond-tall", LIGHT, "another")  # the hindsight bound


def strategy_mark(policy: str | Policy) -> Mark:
    """The mark of a policy or of its command-line form."""
    name = policy.name if isinstance(policy, Policy) else policy.partition(":")[0]
    return STRATEGIES.get(name, OTHER)


def node_mark(tree: TokenTree, node: int) -> Mark:
    """The mark of a node."""
    why = Reason(int(tree.reason[node]))
    if node == 0:
        return ROOT
    if why != Reason.KEPT:
        return DEAD[why]
    return ACCEPTED if node in tree.accepted else KEPT


def short(text: str, most: int = CUT) -> str:
    """The text, cut with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def hover_text(tree: TokenTree, node: int) -> str:
    """All that is known of a node, in one sentence, not escaped."""
    bits = float(tree.entropy[node])
    entropy = "" if bits != bits else f", entropy here {bits:.2f} bits"
    if node == 0:
        return f"{tree.label(0)} ({ROOT.words}){entropy}"
    probability = f"p = {float(tree.logp[node].exp()):.3f}, path P = {float(tree.log_path[node].exp()):.4f}"
    why = Reason(int(tree.reason[node]))
    fate = "accepted" if node in tree.accepted else ("verified" if why == Reason.KEPT else f"pruned: {DEAD[why].words}")
    return f"{tree.label(node)}: {probability}{entropy}; {fate}"


def places(tree: TokenTree, bonus: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Where nodes lie: ``[n]`` columns from 0, neighbours one apart (Reingold-Tilford), and ``[n]`` depths.

    Args:
        tree: to lay out.
        bonus: one place more, the last, for the bonus token below the last accepted node.
    """
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    if bonus:
        parent.append(last_accepted(tree))
        depth.append(depth[parent[-1]] + 1)
    graph = igraph.Graph(n=len(parent), edges=[(p, i) for i, p in enumerate(parent) if p >= 0])
    x = np.array([point[0] for point in graph.layout_reingold_tilford(root=[0])])
    return x - x.min(), np.array(depth)


def last_accepted(tree: TokenTree) -> int:
    """The node that the bonus token follows: the end of the accepted path, or the root."""
    return max(tree.accepted, key=lambda i: int(tree.depth[i]), default=0)


def token_text(tree: TokenTree, token: int) -> str:
    """A token that may be no node of the tree, as its labels are shown: by its tokenizer, else by its id."""
    same = [i for i in range(len(tree)) if int(tree.token[i]) == token]
    if same:
        return tree.label(same[0])
    return str(token) if tree.tokenizer is None else visible(str(tree.tokenizer.decode([token])))


def bonus_text(tree: TokenTree, token: int) -> str:
    """What is to be said of the bonus token, not escaped."""
    said = f"{token_text(tree, token)}: {BONUS.words}"
    guess = tree.children()[last_accepted(tree)].get(token)
    if guess is None or tree.reason[guess] == Reason.KEPT:
        return said
    return f"{said}; the draft had guessed it, pruned: {DEAD[Reason(int(tree.reason[guess]))].words}"


def chances(logs: Tensor) -> np.ndarray:
    """``[n]`` probabilities in [0, 1] from their logs, for sizes and shades; what is no number counts as 0."""
    return np.nan_to_num(np.exp(np.minimum(logs.numpy(), 0.0)), nan=0.0)


def level_entropy(tree: TokenTree) -> list[float]:
    """Entropy in bits that every draft step met: the P-weighted mean over the nodes it expanded; NaN where unknown.

    Draft step d expands nodes of depth d - 1; it is the weight that ``scope="level"`` of the article's pruner takes.
    """
    depth, bits = tree.depth.numpy(), tree.entropy.numpy()
    weight = chances(tree.log_path)
    known = np.isfinite(bits)
    out = []
    for level in range(int(depth.max())):
        here = (depth == level) & known
        out.append(float(np.average(bits[here], weights=weight[here] + 1e-30)) if here.any() else float("nan"))
    return out
