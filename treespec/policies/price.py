"""The dynamic threshold: a node is worth checking while its chance of being used pays for its check.

tau = lambda * dT_verify, with lambda the recent tokens per second and dT_verify the time of one more node at the
present tree size (ALGORITHMS §1.1, item 4). Both are learned from the steps themselves: lambda as a decayed ratio,
dT_verify as the slope of a decayed least-squares line through (nodes, seconds), which needs no cost curve.
"""

from __future__ import annotations

from dataclasses import dataclass

from treespec.policies.base import Observation

DECAY = 0.95  # a step's weight halves every 14 steps: long enough to fit a slope, short enough to follow a text
SMOOTH = 0.3
LOW, HIGH = 0.005, 0.5


@dataclass(frozen=True)
class NodePrice:
    """Running sums of decayed steps, and the threshold they imply; immutable, like the policies that hold it."""

    tau: float = 0.08
    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    n: float = 0.0
    t: float = 0.0
    nn: float = 0.0
    nt: float = 0.0

    @property
    def rate(self) -> float:
        """Recent tokens per second; 0 before the first step."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def learn(self, seen: Observation) -> NodePrice:
        """The price after one more step."""
        n, t = float(seen.nodes), seen.verify_seconds
        new = NodePrice(
            tau=self.tau,
            tokens=self.tokens * DECAY + seen.tokens,
            seconds=self.seconds * DECAY + seen.seconds,
            weight=self.weight * DECAY + 1.0,
            n=self.n * DECAY + n,
            t=self.t * DECAY + t,
            nn=self.nn * DECAY + n * n,
            nt=self.nt * DECAY + n * t,
        )
        spread = new.nn - new.n * new.n / new.weight
        if spread < 1e-9 or new.seconds <= 0:
            return new  # all trees were of one size: no slope can be seen yet
        slope = (new.nt - new.n * new.t / new.weight) / spread
        price = min(max(slope * new.rate, LOW), HIGH)
        return NodePrice(**{**new.__dict__, "tau": (1 - SMOOTH) * self.tau + SMOOTH * price})
