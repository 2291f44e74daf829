"""treespec beside other libraries: one interleaved run, greedy, tokens counted from ids, losses of text shown.

Every round runs every prompt with every contestant, the order rotating. Speed-up: plain ``transformers`` seconds over
own seconds, prefill included, summed over prompts (each the median over rounds); where a text differs from the
baseline's, seconds per token instead. Intervals are bootstraps over prompts. Peers are tuned before, on the repo's own
prompts (those that are not measured). Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging as hf_logging

from benchmarks.peers import Contestant, baselines, by_treespec, peers, reason, tune
from benchmarks.tally import SIXTEEN, Tally, Tell, drop, make_row, margins, markdown, measure, spread, summary
from treespec.api import make_drafter
from treespec.compare import machine
from treespec.errors import InputError, TreespecError
from treespec.files import write_json, write_whole
from treespec.model import TreeModel
from treespec.pairs import chat_ids, load_model, load_pair, shipped_draft
from treespec.policies import parse_policies, parse_policy
from treespec.prompts import Prompt, mixed_prompts, read_prompts

CONTEXT = 2048  # tokens, new ones included
TUNE_TOKENS = 48
EXAMPLES = """examples:
  python -m benchmarks.versus --prompts data/prompts/mixed.jsonl --limit 24 --rounds 3 --max-new-tokens 64 --json v.json
  python -m benchmarks.versus --prompts spec.jsonl --rounds 1 --max-new-tokens 128 --json v.json --draft mix \\
      --policies bestfirst:budget=24,threshold:tau=0.05,budget=16 --fast cpu --markdown v.md
  (keys after a policy's name belong to it; a peer that does not run is listed under left_out with its reason)"""


class Bench:
    """One run: models, prompts, contestants, and the result of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.left_out: dict[str, str] = {}
        self.tuning: dict[str, list[dict[str, Any]]] = {}
        self.model, self.tokenizer = load_model(args.target, args.dtype)
        everything = read_prompts(args.prompts)
        fitting = self._fitting(everything, args.max_new_tokens)
        if not fitting:
            raise InputError(f"no prompt of {args.prompts} leaves {args.max_new_tokens} of {CONTEXT} tokens free")
        self.too_long = len(everything) - len(fitting)
        self.chosen = spread(fitting, args.limit)
        self.ids = {p.id: chat_ids(self.tokenizer, p.turns[:1]) for p in self.chosen}

    def _fitting(self, prompts: Sequence[Prompt], new: int) -> list[Prompt]:
        return [p for p in prompts if len(chat_ids(self.tokenizer, p.turns[:1])) + new <= CONTEXT]

    def contestants(self, tell: Tell) -> list[Tally]:
        """Everybody, warmed up."""
        found = [*baselines(self.model, self.left_out), *self._treespec(), *self._peers(tell)]
        tallies = [Tally(c) for c in found]
        first = next(iter(self.ids.values()))
        for tally in list(tallies):
            tell(f"warming up {tally.contestant.name}")
            try:
                tally.contestant.run(first, min(self.args.max_new_tokens, 8))
            except Exception as error:
                drop(tally, tallies, self.left_out, error)
        return tallies

    def _treespec(self) -> list[Contestant]:
        args = self.args
        pair = load_pair(args.target, args.draft, args.dtype, args.fast)
        drafter = make_drafter(pair.draft, TreeModel.of(pair.target))
        best = parse_policy(SIXTEEN)
        extra = parse_policies(args.policies) if args.policies else []
        chosen = {p.spec(): p for p in (parse_policy("linear"), parse_policy("dynamic"), best, *extra)}
        chosen.pop("plain", None)
        out = [by_treespec(self.model, None, parse_policy("plain"), "off")]
        if args.fast != "off":
            out.append(by_treespec(pair.target, None, parse_policy("plain"), args.fast))
        return out + [by_treespec(pair.target, drafter, p, args.fast) for p in chosen.values()]

    def _peers(self, tell: Tell) -> list[Contestant]:
        if self.args.no_peers:
            return []
        draft, folder = self._peer_draft()
        measured = {p.turns[0] for p in self.chosen}
        rest = [p for p in read_prompts(mixed_prompts()) if p.turns[0] not in measured]
        new = min(self.args.max_new_tokens, TUNE_TOKENS)
        chosen = spread(self._fitting(rest, new), self.args.tune_prompts) if self.args.tune_prompts else []
        ids = [chat_ids(self.tokenizer, p.turns[:1]) for p in chosen]
        out = []
        for peer in peers(self.model, draft, folder):
            try:
                contestant, self.tuning[peer.name] = tune(peer, ids, new, tell)
                out.append(contestant)
            except Exception as error:
                self.left_out[peer.name] = reason(error)
        return out

    def _peer_draft(self) -> tuple[Any, str]:
        try:
            folder = self.args.peer_draft or str(shipped_draft("lm"))
            return load_model(folder, self.args.dtype)[0], folder
        except TreespecError as error:
            if self.args.peer_draft:
                raise
            for name in ("transformers assisted", "flashspec", "economize"):
                self.left_out[name] = f"needs an independent draft, --peer-draft FOLDER ({error})"
            return None, ""

    def result(self, tallies: list[Tally], finished: bool) -> dict[str, Any] | None:
        """Everything over the prompts that all contestants finished; None if there is none."""
        names = [n for n in self.ids if all(n in t.seconds for t in tallies)]
        if not names:
            return None
        category = {p.id: p.category for p in self.chosen}
        margin = margins(self.model, self.ids, tallies[0])
        rows = [make_row(tallies[0], t, names, category, margin) for t in tallies]
        args = self.args
        return {
            **summary(rows),
            "finished": finished,
            "rows": rows,
            "left_out": self.left_out,
            "tuning": self.tuning,
            "prompts": len(names),
            "prompts_too_long": self.too_long,
            "rounds": max(len(s) for s in tallies[0].seconds.values()),
            **{k: getattr(args, k) for k in ("max_new_tokens", "dtype", "fast", "draft", "target")},
            "peer_draft": args.peer_draft or "lm",
            "machine": machine(self.model),
        }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.versus",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = out.add_argument
    add("--prompts", required=True, help="JSON Lines with id, category, turns; first turns are used")
    add("--rounds", type=at_least(1), required=True, help="repetitions of everything")
    add("--max-new-tokens", type=at_least(1), required=True, metavar="N", help="most new tokens per prompt")
    add("--json", type=Path, required=True, metavar="OUT", help="where the result goes, whole or not at all")
    add("--limit", type=at_least(0), default=0, help="only that many prompts, spread evenly over categories; 0 is all")
    add("--target", default="smollm2", help="'smollm2' (embedded), a folder or a hub id")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of every model (default: %(default)s)")
    add("--draft", default="mix", help="treespec's draft: head, mix, lm, ngram or a folder (default: %(default)s)")
    add("--peer-draft", default="", metavar="FOLDER", help="the peers' independent draft model (default: the shipped)")
    add("--no-peers", action="store_true", help="treespec and plain transformers only")
    add("--fast", choices=("cpu", "off"), default="cpu", help="treespec's forward in its speculating rows")
    add("--policies", default="", help="more of them, e.g. bestfirst:budget=24,threshold:tau=0.05,budget=16")
    add("--tune-prompts", type=at_least(0), default=8, help="prompts to tune the peers on; 0 leaves their defaults")
    add("--markdown", type=Path, metavar="OUT.md", help="the printed tables, also there")
    add("--threads", type=at_least(1), help="torch threads (default: torch's own)")
    return out


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``least`` on."""

    def whole(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}; got {text}")
        return int(text)

    return whole


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; the exit code."""
    parse_policies(args.policies) if args.policies else None  # a typo should not wait for a model to load
    for path in (args.json, args.markdown):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    if args.threads:
        torch.set_num_threads(args.threads)
    bench = Bench(args)
    with tqdm(unit="run", file=sys.stderr) as bar:

        def tell(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(1)

        tallies = bench.contestants(tell)
        bar.reset(total=args.rounds * len(bench.ids) * len(tallies))
        finished = measure(tallies, bench.ids, args.rounds, args.max_new_tokens, bench.left_out, tell)
    result = bench.result(tallies, finished)
    if result is not None:
        text = markdown(result)
        write_json(args.json, result)
        if args.markdown is not None:
            write_whole(args.markdown, lambda path: path.write_text(text, encoding="utf-8"))
        print(text, end="")
    if not finished:
        kept = "nothing was finished" if result is None else f"{args.json} holds the {result['prompts']} prompts done"
        print(f"versus: interrupted; {kept}", file=sys.stderr)
    return 0 if finished else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code says how it went."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # flashspec's past_key_values, on every forward
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        return run(parser().parse_args(argv))
    except TreespecError as error:
        print(f"versus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("versus: interrupted before anything was measured; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
