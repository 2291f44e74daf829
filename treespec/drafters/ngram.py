"""Drafting without a model: continuations of the last few tokens, found in the text itself and in a corpus.

Probabilities come from interpolated absolute discounting (Ney, Essen and Kneser 1994): each longer context takes a
discount off every count it has seen and hands that mass to the next shorter one, the shortest (one token) to a
uniform distribution over the vocabulary. So path probabilities and entropies mean something, and every pruner
works on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import torch

from treespec.drafters.base import Drafted, DraftRequest
from treespec.drafters.growth import Growth, grow
from treespec.errors import InputError
from treespec.policies.base import Policy
from treespec.proposals import Proposals

Counts = dict[tuple[int, ...], dict[int, int]]


class NgramTable:
    """Counts of next tokens after every context of 1 to ``order - 1`` tokens."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.counts: Counts = {}

    def add(self, text: Sequence[int], start: int = 0) -> None:
        """Count the tokens ``text[start:]`` after their contexts."""
        for i in range(start, len(text)):
            token = text[i]
            for n in range(1, min(self.order - 1, i) + 1):
                after = self.counts.setdefault(tuple(text[i - n : i]), {})
                after[token] = after.get(token, 0) + 1


class NgramDrafter:
    """Back-off n-grams of the text so far, on top of an optional corpus.

    Args:
        order: longest n-gram, 2 to 16; contexts have 1 to ``order - 1`` tokens.
        corpus: token-id sequences counted once, at construction; the text's own counts are added to theirs.
        discount: taken off every count, in (0, 1).
        weight: how many corpus occurrences one occurrence in the text is worth.

    Raises:
        InputError: for values out of range.
    """

    def __init__(
        self,
        order: int = 5,
        corpus: Iterable[Sequence[int]] = (),
        discount: float = 0.5,
        weight: int = 4,
    ) -> None:
        if not 2 <= order <= 16 or not 0 < discount < 1 or weight < 1:
            raise InputError(
                f"the n-gram drafter needs order 2..16, discount in (0, 1) and weight >= 1; got order={order}, "
                f"discount={discount}, weight={weight}"
            )
        self.order, self.discount, self.weight = order, discount, weight
        self.samples = True  # can draw children and tell what from
        self._corpus = NgramTable(order)
        for sequence in corpus:
            self._corpus.add(list(sequence))

    def begin(self, request: DraftRequest) -> None:
        """Start a new text and count its prompt."""
        self._request = request
        self._text = list(request.ids)
        self._table = NgramTable(self.order)
        self._table.add(self._text)

    @property
    def depth_room(self) -> int:
        """No limit: there is no context window."""
        return 1 << 30

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Append and count the tokens."""
        start = len(self._text)
        self._text += tokens
        self._table.add(self._text, start)

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """Grow a tree by look-ups; each level's time is reported like a forward's."""
        self._forwards: list[float] = []
        self._width = policy.width
        tree, seconds = grow(policy, self._text[-1], max_depth, self._expand, self._request.sampler)
        return Drafted(tree, self._forwards, seconds)

    def _expand(self, growth: Growth, nodes: list[int]) -> Proposals:
        start = perf_counter()
        if self._request.sampler is not None:
            proposals = self._laws(growth, nodes)
            self._forwards.append(perf_counter() - start)
            return proposals
        rows = [self._children(growth, node, self._width) for node in nodes]
        width = max(1, *(len(tokens) for tokens, _, _ in rows), 1)
        pad = [
            (tokens + [0] * (width - len(tokens)), logs + [-math.inf] * (width - len(logs))) for tokens, logs, _ in rows
        ]
        proposals = Proposals(
            torch.tensor([tokens for tokens, _ in pad]),
            torch.tensor([logs for _, logs in pad], dtype=torch.float32),
            torch.tensor([bits for _, _, bits in rows], dtype=torch.float32),
        )
        self._forwards.append(perf_counter() - start)
        return proposals

    def _children(self, growth: Growth, node: int, width: int) -> tuple[list[int], list[float], float]:
        """Tokens, log-probabilities (nats) and entropy (bits) of a node's continuations."""
        path = growth.path_tokens(node)
        seen, rest = self._seen(path)
        if self._request.noise is not None and seen:
            noise = self._request.noise(len(self._text) + len(path))
            order = sorted(seen, key=lambda t: -(math.log(seen[t]) + float(noise[t])))
        else:
            order = sorted(seen, key=lambda t: (-seen[t], t))
        best = order[:width]
        return best, [math.log(seen[t]) for t in best], entropy_bits(seen, rest, self._request.vocabulary)

    def _seen(self, path: list[int]) -> tuple[dict[int, float], float]:
        """Probabilities of the tokens seen before behind a path of the tree, and the mass of all others."""
        reach = self.order - 1
        seen, rest = self.distribution((self._text[-reach:] + path)[-reach:])
        return (seen, rest) if self._request.shape is None else self._shaped(seen, path)

    def _laws(self, growth: Growth, nodes: list[int]) -> Proposals:
        """What children are drawn from: the tokens seen, in proportion.

        Tokens never seen are left out of the law altogether rather than drawn evenly: a law may be any distribution as
        long as it is the one that is tested, and a token from nowhere is not worth a place in the tree.
        """
        found = [self._seen(growth.path_tokens(node)) for node in nodes]
        ids = sorted(set().union(*(seen for seen, _ in found)))
        column = {token: i for i, token in enumerate(ids)}
        law = torch.zeros(len(nodes), len(ids), dtype=torch.float64)
        for row, (seen, _) in zip(law, found):
            row[[column[t] for t in seen]] = torch.tensor(list(seen.values()), dtype=torch.float64)
        bits = torch.tensor([entropy_bits(seen, rest, self._request.vocabulary) for seen, rest in found])
        none = torch.zeros(len(nodes), 0)
        law /= law.sum(-1, keepdim=True).clamp(min=1e-300)
        return Proposals(none.long(), none, bits, law, torch.tensor(ids, dtype=torch.long))

    def distribution(self, context: Sequence[int]) -> tuple[dict[int, float], float]:
        """``{token: probability}`` of every token seen after the context or a suffix of it, and the mass left.

        The left-over mass belongs to the tokens never seen, in equal parts.
        """
        context = context[-(self.order - 1) :]
        seen, share = discounted(context, self._after, lambda n: self.discount, shortest=1)
        # the uniform floor gives seen tokens their part of the rest too
        floor = share / self._request.vocabulary
        seen = {t: p + floor for t, p in seen.items() if t < self._request.vocabulary}
        return seen, max(0.0, 1.0 - sum(seen.values()))

    def _after(self, context: tuple[int, ...]) -> dict[int, int]:
        own, corpus = self._table.counts.get(context), self._corpus.counts.get(context)
        if not corpus:
            return own or {}
        if not own:
            return corpus
        both = dict(corpus)
        for token, count in own.items():
            both[token] = both.get(token, 0) + count * self.weight
        return both

    def _shaped(self, seen: dict[int, float], path: list[int]) -> tuple[dict[int, float], float]:
        """Apply the target's processors to the dense distribution."""
        assert self._request.shape is not None
        vocabulary = self._request.vocabulary
        rest = max(1.0 - sum(seen.values()), 1e-12)
        dense = torch.full((1, vocabulary), math.log(rest / max(vocabulary - len(seen), 1)))
        for token, p in seen.items():
            dense[0, token] = math.log(p)
        shaped = self._request.shape(torch.tensor([self._text + path]), dense)
        probability = shaped[0].float().softmax(-1)
        new = {t: float(probability[t]) for t in seen}
        new = {t: p for t, p in new.items() if p > 0}
        return new, max(0.0, 1.0 - sum(new.values()))


def discounted(
    context: Sequence[int],
    after: Callable[[tuple[int, ...]], dict[int, int] | None],
    discount: Callable[[int], float],
    shortest: int,
) -> tuple[dict[int, float], float]:
    """Interpolated absolute discounting over a context and its suffixes, longest first.

    Args:
        context: the last tokens.
        after: counts of next tokens after a context, or nothing.
        discount: taken off every count, by context length.
        shortest: length of the last context that is asked.

    Returns:
        ``{token: probability}`` of what was seen, and the mass left to whatever stands below.
    """
    share = 1.0
    seen: dict[int, float] = {}
    for n in range(len(context), shortest - 1, -1):
        counts = after(tuple(context[len(context) - n :]))
        if not counts:
            continue
        total = sum(counts.values())
        for token, count in counts.items():
            seen[token] = seen.get(token, 0.0) + share * (count - discount(n)) / total
        share *= discount(n) * len(counts) / total
    return seen, share


def entropy_bits(seen: dict[int, float], rest: float, vocabulary: int) -> float:
    """Entropy of a distribution given by its seen part and a rest spread evenly over the other tokens."""
    bits = -sum(p * math.log2(p) for p in seen.values() if p > 0)
    unseen = vocabulary - len(seen)
    if rest > 0 and unseen > 0:
        bits -= rest * math.log2(rest / unseen)
    return bits
