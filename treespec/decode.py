"""The loop: draft -> prune -> verify -> commit, one :class:`StepEvent` at a time.

``Decoding`` is the only decode loop of the package: ``generate``, the transformers adapter, the command line and the
notebooks all consume its events. Plain decoding is the same loop with an empty tree.

What is emitted is decided token by token: each token of the accepted path is appended, then the stopping criteria are
asked with exactly the text so far, so nothing after a stop is returned, streamed, counted or cached.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from treespec import readout
from treespec.drafters.base import Drafted, Drafter, DraftRequest, FeatureDrafter
from treespec.errors import InputError, PolicyError
from treespec.events import StepEvent, StepTimes
from treespec.model import TreeModel
from treespec.peers import peers
from treespec.policies.base import Observation, Policy
from treespec.readout import Readout
from treespec.request import Request
from treespec.session import Session
from treespec.shaping import draft_shape
from treespec.tree import TokenTree
from treespec.verify import Rule

TREE_ROOM = 64  # rows beside the text that the caches start with
PLANNED = 4096  # new tokens that room is made for at the start; a limit may be far beyond what is ever emitted


class Decoding:
    """One text under way. Iterate over it for its steps.

    Args:
        target: the model whose output counts.
        request: prompt, processors and criteria, prepared by transformers.
        drafter: guesses the trees; None decodes plainly.
        policy: grows and prunes them.
        rule: accepts.
        streamer: a transformers streamer, or None.
    """

    def __init__(
        self,
        target: TreeModel,
        request: Request,
        drafter: Drafter | None,
        policy: Policy,
        rule: Rule,
        streamer: Any = None,
    ) -> None:
        rule.check(policy)
        self._readout = Readout(request, rule)
        target.limits.check_prompt(len(request.visible), request.most_new)
        self.target, self.request, self.policy, self.rule = target, request, policy, rule
        self.peers = peers() if target.divided else None
        self.drafter = drafter if policy.levels > 0 else None
        if self.drafter is not None and self.peers is not None:
            self.drafter = self.peers.drafter(self.drafter)
        self.streamer = streamer
        self.finished = False
        self.length = len(request.visible)  # committed tokens the models see, the root included
        self.emitted = 0
        prompt = request.input_ids
        planned = min(max(request.most_new, 0), PLANNED)
        self._room = self.length + planned + TREE_ROOM
        with torch.inference_mode(False):  # steps may be taken outside the mode that they were asked for in
            self._ids = torch.zeros(1, prompt.shape[1] + planned, dtype=torch.long, device=prompt.device)
        self._ids[:, : prompt.shape[1]] = prompt
        # transformers' own criteria only look at ids: here they can without waiting for a device
        self._own_criteria = all(type(c).__module__.startswith("transformers.") for c in request.criteria)
        at_once = readout.reads_at_once(prompt.device) and self._own_criteria
        self._seen = self._ids.cpu() if at_once else self._ids
        self._text = list(request.visible)
        self._session = self._begin_target()
        start = perf_counter()
        if self.drafter is not None:
            self._check_drafter(self.drafter)
            shape = draft_shape(request.processors)
            # asked of the class: an instance's properties may not be ready before begin
            self._session.keep_hidden = hasattr(type(self.drafter), "read")
            asked = DraftRequest(self._text, self._room, target.vocabulary, shape, rule.noise, rule.sampler)
            self.drafter.begin(asked)
        self._begin_seconds = perf_counter() - start

    def _check_drafter(self, drafter: Drafter) -> None:
        if self.rule.sampler is not None and not getattr(drafter, "samples", False):
            raise PolicyError(
                f"rule {self.rule.name!r} tests children drawn from the draft, but {type(drafter).__name__} does not "
                "say what it draws them from, and children that are not drawn would bias the output; use rule match or "
                "coupled"
            )

    def _begin_target(self) -> Session:
        cache = self.request.cache
        if cache is None:
            return self.target.session(self._room)
        if cache.model is not None and cache.model() is not self.target.model:
            raise InputError("the cache was made by another model; pass one that this model's earlier turn returned")
        known = cache.known(self._text[:-1])  # at least the last token must be fed for its logits
        if self.target.limits.one_by_one < max(cache.length, self.length):
            known = 0  # dynamic frequencies: in one forward over the prompt all rows would have the last ones
        cache.truncate(known)
        if known == 0:
            cache.angles = None
        return Session(self.target, cache, known)

    @property
    def scores(self) -> list[Tensor]:
        """Processed scores ``[1, V]`` per emitted token, if the request asks for them."""
        return self._readout.scores

    @property
    def logits(self) -> list[Tensor]:
        """Raw float32 logits ``[1, V]`` per emitted token, if the request asks for them."""
        return self._readout.logits

    @property
    def sequences(self) -> Tensor:
        """``[1, L + new]``: what was given and what was emitted."""
        return self._ids[:, : self.request.input_ids.shape[1] + self.emitted]

    def __iter__(self) -> Iterator[StepEvent]:
        """Steps until a criterion stops the text; the first is the prefill."""
        index = 0
        while not self.finished:
            with torch.no_grad():
                event = self._prefill() if index == 0 else self._step(index)
            index += 1
            yield event
        if self.streamer is not None:
            self.streamer.end()

    def _prefill(self) -> StepEvent:
        """Read the prompt; its last token's logits give the first new token."""
        start = perf_counter() - self._begin_seconds
        if self.streamer is not None:
            self.streamer.put(self.request.input_ids.cpu())
        if self._restart_needed():  # an earlier turn's cache, on the other side of a longrope switch
            self._session.truncate(0)
        self._cached = self._session.length
        logits = self._session.extend(self._text[self._cached :])
        assert logits is not None
        tree = TokenTree.root_only(self._text[-1])
        return self._emit(0, tree, [0], tree, logits, [], StepTimes(verify=self._session.seconds), start)

    def _step(self, index: int) -> StepEvent:
        start = perf_counter()
        drafted = self._draft()
        tree = drafted.tree if drafted else TokenTree.root_only(self._text[-1])
        if int(tree.token[0]) != self._text[-1]:
            raise InputError(
                f"the drafter's tree has root token {int(tree.token[0])}, but the text ends with {self._text[-1]}"
            )
        kept, origin = tree.kept()
        before = self._session.seconds
        logits = self._verify(kept)
        verify = self._session.seconds - before
        times = StepTimes(verify=verify)
        if drafted:
            times.draft, times.prune = sum(drafted.forwards), drafted.prune_seconds
        return self._emit(index, tree, origin, kept, logits, drafted.forwards if drafted else [], times, start)

    def _draft(self) -> Drafted | None:
        if self.drafter is None or self._restart_needed():
            return None
        room = min(self.request.most_new - self.emitted - 1, self.target.limits.depth_room(self.length))
        room = min(room, self.drafter.depth_room, self.policy.levels)
        return self.drafter.grow(self.policy, room) if room > 0 else None

    def _restart_needed(self) -> bool:
        return self.target.limits.restart_needed(self._session.length, self.length)

    def _verify(self, kept: TokenTree) -> Tensor:
        """Target logits ``[n, V]``; the tree's rows lie uncommitted in the cache."""
        if self._restart_needed():  # longrope: from here on the whole text has other frequencies
            return self._session.recompute(self._text)
        return self._session.tree(kept.token.tolist(), kept.depth.tolist(), kept.ancestors())

    def _emit(
        self,
        index: int,
        tree: TokenTree,
        origin: list[int],
        kept: TokenTree,
        logits: Tensor,
        forwards: list[float],
        times: StepTimes,
        start: float,
    ) -> StepEvent:
        """Walk the acceptance rule, emit its tokens until one stops, commit what was emitted."""
        root = self.length - 1
        tokens: list[int] = []
        path: list[int] = []
        bonus = None
        with closing(self._walk(kept, logits)) as walk:  # closed before the caches move: peers are told then
            for token, node in walk:
                tokens.append(token)
                if node is None:
                    bonus = token
                else:
                    path.append(node)
                if self._append(token):
                    break
        self._commit(index, path, tokens, origin)
        tree.laws = {}  # rows of the vocabulary's size, which events should not keep alive
        tree.accepted = [origin[i] for i in path]
        times.total = perf_counter() - start
        self.policy = self.policy.after_step(Observation(len(tokens), len(kept), times.total, times.verify))
        return StepEvent(
            index, root, tree, tree.accepted, tokens, bonus, len(kept), forwards, times, finished=self.finished
        )

    def _walk(self, kept: TokenTree, logits: Tensor) -> Generator[tuple[int, int | None], None, None]:
        """The accepted tokens, each with the node that held it; in step with the peers, if there are any."""
        walk = self._readout.walk(self, kept, logits)
        yield from walk if self.peers is None else self.peers.agree(walk, self)

    def _append(self, token: int) -> bool:
        """Add one token to the text; True if the text ends with it."""
        at = self.request.input_ids.shape[1] + self.emitted
        if at == self._ids.shape[1]:
            self._lengthen()
        for ids in (self._ids, self._seen):
            ids[:, at].fill_(token)  # an assignment would copy from the host and wait
        self._text.append(token)
        self.emitted += 1
        self.length += 1
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        if self.peers is not None and not self.peers.leads:
            self.finished = self.peers.ended
        else:
            kept = tuple(self.scores) if self._readout.keeps_scores else None
            self.finished = bool(self.request.criteria(self._seen[:, : at + 1], kept).all())
        return self.finished

    def _lengthen(self) -> None:
        """Make room for half as many tokens again."""
        one = self._seen is self._ids
        more = (0, self._ids.shape[1] // 2)
        with torch.inference_mode(False):
            self._ids = torch.nn.functional.pad(self._ids, more)
            self._seen = self._ids if one else torch.nn.functional.pad(self._seen, more)

    def _commit(self, index: int, path: list[int], tokens: list[int], origin: list[int]) -> None:
        """Both caches keep the emitted path; as in transformers, the last token is in none of them."""
        in_cache = path if len(path) < len(tokens) else path[:-1]
        if index > 0:
            self._session.keep([0, *in_cache])
        if self.drafter is None or self.finished:
            return
        self.drafter.commit([origin[i] for i in path], tokens)
        hidden = self._session.hidden
        if not self._session.keep_hidden or hidden is None:
            return
        reader = cast(FeatureDrafter, self.drafter)
        reader.read(hidden, self._cached) if index == 0 else reader.read(hidden[[0, *in_cache]])

    @property
    def cache(self) -> Any:
        """The target's cache: every emitted token but the last."""
        return self._session.cache
