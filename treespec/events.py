"""What happened: one event per step, and their summary. Everything drawn or printed derives from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treespec.tree import TokenTree

if TYPE_CHECKING:
    from treespec.cache import TreeCache


@dataclass
class StepTimes:
    """Seconds of one step.

    Attributes:
        draft: in the draft model's forwards (or the n-gram look-ups).
        prune: in the policy.
        verify: in the target's forward.
        total: all of the step. What is neither draft nor verify is the engine's own overhead, ``prune`` included.
    """

    draft: float = 0.0
    prune: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def overhead(self) -> float:
        """Everything outside the two models' forwards."""
        return self.total - self.draft - self.verify


@dataclass
class StepEvent:
    """One step: draft, prune, verify, commit.

    Attributes:
        index: 0 for the prefill (the prompt's forward, which gives the first token), then 1, 2, …
        position: absolute position of the root, padding not counted.
        tree: everything the draft proposed, with a reason per node; root only without speculation.
        path: indices in ``tree`` of the accepted nodes whose tokens were emitted, root excluded.
        tokens: what the step emitted: the accepted tokens, then the bonus token unless a stop came first.
        bonus: the bonus token, or None if the text ended inside the accepted path.
        nodes: nodes of the verification, root included: the n of T_verify(n).
        draft_forwards: seconds of each draft forward.
        times: seconds by phase.
        finished: this step ended the text.
    """

    index: int
    position: int
    tree: TokenTree
    path: list[int]
    tokens: list[int]
    bonus: int | None
    nodes: int
    draft_forwards: list[float]
    times: StepTimes
    finished: bool = False

    @property
    def is_prefill(self) -> bool:
        """The prompt's forward is not a speculative step and is left out of tokens per step."""
        return self.index == 0

    def _repr_html_(self) -> str:
        from treespec.draw import tree_html  # drawing is never needed to decode

        return tree_html(self.tree, self.bonus)


@dataclass
class Stats:
    """Sums over the steps of one or more texts; ``tokens_per_step`` and ``nodes`` leave the prefill out."""

    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_nodes: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    prune_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0

    @classmethod
    def of(cls, events: Sequence[StepEvent]) -> Stats:
        """Sum up events."""
        out = cls()
        for event in events:
            out.add(event)
        return out

    def add(self, event: StepEvent) -> None:
        """Take in one event."""
        self.tokens += len(event.tokens)
        if event.is_prefill:
            self.prefill_seconds += event.times.total
            return
        self.steps += 1
        self.step_tokens += len(event.tokens)
        self.step_nodes += event.nodes
        self.draft_seconds += event.times.draft
        self.prune_seconds += event.times.prune
        self.verify_seconds += event.times.verify
        self.step_seconds += event.times.total

    def merge(self, other: Stats) -> None:
        """Add another text's sums."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def seconds(self) -> float:
        """Prefill and steps."""
        return self.prefill_seconds + self.step_seconds

    @property
    def overhead_seconds(self) -> float:
        """Time of the steps outside the two models' forwards."""
        return self.step_seconds - self.draft_seconds - self.verify_seconds

    @property
    def tokens_per_step(self) -> float:
        """Accepted draft tokens + bonus per target forward; plain decoding is 1.00."""
        return self.step_tokens / self.steps if self.steps else 0.0

    @property
    def nodes(self) -> float:
        """Mean nodes per verification, root included."""
        return self.step_nodes / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def per_step_ms(self, name: str) -> float:
        """Mean milliseconds per step of ``draft``, ``prune``, ``verify``, ``overhead`` or ``step``."""
        return 1e3 * float(getattr(self, f"{name}_seconds")) / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "nodes": round(self.nodes, 3),
            "seconds": round(self.seconds, 6),
            "tokens_per_s": round(self.tokens_per_second, 3),
            "prefill_ms": round(1e3 * self.prefill_seconds, 3),
            **{f"{n}_ms": round(self.per_step_ms(n), 4) for n in ("draft", "prune", "verify", "overhead")},
        }

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.steps} steps, {self.tokens_per_step:.2f} tokens per step, "
            f"{self.nodes:.1f} nodes per verification, {self.tokens_per_second:.1f} tokens/s "
            f"(per step: draft {self.per_step_ms('draft'):.1f} ms, verify {self.per_step_ms('verify'):.1f} ms, "
            f"overhead {self.per_step_ms('overhead'):.1f} ms)"
        )


@dataclass
class Generation:
    """The result of :func:`treespec.generate`.

    Attributes:
        sequences: ``[1, L + new]`` prompt and new token ids, as transformers returns them.
        prompt_length: L.
        steps: every step, with its tree.
        tokenizer: decodes :attr:`text`, if given.
        scores, logits: per new token ``[1, V]``, when ``output_scores`` / ``output_logits`` were asked for.
        cache: holds all tokens but the last; pass it to the next turn.
    """

    sequences: Tensor
    prompt_length: int
    steps: list[StepEvent]
    tokenizer: Any = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    cache: TreeCache | None = field(default=None, repr=False)

    @property
    def tokens(self) -> list[int]:
        """New token ids."""
        out: list[int] = self.sequences[0, self.prompt_length :].tolist()
        return out

    @property
    def text(self) -> str:
        """New text, special tokens left out; needs a tokenizer."""
        if self.tokenizer is None:
            return repr(self.tokens)
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    @property
    def stats(self) -> Stats:
        """Sums over the steps."""
        return Stats.of(self.steps)

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, {self.stats})"

    def _repr_html_(self) -> str:
        from treespec.draw import generation_html

        return generation_html(self)
