"""Tensor parallelism over two processes (gloo, CPU): the same texts as one process, for every policy and rule."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from conftest import build
from safetensors.torch import save_file
from test_api import characters

from treespec.errors import InputError, PeerError
from treespec.files import write_json
from treespec.head import FeatureHead, HeadConfig
from treespec.launch import end_with_the_others, lost
from treespec.pairs import load_pair
from treespec.peers import Follower, _packed, _unpacked
from treespec.placement.load import load_weights
from treespec.tree import TokenTree

HERE = Path(__file__).parent


def launch(what, folder, processes=2):
    """Run ``ranks.py`` in several processes, as torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, str(HERE / "ranks.py"), what, str(folder)],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("peers")
    target = build("llama")
    for name, model in (("model", target), ("draft", build("llama", seed=5, num_hidden_layers=1))):
        model.save_pretrained(where / name)
        characters().save_pretrained(where / name)
    torch.manual_seed(2)
    config = HeadConfig.like(target, "x", 60)
    ends = (target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    head = FeatureHead(config, *ends, torch.arange(60), torch.ones(32))
    extra = {"token_of": torch.arange(60, dtype=torch.int32), "spread": torch.ones(32)}
    (where / "head").mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    save_file({**tensors, **extra}, where / "head" / "model.safetensors")
    write_json(where / "head" / "config.json", {"model_type": "treespec_head", **vars(config)})
    lines = [
        {"id": f"p{i}", "category": "x", "turns": [text]} for i, text in enumerate(("A tree.", "Two trees?", "So"))
    ]
    (where / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return where


@pytest.mark.slow
def test_two_processes_write_what_one_does_for_every_policy_rule_and_draft(folder):
    done = launch("texts", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((folder / f"texts.{i}.json").read_text()) for i in range(2))
    shares = first.pop("shares"), second.pop("shares")
    assert first == second, "the processes were not in step"
    for draft in ("draft", "self", "ngram", "head"):
        name = str(folder / draft) if draft in ("draft", "head") else draft
        alone = ranks.texts(load_pair(str(folder / "model"), name))
        for (policy, options), want, got in zip(ranks.RUNS, alone, first[draft]):
            assert got["tokens"] == want["tokens"], (draft, policy, options)
            if "auto" not in policy:  # that one follows the clock
                assert got == want, (draft, policy, options)
    linear = ranks.RUNS.index(("linear:gamma=3", dict(do_sample=False)))
    assert first["self"][linear]["steps"] < 7, "no tree was followed"
    whole = sum(p.numel() for p in build("llama").parameters())
    assert all(0 < sum(share) < 0.6 * whole for share in shares), "the target was not divided"


@pytest.mark.slow
def test_commands_under_torchrun_print_and_write_once(folder):
    done = launch("commands", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((folder / f"commands.{i}.json").read_text()) for i in range(2))
    assert second == {"generate": "", "compare": "", "record": ""}
    alone = ranks.commands(folder, False)
    generated, want = json.loads(first["generate"]), json.loads(alone["generate"])
    assert generated["text"] == want["text"] and generated["tokens"] == want["tokens"]
    rows, wanted = (json.loads(c["compare"])["rows"] for c in (first, alone))
    assert [r["policy"] for r in rows] == [r["policy"] for r in wanted] and all(r["lossless"] for r in rows)
    assert [r["tokens_per_step"] for r in rows] == [r["tokens_per_step"] for r in wanted]
    from treespec.trace import Trace, replay

    traces = [Trace.load(folder / f"{name}.parquet") for name in ("divided", "alone")]
    assert len(traces[0]) == len(traces[1]) > 0
    one, two = (replay(trace, "bestfirst:budget=6") for trace in traces)
    assert one.steps.equals(two.steps) and one.totals == two.totals
    assert not list(folder.glob("*rank*")) and not list(folder.glob("*.parts"))


@pytest.mark.slow
@pytest.mark.parametrize("victim, survivor", [(1, 0), (0, 1)])
def test_a_killed_process_ends_the_others_with_a_sentence(folder, victim, survivor):
    done = launch(f"kill{victim}", folder)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "another process of the launch has ended" in line]
    assert any(f"process {survivor} of 2 stops" in line for line in said), done.stderr[-3000:]


def test_one_process_cannot_divide_a_model(folder):
    with pytest.raises(InputError, match=r"needs several processes: start with torchrun"):
        load_weights(str(folder / "model"), "float32", tensor_parallel=True)


def test_heads_that_cannot_be_divided_are_refused_before_loading(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        InputError, match=r"4 attention heads and 2 key-value heads .* among 3 processes; .* among 1, 2"
    ):
        load_weights(str(folder / "model"), "float32", tensor_parallel=True)


def test_toys_and_fast_forwards_are_not_divided(folder):
    with pytest.raises(InputError, match="tensor parallelism is for models"):
        load_pair("toy", tensor_parallel=True)
    with pytest.raises(InputError, match="without --fast"):
        load_pair(str(folder / "model"), "ngram", fast="cpu", tensor_parallel=True)


def test_a_tree_survives_the_journey():
    tree = TokenTree.from_lists(
        [5, 128_255, 7], [-1, 0, 1], [0.0, -0.1, -3.25], [1.5, float("nan"), 0.25], reason=[0, 0, 2]
    )
    again = _unpacked(_packed(tree))
    for name in ("token", "parent", "depth", "logp", "log_path", "entropy", "rank", "reason"):
        torch.testing.assert_close(getattr(again, name), getattr(tree, name), rtol=0, atol=0, equal_nan=True)
        assert getattr(again, name).dtype == getattr(tree, name).dtype


def test_followers_do_not_draft_alone():
    with pytest.raises(PeerError, match="all processes"):
        Follower().grow(None, 3)


def test_the_launchers_signal_becomes_a_sentence():
    before = signal.getsignal(signal.SIGTERM)
    try:
        end_with_the_others()
        with pytest.raises(PeerError, match="another process of the launch has ended"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_errors_are_not_blamed_on_others():
    assert not lost(RuntimeError("Connection closed by peer"))  # nobody else is there
