"""Recording by several processes: each takes its share of the prompts into a file of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


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


@contextmanager
def launched(count: int, out: Path) -> Iterator[Shard]:
    """The share of this process under ``torchrun`` or ``accelerate launch``; everything where nobody launched it.

    Args:
        count: prompts in all.
        out: the file of a recording by one process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Shard(0, 1, list(range(count)), out)
        return
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    rank, world = state.process_index, state.num_processes
    try:
        with state.split_between_processes(list(range(count))) as numbers:
            name = f"{out.stem}.rank{rank}-of-{world}{out.suffix}"
            yield Shard(rank, world, list(numbers), out.with_name(name))
    finally:
        state.destroy_process_group()
