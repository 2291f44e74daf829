"""Texts of a toy pair, drawn with and without speculation by the live engine, and whether their laws differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from treespec.api import make_drafter
from treespec.chance import Draws
from treespec.decode import Decoding
from treespec.exactness import Path, plain_law
from treespec.model import TreeModel
from treespec.policies import Autoregressive, Policy, parse_policy
from treespec.proposals import top_k
from treespec.rejection import Rrs
from treespec.request import Request, prepare
from treespec.toy import TableModel
from treespec.verify import RULES, Rule, make_rule

WORDS = "abc"  # tokens of the toy
START = 1  # the prompt; token 0 is the padding
LENGTH = 4  # new tokens: the prefill's, then a tree of two levels and its bonus
SHOWN = 3  # of them; the first one is drawn by the prefill alone
BIASED = "biased"
TREE, CHAIN = "uniform:depth=2,width=2", "linear:gamma=2"
PLAIN_SEEDS, OWN_SEEDS = 10**9, 2 * 10**9  # samples of the two sides share no seed
LEAST = 5.0  # expected texts in a cell of the G-test; rarer texts are put together


class FirstChildren:
    """The draft's first children, though the rule believes that they were drawn."""

    def children(self, law: Tensor, widths: Tensor) -> Tensor:
        """See :class:`treespec.sampling.Sampler`."""
        return top_k(law, int(widths.max()))


class BiasedRrs(Rrs):
    """Deliberately wrong, to see a test fail: ``rrs`` over children that were *not* drawn but are the draft's first.

    Its p/q test pays for how rarely a token is proposed; a token that is proposed every time must not be paid for. So
    the draft's favourites come out too often. The engine refuses no such rule by its name: it lies about its sampler.
    """

    name = BIASED

    @property
    def sampler(self) -> FirstChildren:
        """Draws nothing."""
        return FirstChildren()


@dataclass
class Toy:
    """A target and a draft over three tokens, whose every distribution is known.

    Args:
        seed: of both tables.
    """

    seed: int = 3
    target: TableModel = field(init=False)
    draft: TableModel = field(init=False)
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.target = TableModel.random(len(WORDS), seed=self.seed, sharpness=1.2)
        self.draft = self.target.blurred(seed=self.seed + 1, noise=1.0)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH}
        self.request = prepare(self.target, torch.tensor([[START]]), **options)

    def law(self) -> dict[Path, float]:
        """Probability of every text on show, by enumeration."""
        prompt = self.request.visible
        whole = plain_law(lambda path: self.target.distribution([*prompt, *path]), LENGTH)
        shown: dict[Path, float] = {}
        for text, p in whole.items():
            shown[text[-SHOWN:]] = shown.get(text[-SHOWN:], 0.0) + p
        return dict(sorted(shown.items()))

    def sample(self, rule: str, seed: int, plain: bool = False) -> Path:
        """One text by the engine: its last :data:`SHOWN` tokens.

        Args:
            rule: one of :data:`treespec.verify.RULES`, or ``"biased"``.
            seed: of the draws.
            plain: without speculation.
        """
        policy = Autoregressive() if plain else policy_of(rule)
        owner = TreeModel.of(self.target)
        drafter = None if plain else make_drafter(self.draft, owner)
        decoding = Decoding(owner, self.request, drafter, policy, rule_of("match" if plain else rule, seed))
        for _ in decoding:
            pass
        text: list[int] = decoding.sequences[0, -SHOWN:].tolist()
        return tuple(text)


def rule_of(name: str, seed: int) -> Rule:
    """A rule by name, the biased one included."""
    if name == BIASED:
        return BiasedRrs(Draws(seed), Draws(seed, stream=1))
    return make_rule(name, sample=True, seed=seed, vocabulary=len(WORDS))


def policy_of(rule: str) -> Policy:
    """The policy that a rule is shown with: a tree where it can verify one."""
    return parse_policy(CHAIN if rule == "block" else TREE)


def g_test(counts: Mapping[Path, int], law: Mapping[Path, float]) -> float:
    """P value of the G-test of counts against a law; rare texts are put together, and 1.0 where too few are left."""
    texts = sorted(law, key=lambda text: law[text])
    expected = np.array([law[text] for text in texts]) * sum(counts.values())
    observed = np.array([counts.get(text, 0) for text in texts], dtype=float)
    rare = int(np.searchsorted(expected, LEAST))  # these first ones are summed up, and joined by the next if need be
    while 0 < rare < len(texts) and expected[:rare].sum() < LEAST:
        rare += 1
    if rare:
        expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
        observed = np.concatenate([[observed[:rare].sum()], observed[rare:]])
    if len(expected) < 2:
        return 1.0
    return float(stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def same_law(one: Mapping[Path, int], other: Mapping[Path, int]) -> float:
    """P value of the G-test that two sets of counts come from one law; rare texts are put together."""
    texts = sorted({*one, *other})
    table = np.array([[side.get(text, 0) for text in texts] for side in (one, other)], dtype=float)
    common = table.sum(axis=0) >= 2 * LEAST
    table = np.column_stack([table[:, common], table[:, ~common].sum(axis=1)])
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2 or not table.sum(axis=1).all():
        return 1.0
    return float(stats.chi2_contingency(table, correction=False, lambda_="log-likelihood").pvalue)


@dataclass
class Tally:
    """Texts drawn so far, and the p values along the way.

    Attributes:
        plain, own: counts by text, without and with speculation.
        trail: ``(samples, p against plain, p against the law)`` after each batch.
    """

    plain: Counter[Path] = field(default_factory=Counter)
    own: Counter[Path] = field(default_factory=Counter)
    trail: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Texts per side."""
        return self.own.total()

    def distance(self, law: Mapping[Path, float]) -> float:
        """Total variation of the speculative counts from a law; of sampling noise alone it is about sqrt(K / 2πN)."""
        return 0.5 * sum(abs(self.own[text] / self.samples - p) for text, p in law.items()) if self.samples else 0.0


def draw(toy: Toy, rule: str, tally: Tally, count: int, stopping: Callable[[], bool]) -> Iterator[int]:
    """Draw ``count`` texts per side into a tally, yielding after each pair; goes on where the tally ended.

    Args:
        toy: the pair.
        rule: of the speculative side.
        tally: takes them in.
        count: most texts per side.
        stopping: asked before each.
    """
    first = tally.samples
    for number in range(first, first + count):
        if stopping():
            return
        tally.plain[toy.sample(rule, PLAIN_SEEDS + number, plain=True)] += 1
        tally.own[toy.sample(rule, OWN_SEEDS + number)] += 1
        yield number + 1


CHOICES = (*RULES, BIASED)
