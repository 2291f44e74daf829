"""From draft logits to what a policy needs: the first K children of each node, and the node's entropy in bits.

This is the pruning decision's inner loop: one log-softmax, one entropy and one top-k over ``[nodes, vocabulary]``.
On a CPU the C kernel does it in two passes over a row. Without it, it goes some rows at a time, so that the scratch
buffers are reused instead of faulted in, and the top-k is found through block maxima, because a partial sort of 128,256
scores would cost more than everything else together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.native import kernel, native_propose

BLOCK = 256  # scores per block in the top-k
CHUNK = 1 << 20  # float32 scores per chunk on a CPU: 4 MB, measured best of 2^15 to 2^24


@dataclass
class Proposals:
    """Children of F nodes: ``token`` ``[F, K]`` int64, ``logp`` ``[F, K]`` float32 (nats; -inf where none),
    ``entropy`` ``[F]`` float32 (bits).

    Where children are to be drawn there are none yet (K = 0) but the whole distribution: ``law`` ``[F, C]``
    probabilities of the tokens ``ids`` ``[C]`` (None: 0 to C - 1).
    """

    token: Tensor
    logp: Tensor
    entropy: Tensor
    law: Tensor | None = None
    ids: Tensor | None = None


def propose(logits: Tensor, k: int, noise: Tensor | None = None) -> Proposals:
    """The first ``k`` children and the entropy of every row.

    Args:
        logits: ``[F, V]``, any float dtype; -inf marks tokens that cannot be proposed.
        k: children per row; clipped to V.
        noise: ``[V]`` float32 Gumbel noise shared by the rows (they stand at one position). Children are then the
            top-k of ``log q + noise``, sampling without replacement (ALGORITHMS §2, ``coupled``), in that order.

    Returns:
        Proposals on the CPU, where tree bookkeeping lives. Rows without any finite logit get no children and
        infinite entropy: a draft that breaks proposes nothing.
    """
    k = min(k, logits.shape[-1])
    if noise is None and logits.device.type == "cpu" and k and kernel() is not None:
        token, logp, nats = native_propose(logits.float(), k)
        return Proposals(token, logp, nats / math.log(2))
    rows = max(1, CHUNK // logits.shape[-1]) if logits.device.type == "cpu" else logits.shape[0]
    parts = [_propose(part.float(), k, noise) for part in logits.split(rows)]
    token, logp, entropy = (torch.cat(columns) for columns in zip(*parts))
    return Proposals(token.cpu(), logp.cpu(), entropy.cpu())


def whole(logits: Tensor, ids: Tensor | None = None) -> Proposals:
    """Distributions to draw children from, and their entropies.

    Args:
        logits: ``[F, C]``, any float dtype; -inf marks impossible tokens. Rows without any finite logit get an
            all-zero law, from which nothing can be drawn, and infinite entropy.
        ids: ``[C]`` token of each column, if they are not 0 to C - 1.
    """
    law = torch.nan_to_num(logits.float().softmax(-1), nan=0.0)
    bits = torch.special.entr(law).sum(-1) / math.log(2)
    bits = bits.masked_fill(law.sum(-1) == 0, torch.inf).cpu()
    none = torch.zeros(len(law), 0)
    return Proposals(none.long(), none, bits, law, ids)


def _propose(x: Tensor, k: int, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    probability = x.softmax(-1)
    token = top_k(x if noise is None else x + noise.to(x.device), k)
    best = token[:, :1] if noise is None else x.argmax(-1, keepdim=True)
    # torch's float32 softmax over 50,000 tokens misses 1 by up to 1e-4, which is a thousandth of a bit: divide it out
    total = probability.sum(-1, keepdim=True)
    log_total = x.gather(-1, best) - probability.gather(-1, best).log() + total.log()
    spread = probability.mul_(x).sum(-1, keepdim=True) / total  # H = log Z - sum p*x
    broken = ~torch.isfinite(log_total)
    if bool(torch.isnan(spread).any()):  # 0 * -inf of impossible tokens counts as 0; rare, so paid for only then
        spread = torch.nan_to_num_(probability, nan=0.0).sum(-1, keepdim=True) / total
    entropy = ((log_total - spread) / math.log(2)).clamp(min=0.0).masked_fill(broken, torch.inf)
    # clamp: rounding must not make a probability exceed one, or a child outrank its parent
    logp = (x.gather(-1, token) - log_total).clamp(max=0.0).masked_fill(broken, -torch.inf)
    return token, logp, entropy.squeeze(-1)


def top_k(scores: Tensor, k: int) -> Tensor:
    """``[F, k]`` indices of the largest scores, best first; exact (which of equal scores comes first is open).

    The k best scores lie in the k blocks of largest maximum, so only those are sorted.
    """
    rows, size = scores.shape
    if scores.device.type != "cpu" or size < 2 * k * BLOCK:
        return scores.topk(k, dim=-1).indices
    whole = size // BLOCK * BLOCK
    best = scores[:, :whole].view(rows, -1, BLOCK).amax(-1).topk(k, dim=-1).indices  # [F, k] block numbers
    index = (best[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    index = torch.cat([index, torch.arange(whole, size).expand(rows, -1)], dim=-1)
    return index.gather(-1, scores.gather(-1, index).topk(k, dim=-1).indices)
