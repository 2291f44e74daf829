"""The long benchmark: composed prompts, resuming after kills at random moments, and files it must not touch."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from test_cli import run

from treespec.bench import bench, make_plan, merge_rounds, read_rounds
from treespec.errors import InputError
from treespec.pairs import chat_ids, load_pair
from treespec.policies import parse_policies
from treespec.prompts import Prompt, filler_ids, lengthened

pytestmark = pytest.mark.thorough

PROMPTS = [
    Prompt("d1", "dialogue", ["the cat sat on the mat"]),
    Prompt("c1", "code", ["a dog ran under the tree"]),
    Prompt("d2", "dialogue", ["the tree sat"]),
]
POLICIES = parse_policies("linear:gamma=3,uniform:depth=2,width=2")


def plan(**settings):
    return make_plan(POLICIES, PROMPTS, **{"target": "toy", "draft": "model", "max_new_tokens": 12, **settings})


@pytest.fixture(scope="module")
def pair():
    return load_pair("toy", "model")


def content(path):
    """The rounds without their times."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        for row in line["rows"]:
            row["stats"] = {k: v for k, v in row["stats"].items() if not k.endswith("seconds")}
    return lines


def test_rounds_are_kept_line_by_line_and_summed(pair, tmp_path):
    out, seen = tmp_path / "r.jsonl", []
    result = bench(pair, PROMPTS, plan(input_length=40), out, 7, progress=lambda *a: seen.append(a))
    lines = content(out)
    assert [line["round"] for line in lines] == list(range(7)) and seen[-1][:2] == (21, 21)
    assert {line["config"] for line in lines} == {plan(input_length=40).hash} == {result["config"]}
    assert sorted(line["prompt"] for line in lines[:3]) == ["c1", "d1", "d2"], "every prompt before any comes again"
    assert all(line["input_tokens"] == 40 for line in lines) and len({line["text"] for line in lines}) == 3
    assert [r["policy"] for r in result["rows"]] == ["plain", "linear:gamma=3", "uniform:depth=2,width=2"]
    assert all(r["lossless"] for r in result["rows"]) and result["rows"][0]["speedup"] == 1.0
    assert result["categories"] == {c: sum(line["category"] == c for line in lines) for c in ("code", "dialogue")}
    assert result["rows"][1]["nodes"] > 3 and result["rows"][1]["decode_speedup"] > 0 and result["rounds"] == 7


def test_it_goes_on_and_adds_nothing_twice(pair, tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    bench(pair, PROMPTS, plan(), one, 5)
    for rounds in (2, 2, 4, 5):
        bench(pair, PROMPTS, plan(), two, rounds)
    assert content(one) == content(two)
    before = two.read_bytes()
    assert bench(pair, PROMPTS, plan(), two, 3)["rounds"] == 3 and two.read_bytes() == before


def test_two_processes_shares_merge_to_what_one_does(pair, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", [tmp_path / f"r{i}.jsonl" for i in range(2)]
    bench(pair, PROMPTS, plan(), whole, 5)
    for i, part in enumerate(parts):
        result = bench(pair, PROMPTS, plan(), part, 5, share=(i, 2))
        assert result["rounds"] == (3, 2)[i] and [line["round"] for line in content(part)] == list(range(i, 5, 2))
    before = parts[1].read_bytes()
    bench(pair, PROMPTS, plan(), parts[1], 5, share=(1, 2))
    assert parts[1].read_bytes() == before, "a finished share was gone on with"
    assert merge_rounds(parts[::-1], tmp_path / "merged.jsonl") == 5
    assert content(tmp_path / "merged.jsonl") == content(whole)
    assert len(read_rounds(tmp_path / "merged.jsonl", plan())) == 5
    with pytest.raises(InputError, match="is round 1, not 0"):
        read_rounds(parts[1], plan())


def test_rounds_that_do_not_belong_together_are_not_merged(pair, tmp_path):
    parts = [tmp_path / f"r{i}.jsonl" for i in range(3)]
    for i, settings in enumerate(({}, {}, {"max_new_tokens": 9})):
        bench(pair, PROMPTS, plan(**settings), parts[i], 4, share=(min(i, 1), 2))
    for files, words in (
        ([parts[0], parts[2]], "different settings"),
        ([parts[0], parts[0]], "round 0 is in .* and in another"),
        ([parts[1]], "round 0 is in none"),
        ([tmp_path / "none"], "cannot read"),
        ([], "none of the files"),
    ):
        with pytest.raises(InputError, match=words):
            merge_rounds(files, tmp_path / "out.jsonl")
        assert not (tmp_path / "out.jsonl").exists()
    parts[2].write_text("[1]")
    with pytest.raises(InputError, match="no finished round"):
        merge_rounds([parts[2]], tmp_path / "out.jsonl")


def test_a_torn_last_line_is_dropped(pair, tmp_path):
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    bench(pair, PROMPTS, plan(), whole, 3)
    torn.write_bytes(whole.read_bytes()[:-40])
    assert len(read_rounds(torn, plan())) == 2 and torn.read_bytes().endswith(b"\n")
    bench(pair, PROMPTS, plan(), torn, 3)
    assert content(torn) == content(whole)


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from test_bench import POLICIES, PROMPTS, plan
from treespec.bench import bench
from treespec.pairs import load_pair
pair = load_pair("toy", "model")
print("ready", flush=True)
for line in sys.stdin:  # one benchmark per line; the parent kills a forked child in the middle of it
    import os
    pid = os.fork()
    if pid == 0:
        bench(pair, PROMPTS, plan(input_length=16, max_new_tokens=6), Path(line.strip()), 20)
        os._exit(0)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_twenty_kills_change_nothing(pair, tmp_path):
    clean, killed = tmp_path / "clean.jsonl", tmp_path / "killed.jsonl"
    began = time.perf_counter()
    bench(pair, PROMPTS, plan(input_length=16, max_new_tokens=6), clean, 20)
    whole = time.perf_counter() - began
    code = CHILD.format(tests=os.path.dirname(os.path.abspath(__file__)))
    rng, kills = random.Random(0), 0
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout.readline() == "ready\n"
        for _ in range(200):
            print(killed, file=host.stdin, flush=True)
            child = int(host.stdout.readline())
            if kills < 20:
                time.sleep(rng.uniform(0, whole / 25))
                with contextlib.suppress(ProcessLookupError):  # it was quicker
                    os.kill(child, signal.SIGKILL)
            ended = host.stdout.readline().split()[1]
            kills += ended == "-9"
            if ended == "0":
                break
        host.stdin.close()
    assert kills == 20 or ended == "0"
    assert content(killed) == content(clean)


def test_other_settings_and_other_files_are_left_alone(pair, tmp_path):
    out = tmp_path / "r.jsonl"
    bench(pair, PROMPTS, plan(), out, 2)
    before = out.read_bytes()
    with pytest.raises(InputError, match="max_new_tokens=12, not 13"):
        bench(pair, PROMPTS, plan(max_new_tokens=13), out, 2)
    assert out.read_bytes() == before
    out.write_text("a poem\n")
    with pytest.raises(InputError, match="line 1 is no finished round"):
        read_rounds(out, plan())
    assert out.read_text() == "a poem\n"
    out.write_bytes(before.splitlines(keepends=True)[1])
    with pytest.raises(InputError, match="round 1, not 0"):
        read_rounds(out, plan())
    with pytest.raises(InputError, match="no folder"):
        read_rounds(tmp_path / "no" / "r.jsonl", plan())
    with pytest.raises(InputError, match="at most 2 tokens"):
        bench(pair, PROMPTS, plan(input_length=2), tmp_path / "n.jsonl", 1)


def test_an_untouched_file_without_a_newline_is_not_cut_away(pair, tmp_path):
    out = tmp_path / "mine.txt"
    out.write_text("not a benchmark at all")
    with pytest.raises(InputError, match="no finished round"):
        read_rounds(out, plan())
    assert out.read_text() == "not a benchmark at all"


def test_prompts_are_composed_to_length(pair):
    tokenizer = pair.tokenizer
    filler = filler_ids(PROMPTS, tokenizer, 100, start=1)
    assert len(filler) == 100 and tokenizer.decode(filler[:3]) == "a dog ran"
    for length in (3, 5, 17, 64):
        text = lengthened(PROMPTS[2], filler, tokenizer, lambda t: len(chat_ids(tokenizer, [t])), length)
        assert text.endswith(PROMPTS[2].turns[0]) and len(chat_ids(tokenizer, [text])) == length
    with pytest.raises(InputError, match="alone has 3 tokens"):
        lengthened(PROMPTS[2], filler, tokenizer, lambda t: len(chat_ids(tokenizer, [t])), 2)


def test_the_command(capsys, monkeypatch, tmp_path):
    out, prompts = tmp_path / "r.jsonl", tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(vars(p)) + "\n" for p in PROMPTS))
    command = ("bench", "--prompts", str(prompts), "--out", str(out), "--target", "toy", "--draft", "model", "--policies", "linear:gamma=2",
               "--max-new-tokens", "6", "--rounds", "3")  # fmt: skip
    code, text, _ = run(capsys, monkeypatch, *command, "--json")
    result = json.loads(text)
    assert code == 0 and result["rounds"] == 3 and set(result["categories"]) <= {"dialogue", "code"}
    code, text, _ = run(capsys, monkeypatch, *command)
    assert code == 0 and "linear:gamma=2" in text and len(content(out)) == 3
    code, text, err = run(capsys, monkeypatch, *command, "--seed", "1")
    assert code == 2 and text == "" and "seed=0, not 1" in err and "--force" in err
    code, _, _ = run(capsys, monkeypatch, *command, "--seed", "1", "--force")
    assert code == 0 and len(content(out)) == 3
