"""Is the prediction true? The recommended setting on the live engine, beside what the replay said of the same prompts.

The prompts are held-out ones of the trace and the texts are as long as there, so the steps are the very ones that were
replayed; what is left to differ is the cost model, and rounding. Both speed-ups are of decoding: the prompt's own
forward, which no tree shortens, is left out. The measured speed-up of whole texts stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treespec.compare import Progress, compare
from treespec.cost import CostModel
from treespec.errors import InputError
from treespec.pairs import Pair
from treespec.policies import parse_policy
from treespec.prompts import Prompt
from treespec.scoring import priced, score
from treespec.search import halves
from treespec.trace import Trace


def confirm(
    policy: str,
    trace: Trace,
    cost: CostModel,
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    limit: int = 12,
    rounds: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run a setting live on held-out prompts of a trace.

    Args:
        policy: the setting, as ``Tuning.recommended["policy"]`` has it.
        trace: what it was found on, greedy.
        cost: what it was priced with.
        pair: the models of the trace.
        prompts: those of the trace, by id; others are ignored.
        limit: most prompts.
        rounds: repetitions of everything.
        seed: of the search, which says what was held out.
        progress: told before every generation.

    Returns:
        ``predicted`` and ``measured``, each with ``decoding_speedup`` and ``tokens_per_step``, ``measured`` also with
        the row of :func:`treespec.compare.compare`, whose ``speedup`` is of whole texts; ``ratio``, measured over
        predicted; ``prompts``, their ids; ``machine``.

    Raises:
        InputError: if the trace was sampled, or none of its held-out prompts is among ``prompts``.
    """
    held, text = held_prompts(trace, prompts, limit, seed), {p.id: p for p in prompts}
    live = compare(
        pair,
        [text[trace.prompts[k].id] for k in held],
        [parse_policy(policy)],
        rounds=rounds,
        max_new_tokens=int(trace.about["max_new_tokens"]),
        progress=progress,
    )
    plain = next(r for r in live["rows"] if r["policy"] == "plain")
    own = next((r for r in live["rows"] if r is not plain), plain)  # the answer may be not to speculate
    measured = {**own, "decoding_speedup": round(_token_ms(plain) / _token_ms(own), 3)}
    row = score(trace, parse_policy(policy), priced(cost, trace)).row(np.array(held))
    predicted = {"decoding_speedup": row["speedup"], **{k: row[k] for k in ("tokens_per_step", "nodes", "step_ms")}}
    return {
        "predicted": predicted,
        "measured": measured,
        "ratio": measured["decoding_speedup"] / predicted["decoding_speedup"],
        "prompts": [trace.prompts[k].id for k in held],
        "machine": live["machine"],
    }


def held_prompts(trace: Trace, prompts: Sequence[Prompt], limit: int, seed: int) -> list[int]:
    """Numbers of the held-out prompts that a confirmation runs; neither a model nor a search is needed to tell.

    The arguments are those of :func:`confirm`, and so are its errors.
    """
    if trace.about.get("sample") != "greedy":
        raise InputError("a prediction is confirmed on greedy texts; this trace was sampled: record a greedy one")
    if not isinstance(trace.about.get("max_new_tokens"), int):
        raise InputError("the trace does not say how long its texts may be, so they cannot be written again")
    known = {p.id for p in prompts}
    held = sorted(int(k) for k in halves(trace, np.random.default_rng(seed))[1] if trace.prompts[int(k)].id in known)
    if not held:
        raise InputError(
            "none of the trace's held-out prompts is in the prompt file; give the file it was recorded from"
        )
    return held if limit >= len(held) else [held[i * len(held) // limit] for i in range(limit)]


def _token_ms(row: dict[str, Any]) -> float:
    """Milliseconds of decoding per token."""
    return float((row["verify_ms"] + row["draft_ms"] + row["overhead_ms"]) / row["tokens_per_step"])
