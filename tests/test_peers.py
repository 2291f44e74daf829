"""Tensor parallelism over two processes (gloo, CPU): the same texts as one process, for every policy and rule."""

import json
import os
import signal
import socket
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
from treespec.launch import end_with_the_others, first, lost, rank, world
from treespec.pairs import load_pair
from treespec.peers import Follower, _packed, _unpacked
from treespec.placement.load import load_weights
from treespec.tree import TokenTree

HERE = Path(__file__).parent


def environment(**more):
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def torchrun(victim, folder, *what):
    """Run ``ranks.py`` in two processes, as torchrun does, until one of them is killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*command, str(HERE / "ranks.py"), str(victim), str(folder), *what],
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment(),
    )


def survivor(victim, folder):
    """The same without a launcher that would end the other: what the other one says and how it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py"), str(victim), str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(RANK=str(i), LOCAL_RANK=str(i), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=1500)[1] for process in both]
    assert both[victim].returncode == -signal.SIGKILL
    return both[1 - victim].returncode, said[1 - victim]


@pytest.fixture(scope="module")
def launched(folder):
    """Everything that two living processes do, and how they ended: one launch."""
    done = torchrun(1, folder, "texts", "commands")
    results = [folder / f"results.{i}.json" for i in range(2)]
    assert all(r.is_file() for r in results), done.stderr[-3000:]
    return done, *(json.loads(r.read_text()) for r in results)


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
@pytest.mark.parametrize("draft", ranks.DRAFTS)
def test_two_processes_write_what_one_does_for_every_policy_and_rule(folder, launched, draft):
    _, first, second = launched
    assert first[draft] == second[draft], "the processes were not in step"
    name = str(folder / draft) if draft in ("draft", "head") else draft
    runs = ranks.DRAFTS[draft]
    alone = ranks.texts(load_pair(str(folder / "model"), name), runs)
    for (policy, options), want, got in zip(runs, alone, first[draft], strict=True):
        assert got["tokens"] == want["tokens"], (policy, options)
        if "auto" not in policy:  # that one follows the clock
            assert got == want, (policy, options)


@pytest.mark.slow
def test_the_target_is_divided_and_trees_are_followed(launched):
    _, first, second = launched
    assert min(run["steps"] for run in first["self"]) < 6, "no tree was followed"
    whole = sum(p.numel() for p in build("llama").parameters())
    assert all(0 < sum(each["shares"]) < 0.6 * whole for each in (first, second))


@pytest.mark.slow
def test_where_the_first_process_fails_all_end_alike_and_can_go_on(folder, launched):
    _, first, second = (each["failures"] if isinstance(each, dict) else None for each in launched)
    pair = load_pair(str(folder / "model"), str(folder / "draft"))
    alone = ranks.failures(pair.target, pair.draft, ranks.LINEAR)
    assert first == alone, "not what one process ends with"
    assert first["policy"][0] == "PolicyError" and "dropped some of them" in first["policy"][1]
    assert first["begin"] == ["VocabularyError", "another vocabulary"]
    assert first["commit"] == ["OutOfMemoryError", "the draft ran out of memory"]
    assert first["target"][0] == "NonFiniteLogitsError" and len(first["text"]) == ranks.NEW
    assert second.pop("grow") == ["PeerError", "the first process failed: RuntimeError: boom"]
    assert first.pop("grow") == ["RuntimeError", "boom\nand more"]
    assert second == first


@pytest.mark.slow
def test_commands_under_torchrun_print_and_write_once(folder, launched):
    first, second = (each["commands"] for each in launched[1:])
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
def test_a_killed_process_ends_the_others_with_a_sentence(launched):
    done = launched[0]
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "another process of the launch has ended" in line]
    assert any("process 0 of 2 stops" in line for line in said), done.stderr[-3000:]


@pytest.mark.slow
def test_so_does_the_first_one_killed_without_a_launcher(folder):
    code, said = survivor(0, folder)
    assert code == 1 and "process 1 of 2 stops: another process of the launch has ended" in said, said[-3000:]
    assert "Traceback" not in said


@pytest.mark.parametrize("name, value, least", [("WORLD_SIZE", "abc", 1), ("WORLD_SIZE", "0", 1), ("RANK", "-1", 0)])
def test_a_launchers_variable_that_is_no_number_is_said(monkeypatch, name, value, least):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"{name} is '{value}'; torchrun sets it to a whole number from {least}"):
        world() if name == "WORLD_SIZE" else rank()
    assert first()


def test_followers_leave_the_word_to_the_first(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    assert rank() == 2 and not first()
    monkeypatch.setenv("RANK", "")
    assert rank() == 0 and first()


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
        signal.set_wakeup_fd(-1)


STUCK = """
import ctypes
import threading
from treespec.launch import end_with_the_others
end_with_the_others(0.2)
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
threading.Timer(1, print, ["waiting"], {"flush": True}).start()  # said when the main thread is in there
libc.pthread_mutex_lock(lock)  # for ever, and no handler of Python's runs in here
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="blocks the main thread with a C library's lock")
def test_the_sentence_comes_even_where_the_main_thread_never_returns():
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert stuck.stdout.readline() == "waiting\n"
        stuck.terminate()
        out, said = stuck.communicate(timeout=600)
    finally:
        stuck.kill()
    assert stuck.returncode == 1 and "another process of the launch has ended" in said and "Traceback" not in said


def test_other_errors_are_not_blamed_on_others():
    assert not lost(RuntimeError("Connection closed by peer"))  # nobody else is there
