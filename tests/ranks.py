"""What the processes of a launch run in ``test_peers.py``: ``ranks.py VICTIM FOLDER WHAT …``; FOLDER gets the results.

In the end VICTIM, a rank, is killed in the middle of a text. Starting processes is dear, so one launch checks much.
"""

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
from treespec.drafters import NgramDrafter
from treespec.errors import OutOfMemoryError, VocabularyError
from treespec.launch import rank, world
from treespec.pairs import load_pair
from treespec.peers import Follower
from treespec.policies import Uniform

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
NEW = 10
DRAFTS = {"draft": RUNS, "self": RUNS[::3], "ngram": RUNS[1::3], "head": RUNS[2::3]}  # the others share the runs


def texts(pair, runs):
    """The tokens of every run, and its paths."""
    out = []
    for policy, options in runs:
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


class Liar(Uniform):
    """Says that it decides before it sees the drawn children, and does not."""

    name = "liar"

    def trim(self, score, kept, drawn):
        return kept & (torch.arange(kept.shape[1]) < 2)


class Broken(NgramDrafter):
    """A draft that fails where it is told to."""

    def __init__(self, where, error):
        super().__init__()
        self.fails = {where: error}

    def begin(self, request):
        self._fail("begin")
        super().begin(request)

    def commit(self, path, tokens):
        self._fail("commit")
        super().commit(path, tokens)

    def grow(self, policy, max_depth):
        self._fail("grow")
        return super().grow(policy, max_depth)

    def _fail(self, where):
        if where in self.fails:
            raise self.fails[where]


def failures(target, draft, linear):
    """What every process ends with where the first one's policy or draft, or the target, breaks; and a text after that.

    Args:
        target: divided or not.
        draft: a model, or in processes that follow nobody's.
        linear: options of the text.
    """
    leads = rank() == 0
    broken = lambda where, error: Broken(where, error) if leads else Follower()  # noqa: E731
    runs = {
        "policy": dict(draft=draft, policy=Liar(2, 2), rule="rrs", **SAMPLED),
        "begin": dict(draft=broken("begin", VocabularyError("another vocabulary")), **linear),
        "commit": dict(draft=broken("commit", OutOfMemoryError("the draft ran out of memory")), **linear),
        "grow": dict(draft=broken("grow", RuntimeError("boom\nand more")), **linear),
        "target": dict(draft=draft, **linear),
    }
    ended = {}
    for name, options in runs.items():
        hook = target.lm_head.register_forward_hook(_no_numbers) if name == "target" else None
        try:
            treespec.generate(target, inputs=prompt(6), max_new_tokens=NEW, **options)
        except Exception as error:
            ended[name] = [type(error).__name__, str(error)]
        if hook is not None:
            hook.remove()
    ended["text"] = treespec.generate(target, draft, prompt(6), max_new_tokens=NEW, **linear).tokens
    return ended


def _no_numbers(module, inputs, out):
    return out * torch.nan if out.shape[1] > 1 else out


def killed(victim, folder):
    """One text, in the middle of which a process is killed; ends this process."""
    from treespec.cli import main as run
    from treespec.decode import Decoding

    honest = Decoding._step

    def step(self, index):
        if index == 3 and rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, index)

    Decoding._step = step
    options = ("--draft", str(folder / "draft"), "--policy", "linear", "--max-new-tokens", "60")
    sys.argv = ["treespec", "generate", "--prompt", "Tree?", "--target", str(folder / "model"), *options]
    run()


LINEAR = dict(policy="linear:gamma=3", do_sample=False)


def main(victim, folder, *what):
    results = {}
    if "texts" in what:
        for draft, runs in DRAFTS.items():
            name = str(folder / draft) if draft in ("draft", "head") else draft
            pair = load_pair(str(folder / "model"), name, tensor_parallel=True)
            results[draft] = texts(pair, runs)
            if draft == "draft":
                results["failures"] = failures(pair.target, pair.draft, LINEAR)
        results["shares"] = [p.to_local().numel() for p in pair.target.parameters() if hasattr(p, "to_local")]
    if "commands" in what:
        results["commands"] = commands(folder, True)
    assert world() == 2
    (folder / f"results.{rank()}.json").write_text(json.dumps(results))
    killed(int(victim), folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
