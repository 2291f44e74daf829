"""The trees that a replay grows, one row a position."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

NONE = -1  # instead of a node
FILL = {"widths": 0, "kept": NONE}  # padding of the tables that have two dimensions


@dataclass
class Grown:
    """Trees of B positions.

    Args:
        accepted: ``[B]`` int64, nodes of the true continuation among the verified ones.
        nodes: ``[B]`` int64, nodes of the verification, the root included.
        widths: ``[B, levels]`` int64, nodes that each draft forward expanded.
        truncated: ``[B]`` bool, see the module's docstring.
        kept: ``[B, M]`` int64, the verified candidates as numbers in :class:`Index`, ascending, -1 for padding.
    """

    accepted: Tensor
    nodes: Tensor
    widths: Tensor
    truncated: Tensor
    kept: Tensor

    @property
    def levels(self) -> Tensor:
        """``[B]`` draft forwards."""
        return (self.widths > 0).sum(-1)

    def at(self, rows: Tensor) -> Grown:
        """The trees of ``rows``."""
        return Grown(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @classmethod
    def stack(cls, parts: list[Grown]) -> Grown:
        """The trees of all parts."""
        if len(parts) == 1:
            return parts[0]
        tables = {f.name: [getattr(p, f.name) for p in parts] for f in fields(cls)}
        for name, fill in FILL.items():
            widest = max(tables[name], key=lambda t: int(t.shape[1]))
            tables[name] = [_as_wide(t, widest, fill) for t in tables[name]]
        return cls(**{name: torch.cat(values) for name, values in tables.items()})

    def put(self, rows: Tensor, other: Grown) -> None:
        """Overwrite the trees of ``rows``."""
        for f in fields(self):
            mine, new = getattr(self, f.name), getattr(other, f.name)
            if f.name in FILL:
                mine, new = _as_wide(mine, new, FILL[f.name]), _as_wide(new, mine, FILL[f.name])
            setattr(self, f.name, mine.index_copy(0, rows, new))

    def differs(self, other: Grown) -> Tensor:
        """``[B]`` bool: another tree, or other draft forwards."""
        out = self.nodes != other.nodes
        for name, fill in FILL.items():
            mine, new = getattr(self, name), getattr(other, name)
            out |= (_as_wide(mine, new, fill) != _as_wide(new, mine, fill)).any(-1)
        return out


def _as_wide(table: Tensor, other: Tensor, fill: int) -> Tensor:
    missing = other.shape[1] - table.shape[1]
    return torch.nn.functional.pad(table, (0, missing), value=fill) if missing > 0 else table
