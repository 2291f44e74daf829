"""The command line as a person meets it: exit codes, one sentence per fault, JSON alone on stdout."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from treespec import cli
from treespec.errors import DownloadError


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["treespec", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def treespec(capsys, monkeypatch):
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


TOY = ("--target", "toy", "--draft", "model")


def test_generate_streams_text_and_notes_the_sums(treespec):
    code, out, err = treespec(
        "generate", "--prompt", "the cat sat", *TOY, "--policy", "linear:gamma=3", "--max-new-tokens", "9"
    )
    assert code == 0 and len(out.split()) == 9 and "tokens per step" in err


def test_generate_json_is_one_object(treespec):
    code, out, _ = treespec(
        "generate",
        "--prompt",
        "the cat",
        *TOY,
        "--json",
        "--max-new-tokens",
        "9",
        "--temperature",
        "0.8",
        "--seed",
        "3",
    )
    row = json.loads(out)
    assert code == 0 and set(row) == {"text", "tokens", "policy", "stats"} and len(row["tokens"]) == 9
    again = json.loads(
        treespec(
            "generate",
            "--prompt",
            "the cat",
            *TOY,
            "--json",
            "--max-new-tokens",
            "9",
            "--temperature",
            "0.8",
            "--seed",
            "3",
        )[1]
    )
    assert again["tokens"] == row["tokens"]


def test_compare_table_and_json(treespec, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"id": "a", "category": "x", "turns": ["the cat"]}\n{"id": "b", "category": "x", "turns": ["a dog"]}\n'
    )
    arguments = (
        "compare",
        "--prompts",
        str(file),
        *TOY,
        "--policies",
        "linear:gamma=2,uniform:depth=2,width=2",
        "--max-new-tokens",
        "8",
    )
    code, out, _ = treespec(*arguments)
    assert code == 0 and "plain" in out and "uniform:depth=2,width=2" in out and "×" in out
    code, out, _ = treespec(*arguments, "--json", "--rounds", "2")
    result = json.loads(out)
    assert code == 0 and [r["policy"] for r in result["rows"]] == ["plain", "linear:gamma=2", "uniform:depth=2,width=2"]
    assert result["prompts"] == 2 and result["rounds"] == 2


def test_rules_on_the_command_line(treespec, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "category": "x", "turns": ["the cat"]}\n')
    more = (*TOY, "--max-new-tokens", "8", "--temperature", "0.9", "--json")
    for rule in ("rrs", "hybrid", "block", "traversal"):
        code, out, _ = treespec("generate", "--prompt", "the cat", "--rule", rule, "--policy", "linear:gamma=2", *more)
        assert code == 0 and len(json.loads(out)["tokens"]) == 8
    code, out, _ = treespec(
        "compare", "--prompts", str(file), "--policies", "linear,threshold", "--rules", "match,rrs", *more
    )
    result = json.loads(out)
    assert code == 0 and [(r["rule"], r["policy"]) for r in result["refused"]] == [("rrs", "threshold")]
    assert [r["rule"] for r in result["rows"]] == ["coupled", "match", "match", "rrs"]


def test_policies_lists_names_parameters_and_sources(treespec):
    code, out, _ = treespec("policies")
    assert code == 0 and "tau=0.08" in out and "mid_widths=2/3" in out
    rows = json.loads(treespec("policies", "--json")[1])["policies"]
    names = [
        "plain",
        "linear",
        "uniform",
        "threshold",
        "dynamic",
        "specinfer",
        "eagle2",
        "opttree",
        "sequoia",
        "bestfirst",
        "throughput",
    ]
    assert [r["name"] for r in rows] == names and all(name in out for name in names)
    assert all(set(r) == {"name", "parameters", "source"} and r["source"] for r in rows)


@pytest.mark.parametrize("arguments, words", [
    (("generate", "--prompt", "x", "--policy", "dynamc"), "did you mean 'dynamic'"),
    (("generate", "--prompt", "x", "--policy", "dynamic:tua=1"), "did you mean 'tau'"),
    (("generate", "--prompt", "x", "--policy", "dynamic:tau=0"), "(0, 1]"),
    (("generate", "--prompt", "x", "--policy", "dynamic:low=3,high=1"), "low must not exceed high"),
    (("generate", "--prompt", "x", "--policy", "threshold:budget=0"), "budget"),
    (("generate", "--prompt", "  ", *TOY), "empty"),
    (("generate", "--prompt", "the cat", *TOY, "--rule", "magic"), "unknown acceptance rule"),
    (("generate", "--prompt", "the cat", "--target", "toy", "--draft", "none", "--policy", "linear"), "needs a draft"),
    (("generate", "--prompt", "the cat", "--target", "/no/such/folder"), "cannot load"),
    (("generate", "--prompt", "the cat", *TOY, "--dtype", "int3"), "unknown dtype"),
    (("generate", "--prompt", "the cat", *TOY, "--dtype", "int4"), "a table in float32"),
    (("generate", "--prompt", "x", "--max-new-tokens", "0"), "max-new-tokens"),
    (("generate", "--prompt", "x", "--max-new-tokens", "many"), "max-new-tokens"),
    (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
    (("generate",), "--prompt"), (("generate", "--nonsense"), "nonsense"), (("nonsense",), "nonsense"),
    (("compare", "--prompts", "/no/such/file", *TOY), "No such file"),
    (("compare", "--rules", "match,magic", *TOY), "unknown acceptance rule 'magic'"),
    (("generate", "--prompt", "the cat", *TOY, "--rule", "rrs", "--temperature", "0.8"), "would be biased with policy 'dynamic'"),
    (("compare", "--policies", "", *TOY), "no policy"), (("compare", "--rounds", "0", *TOY), "rounds"),
])  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_2(treespec, arguments, words):
    code, out, err = treespec(*arguments)
    assert code == 2 and out == "" and words in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_malformed_prompts_name_their_line(treespec, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": 1, "turns": ["a"]}\n{"id": 2}\n')
    code, _, err = treespec("compare", "--prompts", str(file), *TOY)
    assert code == 2 and "line 2" in err


def test_failures_that_are_nobodys_input_exit_1(treespec, monkeypatch):
    def fail(*a):
        raise DownloadError("the embedded target could not be had")

    monkeypatch.setattr("treespec.pairs.embedded_target", fail)
    code, out, err = treespec("generate", "--prompt", "hello")
    assert code == 1 and out == "" and "could not be had" in err


def test_nan_logits_are_named(treespec, monkeypatch):
    from treespec.toy import TableModel

    honest = TableModel.forward

    @functools.wraps(honest)  # the signature is looked at
    def broken(self, *args, **kwargs):
        out = honest(self, *args, **kwargs)
        out.logits = (
            out.logits * torch.nan if kwargs.get("cache") is not None and kwargs["cache"].length > 6 else out.logits
        )
        return out

    monkeypatch.setattr(TableModel, "forward", broken)
    code, _, err = treespec("generate", "--prompt", "the cat sat on", "--target", "toy", "--draft", "none")
    assert code == 2 and "NaN" in err


def test_help_teaches(treespec):
    for command in ("generate", "compare", "policies"):
        code, out, _ = treespec(command, "--help")
        assert code == 0 and "Usage" in out
        assert command == "policies" or "Example" in out
    code, out, _ = treespec()
    assert "generate" in out and "compare" in out


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_no_traceback():
    command = [
        "env",
        "--default-signal=INT",  # a shell's background jobs inherit an ignored one
        sys.executable,
        "-m",
        "treespec.cli",
        "generate",
        "--prompt",
        "Tell me a long story.",
        "--max-new-tokens",
        "400",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    first = process.stdout.read(1)  # text has begun to stream
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert first and process.returncode == 130 and "interrupted" in err and "Traceback" not in err
