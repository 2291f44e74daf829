"""What a trace and a cost model are from, what they do not say, and the commands that make them again.

A page that people decide by has to tell measured from modelled. All of it is read off the files themselves; where a
file does not say something, that is what is said.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from treespec.cost import At, CostModel, shipped
from treespec.files import read_bytes, read_json
from treespec.prompts import digest, mixed_prompts, read_prompts
from treespec.search import TRUNCATED
from treespec.trace import Trace

FEW_PROMPTS = 10  # fewer held-out prompts than this make an interval that is itself uncertain


def sha256(path: str | Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def cost_about(cost: CostModel) -> dict[str, Any]:
    """What a curve's file says beside the curve: ``machine``, ``target``, ``points`` …; ``{}`` without a file."""
    path = shipped().get(str(cost), Path(str(cost)))
    return read_json(path) if os.path.isfile(path) else {}


def recorded(trace: Trace) -> dict[str, str]:
    """What was recorded, as names and values for people."""
    about = trace.about
    categories = Counter(p.category or "no category" for p in trace.prompts)
    sample = about.get("sample")
    if sample == "coupled":
        warmth, top, seed = (about.get(key) for key in ("temperature", "top_p", "seed"))
        sample = f"coupled noise, temperature {warmth}, top-p {top}, seed {seed}"
    caps = trace.caps
    versions = about.get("versions") or {}
    found = {
        "target": f"{about.get('target')}, {about.get('dtype')}",
        "forward": str(about.get("forward", "not said")),
        "draft": " ".join(dict.fromkeys(str(about[k]) for k in ("draft", "drafter") if about.get(k))),
        "text": f"{sample}, at most {about.get('max_new_tokens')} new tokens a prompt",
        "prompts": f"{len(trace.prompts)}: " + ", ".join(f"{n} {name}" for name, n in sorted(categories.items())),
        "positions": f"{len(trace):,}, {trace.positions.mean():.0f} tokens before them on average "
        f"({trace.positions.min()} to {trace.positions.max()})",
        "supertrees": f"{len(trace.nodes['node']):,} nodes; path probability from {caps.floor:g}, {caps.depth} levels, "
        f"the {caps.nodes} most probable of trees {', '.join(map(str, caps.widths))} wide",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else str(versions),
    }
    return {name: value for name, value in found.items() if value}


def record_command(trace: Trace) -> tuple[str, list[str]]:
    """The command that records such a trace again, and what the trace does not say of it, a sentence each."""
    about, caps = trace.about, trace.caps
    said: list[str] = []
    by_command = "fast" in about  # the command names the draft as it was asked for, and the forward
    options: list[tuple[str, Any]] = [("target", about.get("target"))]
    options += [("draft", about.get("draft"))] if by_command else []
    options += _asked(trace, said)
    options += [("max-new-tokens", about.get("max_new_tokens"))]
    if about.get("sample") == "coupled":
        options += [("sample", "coupled"), ("temperature", about.get("temperature")), ("top-p", about.get("top_p"))]
    options += [("seed", about.get("seed")), ("floor", f"{caps.floor:g}"), ("depth", caps.depth)]
    options += [("width", caps.width), ("nodes", caps.nodes), ("narrow", "/".join(map(str, caps.narrow)))]
    options += [("dtype", about.get("dtype")), ("fast", about.get("fast"))]
    if not by_command:
        said.append(
            f"The trace was recorded from Python: put in --draft and --fast yourself. Its draft was a "
            f"{about.get('draft', 'draft of unknown kind')}, its target's forward: {about.get('forward', 'not said')}."
        )
    words = ["treespec", "record", "--out", Path(trace.path).name]
    for name, value in options:
        words += [f"--{name}", str(value)] if value is not None else []
    return shlex.join(words), said


def _asked(trace: Trace, said: list[str]) -> list[tuple[str, Any]]:
    """Options that choose the prompts: the repo's own, or some of them, if the trace's digest is theirs."""
    asked = trace.about.get("asked")
    rows = read_prompts(mixed_prompts())
    if len(trace.prompts) < len(rows):
        limits = range(len(trace.prompts), len(rows))
        found = [n for n in limits if digest([rows[i * len(rows) // n] for i in range(n)]) == asked]
        if found:
            return [("limit", found[0])]
    if digest(rows) == asked:
        if len(trace.prompts) < len(rows):
            said.append(f"The trace holds {len(trace.prompts)} of the {len(rows)} prompts that were asked.")
        return []
    said.append(f"Its prompts are not the package's own: put in the file whose prompts have the digest {asked}.")
    return [("prompts", "YOUR_PROMPTS.jsonl")]


def not_measured(trace: Trace, cost: At, rows: list[dict[str, Any]], tuning: dict[str, Any]) -> list[str]:
    """What the figures of a review do not rest on a measurement for, one sentence each.

    Args:
        trace: what was replayed.
        cost: the prices.
        rows: of :func:`treespec.table.article_table`.
        tuning: :meth:`treespec.tune.Tuning.as_dict`.
    """
    out = [
        "No speed-up on this page was timed. Tokens per step and nodes are exact replays of recorded texts; the "
        "seconds are the cost model's, and the prompt's own forward (prefill) is left out.",
        *_of_cost(trace, cost),
    ]
    named = [r["strategy"] for r in rows if r["extrapolated"]]
    if named:
        what = "Outside the sizes, contexts or batches that the cost model was measured for or its GPUs hold"
        out.append(f"{what}: {', '.join(named)}.")
    short = [f"{r['strategy']} ({100 * r['truncated_share']:.0f} %)" for r in rows if r["truncated_share"] > TRUNCATED]
    if short:
        out.append(
            "Strategies that asked for nodes beyond the recording in this share of their steps, so their rows are of "
            f"smaller and cheaper trees: {', '.join(short)}."
        )
    held = tuning["prompts"]["held_out"]
    if len(trace.prompts) < 2:
        out.append("There is one prompt, so nothing could be held out: the search saw what it is judged by.")
    elif held < FEW_PROMPTS:
        out.append(f"Only {held} prompts were held out; their interval is itself uncertain.")
    if trace.about.get("sample") == "greedy":
        out.append("Only greedy text was recorded; sampled text, and other temperatures, may accept fewer tokens.")
    if trace.about.get("dtype") != "float32":
        out.append(
            f"The target ran in {trace.about.get('dtype')}, where a batched forward rounds differently from a single "
            "one: live text can leave the recorded one at ties."
        )
    out.append("Memory, energy, several requests at once and other prompts than these were not looked at.")
    return out


def _of_cost(trace: Trace, cost: At) -> list[str]:
    """What the cost model itself is not."""
    about, out = cost_about(cost.cost), []
    provenance = str(getattr(cost.cost, "provenance", "")) or "it does not say where its numbers are from"
    if not about.get("points"):
        out.append(f"The cost model {cost} carries no single measurements. {_sentence(provenance)}")
    for what in ("target", "dtype", "forward"):
        mine, other = about.get(what), trace.about.get(what)
        if mine and other and mine != other:
            out.append(f"The cost curve was measured with {what} {mine}, the trace was recorded with {other}.")
    if cost.batch > 1:
        out.append(f"A batch of {cost.batch} is priced as one forward over all its rows; that is an assumption.")
    if "machine" not in about:
        out.append("Neither file names the machine that it is from; texts and trees do not depend on it, seconds do.")
    return out


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."
