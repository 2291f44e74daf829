"""What the processes of a launch run in ``test_peers.py``: ``ranks.py WHAT FOLDER``; results go to FOLDER as JSON."""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import torch
from conftest import prompt

import treespec
from treespec.launch import leave, rank, world
from treespec.pairs import load_pair

torch.set_num_threads(1)
POLICIES = [
    "plain",
    "linear:gamma=3",
    "uniform:depth=3,width=2",
    "threshold:tau=0.02,budget=16",
    "specinfer",
    "eagle2:total=20,depth=4,top_k=4",
    "opttree:budget=12",
    "sequoia:budget=10",
    "bestfirst:budget=10",
    "throughput:cost=article",
    "dynamic:tau=0.01,high=9",
    "dynamic:tau=auto,high=9",
]
SAMPLED = dict(do_sample=True, temperature=0.9, top_k=0, seed=11)
RUNS = [
    *((policy, dict(do_sample=False)) for policy in POLICIES),
    *((policy, dict(SAMPLED, rule="coupled")) for policy in POLICIES),
    *(("uniform:depth=2,width=2", dict(SAMPLED, rule=rule)) for rule in ("match", "rrs", "hybrid", "traversal")),
    ("linear:gamma=3", dict(SAMPLED, rule="block")),
    ("linear:gamma=3", dict(do_sample=False, repetition_penalty=1.3)),
]
NEW = 14


def texts(pair):
    """The tokens of every run, and its paths."""
    out = []
    for policy, options in RUNS:
        got = treespec.generate(pair.target, pair.draft, prompt(6), policy=policy, max_new_tokens=NEW, **options)
        out.append({"tokens": got.tokens, "steps": len(got.steps), "nodes": sum(e.nodes for e in got.steps)})
    return out


def command(*arguments):
    """What a command prints."""
    from treespec.cli import app

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app([*arguments], standalone_mode=False)
    return out.getvalue()


def commands(folder, divided):
    """Three commands, one after the other, as one process or as several."""
    name, draft = str(folder / "model"), str(folder / "draft")
    common = ("--target", name, "--draft", draft, "--max-new-tokens", "9")
    trace = folder / ("divided.parquet" if divided else "alone.parquet")
    tensor = ("--parallel", "tensor") if divided else ()
    prompts = ("--prompts", str(folder / "prompts.jsonl"))
    return {
        "generate": command("generate", "--prompt", "Tree?", *common, "--policy", "linear:gamma=2", "--json"),
        "compare": command(
            "compare", *prompts, *common, "--policies", "linear:gamma=2,uniform:depth=2,width=2", "--json"
        ),
        "record": command("record", *prompts, *common, "--out", str(trace), "--depth", "3", *tensor, "--json"),
    }


def main(what, folder):
    if what == "texts":
        results = {}
        for draft in ("draft", "self", "ngram"):
            name = str(folder / "draft") if draft == "draft" else draft
            pair = load_pair(str(folder / "model"), name, tensor_parallel=True)
            results[draft] = texts(pair)
        results["head"] = texts(load_pair(str(folder / "model"), str(folder / "head"), tensor_parallel=True))
        results["shares"] = [p.to_local().numel() for p in pair.target.parameters() if hasattr(p, "to_local")]
    elif what == "commands":
        results = commands(folder, True)
    else:
        from treespec.cli import main as run
        from treespec.decode import Decoding

        honest = Decoding._step

        def step(self, index):
            if index == 3 and rank() == int(what.removeprefix("kill")):
                os.kill(os.getpid(), signal.SIGKILL)
            return honest(self, index)

        Decoding._step = step
        options = ("--draft", str(folder / "draft"), "--policy", "linear", "--max-new-tokens", "60")
        sys.argv = ["treespec", "generate", "--prompt", "Tree?", "--target", str(folder / "model"), *options]
        run()
    assert world() == 2
    (folder / f"{what}.{rank()}.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
