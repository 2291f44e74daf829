"""A cost curve from this machine: what a verification of n nodes takes, a draft forward, and the rest of a step.

Verifications are timed in the engine's own session: a tree of n nodes behind ``context`` cached tokens, then forgotten.
Draft forwards, the overhead and plain decoding are read off short texts that the engine really decodes, with trees
that are w nodes wide, so every kind of drafter is measured as it is used. Each round does everything once, the order
rotating, after a warm-up round that does not count: a machine that drifts hits all points alike.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from treespec.api import make_drafter, start
from treespec.compare import Progress, machine
from treespec.cost import CostCurve
from treespec.errors import InputError
from treespec.intervals import median_interval
from treespec.model import TreeModel
from treespec.pairs import Pair
from treespec.policies import Autoregressive, Policy, SpecInfer
from treespec.policies.base import MAX_NODES
from treespec.prompts import filler_ids, mixed_prompts, read_prompts
from treespec.session import Session
from treespec.tree import TokenTree

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (128, 512)
WIDTHS = (1, 2, 4, 8, 16)
MOST_CONTEXT = 1 << 20
TOKENS = 8  # of the short texts; the first is the prefill's


@dataclass
class Samples:
    """Seconds by what was timed.

    Attributes:
        verify: by (context, nodes).
        draft: by nodes of the draft forward, as many as the drafter really had.
        plain: of whole steps of plain decoding.
        plain_verify: of those steps' forwards.
        overhead: of steps with a tree, outside both models' forwards.
    """

    verify: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    draft: dict[int, list[float]] = field(default_factory=dict)
    plain: list[float] = field(default_factory=list)
    plain_verify: list[float] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)


def measure(
    pair: Pair,
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = CONTEXTS,
    widths: Sequence[int] = WIDTHS,
    rounds: int = 7,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[CostCurve, dict[str, Any]]:
    """Measure a pair on this machine.

    Args:
        pair: target, draft and tokenizer; without a draft its curve is flat at 0.
        sizes: nodes of a verification, the root included; 1 is always among them.
        contexts: cached tokens before the tree.
        widths: nodes of a draft forward.
        rounds: repetitions of everything, at least 3 for an interval; one more warms up.
        seed: of the bootstrap.
        progress: told before every round.

    Returns:
        The curve, and what else its file says: single points with 95 % intervals, the machine, the pair.

    Raises:
        InputError: for sizes or contexts that are not positive, or that the model's context cannot hold.
    """
    check_points(sizes, contexts, widths)
    sizes, contexts = sorted({1, *sizes}), sorted(set(contexts))
    if rounds < 1:
        raise InputError(f"rounds must be at least 1; got {rounds}")
    owner, drafter = TreeModel.of(pair.target), make_drafter(pair.draft, TreeModel.of(pair.target))
    if contexts[-1] + sizes[-1] > owner.limits.context:
        raise InputError(
            f"a context of {contexts[-1]:,} tokens and a tree of {sizes[-1]} do not fit the target's "
            f"{owner.limits.context:,} tokens; give smaller --contexts or --sizes"
        )
    text = filler_ids(read_prompts(mixed_prompts()), pair.tokenizer, contexts[-1])
    sessions = {c: _session(owner, text[:c], sizes[-1], hasattr(type(drafter), "read")) for c in contexts}
    texts = _texts(widths if drafter is not None else ())
    tasks: list[Callable[[Samples], None]] = [
        *(_Verification(c, n, sessions[c]) for c in contexts for n in sizes),
        *(_Text(pair, drafter, policy, text[: contexts[0]]) for policy in texts),
    ]
    samples = Samples()
    for turn in range(rounds + 1):
        if progress is not None:
            progress(turn, rounds + 1, "warming up" if turn == 0 else f"round {turn} of {rounds}")
        into = samples if turn else Samples()
        for task in [*tasks[turn % len(tasks) :], *tasks[: turn % len(tasks)]]:
            task(into)
    return _result(samples, pair, rounds, seed)


def check_points(sizes: Sequence[int], contexts: Sequence[int], widths: Sequence[int]) -> None:
    """Refuse points that nobody can measure, before a model is loaded.

    Raises:
        InputError: naming what is possible.
    """
    for name, values, least, most in (
        ("sizes", sizes, 1, MAX_NODES),
        ("contexts", contexts, 2, MOST_CONTEXT),
        ("widths", widths, 1, MAX_NODES // 2),
    ):
        wrong = [value for value in values if not least <= value <= most]
        if wrong or (name == "contexts" and not values):
            raise InputError(
                f"{name} must be at least {least} and at most {most:,}; got {wrong[0] if wrong else 'none'}"
            )


def _texts(widths: Sequence[int]) -> list[Policy]:
    """Plain decoding, and a tree with a level of w nodes for every w."""
    return [Autoregressive(), *(SpecInfer((w, 1)) for w in sorted(set(widths)))]


def _session(owner: TreeModel, text: list[int], room: int, hidden: bool) -> Session:
    session = owner.session(len(text) + room)
    session.keep_hidden = hidden
    with torch.no_grad():
        session.extend(text, logits="none")
    return session


@dataclass
class _Verification:
    """One timed tree forward; nodes hang in a binary tree, the time does not depend on the shape."""

    context: int
    n: int
    session: Session

    def __call__(self, samples: Samples) -> None:
        tree = TokenTree.from_lists([1] * self.n, [-1, *((i - 1) // 2 for i in range(1, self.n))], [0.0] * self.n)
        before = self.session.seconds
        with torch.no_grad():
            self.session.tree(tree.token.tolist(), tree.depth.tolist(), tree.ancestors())
        samples.verify.setdefault((self.context, self.n), []).append(self.session.seconds - before)
        self.session.keep([])


@dataclass
class _Text:
    """A short text under one policy, for the draft's forwards, the overhead and plain decoding."""

    pair: Pair
    drafter: Any
    policy: Policy
    prompt: list[int]

    def __call__(self, samples: Samples) -> None:
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}
        for event in start(self.pair.target, self.drafter, self.prompt, policy=self.policy, **options):
            if event.index < 2:  # the prefill, and the first step, whose draft forward reads the prompt
                continue
            if isinstance(self.policy, Autoregressive):
                samples.plain.append(event.times.total)
                samples.plain_verify.append(event.times.verify)
                continue
            samples.overhead.append(event.times.overhead)
            expanded = event.tree.parent[event.tree.parent >= 0].unique()
            widths = torch.bincount(event.tree.depth[expanded]).tolist() if len(expanded) else []
            for width, seconds in zip(widths, event.draft_forwards):
                samples.draft.setdefault(width, []).append(seconds)


def _result(samples: Samples, pair: Pair, rounds: int, seed: int) -> tuple[CostCurve, dict[str, Any]]:
    middle = {key: float(np.median(values)) for key, values in samples.verify.items()}
    contexts = sorted({c for c, _ in middle})
    sizes = sorted({n for _, n in middle})
    draft = {w: float(np.median(v)) for w, v in sorted(samples.draft.items())} or {1: 0.0}
    base, slopes = _lines(contexts, np.array([[middle[c, n] for n in sizes] for c in contexts]))
    outside = float(np.median(samples.plain) - np.median(samples.plain_verify)) if samples.plain else 0.0
    curve = CostCurve(
        tuple(map(float, sizes)),
        base,
        tuple(map(float, draft)),
        tuple(draft.values()),
        overhead=float(np.median(samples.overhead)) if samples.overhead else max(outside, 0.0),
        provenance=f"measured by treespec measure: {pair.name}, {pair.target.dtype}, {pair.forward}, {rounds} rounds, "
        f"{datetime.date.today().isoformat()}",
        context=float(contexts[0]),
        context_seconds=slopes,
        longest=float(contexts[-1]),
    )
    curve = replace(curve, plain=curve.verify(1) + max(outside, 0.0))
    points: dict[str, Any] = {
        "verify": [{"context": c, "rows": n, **_point(samples.verify[c, n], seed)} for c, n in sorted(middle)],
        "draft": [{"rows": w, **_point(v, seed)} for w, v in sorted(samples.draft.items())],
        "plain": _point(samples.plain or [curve.verify(1) + max(outside, 0.0)], seed),
        "overhead": _point(samples.overhead or [curve.overhead], seed),
    }
    about = {"target": pair.name, "dtype": str(pair.target.dtype).removeprefix("torch."), "forward": pair.forward}
    return curve, {**about, "rounds": rounds, "machine": machine(pair.target), "points": points}


def _lines(contexts: list[int], seconds: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Least-squares lines over contexts, by size: seconds at the shortest, and what a further token adds (not below 0).

    Args:
        contexts: c of them, ascending.
        seconds: ``[c, sizes]``.
    """
    more = np.array(contexts, dtype=float) - contexts[0]
    spread = more - more.mean()
    slopes = np.zeros(seconds.shape[1]) if len(contexts) < 2 else (spread @ seconds) / (spread @ spread)
    slopes = slopes.clip(min=0.0)
    base = seconds.mean(0) - slopes * more.mean()
    return tuple(base.clip(min=seconds.min() * 1e-3).tolist()), tuple(slopes.tolist()) if len(contexts) > 1 else ()


def _point(values: list[float], seed: int) -> dict[str, Any]:
    middle, low, high = median_interval(values, seed)
    return {"seconds": middle, "interval": [low, high], "samples": len(values)}
