"""Training a feature head on the target's answers, several steps deep.

At step 0 the head sees the target's true features. At step j it sees its own output of step j - 1, one token further
on, as it will below the root of a tree; a query then attends to true rows up to the root and to its own rows of the
steps between (EAGLE-3, Li et al. 2025, "training-time test"; HASS, Zhang et al. 2024). The loss of each step is the
cross-entropy to a mixture of the target's distribution and its best token, since trees are mostly judged greedily.
Prompts are context: their keys and values are computed, nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from treespec.distill.loop import held_out
from treespec.distill.store import Text
from treespec.head import FeatureHead, HeadConfig

FIT_ON = 1000  # texts that spread and first guess are fitted on
BEST = 16  # target tokens kept per position
NOISE = 0.1  # standard deviations, on the features that are read
DISTANCE = 0.3  # weight of the squared distance to the true feature
STEP_WEIGHT = 0.8  # of each deeper step
HARD = 0.5  # share of the target's best token in what is learnt


def draft_vocabulary(texts: Sequence[Text], size: int, vocabulary: int) -> Tensor:
    """Ids of the tokens that the target says most, ascending; the rest of the room goes to the lowest ids."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tokens[text.prompt :].tolist())
    best = [token for token, _ in counts.most_common(size)]
    for token in range(vocabulary):
        if len(best) >= size:
            break
        if token not in counts:
            best.append(token)
    return torch.tensor(sorted(best))


def new_head(target: Any, name: str, texts: Sequence[Text], size: int, seed: int) -> FeatureHead:
    """A head that starts as the best linear guess, which saves the first thousands of steps.

    ``mix`` is the ridge regression of the next feature on token and feature; attention and MLP start by adding nothing.
    """
    torch.manual_seed(seed)
    config = HeadConfig.like(target, name, size)
    squares, rows = torch.zeros(config.hidden_size, dtype=torch.float64), 0
    for text in texts[:FIT_ON]:
        squares += text.features.double().square().sum(0)
        rows += len(text.features)
    spread = (squares / max(rows, 1)).sqrt().float().clamp(min=1e-4)
    embedding, output = target.get_input_embeddings().weight.float(), target.get_output_embeddings().weight.float()
    tokens = draft_vocabulary(texts, size, config.vocabulary).to(output.device)
    head = FeatureHead(config, embedding, output, tokens, spread.to(output.device)).to(output.device)
    for part in (head.q, head.kv, head.gate_up):
        torch.nn.init.normal_(part.weight, std=part.in_features**-0.5)
    torch.nn.init.zeros_(head.out.weight)
    torch.nn.init.zeros_(head.down.weight)
    _fit_mix(head, texts[:FIT_ON])
    return head


@torch.no_grad()
def _fit_mix(head: FeatureHead, texts: Sequence[Text]) -> None:
    size = head.config.hidden_size
    device = head.output.device
    gram = torch.zeros(2 * size, 2 * size, dtype=torch.float64, device=device)
    cross = torch.zeros(2 * size, size, dtype=torch.float64, device=device)
    rows = 0
    for text in texts:
        at = text.prompt
        features = head.normal(text.features[at - 1 :].to(device).float())
        x = head.pair(text.tokens[at:-1].to(device).long(), features[:-1])
        gram += (x.T @ x).double()
        cross += (x.T @ features[1:]).double()
        rows += len(x)
    gram.diagonal().add_(1e-3 * rows)
    head.mix.weight.copy_(torch.linalg.solve(gram, cross).T.float())


@dataclass
class Batch:
    """B texts, prompts right-aligned in ``context`` [B, P], answers left-aligned in ``answer`` [B, A].

    A row is a pair of a token and the feature before it. ``best``, ``share`` ``[B, A, BEST]`` are draft ids and the
    probabilities to learn; ``counts`` ``[B, A]`` marks rows that have them.
    """

    context: Tensor
    context_features: Tensor
    context_seen: Tensor
    answer: Tensor
    answer_features: Tensor
    best: Tensor
    share: Tensor
    counts: Tensor


class HeadData:
    """Texts as batches for a head.

    Args:
        head: whose draft vocabulary and output matrix are used.
        texts: with features.
    """

    def __init__(self, head: FeatureHead, texts: Sequence[Text]) -> None:
        self.head = head
        self.texts = [t for t in texts if len(t.tokens) - t.prompt >= 3]
        self.train = [t for t in self.texts if not held_out(t)]
        self.test = [t for t in self.texts if held_out(t)]
        self._known: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._draft_id = torch.full((head.config.vocabulary,), -1)
        self._draft_id[head.token_of.cpu()] = torch.arange(len(head.token_of))

    @torch.no_grad()
    def targets(self, text: Text) -> tuple[Tensor, Tensor, Tensor]:
        """What to learn at the answer's rows; made once per text."""
        if text.index not in self._known:
            hidden = text.features[text.prompt :].to(self.head.output.device).float()
            top = self.head.logits(self.head.normal(hidden)).topk(min(BEST, len(self.head.token_of)), dim=-1)
            best, share = top.indices.cpu(), (1 - HARD) * top.values.softmax(-1).cpu()
            share[:, 0] += HARD
            counts = torch.ones(len(best), dtype=torch.bool)
            if text.temperature == 0:  # the next token is the target's best: known even outside the draft vocabulary
                counts = self._draft_id[text.tokens[text.prompt + 1 :].long()] == best[:, 0]
            self._known[text.index] = (best.to(torch.int32), share.half(), counts)
        return self._known[text.index]

    def batch(self, texts: Sequence[Text]) -> Batch:
        """One batch."""
        size = self.head.config.hidden_size
        reach = max(t.prompt for t in texts) - 1
        length = max(len(t.tokens) - 1 - t.prompt for t in texts)
        n, width = len(texts), min(BEST, len(self.head.token_of))
        made = Batch(
            torch.zeros(n, reach, dtype=torch.long), torch.zeros(n, reach, size),
            torch.zeros(n, reach, dtype=torch.bool),
            torch.zeros(n, length, dtype=torch.long), torch.zeros(n, length, size),
            torch.zeros(n, length, width, dtype=torch.long), torch.zeros(n, length, width),
            torch.zeros(n, length, dtype=torch.bool),
        )  # fmt: skip
        for i, text in enumerate(texts):
            prompt, rows = text.prompt, len(text.tokens) - 1 - text.prompt
            made.context[i, reach - prompt + 1 :] = text.tokens[1:prompt]
            made.context_features[i, reach - prompt + 1 :] = text.features[: prompt - 1]
            made.context_seen[i, reach - prompt + 1 :] = True
            made.answer[i, :rows] = text.tokens[prompt:-1]
            made.answer_features[i, :rows] = text.features[prompt - 1 : -1]
            made.best[i, :rows], made.share[i, :rows], made.counts[i, :rows] = self.targets(text)
        made = Batch(**{f.name: getattr(made, f.name).to(self.head.output.device) for f in fields(made)})
        made.context_features = self.head.normal(made.context_features)
        made.answer_features = self.head.normal(made.answer_features)
        return made


class Unrolled:
    """A head over one batch, step after step on its own outputs."""

    def __init__(self, head: FeatureHead, batch: Batch) -> None:
        self.head, self.batch = head, batch
        config = head.config
        self.groups = config.heads // config.kv_heads
        reach, length = batch.context.shape[1], batch.answer.shape[1]
        at = torch.arange(reach + length, device=batch.answer.device)
        self.turn = head.rotary(at[reach:])
        before = head.norm1(head.mixed(batch.context, batch.context_features))
        self.context_keys, self.context_values = head.keys_values(before, head.rotary(at[:reach]))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, features: Tensor) -> Tensor:
        """Features in ``[B, A, H]`` (step 0: the target's, else the last output moved on by one), features out."""
        head, j = self.head, len(self.keys)
        x = head.mixed(self.batch.answer, features)
        normed = head.norm1(x)
        query = head.queries(normed, self.turn).unflatten(2, (-1, self.groups))  # [B, A, kv, g, D]
        key, value = head.keys_values(normed, self.turn)
        self.keys.append(key)
        self.values.append(value)
        return head.rest(x, self._attended(query, j).flatten(2))

    def _attended(self, query: Tensor, j: int) -> Tensor:
        """``[B, A, kv, g, D]``: over true rows up to the root, then over its own rows of steps 1 to j."""
        scale = query.shape[-1] ** -0.5
        true_keys = torch.cat([self.context_keys, self.keys[0]], 1)
        true_values = torch.cat([self.context_values, self.values[0]], 1)
        scores = torch.einsum("bakgd,bskd->bkgas", query * scale, true_keys)
        length, reach = query.shape[1], self.batch.context.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril(-j)
        shown = torch.cat(
            [self.batch.context_seen[:, None].expand(-1, length, -1), seen.expand(len(query), -1, -1)], -1
        )
        scores = scores.masked_fill(~shown[:, None, None], torch.finfo(scores.dtype).min)
        own = [
            torch.einsum("bakgd,bakd->bkga", query * scale, moved(self.keys[i], j - i))[..., None]
            for i in range(1, j + 1)
        ]
        share = torch.cat([scores, *own], -1).softmax(-1)
        out = torch.einsum("bkgas,bskd->bakgd", share[..., : reach + length], true_values)
        for i in range(1, j + 1):
            part = share[..., reach + length + i - 1].permute(0, 3, 1, 2)[..., None]
            out = out + part * moved(self.values[i], j - i)[:, :, :, None]
        return out


def moved(x: Tensor, by: int) -> Tensor:
    """Rows of ``[B, A, ...]`` moved on by some positions, zeros before them."""
    if by == 0:
        return x
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], 1)


def unrolled_loss(head: FeatureHead, batch: Batch, steps: int) -> tuple[Tensor, dict[str, float]]:
    """Weighted cross-entropy over the steps, plus how far the first output is from the true feature.

    The distance gives 576 figures a token where the cross-entropy gives one, which is what a small corpus needs; noise
    on the features read keeps the head from leaning on their last digits (EAGLE, section 4).

    Returns:
        The loss, and the share of first choices that are the target's, by step.
    """
    features = batch.answer_features + NOISE * torch.randn_like(batch.answer_features)
    run = Unrolled(head, batch)
    total, weights = torch.zeros((), device=features.device), 0.0
    distance = total
    figures = {}
    for j in range(steps):
        out = run.step(features)
        counts = batch.counts.clone()
        counts[:, :j] = False
        features_next = moved(out, 1)
        if not bool(counts.any()):
            features = features_next
            continue
        scores = head.logits(out[counts])
        best, share = batch.best[counts], batch.share[counts]
        each = scores.logsumexp(-1) - (scores.gather(-1, best) * share).sum(-1)
        weight = STEP_WEIGHT**j
        total, weights = total + weight * each.mean(), weights + weight
        figures[f"top1_{j}"] = float((scores.detach().argmax(-1) == best[:, 0]).float().mean())
        if j == 0:
            near = (out[:, :-1] - batch.answer_features[:, 1:])[batch.counts[:, :-1] & batch.counts[:, 1:]]
            distance = near.square().sum() / max(near.numel(), 1)
        features = features_next
    return total / max(weights, 1.0) + DISTANCE * distance, figures


@torch.no_grad()
def measure(head: FeatureHead, data: HeadData, steps: int, ranks: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Any]:
    """Agreement with the target on held-out greedy texts, by depth: recall among the first 1, 2, 4, 8 guesses.

    Positions whose token lies outside the draft vocabulary count as misses.
    """
    hits = torch.zeros(steps, len(ranks))
    seen = torch.zeros(steps)
    texts = sorted((t for t in data.test if t.temperature == 0), key=lambda t: t.prompt)
    for at in range(0, len(texts), 8):
        some = texts[at : at + 8]
        batch = data.batch(some)
        run, features = Unrolled(head, batch), batch.answer_features
        at_row = torch.arange(batch.answer.shape[1], device=batch.answer.device)
        rows = torch.stack([at_row < len(t.tokens) - 1 - t.prompt for t in some])
        for j in range(steps):
            out = run.step(features)
            counts = rows.clone()
            counts[:, :j] = False
            guesses = head.logits(out[counts]).topk(min(max(ranks), len(head.token_of)), dim=-1).indices
            right = (guesses == batch.best[counts][:, :1]) & batch.counts[counts][:, None]
            for r, rank in enumerate(ranks):
                hits[j, r] += int(right[:, :rank].any(-1).sum())
            seen[j] += len(right)
            features = moved(out, 1)
    table = (hits / seen[:, None].clamp(min=1)).tolist()
    return {
        "positions": int(seen[0]),
        "recall_by_depth": [
            {f"top{rank}": round(value, 4) for rank, value in zip(ranks, row)} for row in table
        ],
    }  # fmt: skip
