"""Training a small independent language model with the target's tokenizer.

It knows nothing of the target but its answers, so it serves any engine that takes a draft model: treespec's
``ModelDrafter`` and transformers' ``assistant_model=`` alike. Its embedding starts as the target's, projected on the
directions in which the tokens that the target says most differ; the loss is the head's (:mod:`.train_head`).
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from treespec.distill.store import Text
from treespec.distill.train_head import HeadData
from treespec.errors import InputError

OTHERS = 2048  # sampled tokens outside the frequent ones, per batch


@dataclass(frozen=True)
class LmShape:
    """Sizes of the small model."""

    hidden: int = 192
    layers: int = 3
    heads: int = 3
    inner: int = 512
    context: int = 2048


def new_lm(target: Any, frequent: Tensor, shape: LmShape, seed: int) -> LlamaForCausalLM:
    """An untrained model around the projected embedding.

    Args:
        target: whose tokenizer and embedding are used.
        frequent: ids that the projection is fitted to.
        shape: sizes.
        seed: of the layers.

    Raises:
        InputError: if it would be wider than the target.
    """
    width = target.get_input_embeddings().weight.shape[1]
    if shape.hidden > width:
        raise InputError(f"a draft of width {shape.hidden} would be wider than its target ({width}); lower its width")
    torch.manual_seed(seed)
    theirs = target.config.get_text_config(decoder=True)
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(target.get_input_embeddings().weight.device)
    with torch.no_grad():
        table = target.get_input_embeddings().weight.detach().float()
        basis = torch.linalg.svd(table[frequent], full_matrices=False).Vh[: shape.hidden]
        small = table @ basis.T
        model.get_input_embeddings().weight.copy_(small / small[frequent].norm(dim=-1).mean())
    return model


class LmData:
    """Texts as batches for a language model; targets and vocabulary are those of a head's data."""

    def __init__(self, data: HeadData) -> None:
        self.data = data
        self.train, self.test = data.train, data.test
        self.frequent = data.head.token_of.cpu()
        rare = torch.ones(data.head.config.vocabulary, dtype=torch.bool)
        rare[self.frequent] = False
        self.rare = torch.nonzero(rare).squeeze(-1)

    def loss(self, model: LlamaForCausalLM, texts: Sequence[Text]) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy to the target's distribution over the answers' tokens, and the share of first choices right.

        The normaliser runs over the frequent tokens and a sample of the others, which stand for all of them (sampled
        softmax): over all 49,152 it would cost five times the rest of the model.
        """
        hidden, best, share = self.read(model, texts)
        count = min(OTHERS, len(self.rare))
        others = self.rare[torch.randint(max(len(self.rare), 1), (count,))]
        columns = torch.cat([self.frequent, others]).to(hidden.device)
        scores = hidden @ model.lm_head.weight[columns].T
        if len(others):
            scores[:, len(self.frequent) :] += math.log(len(self.rare) / len(others))
        each = scores.logsumexp(-1) - (scores.gather(-1, best) * share).sum(-1)
        return each.mean(), {"top1": float((scores.detach().argmax(-1) == best[:, 0]).float().mean())}

    def read(self, model: LlamaForCausalLM, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``[N, h]`` at the answers' rows that have targets, draft ids and shares ``[N, BEST]``."""
        size = max(len(t.tokens) for t in texts) - 1
        ids = torch.zeros(len(texts), size, dtype=torch.long)
        seen = torch.zeros(len(texts), size, dtype=torch.long)
        where, best, share = [], [], []
        for i, text in enumerate(texts):
            n = len(text.tokens) - 1
            ids[i, :n], seen[i, :n] = text.tokens[:-1], 1
            their, part, counts = self.data.targets(text)
            where.append(i * size + text.prompt + torch.nonzero(counts).squeeze(-1))
            best.append(their[counts].long())
            share.append(part[counts].float())
        device = model.device
        hidden = model.model(input_ids=ids.to(device), attention_mask=seen.to(device)).last_hidden_state
        rows = hidden.flatten(0, 1)[torch.cat(where).to(device)]
        return rows, torch.cat(best).to(device), torch.cat(share).to(device)


@torch.no_grad()
def measure_lm(model: LlamaForCausalLM, data: LmData, ranks: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Any]:
    """Recall of the target's best token among the first 1, 2, 4, 8 guesses, on held-out greedy texts.

    Tokens outside the head's draft vocabulary count as misses, as they do for the head.
    """
    texts = [t for t in data.test if t.temperature == 0]
    hits, total = torch.zeros(len(ranks)), 0
    for at in range(0, len(texts), 8):
        some = texts[at : at + 8]
        hidden, best, _ = data.read(model, some)
        token = data.frequent.to(best.device)[best[:, :1]]
        found = model.lm_head(hidden).topk(max(ranks), dim=-1).indices == token
        for r, rank in enumerate(ranks):
            hits[r] += int(found[:, :rank].any(-1).sum())
        total += sum(len(t.tokens) - 1 - t.prompt for t in some)
    return {"positions": total, **{f"top{rank}": round(float(h) / max(total, 1), 4) for rank, h in zip(ranks, hits)}}


def save_lm(model: LlamaForCausalLM, folder: Path) -> None:
    """As a transformers folder, in bfloat16; the config is the last file to appear."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as work:
        copy.to(torch.bfloat16).save_pretrained(work)
        for file in sorted(Path(work).iterdir(), key=lambda f: f.name == "config.json"):  # what makes it a model, last
            os.replace(file, folder / file.name)
