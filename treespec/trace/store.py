"""A loaded trace: flat arrays over the nodes of all supertrees, positions that point into them, and merging."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from treespec.errors import TraceError
from treespec.files import write_whole
from treespec.trace.index import Index
from treespec.trace.schema import Caps, PromptInfo, read_file, write_groups
from treespec.tree import TokenTree

LEAST_LOGP = -1e30  # a path of finite ones sums up to a finite one


@dataclass(eq=False)
class Trace:
    """Supertrees at every position of recorded texts.

    Args:
        about: what the recording depends on: models, dtype, sampling, seed, caps, versions.
        prompts: in order.
        nodes: by column name, one entry per node of all positions (:mod:`treespec.trace.schema`).
        root: ``[P]`` int64, index of each position's root among the nodes.
        prompt: ``[P]`` int32, index of its prompt.
        left: ``[P]`` int32, tokens of the text behind it, at least 1.
        path: the file.
    """

    about: dict[str, Any]
    prompts: list[PromptInfo]
    nodes: dict[str, np.ndarray]
    root: np.ndarray
    prompt: np.ndarray
    left: np.ndarray
    path: str = ""

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that :func:`treespec.trace.record` wrote.

        Raises:
            TraceError: if it cannot be read, is no trace, is a newer treespec's, damaged or empty.
        """
        table, about, prompts = read_sound(path)
        nodes = _columns(table)
        root = np.flatnonzero(nodes["node"] == 0)
        counts = [p.positions for p in prompts]
        if not len(root):
            raise TraceError(f"the trace {path} is empty: no text had two new tokens")
        left = np.concatenate([np.arange(n, 0, -1, dtype=np.int32) for n in counts])
        prompt = np.repeat(np.arange(len(prompts), dtype=np.int32), counts)
        return cls(about, prompts, nodes, root, prompt, left, str(path))

    def __len__(self) -> int:
        return len(self.root)

    def __repr__(self) -> str:
        about = self.about
        return (
            f"Trace({len(self):,} positions of {len(self.prompts)} prompts, {about.get('target')} with "
            f"{about.get('draft')}, {about.get('sample')}, {len(self.nodes['node']):,} nodes)"
        )

    @property
    def caps(self) -> Caps:
        """How far the supertrees reach."""
        return Caps(**self.about["caps"])

    @functools.cached_property
    def index(self) -> Index:
        """The level-wise form that a replay reads, made once."""
        greedy, complete = self.about.get("sample") == "greedy", self.about.get("complete", False)
        return Index.of(self.nodes, self.root, self.caps, ranked=greedy, complete=complete)

    @property
    def positions(self) -> np.ndarray:
        """``[P]`` int32 absolute positions of the roots."""
        out: np.ndarray = self.nodes["position"][self.root]
        return out

    def tree(self, row: int) -> TokenTree:
        """The supertree of position number ``row``; ``accepted`` marks the true continuation."""
        start = int(self.root[row])
        own = slice(start, start + int(self.index.size[row]))
        part = {name: values[own].tolist() for name, values in self.nodes.items()}
        tree = TokenTree.from_lists(part["token"], part["parent"], part["logp"], part["entropy"], part["rank"])
        tree.log_path = torch.from_numpy(self.index.log_path[own].numpy().copy())
        tree.accepted = np.flatnonzero(self.nodes["is_true"][own])[1:].tolist()
        return tree

    def tokens(self, prompt: int) -> list[int]:
        """The target's text for prompt number ``prompt``."""
        rows = np.flatnonzero(self.prompt == prompt)
        return [*self.nodes["token"][self.root[rows]].tolist(), self.prompts[prompt].last]


def read_sound(path: str | Path) -> tuple[pa.Table, dict[str, Any], list[PromptInfo]]:
    """:func:`read_file`, with rows that are what they should be.

    Raises:
        TraceError: as there, or if the rows are not supertrees: a replay indexes with them.
    """
    table, about, prompts = read_file(path)
    counts = [p.positions for p in prompts]
    if any(table[name].null_count for name in table.column_names) or not _sound(_columns(table), counts):
        raise TraceError(f"{path} is damaged: its rows are not the trees its metadata speaks of; record it again")
    return table, about, prompts


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    return {name: table[name].to_numpy() for name in table.column_names if name != "prompt"}


def _sound(nodes: dict[str, np.ndarray], counts: Sequence[int]) -> bool:
    root = np.flatnonzero(nodes["node"] == 0)
    if not len(nodes["node"]):
        return sum(counts) == 0
    node, parent, depth = (nodes[name].astype(np.int64) for name in ("node", "parent", "depth"))
    if len(root) != sum(counts) or not len(root) or root[0] != 0:
        return False
    start = np.repeat(root, np.diff(root, append=len(node)))
    inner = node > 0
    above = (start + parent)[inner]
    siblings = np.diff(above) == 0
    return bool(
        np.array_equal(node, np.arange(len(node)) - start)
        and (parent[~inner] == -1).all()
        and (parent[inner] >= 0).all()
        and (parent < node).all()
        and (np.diff(above) >= 0).all()  # level by level, the children of a node side by side
        and (depth[~inner] == 0).all()
        and np.array_equal(depth[inner], depth[above] + 1)
        and (nodes["rank"] >= 0).all()
        and (np.diff(nodes["rank"][inner])[siblings] > 0).all()
        and (nodes["logp"] <= 0).all()
        and ((nodes["logp"] > LEAST_LOGP) | np.isneginf(nodes["logp"])).all()
        and (nodes["token"] >= 0).all()
        and (nodes["position"] >= 1).all()
        and (nodes["room"] >= 0).all()
        and (nodes["offered"] >= -1).all()
        and not (nodes["entropy"] < 0).any()
        and not np.isinf(nodes["entropy"]).any()
        and _one_text(nodes["is_true"], inner, above)
    )


def _one_text(is_true: np.ndarray, inner: np.ndarray, above: np.ndarray) -> bool:
    """Whether the true nodes of every tree are one path from its root: what was accepted is counted along it."""
    below = is_true[inner]
    parents = above[below]
    return bool(is_true[~inner].all() and is_true[parents].all() and (np.diff(parents) > 0).all())


def merge(paths: Sequence[str | Path], out: str | Path, force: bool = False) -> list[PromptInfo]:
    """Put traces of disjoint prompts into one file, in the prompts' order.

    Args:
        paths: traces made with the same settings, e.g. by the processes of one launch.
        out: the file to write.
        force: replace it if it is there.

    Returns:
        The prompts of the merged trace.

    Raises:
        TraceError: if ``out`` exists, or the traces differ in a setting, share a prompt, or cannot be read.
    """
    if os.path.lexists(out) and not force:
        raise TraceError(f"{out} exists; give another name, or --force to replace it")
    if not paths:
        raise TraceError("nothing to merge: give at least one trace")
    found: list[tuple[PromptInfo, pa.Table]] = []
    first: dict[str, Any] = {}
    for path in paths:
        table, about, prompts = read_sound(path)
        first = first or about
        check_same(about, first, str(path), str(paths[0]))
        found += zip(prompts, _by_prompt(table, prompts))
    found.sort(key=lambda pair: pair[0].number)
    for (one, _), (two, _) in itertools.pairwise(found):
        if one.number == two.number:
            raise TraceError(f"prompt {two.id!r} is in more than one of the traces; merge disjoint ones")
    prompts = [p for p, _ in found]
    write_whole(Path(out), lambda path: write_groups(path, [t for _, t in found], first, prompts))
    return prompts


def _by_prompt(table: pa.Table, prompts: list[PromptInfo]) -> list[pa.Table]:
    """The rows of each prompt; as many positions as its text has tokens before the last."""
    start = np.append(np.flatnonzero(table["node"].to_numpy() == 0), len(table))
    ends = np.cumsum([0, *(p.positions for p in prompts)])
    return [table.slice(start[a], start[b] - start[a]) for a, b in itertools.pairwise(ends)]


def check_same(about: dict[str, Any], wanted: dict[str, Any], mine: str, other: str) -> None:
    """Refuse settings that differ.

    Raises:
        TraceError: naming the first difference.
    """
    for key in {**wanted, **about}:
        if about.get(key) != wanted.get(key):
            raise TraceError(
                f"{mine} was made with {key}={about.get(key)!r}, {other} with {wanted.get(key)!r}; "
                "only recordings of the same settings belong together"
            )
