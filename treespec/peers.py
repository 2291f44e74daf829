"""One text decoded by several processes in step, each holding a share of every layer of the target.

Under ``torchrun`` transformers divides the target's layers among the processes (tensor parallelism), and every forward
is a joint one: all processes must make the same forwards in the same order. So the first process decides. It alone has
the draft; it grows the tree and sends it, it walks the acceptance rule and sends the tokens and whether the text ends.
The others follow. What is sent is a few hundred numbers a step, over gloo on the CPU: no GPU waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treespec import errors
from treespec.drafters.base import Drafted, Drafter, DraftRequest, FeatureDrafter
from treespec.errors import PeerError, TreespecError
from treespec.launch import peer_error
from treespec.limits import NO_LIMIT
from treespec.policies.base import Policy
from treespec.tree import TokenTree

WAIT = timedelta(hours=2)  # for a process that is still loading; one that is gone is noticed at once
INTS = ("token", "parent", "depth", "rank", "reason")
FLOATS = ("logp", "log_path", "entropy")

Walk = Iterator[tuple[int, int | None]]


class Peers:
    """The processes that decode one text; made by all of them together."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=WAIT)
        self.ended = False  # for those that follow: the token that was yielded last ends the text

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides."""
        return self.rank == 0

    def send(self, table: Tensor | None) -> Tensor:
        """The first process's ``[R, C]`` float64 table, everywhere; exact for whole numbers below 2**53.

        Raises:
            PeerError: if another process is gone.
            TreespecError: in those that follow, what the first process failed with instead (see :meth:`fail`).
        """
        shape = self._broadcast(torch.tensor([0, 0] if table is None else list(table.shape)))
        rows, columns = shape.tolist()
        if rows < 0:
            raise _as_error(bytes(self._broadcast(torch.zeros(columns, dtype=torch.uint8)).tolist()))
        out = torch.empty(rows, columns, dtype=torch.float64) if table is None else table.double().contiguous()
        return self._broadcast(out) if out.numel() else out

    def fail(self, error: Exception) -> None:
        """Tell the others, who wait for a table, why there is none: they raise the same, so that all end alike.

        Args:
            error: of the first process; that another one is gone need not be told.
        """
        if isinstance(error, PeerError):
            return
        words = _as_bytes(error)
        self._broadcast(torch.tensor([-1, len(words)]))
        self._broadcast(torch.tensor(list(words), dtype=torch.uint8))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        try:
            dist.broadcast(tensor, 0, group=self._group)
        except RuntimeError as error:
            raise peer_error(error) from None
        return tensor

    def drafter(self, drafter: Drafter) -> Drafter:
        """The first process's drafter, for all of them."""
        flags = torch.tensor([[float(hasattr(type(drafter), "read")), float(getattr(drafter, "samples", False))]])
        reads, samples = self.send(flags if self.leads else None)[0].tolist()
        return (SharedFeatureDrafter if reads else SharedDrafter)(self, drafter, bool(samples))

    def agree(self, walk: Walk, text: Any) -> Walk:
        """The first process's walk; the others get its tokens once it is over.

        Args:
            walk: of the acceptance rule; only the first process takes it.
            text: the :class:`treespec.decode.Decoding` that takes the tokens; its ``finished`` is sent along.
        """
        if not self.leads:
            *rows, (ends, _) = self.send(None).long().tolist()
            for i, (token, node) in enumerate(rows):
                self.ended = bool(ends) and i == len(rows) - 1
                yield token, None if node < 0 else node
            return
        taken: list[list[int]] = []
        try:
            for token, node in walk:
                taken.append([token, -1 if node is None else node])
                yield token, node
        except GeneratorExit:  # the text ended before the walk did
            pass
        except Exception as error:
            self.fail(error)
            raise
        self.send(torch.tensor([*taken, [int(text.finished), 0]], dtype=torch.float64))


@lru_cache
def peers() -> Peers:
    """The one of this launch; all processes must ask for it together."""
    return Peers()


class Follower:
    """Stands for the draft in the processes that have none."""

    def begin(self, request: DraftRequest) -> None:
        """Nothing: the first process drafts."""

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Nothing: the first process drafts."""

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """Refused: its trees come from the first process."""
        raise PeerError("only the first process has a draft; generate in all processes of the launch together")

    @property
    def depth_room(self) -> int:
        """No limit of its own."""
        return NO_LIMIT


class SharedDrafter:
    """A drafter of the first process, whose trees all processes get.

    Args:
        peers: the processes.
        drafter: grows the trees in the first one; unused in the others.
        samples: see :class:`treespec.drafters.base.DraftRequest`.
    """

    def __init__(self, peers: Peers, drafter: Drafter, samples: bool) -> None:
        self.peers, self.inner, self.samples = peers, drafter, samples
        self._failed: Exception | None = None

    @property
    def depth_room(self) -> int:
        """No limit here: all must ask for a tree or none; the drafter's own limit is applied in :meth:`grow`."""
        return NO_LIMIT

    def begin(self, request: DraftRequest) -> None:
        """See :class:`treespec.drafters.base.Drafter`."""
        self._failed = None
        self._lead(lambda: self.inner.begin(request))
        self._text_end = request.ids[-1]

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """See :class:`treespec.drafters.base.Drafter`."""
        self._lead(lambda: self.inner.commit(path, tokens))
        self._text_end = tokens[-1]

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """The first process's tree. What its children were drawn from stays there: only there it is looked at."""
        if not self.peers.leads:
            return Drafted(_unpacked(self.peers.send(None)))
        try:
            drafted = self._grow(policy, max_depth)
        except Exception as error:
            self.peers.fail(error)
            raise
        self.peers.send(_packed(drafted.tree))
        return drafted

    def _grow(self, policy: Policy, max_depth: int) -> Drafted:
        if self._failed is not None:
            raise self._failed
        room = min(max_depth, self.inner.depth_room)
        return self.inner.grow(policy, room) if room > 0 else Drafted(TokenTree.root_only(self._text_end))

    def _lead(self, act: Callable[[], None]) -> None:
        """Act in the first process. Where that fails no other waits for a word: they hear of it at the next tree."""
        if not self.peers.leads or self._failed is not None:
            return
        try:
            act()
        except Exception as error:
            self._failed = error


class SharedFeatureDrafter(SharedDrafter):
    """The same for a drafter that reads hidden states: after the last norm they are whole in every process."""

    inner: FeatureDrafter

    def read(self, hidden: Tensor, start: int | None = None) -> None:
        """See :class:`treespec.drafters.base.FeatureDrafter`."""
        self._lead(lambda: self.inner.read(hidden, start))


def _as_bytes(error: Exception) -> bytes:
    """An error of ours by name and sentence; of any other only that the first process has failed."""
    if isinstance(error, TreespecError):
        return f"{type(error).__name__}\n{error}".encode()
    reason = (str(error).strip() or "no reason given").splitlines()[0][:160]
    return f"PeerError\nthe first process failed: {type(error).__name__}: {reason}".encode()


def _as_error(words: bytes) -> TreespecError:
    name, _, sentence = words.decode().partition("\n")
    kind: type[TreespecError] = getattr(errors, name, TreespecError)
    return kind(sentence)


def _packed(tree: TokenTree) -> Tensor:
    """``[N, 8]`` float64."""
    return torch.stack([getattr(tree, name).double() for name in (*INTS, *FLOATS)], dim=-1)


def _unpacked(table: Tensor) -> TokenTree:
    columns = dict(zip((*INTS, *FLOATS), table.unbind(-1)))
    token, parent, depth, rank, reason = (columns[name].long() for name in INTS)
    logp, log_path, entropy = (columns[name].float() for name in FLOATS)
    return TokenTree(token, parent, depth, logp, log_path, entropy, rank, reason.to(torch.uint8))
