"""From the logits of one verification to the emitted tokens: the rule's walk, and what it reads off a device.

On the CPU the rule asks for scores node by node along its walk, so processors run once per emitted token and rejected
branches cost nothing. On any other device each such read waits for it. There the rule's table of all nodes is computed
where the logits lie (a few numbers a node) and read at once; rules that look ahead get all rows in one copy instead.
Processors that may keep state must see the emitted tokens one by one, wherever they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from treespec.errors import NonFiniteLogitsError
from treespec.request import Request
from treespec.sampling import Law
from treespec.shaping import all_stateless, check_stateless, node_scores
from treespec.tree import TokenTree
from treespec.verify import Rule, TableRule, follow

Walk = Iterator[tuple[int, int | None]]


def reads_at_once(device: torch.device) -> bool:
    """Whether a step should read its tokens off the device in one go: elsewhere than on the CPU each read waits.

    On the CPU it would cost more: all nodes would be looked at, not only those on the path.
    """
    return device.type != "cpu"


class Text(Protocol):
    """The text that takes the tokens: it grows during a walk."""

    length: int
    emitted: int

    @property
    def sequences(self) -> Tensor:
        """``[1, L + new]``, what processors see."""


class Readout:
    """Walks an acceptance rule over the target's logits.

    Args:
        request: its processors shape the scores; its config says what is kept.
        rule: accepts.

    Attributes:
        scores, logits: ``[1, V]`` per emitted token, processed and raw, where the request asks for them.

    Raises:
        InputError: for processors that the rule cannot serve.
    """

    def __init__(self, request: Request, rule: Rule) -> None:
        if rule.ahead:
            check_stateless(request.processors, rule.name)
        config = request.config
        self.rule, self.processors = rule, request.processors
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def walk(self, text: Text, tree: TokenTree, logits: Tensor) -> Walk:
        """The emitted tokens, each with the node that held it (None for the bonus token).

        Args:
            text: it has taken each token before the next one is asked for.
            tree: n verified nodes.
            logits: ``[n, V]`` of the target.

        Raises:
            NonFiniteLogitsError: for NaN logits.
        """
        if not self.rule.ahead and not (reads_at_once(logits.device) and all_stateless(self.processors)):
            yield from self.rule.walk(tree, lambda node: self._row(text, logits, node), text.length)
            return
        scores = self._rows(text, tree, logits)
        walk = (self._ahead if self.rule.ahead else self._at_once)(text, tree, logits, scores)
        at = 0
        for token, node in walk:
            if self.keeps_logits:
                self.logits.append(logits[at][None].float().to(scores.device, copy=True))
            if self.keeps_scores:
                self.scores.append(scores[at][None].clone())
            yield token, node
            at = at if node is None else node

    def _row(self, text: Text, logits: Tensor, node: int) -> Tensor:
        """Processed float32 scores ``[V]`` at a node whose path is what was emitted so far."""
        raw = logits[node]
        if math.isnan(float(raw.max())):  # the maximum passes NaN on, in one read
            raise _not_a_number(text)
        ids = text.sequences
        copy = self.keeps_logits or len(self.processors) > 0
        scores = raw[None].to(torch.float32, copy=copy).to(ids.device)
        if self.keeps_logits:
            self.logits.append(scores.clone())
        scores = self.processors(ids, scores)
        if self.keeps_scores:
            self.scores.append(scores)
        row: Tensor = scores[0]
        return row

    def _rows(self, text: Text, tree: TokenTree, logits: Tensor) -> Tensor:
        """Processed float32 scores ``[n, V]`` of all nodes, each with its own prefix, where transformers processes."""
        if not len(self.processors):
            return logits.float()
        ids = text.sequences
        return node_scores(self.processors, ids, tree, logits.float().to(ids.device))

    def _at_once(self, text: Text, tree: TokenTree, logits: Tensor, scores: Tensor) -> Walk:
        rule = cast(TableRule, self.rule)
        table = rule.table(tree, scores, text.length)
        broken = logits.amax(-1, keepdim=True).isnan().to(table)
        rows = to_host([torch.cat([broken, table], dim=-1)])[0].tolist()  # the one read of a step
        children = [list(found) for found in tree.children()]

        def choose(node: int, position: int) -> int:
            nan, *row = rows[node]
            if nan:
                raise _not_a_number(text)
            return rule.choose_from(row, children[node])

        return follow(tree, choose, text.length)

    def _ahead(self, text: Text, tree: TokenTree, logits: Tensor, scores: Tensor) -> Walk:
        laws = list(tree.laws.items())
        worst, rows, *q = to_host([logits.amax().float()[None], scores, *(law.probability for _, law in laws)])
        if math.isnan(float(worst)):
            raise _not_a_number(text)
        tree.laws = {node: Law(found, law.ids) for (node, law), found in zip(laws, q)}
        return self.rule.walk(tree, rows.__getitem__, text.length)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU: one copy for all that lie on one device in one dtype; those there already as they are."""
    out = list(tensors)
    for kind in {(t.device, t.dtype) for t in tensors if reads_at_once(t.device)}:
        mine = [i for i, t in enumerate(tensors) if (t.device, t.dtype) == kind]
        flat = torch.cat([tensors[i].flatten() for i in mine]).cpu()
        for i, part in zip(mine, flat.split([tensors[i].numel() for i in mine])):
            out[i] = part.view(tensors[i].shape)
    return out


def _not_a_number(text: Text) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"the target's logits at position {text.length - 1} hold NaN after {text.emitted} new tokens; "
        "load it in a wider dtype (float32 or bfloat16) or check its weights"
    )
