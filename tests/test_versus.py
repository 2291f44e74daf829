"""The side-by-side benchmark: spreading, measuring, divergences, rows, tables, and one run on a tiny Llama."""

import argparse
import importlib.util
import json

import numpy as np
import pytest
import torch
from conftest import build

from benchmarks import peers, tally, versus
from benchmarks.peers import Contestant, Peer
from benchmarks.tally import Tally
from treespec.drafters import NgramDrafter
from treespec.errors import InputError
from treespec.events import Stats
from treespec.fast import speed_up
from treespec.pairs import Pair
from treespec.prompts import Prompt

pytestmark = pytest.mark.thorough

NAMES = ["a", "b", "c"]
CATEGORY = {"a": "x", "b": "x", "c": "y"}


def told(seconds, texts=None, group="treespec", **more):
    """A tally that has measured one round of every prompt."""
    out = Tally(Contestant(more.pop("name", group), group, lambda ids, n: [], **more))
    for name, time, text in zip(NAMES, seconds, texts or [[1, 2, 3, 4]] * 3):
        out.add(
            name, time, text, Stats(tokens=4, steps=2, step_tokens=3, step_nodes=8) if group == "treespec" else None
        )
    return out


def row(base, own):
    return tally.make_row(base, own, NAMES, CATEGORY, lambda name, at: 0.25)


@pytest.fixture
def rows():
    base = told([1.0, 2.0, 3.0], group="baseline", name="transformers")
    return [
        row(base, base),
        row(base, told([1.0, 2.0, 3.0], name="treespec plain", policy="plain")),
        row(base, told([0.8, 1.6, 2.4], name="treespec plain, fast", policy="plain", fast="cpu")),
        row(base, told([0.5, 0.5, 1.0], name="best", policy=tally.SIXTEEN, fast="cpu")),
        row(base, told([0.5, 1.0, 1.5], group="peer", name="other")),
    ]


def test_prompts_are_spread_over_categories_and_within_them():
    prompts = [
        Prompt(f"{kind}{i}", kind, ["?"]) for kind, count in (("x", 10), ("y", 2), ("z", 6)) for i in range(count)
    ]
    chosen = [p.id for p in tally.spread(prompts, 9)]
    assert chosen == ["x0", "x2", "x5", "x7", "y0", "y1", "z0", "z2", "z4"], "y has no more to give"
    assert tally.spread(prompts, 0) == tally.spread(prompts, 99) == prompts
    assert {p.category for p in tally.spread(prompts, 3)} == {"x", "y", "z"}
    assert all(len(tally.spread(prompts, n)) == n for n in range(1, 18))


def test_every_contestant_runs_every_prompt_in_every_round_in_rotating_order():
    order = []
    tallies = [Tally(Contestant(n, "peer", lambda ids, n_, n=n: order.append(n) or [1])) for n in "ABC"]
    assert tally.measure(tallies, {"a": [1], "b": [2]}, 3, 4, {}, lambda what: None)
    assert "".join(order) == "ABCBCACAB" * 2
    assert all(len(t.seconds[n]) == 3 for t in tallies for n in "ab") and all(t.steady for t in tallies)


def test_a_peer_that_fails_is_left_out_with_its_reason_and_anything_else_is_raised():
    def broken(ids, n):
        raise ValueError("no such thing\nmore")

    good, bad = Tally(Contestant("good", "baseline", lambda ids, n: [1])), Tally(Contestant("bad", "peer", broken))
    left_out, tallies = {}, [good, bad]
    assert tally.measure(tallies, {"a": [1], "b": [2]}, 1, 4, left_out, lambda what: None)
    assert tallies == [good] and left_out == {"bad": "ValueError: no such thing"} and set(good.texts) == {"a", "b"}
    with pytest.raises(ValueError, match="no such"):
        tally.measure([good, Tally(Contestant("own", "treespec", broken))], {"a": [1]}, 1, 4, {}, lambda what: None)


def test_an_interrupt_keeps_whole_turns_only():
    runs = []

    def decode(ids, n):
        runs.append(ids)
        if len(runs) == 6:
            raise KeyboardInterrupt
        return [1]

    tallies = [Tally(Contestant(n, "baseline", decode)) for n in "AB"]
    assert not tally.measure(tallies, {"a": [1], "b": [2], "c": [3]}, 1, 4, {}, lambda what: None)
    assert [set(t.seconds) for t in tallies] == [{"a", "b"}] * 2


def test_speedup_is_the_ratio_of_summed_medians_with_an_interval_around_it(rows):
    base, plain, _, best, _ = rows
    assert base["speedup"] == plain["speedup"] == 1.0 and base["speedup_ci"] == [1.0, 1.0]
    assert best["speedup"] == 3.0 and best["speedup_of"] == "seconds"
    assert best["speedup_ci"][0] < 3.0 < best["speedup_ci"][1]
    assert best["seconds"] == 2.0 and best["tokens"] == 12 and best["tokens_per_s"] == 6.0
    assert best["by_category"] == {
        "x": {"prompts": 2, "speedup": 3.0, "tokens_per_step": 1.5},
        "y": {"prompts": 1, "speedup": 3.0, "tokens_per_step": 1.5},
    }
    assert best["nodes"] == 4.0 and base["nodes"] is None and base["tokens_per_step"] is None
    slow = told([1.0, 2.0, 3.0])
    slow.add("a", 9.0, [1, 2, 3, 4], None)
    slow.add("a", 2.0, [1, 2, 3, 4], None)
    assert list(slow.medians(NAMES)) == [2.0, 2.0, 3.0]


def test_where_a_text_differs_it_is_listed_and_seconds_per_token_count():
    base = told([4.0, 4.0, 4.0], group="baseline")
    own = told([1.0, 1.0, 1.0], [[1, 2, 9, 4], [1, 2], [1, 2, 3, 4]], group="peer")
    line = row(base, own)
    assert line["divergences"] == [
        {"prompt": "a", "position": 2, "margin": 0.25},
        {"prompt": "b", "position": 2, "margin": 0.25},
    ]
    assert not line["lossless"] and line["speedup_of"] == "seconds per token"
    assert line["speedup"] == 3.0 == np.sum([1, 1, 1]) / np.sum([0.25, 0.5, 0.25])
    unsteady = told([1.0, 1.0, 1.0])
    unsteady.add("a", 1.0, [7], None)
    assert not row(base, unsteady)["lossless"], "another text in a later round is no lossless text"


def test_the_margin_is_the_gap_of_the_two_top_logits(llama):
    base = Tally(Contestant("transformers", "baseline", peers.by_transformers(llama)))
    prompt = [5, 6, 7]
    base.add("a", 1.0, base.contestant.run(prompt, 4), None)
    margin = tally.margins(llama, {"a": prompt}, base)
    with torch.no_grad():
        top = llama(torch.tensor([prompt + base.texts["a"][:2]])).logits[0, -1].topk(2)
    assert top.indices[0] == base.texts["a"][2]
    assert margin("a", 2) == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-4) == margin("a", 2)


def test_the_summary_compares_like_with_like(rows):
    assert tally.summary(rows) == {
        "best_treespec": "best",
        "best_speedup": 3.0,
        "speculation_only": 2.4,  # over plain with the same forward: 1.25
        "best_peer": "other",
        "best_peer_speedup": 2.0,
        "versus_best_peer": 1.5,
        "tokens_per_step_16": 1.5,
        "lossless": True,
    }
    alone = tally.summary(rows[:2])
    assert alone["best_peer"] is alone["versus_best_peer"] is alone["tokens_per_step_16"] is None
    rows[1]["lossless"] = False
    assert tally.summary(rows)["lossless"] is False


def test_a_category_whose_texts_end_at_once_has_no_tokens_per_step():
    own = told([1.0, 1.0, 1.0], policy=tally.SIXTEEN)
    own.stats["c"] = Stats(tokens=1)
    line = row(told([1.0, 1.0, 1.0], group="baseline"), own)
    assert [c["tokens_per_step"] for c in line["by_category"].values()] == [1.5, None]
    assert tally.summary([line])["tokens_per_step_16"] == 1.5


def test_a_model_that_cannot_be_packed_leaves_that_row_out(llama, monkeypatch):
    def fails(model):
        raise RuntimeError("no such instruction")

    for packs, why in (
        (lambda model: 0, "no linear layer can be packed here"),
        (fails, "RuntimeError: no such instruction"),
    ):
        left_out = {}
        monkeypatch.setattr(peers, "pack_linears", packs)
        assert [c.name for c in peers.baselines(llama, left_out)] == ["transformers"]
        assert left_out == {"transformers + packed linears": why}


def test_the_tables_name_rows_categories_divergences_and_what_is_missing(rows):
    rows[4] |= {"lossless": False, "divergences": [{"prompt": "b", "position": 7, "margin": 0.001}]}
    text = tally.markdown({
        "rows": rows, "prompts": 3, "max_new_tokens": 4, "rounds": 1, "dtype": "float32", "draft": "mix",
        "machine": {"threads": 1}, "left_out": {"economize": "not installed"},
    })  # fmt: skip
    lines = text.splitlines()
    assert lines[0].startswith("3 prompts × 4 tokens × 1 round(s), float32")
    assert any(line.startswith("| best | 3.00× (") and line.endswith("| yes |") for line in lines)
    assert "| speed-up | x | y |" in lines and "| tokens/step | x | y |" in lines
    assert sum(line.startswith("| other |") for line in lines) == 2, "no tokens per step of a peer"
    assert "- other: b differs at 7, margin 0.001" in lines and "- left out: economize: not installed" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {10, 4}


def test_tuning_takes_the_fastest_setting_and_survives_broken_ones(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(peers, "perf_counter", lambda: next(clock))

    def make(settings):
        if settings["n"] == 0:
            raise RuntimeError("not this one")
        return lambda ids, n: [1] * settings["n"]

    peer = Peer("p", ({"n": 0}, {"n": 2}, {"n": 4}, {"n": 3}), make)
    chosen, record = peers.tune(peer, [[1], [2]], 4, lambda what: None)
    assert chosen.settings == {"n": 4} and chosen.name == "p (n=4)" and chosen.group == "peer"
    assert record[0] == {"n": 0, "failed": "RuntimeError: not this one"} and len(record) == 4
    assert record[2] == {"n": 4, "ms_per_token": 250.0}
    with pytest.raises(RuntimeError, match="not this one"):
        peers.tune(Peer("p", ({"n": 0},), make), [[1]], 4, lambda what: None)
    assert peers.tune(Peer("p", ({"n": 2}, {"n": 4}), make), [], 4, lambda what: None)[0].settings == {"n": 2}


def test_texts_end_with_the_end_of_text():
    assert peers.until_end([1, 2, 3, 4], frozenset([3]), 8) == [1, 2, 3]
    assert peers.until_end([1, 2, 3, 4], frozenset([3]), 2) == [1, 2]
    assert peers.until_end([1, 2], frozenset(), 8) == [1, 2]


def tokenize(text):
    return [3 + ord(c) % 90 for c in text[:12]]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Loading gives a tiny Llama; the draft is a near twin, saved so that peers can load their own copy."""
    draft = build("llama", num_hidden_layers=1)
    draft.save_pretrained(tmp_path / "draft")

    def load_model(name, dtype):
        return (draft if "draft" in str(name) else build("llama", eos_token_id=2)), tokenize

    def load_pair(target, draft, dtype, fast):
        model = build("llama", eos_token_id=2)
        speed_up(model, fast)
        return Pair(model, NgramDrafter(), tokenize, "tiny")

    monkeypatch.setattr(versus, "load_model", load_model)
    monkeypatch.setattr(versus, "load_pair", load_pair)
    lines = [{"id": k, "category": c, "turns": [t]} for k, c, t in (("a", "x", "tell me more"), ("b", "y", "or less"))]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def command(folder, *more):
    return [
        "--prompts", str(folder / "p.jsonl"), "--rounds", "1", "--max-new-tokens", "6", "--json",
        str(folder / "out.json"), "--draft", "ngram", "--tune-prompts", "1", *more,
    ]  # fmt: skip


def test_one_whole_run(tiny, capsys):
    more = ["--peer-draft", str(tiny / "draft"), "--markdown", str(tiny / "out.md"), "--policies", "threshold,plain"]
    assert versus.main(command(tiny, *more)) == 0
    result = json.loads((tiny / "out.json").read_text())
    names = [r["name"] for r in result["rows"]]
    assert names[:4] == ["transformers", "transformers + packed linears", "treespec plain", "treespec plain, fast"]
    assert [r["policy"] for r in result["rows"] if r["group"] == "treespec"][2:] == [
        "linear", "dynamic", tally.SIXTEEN, "threshold"
    ]  # fmt: skip
    assert result["lossless"] and result["finished"] and result["prompts"] == 2 and result["rounds"] == 1
    assert result["tokens_per_step_16"] >= 1 and result["best_speedup"] > 0 and result["versus_best_peer"] > 0
    assert all(r["lossless"] and set(r["by_category"]) == {"x", "y"} for r in result["rows"])
    peers_seen = {name.split(" (")[0] for name in names if "(" in name}
    here = {p for p in ("flashspec", "economize") if importlib.util.find_spec(p)}
    assert peers_seen == {"transformers assisted", "transformers prompt lookup"} | here
    assert set(result["left_out"]) == {"flashspec", "economize"} - here
    assert set(result["tuning"]) == peers_seen
    printed = capsys.readouterr().out
    assert printed == (tiny / "out.md").read_text() and "treespec bestfirst:budget=16, fast" in printed
    assert sorted(p.name for p in tiny.iterdir()) == ["draft", "out.json", "out.md", "p.jsonl"]


def test_an_interrupt_writes_what_is_finished_or_nothing(tiny, monkeypatch, capsys):
    finish = tally.timed
    runs = []

    def stops(contestant, prompt, n):
        runs.append(contestant)
        if len(runs) > after:
            raise KeyboardInterrupt
        return finish(contestant, prompt, n)

    monkeypatch.setattr(tally, "timed", stops)
    monkeypatch.setattr(versus.Bench, "_peers", lambda self, tell: [])
    after = 3
    assert versus.main(command(tiny)) == 130 and not (tiny / "out.json").exists()
    assert "nothing was finished" in capsys.readouterr().err
    runs.clear()
    after = 10  # seven contestants: one prompt is done
    assert versus.main(command(tiny)) == 130
    result = json.loads((tiny / "out.json").read_text())
    assert result["finished"] is False and result["prompts"] == 1 and len(result["rows"]) == 7


def test_bad_input_is_one_sentence(tiny, capsys):
    assert versus.main(command(tiny, "--policies", "nope")) == 2
    assert "unknown policy 'nope'" in capsys.readouterr().err
    assert versus.main(command(tiny, "--markdown", str(tiny / "no" / "out.md"))) == 2
    assert "there is no folder" in capsys.readouterr().err
    args = versus.parser().parse_args([*command(tiny), "--max-new-tokens", "2048"])
    with pytest.raises(InputError, match="no prompt"):
        versus.Bench(args)
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        versus.at_least(1)("0")
    assert not (tiny / "out.json").exists()
