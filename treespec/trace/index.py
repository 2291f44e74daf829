"""What a replay reads: the nodes of all supertrees as flat tensors with pointers to their children.

Also, for what was *not* recorded, how probable it can be. A recorder leaves out children below the floor, those that
are not among the ``nodes`` most probable of the levels so far, and those ranked from ``width`` on. Hence a child that
was offered but is not there has a path probability below both marks, and at most what its siblings leave over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.trace.schema import Caps

MASS = 1e-5  # how far float32 probabilities may miss a sum of one


@dataclass
class Index:
    """Flat tensors; N nodes, P positions.

    Args:
        caps: of the recording.
        ranked: a child is never more probable than one of a lower rank; under coupled noise it can be.
        everywhere: children that the draft has at every node, recorded or not; 0 if that is not known.
        root: ``[P]`` int64.
        size: ``[P]`` int64, nodes of the position.
        room: ``[P]`` int64, levels that a tree may have.
        logp, log_path, entropy: ``[N]`` float32.
        rank, offered: ``[N]`` int16.
        is_true: ``[N]`` bool.
        first: ``[N]`` int32, the first child; 0 if there is none.
        count: ``[N]`` int16, recorded children.
        rest: ``[N]`` float32, log of the probability that the recorded children leave over.
        most: ``[N]`` int16, the highest rank on the path from the root.
        mark: ``[W, P, levels + 2]`` float32 by width and depth: in the tree of so many children per node, no unrecorded
            node has this path log-probability or more.
    """

    caps: Caps
    ranked: bool
    everywhere: int
    root: Tensor
    size: Tensor
    room: Tensor
    logp: Tensor
    log_path: Tensor
    entropy: Tensor
    rank: Tensor
    offered: Tensor
    is_true: Tensor
    first: Tensor
    count: Tensor
    rest: Tensor
    most: Tensor
    mark: Tensor

    @classmethod
    def of(
        cls, nodes: dict[str, np.ndarray], root: np.ndarray, caps: Caps, ranked: bool, complete: bool = False
    ) -> Index:
        """Build it from the columns of a trace; ``complete``: the draft is a law over one vocabulary at every node."""
        total = len(nodes["node"])
        size = np.diff(root, append=total)
        inner = np.flatnonzero(nodes["node"] > 0).astype(np.int32)
        above = np.repeat(root.astype(np.int32), size)[inner] + nodes["parent"][inner]
        log_path, most = _along(nodes, inner, above)
        marks = [_marks(log_path, most, w, nodes["depth"], root, size, caps) for w in caps.widths]
        head = np.flatnonzero(np.diff(above, prepend=-1))  # siblings lie side by side
        first, count, mass = np.zeros(total, np.int32), np.zeros(total, np.int16), np.zeros(total)
        first[above[head]] = inner[head]
        count[above[head]] = np.diff(head, append=len(above))
        if len(head):
            mass[above[head]] = np.add.reduceat(np.exp(nodes["logp"][inner].astype(np.float64)), head)
        arrays = {
            "root": root.astype(np.int64),
            "size": size.astype(np.int64),
            "room": nodes["room"][root].astype(np.int64),
            "log_path": log_path,
            "first": first,
            "count": count,
            "rest": np.log(np.clip(1 - mass, 0, None) + MASS).clip(max=0).astype(np.float32),
            "most": most,
            "mark": np.stack(marks),
        }
        arrays |= {name: nodes[name].copy() for name in ("logp", "entropy", "rank", "offered", "is_true")}
        offered = nodes["offered"][nodes["offered"] >= 0]
        everywhere = int(offered.min()) if complete and len(offered) else 0
        return cls(
            caps=caps,
            ranked=ranked,
            everywhere=everywhere,
            **{name: torch.from_numpy(value) for name, value in arrays.items()},
        )


def _along(nodes: dict[str, np.ndarray], inner: np.ndarray, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[N]`` float32 path log-probabilities, added up level by level as the engine does, and int16 highest ranks."""
    log_path = np.zeros(len(nodes["node"]), np.float32)
    most = nodes["rank"].copy()
    depth = nodes["depth"][inner]
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = depth == level
        log_path[inner[here]] = log_path[above[here]] + nodes["logp"][inner[here]]
        most[inner[here]] = np.maximum(most[above[here]], most[inner[here]])
    return log_path, most


def _marks(
    log_path: np.ndarray,
    most: np.ndarray,
    width: int,
    depth: np.ndarray,
    root: np.ndarray,
    size: np.ndarray,
    caps: Caps,
) -> np.ndarray:
    """``[P, levels + 2]``: the floor, or the score of the last of the ``nodes`` best down to a depth, if that is more.

    Nodes that are recorded for another reason (another width, the first choices, the true text) lie below the mark of
    their own level and change none.
    """
    floor = np.float32(math.log(caps.floor)) if caps.floor > 0 else np.float32(-np.inf)
    levels = int(depth.max(initial=0))
    mark = np.full((len(root), levels + 2), floor, np.float32)
    owner = np.repeat(np.arange(len(root), dtype=np.int32), size)
    inside = (depth > 0) & (log_path >= floor) & (most < width)
    picked = np.flatnonzero((size > caps.nodes)[owner] & inside)
    picked = picked[np.lexsort((-log_path[picked], owner[picked]))]
    owner, level, score = owner[picked], depth[picked], log_path[picked]
    head = np.flatnonzero(np.diff(owner, prepend=-1))
    base = np.repeat(head, np.diff(head, append=len(owner)))
    for d in range(1, levels + 1):
        among = np.cumsum(level <= d)
        place: np.ndarray = among - np.where(base > 0, among[base - 1], 0)
        last = (place == caps.nodes) & (level <= d)
        mark[owner[last], d] = np.maximum(floor, score[last])
    mark[:, levels + 1] = mark[:, levels]
    return mark
