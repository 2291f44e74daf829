"""Recording a trace, prompt by prompt, so that a kill loses only the prompt under way.

Row groups cannot be appended to a Parquet file in place. So every finished prompt is a small file of its own in a
folder beside the trace, there whole or not at all; at the end they are put together and the folder goes. The same
command goes on where a killed one stopped, and the file is the same as that of a run in one go.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from filelock import FileLock, Timeout

from treespec.api import make_drafter, start
from treespec.drafters.base import Drafter
from treespec.errors import InputError, TraceError, TreespecError
from treespec.files import make_folder, replaceable, write_whole
from treespec.model import TreeModel
from treespec.pairs import Pair, chat_ids
from treespec.peers import peers
from treespec.policies.base import number, whole
from treespec.prompts import Prompt, digest
from treespec.trace.schema import COLUMNS, MOST, Caps, PromptInfo, read_file, write_groups
from treespec.trace.store import check_same
from treespec.trace.supertree import Bottomless, FeatureTape, Tape
from treespec.tree import TokenTree

SAMPLES = ("greedy", "coupled")
Progress = Callable[[int, int, str], None]  # done, total, what is running


@dataclass(frozen=True)
class Sampling:
    """How the target writes. Either way its text does not depend on any tree, which is what makes a replay exact.

    Args:
        kind: ``"greedy"``, or ``"coupled"``: drawn with noise keyed by (seed, position).
        temperature, top_p: of the draws.
        seed: of the draws.
        max_new_tokens: most new tokens per prompt.
    """

    kind: str = "greedy"
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kind not in SAMPLES:
            raise TraceError(f"unknown sampling {self.kind!r}; known: {', '.join(SAMPLES)}")
        number("temperature", self.temperature, 0, 100, open_low=True)
        number("top-p", self.top_p, 0, 1, open_low=True)
        whole("max-new-tokens", self.max_new_tokens, 1, MOST)

    def options(self) -> dict[str, Any]:
        """Arguments of :func:`treespec.api.start`."""
        common = {"rule": "coupled", "seed": self.seed, "max_new_tokens": self.max_new_tokens}
        if self.kind == "greedy":
            return {**common, "do_sample": False}
        return {**common, "do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


def record(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    sampling: Sampling | None = None,
    caps: Caps | None = None,
    about: dict[str, Any] | None = None,
    share: Sequence[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[PromptInfo]:
    """Record the draft's supertrees along the target's answers to the prompts' first turns.

    Args:
        pair: target and draft.
        prompts: all of them, whoever records them.
        out: the trace file. Parts lie in ``OUT.parts`` until it is finished.
        sampling: how the target writes; default greedy.
        caps: how far the supertrees reach.
        about: what else the recording depends on, e.g. ``{"draft": "head"}``; other settings refuse to go on with it.
        share: numbers of the prompts that this process records; default all.
        force: replace ``out`` if it is there, and parts of other settings.
        progress: told before every prompt.

    Returns:
        What was recorded, in the prompts' order.

    Raises:
        TraceError: if ``out`` exists, its parts belong to other settings, or another process is at it.
        TreespecError: for a prompt that cannot be decoded, or a pair without a draft.
    """
    sampling, caps = sampling or Sampling(), caps or Caps()
    owner = TreeModel.of(pair.target)
    drafter = make_drafter(pair.draft, owner)
    if drafter is None:
        raise TraceError("a trace holds what a draft guesses: give a draft, e.g. --draft ngram")
    numbers = list(range(len(prompts)) if share is None else share)
    together = peers() if owner.divided else None
    if together is not None and not together.leads:
        for i in together.send(None)[:, 0].long().tolist():
            write_text(pair, prompts[i], sampling, Tape())
        return []
    everything = describe(pair, drafter, prompts, sampling, caps, about)
    with _Parts(Path(out), everything, force) as parts:
        if together is not None:
            together.send(torch.tensor([[i] for i in numbers if not parts.has(i)]).view(-1, 1))
        for done, i in enumerate(numbers):
            if progress is not None:
                progress(done, len(numbers), prompts[i].id)
            if not parts.has(i):
                info, table = record_prompt(pair, drafter, prompts[i], i, sampling, caps)
                parts.add(info, table)
        if progress is not None:
            progress(len(numbers), len(numbers), "done")
        return parts.finish(numbers)


def describe(
    pair: Pair,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    caps: Caps,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a recording depends on, as a trace says it; ``asked`` is a digest of all its prompts."""
    from treespec import __version__

    named = {
        "target": pair.name,
        "draft": type(drafter).__name__,
        "drafter": type(drafter).__name__,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "forward": pair.forward,
        "complete": getattr(type(drafter), "complete", False) and (sampling.kind == "greedy" or sampling.top_p == 1),
        **(about or {}),
    }
    how = asdict(sampling)
    versions = {"treespec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        **named,
        "sample": how.pop("kind"),
        **how,
        "caps": {**asdict(caps), "narrow": list(caps.narrow)},
        "asked": digest(prompts),
        "versions": versions,
    }


def record_prompt(
    pair: Pair, drafter: Drafter, prompt: Prompt, index: int, sampling: Sampling, caps: Caps
) -> tuple[PromptInfo, pa.Table]:
    """One prompt's rows: the target writes, then the drafter guesses along its text."""
    tape = FeatureTape() if hasattr(type(drafter), "read") else Tape()
    ids, text = write_text(pair, prompt, sampling, tape)
    info = PromptInfo(index, prompt.id, prompt.category, len(ids), len(text), text[-1])
    with torch.no_grad():
        groups = [
            _rows(tree, offered, len(ids) + i, room, text[i + 1 :])
            for i, (tree, room, offered) in enumerate(tape.play(drafter, caps, text[-1]))
        ]
    if not groups:  # a text of one token has no position
        return info, COLUMNS.empty_table()
    columns = {name: np.concatenate([g[name] for g in groups]) for name in groups[0]}
    size = len(columns["node"])
    return info, pa.table({"prompt": [prompt.id] * size, **columns}).select(COLUMNS.names).cast(COLUMNS)


def write_text(pair: Pair, prompt: Prompt, sampling: Sampling, tape: Tape) -> tuple[list[int], list[int]]:
    """The prompt's ids and what the target writes; the tape keeps what a drafter would have seen."""
    ids = chat_ids(pair.tokenizer, prompt.turns[:1])
    decoding = start(pair.target, tape, ids, policy=Bottomless(), tokenizer=pair.tokenizer, **sampling.options())
    for _ in decoding:
        pass
    return ids, decoding.sequences[0, len(ids) :].tolist()


def _rows(tree: TokenTree, offered: list[int], position: int, room: int, following: list[int]) -> dict[str, np.ndarray]:
    """The columns of one position.

    Args:
        tree: the supertree; every node of it was kept, and expanded unless it lies on the last level.
        offered: children of the expanded nodes.
        position: of the root.
        room: levels that a tree could have.
        following: the tokens after the root.
    """
    size = len(tree)
    is_true, below, node = np.zeros(size, bool), tree.children(), 0
    is_true[0] = True
    for token in following:
        if (child := below[node].get(token)) is None:
            break
        is_true[child], node = True, child
    return {
        "position": np.full(size, position, np.int32),
        "node": np.arange(size, dtype=np.int16),
        "parent": tree.parent.numpy().astype(np.int16),
        "depth": tree.depth.numpy().astype(np.uint8),
        "token": tree.token.numpy().astype(np.int32),
        "rank": tree.rank.numpy().astype(np.int16),
        "logp": tree.logp.numpy(),
        "entropy": tree.entropy.numpy(),
        "offered": np.array(offered + [-1] * (size - len(offered)), np.int16),
        "is_true": is_true,
        "room": np.full(size, room, np.int16),
    }


def check_out(out: Path, force: bool) -> None:
    """Refuse, before any work, to record over something.

    Raises:
        TraceError: if ``out`` exists and ``force`` is not given, or is a folder.
    """
    if os.path.lexists(out) and not force:
        raise TraceError(f"{out} exists; give another --out, or --force to replace it")
    try:
        replaceable(out)
    except InputError as error:
        raise TraceError(str(error)) from None


class _Parts:
    """The folder of finished prompts beside a trace that is being recorded; one process at a time."""

    def __init__(self, out: Path, about: dict[str, Any], force: bool) -> None:
        self.out, self.about, self.force = out, about, force
        self.folder = out.with_name(out.name + ".parts")
        self._lock = FileLock(str(self.folder) + ".lock", timeout=0)

    def __enter__(self) -> _Parts:
        check_out(self.out, self.force)
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except (OSError, ValueError) as error:
            reason = "another process records it" if isinstance(error, Timeout) else getattr(error, "strerror", error)
            raise TraceError(f"cannot record {self.out}: {reason}") from None
        try:
            self._check()
            make_folder(self.folder)
        except TreespecError:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if not self.folder.exists():
            Path(self._lock.lock_file).unlink(missing_ok=True)

    def _check(self) -> None:
        """Parts of other settings are not gone on with."""
        part = next(iter(sorted(self.folder.glob("[0-9]*.parquet"))), None)
        if part is None:
            return
        try:
            check_same(read_file(part)[1], self.about, str(self.folder), "this recording")
        except TraceError as error:
            if not self.force:
                raise TraceError(f"{error}; give another --out, or --force to begin again") from None
            shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def has(self, number: int) -> bool:
        """Whether the prompt is recorded."""
        return self._path(number).exists()

    def add(self, info: PromptInfo, table: pa.Table) -> None:
        """Write one prompt's part."""
        write = functools.partial(write_groups, groups=[table], about=self.about, prompts=[info])
        write_whole(self._path(info.number), write)

    def finish(self, numbers: Sequence[int]) -> list[PromptInfo]:
        """Put the parts together; then, and only then, they go."""
        tables, prompts = [], []
        for number_ in sorted(numbers):
            table, _, infos = read_file(self._path(number_))
            tables.append(table)
            prompts += infos
        whole_file = self.folder / "whole.parquet"  # in there: a kill leaves no litter beside the trace
        write_groups(whole_file, tables, self.about, prompts)
        try:
            os.replace(whole_file, self.out)
        except OSError as error:
            raise TraceError(f"cannot write {self.out}: {error.strerror}; its parts are in {self.folder}") from None
        shutil.rmtree(self.folder)
        return prompts
