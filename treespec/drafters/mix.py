"""A feature head that remembers: n-grams of the text so far, backing off to the head.

Small models repeat themselves and their prompts, and that a head of one layer hardly sees. So probabilities come from
absolute discounting as in :mod:`treespec.drafters.ngram`, except that the mass a context takes off its counts goes to
the head's distribution in the end, not to a uniform one. With nothing found, this is the head alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from treespec.drafters.base import DraftRequest
from treespec.drafters.growth import Growth
from treespec.drafters.head import HeadDrafter
from treespec.drafters.ngram import NgramTable, discounted
from treespec.errors import InputError
from treespec.head import FeatureHead
from treespec.proposals import Proposals, propose, whole

# mass that a context of 2, 3, … tokens takes off each count: fitted on the shipped head's held-out training answers
# (6,106 tokens of SmolLM2's greedy answers: 1.70 nats a token, the head alone 2.11)
DISCOUNTS = (0.8, 0.9, 0.9, 0.95, 0.5)
TINY = 1e-30  # instead of zero: no infinities, no proposal


class MixDrafter(HeadDrafter):
    """Head and n-grams as one distribution.

    Args:
        head: loaded for the target in use.
        discounts: per context length from 2 on, in (0, 1); its length sets the longest context.

    Raises:
        InputError: for discounts out of range.
    """

    def __init__(self, head: FeatureHead, discounts: Sequence[float] = DISCOUNTS) -> None:
        if not discounts or not all(0 < d < 1 for d in discounts):
            raise InputError(f"discounts must be one or more numbers between 0 and 1; got {tuple(discounts)}")
        super().__init__(head)
        self.discounts = tuple(discounts)
        self.order = len(discounts) + 2
        self._column = {token: i for i, token in enumerate(self.forward.token_of.tolist())}

    def begin(self, request: DraftRequest) -> None:
        """Start a new text and count its prompt."""
        super().begin(request)
        self._table = NgramTable(self.order)
        self._table.add(self._text)

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Append and count the tokens."""
        start = len(self._text)
        super().commit(path, tokens)
        self._table.add(self._text, start)

    def _propose(self, logits: Tensor, growth: Growth, nodes: list[int], noise: Tensor | None) -> Proposals:
        found = [self._seen(growth, node) for node in nodes]
        if not any(seen for seen, _ in found):
            return super()._propose(logits, growth, nodes, noise)
        drawn = self._request.sampler is not None
        if self._request.shape is None and noise is None and not drawn:
            return self._mixed(logits, found)
        mixed, ids = self._dense(logits, found)
        if self._request.shape is not None:
            dense = mixed.new_full((len(nodes), self._request.vocabulary), -torch.inf)
            dense[:, ids.to(mixed.device)] = mixed
            dense = self._shaped(dense, growth, nodes)
            return whole(dense) if drawn else propose(dense, self._width, noise)
        if drawn:
            return whole(mixed, ids)
        chosen = propose(mixed, self._width, None if noise is None else noise.cpu()[ids])
        return Proposals(ids[chosen.token], chosen.logp, chosen.entropy)

    def _mixed(self, logits: Tensor, found: list[tuple[dict[int, float], float]]) -> Proposals:
        """Children and entropies of the mixture, from the head's and the few tokens found: no second softmax."""
        head = propose(logits, self._width)
        out = Proposals(self.forward.token_of[head.token], head.logp, head.entropy)
        for row, (seen, share) in enumerate(found):
            if not seen:
                continue
            log_total = float(logits[row, head.token[row, 0]]) - float(head.logp[row, 0])
            columns = [self._column[token] for token in seen if token in self._column]
            guessed = dict(zip(columns, (logits[row, columns].float() - log_total).exp().tolist()))
            chance = dict(zip(out.token[row].tolist(), (head.logp[row].exp() * share).tolist()))
            # the head's part alone: -sum r p log r p = r H - r log r; then each found token's term is put right
            nats = share * float(head.entropy[row]) * math.log(2) - share * math.log(share)
            for token, p in seen.items():
                own = share * guessed.get(self._column.get(token, -1), 0.0)
                chance[token] = own + p
                nats += (own * math.log(own) if own > 0 else 0.0) - (own + p) * math.log(own + p)
            best = sorted(chance.items(), key=itemgetter(1), reverse=True)[: head.token.shape[1]]
            out.token[row] = torch.tensor([token for token, _ in best])
            out.logp[row] = torch.tensor([p for _, p in best]).clamp(min=TINY, max=1.0).log()
            out.entropy[row] = max(nats, 0.0) / math.log(2)
        return out

    def _dense(self, logits: Tensor, found: list[tuple[dict[int, float], float]]) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the mixture ``[F, C]`` and the ids of its columns: the draft vocabulary, then the tokens
        outside it that were found.
        """
        rest = torch.tensor([share for _, share in found], device=logits.device)
        outside = sorted({token for seen, _ in found for token in seen if token not in self._column})
        extra = {token: len(self._column) + i for i, token in enumerate(outside)}
        ids = torch.cat([self.forward.token_of, torch.tensor(outside, dtype=torch.long)])
        mixed = torch.nn.functional.pad(logits.float().softmax(-1) * rest[:, None], (0, len(outside)))
        rows = [i for i, (seen, _) in enumerate(found) for _ in seen]
        at = [extra[token] if token in extra else self._column[token] for seen, _ in found for token in seen]
        mixed[rows, at] += torch.tensor([p for seen, _ in found for p in seen.values()], device=logits.device)
        return mixed.clamp_(min=TINY).log_(), ids

    def _seen(self, growth: Growth, node: int) -> tuple[dict[int, float], float]:
        """``{token: probability}`` after the node's last tokens in the text so far, and the mass left to the head."""
        reach = self.order - 1
        context = (self._text[-reach:] + growth.path_tokens(node))[-reach:]
        seen, share = discounted(context, self._table.counts.get, lambda n: self.discounts[n - 2], shortest=2)
        # a prompt may hold ids that the target's head does not have
        return {token: p for token, p in seen.items() if token < self._request.vocabulary}, share
