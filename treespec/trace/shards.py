"""Recording by several processes: each takes its share of the prompts into a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from treespec.launch import world


@dataclass(frozen=True)
class Shard:
    """What one process of a launch records.

    Args:
        rank, world: which of how many.
        numbers: of its prompts.
        out: its file, ``T.rank0-of-2.parquet`` for ``T.parquet``.
    """

    rank: int
    world: int
    numbers: list[int]
    out: Path


def own_file(out: Path, number: int, processes: int) -> Path:
    """The file of one process: ``T.rank0-of-2.parquet`` for ``T.parquet``; ``out`` itself where there is one only."""
    return out if processes < 2 else out.with_name(f"{out.stem}.rank{number}-of-{processes}{out.suffix}")


@contextmanager
def launched(count: int, out: Path, share: bool = True) -> Iterator[Shard]:
    """The share of this process under ``torchrun`` or ``accelerate launch``; everything where nobody launched it.

    Args:
        count: prompts in all.
        out: the file of a recording by one process.
        share: False where the processes work on every prompt together.
    """
    if world() < 2 or not share:
        yield Shard(0, 1, list(range(count)), out)
        return
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    number, processes = state.process_index, state.num_processes
    try:
        with state.split_between_processes(list(range(count))) as numbers:
            yield Shard(number, processes, list(numbers), own_file(out, number, processes))
    finally:
        state.destroy_process_group()
