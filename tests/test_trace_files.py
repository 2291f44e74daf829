"""Recording survives kills, shards merge, and a bad file is one sentence."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_cli import run

from treespec.errors import TraceError
from treespec.pairs import load_pair
from treespec.prompts import Prompt
from treespec.trace import Caps, Sampling, Trace, merge, record, replay
from treespec.trace.schema import COLUMNS, KEY, SCHEMA

CAPS = Caps(floor=1e-3, depth=4, width=8, nodes=16)
SHORT = Sampling(max_new_tokens=8)
PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], [text]) for i, text in enumerate(
    ["the cat sat", "a dog ran on", "the tree", "a mat under", "the dog", "a cat on the mat", "the cat ran"]
)]  # fmt: skip


@pytest.fixture
def toy():
    return load_pair("toy", "model")


@pytest.fixture
def trace(toy, tmp_path):
    out = tmp_path / "t.parquet"
    record(toy, PROMPTS, out, sampling=SHORT, caps=CAPS)
    return out


@pytest.fixture
def treespec(capsys, monkeypatch):
    return lambda *arguments: run(capsys, monkeypatch, *map(str, arguments))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(vars(p)) + "\n" for p in PROMPTS))
    return path


def test_it_reads_as_a_plain_table(trace):
    frame = pd.read_parquet(trace)
    assert list(frame.columns) == COLUMNS.names and set(frame.prompt) == {p.id for p in PROMPTS}
    assert pq.ParquetFile(trace).num_row_groups == len(PROMPTS)
    roots = frame[frame.node == 0]
    assert len(roots) == 7 * len(PROMPTS) == len(Trace.load(trace))
    assert (roots.is_true & (roots.depth == 0) & (roots.logp == 0)).all()
    assert (frame.entropy.isna() == (frame.offered < 0)).all()
    assert (
        frame[~frame.entropy.isna()].entropy.ge(0).all() and (frame.depth <= np.minimum(frame.room, CAPS.depth)).all()
    )
    true = frame[frame.is_true & (frame.depth > 0)]
    assert true.groupby(["prompt", "position", "depth"]).size().max() == 1, "one text, one true node a depth"
    about = json.loads(pq.read_schema(trace).metadata[KEY])
    assert about["schema"] == SCHEMA and about["caps"]["nodes"] == 16 and about["sample"] == "greedy"
    assert [p["category"] for p in about["prompts"]] == [p.category for p in PROMPTS] and about["versions"]["torch"]


@pytest.mark.thorough
def test_the_true_continuation_is_there_however_improbable(toy, tmp_path):
    """With almost nothing but it recorded, its nodes say what the draft thought of them."""
    record(toy, PROMPTS, tmp_path / "all.parquet", sampling=SHORT, caps=Caps(0.0, 4, 12, 4096))
    record(toy, PROMPTS, tmp_path / "few.parquet", sampling=SHORT, caps=Caps(0.9, 4, 12, 1))
    everything, few = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("all", "few"))
    keys = ["prompt", "position", "depth", "token", "rank", "logp"]
    whole, part = (f[f.is_true][keys].reset_index(drop=True) for f in (everything, few))
    pd.testing.assert_frame_equal(whole, part, check_exact=False, rtol=1e-4, atol=1e-5)
    assert len(few) < len(everything) / 10


KILLS = textwrap.dedent("""
    import os, random, shutil, signal, sys, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from treespec.pairs import load_pair
    from treespec.trace import record
    from test_trace_files import CAPS, PROMPTS, SHORT

    folder, pair = Path(sys.argv[1]), load_pair("toy", "model")

    def start(out):  # a fork of a process that has imported everything: no seconds of imports, a real kill
        child = os.fork()
        if child == 0:
            record(pair, PROMPTS, out, sampling=SHORT, caps=CAPS)
            os._exit(0)
        return child

    before = time.perf_counter()
    os.waitpid(start(folder / "clean.parquet"), 0)
    seconds = time.perf_counter() - before
    clean = (folder / "clean.parquet").read_bytes()
    chance, out, killed, resumed = random.Random(1), folder / "k.parquet", 0, 0
    while killed < 20:
        resumed += any(out.with_name("k.parquet.parts").glob("0*.parquet"))
        child = start(out)
        time.sleep(chance.uniform(0, 0.7 * seconds))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if out.exists():
            assert out.read_bytes() == clean, "a resumed recording differs"
            out.unlink()
            shutil.rmtree(folder / "k.parquet.parts", ignore_errors=True)
    assert os.waitpid(start(out), 0)[1] == 0
    assert out.read_bytes() == clean
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["clean.parquet", "k.parquet"], left
    print(resumed)
""")


@pytest.mark.thorough
def test_killed_at_twenty_moments_nothing_is_lost_or_twice(tmp_path):
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    folder = tmp_path / "work"
    folder.mkdir()
    path = [*sys.path, str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; sys.argv = ['', {str(folder)!r}]\n" + KILLS],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 5, "hardly ever was there anything to go on with"


def test_shares_merge_to_the_whole(toy, trace, tmp_path):
    shares = [range(0, 7, 2), range(1, 7, 2)]
    files = [tmp_path / f"t.rank{i}-of-2.parquet" for i in range(2)]
    for out, share in zip(files, shares):
        record(toy, PROMPTS, out, sampling=SHORT, caps=CAPS, share=share)
    merge(files[::-1], tmp_path / "merged.parquet")
    assert (tmp_path / "merged.parquet").read_bytes() == trace.read_bytes()
    with pytest.raises(TraceError, match="exists"):
        merge(files, tmp_path / "merged.parquet")
    with pytest.raises(TraceError, match="'p0' is in more than one"):
        merge([files[0], trace], tmp_path / "again.parquet")
    record(toy, PROMPTS, tmp_path / "other.parquet", sampling=SHORT, caps=Caps(0.1, 4, 8, 16), share=[1])
    with pytest.raises(TraceError, match="was made with caps"):
        merge([files[0], tmp_path / "other.parquet"], tmp_path / "again.parquet")
    assert not (tmp_path / "again.parquet").exists()


@pytest.mark.slow
def test_two_processes_of_torchrun_record_what_one_does(tmp_path, file, treespec):
    common = [
        "record",
        "--prompts",
        str(file),
        "--target",
        "toy",
        "--draft",
        "model",
        "--max-new-tokens",
        "8",
        "--depth",
        "3",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "treespec.cli"]
    done = subprocess.run([*launch, *common, "--out", str(tmp_path / "t.parquet")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shards = sorted(tmp_path.glob("t.rank*-of-2.parquet"))
    assert [s.name for s in shards] == ["t.rank0-of-2.parquet", "t.rank1-of-2.parquet"]
    assert treespec("merge", *shards, "--out", tmp_path / "merged.parquet")[0] == 0
    assert treespec(*common, "--out", tmp_path / "one.parquet")[0] == 0
    assert (tmp_path / "merged.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


def rewritten(trace, out, change=None, **about):
    """A copy with other metadata or other rows."""
    table = pq.read_table(trace)
    content = json.loads(table.schema.metadata[KEY]) | about
    if change is not None:
        table = change(table)
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(content)}), out)
    return out


def column(name, values):
    return lambda table: table.set_column(table.column_names.index(name), table.schema.field(name), values(table[name]))


BAD = {
    "cut short": (lambda t, o: o.write_bytes(t.read_bytes()[:-700]), "cannot be read as Parquet"),
    "no parquet": (lambda t, o: o.write_text("a,b\n1,2\n"), "cannot be read as Parquet"),
    "nothing": (lambda t, o: o.write_bytes(b""), "cannot be read as Parquet"),
    "a folder": (lambda t, o: o.mkdir(), "cannot be read as Parquet"),
    "missing": (lambda t, o: None, "there is no trace"),
    "foreign": (lambda t, o: pd.DataFrame({"x": [1]}).to_parquet(o), "not a treespec trace"),
    "newer": (lambda t, o: rewritten(t, o, schema=SCHEMA + 1), "install the newer treespec"),
    "odd schema": (lambda t, o: rewritten(t, o, schema="x"), "not a treespec trace"),
    "other columns": (lambda t, o: rewritten(t, o, lambda x: x.drop_columns(["room"])), "columns of a trace"),
    "no prompts": (lambda t, o: rewritten(t, o, prompts=3), "prompts or caps"),
    "no caps": (lambda t, o: rewritten(t, o, caps={"flor": 1}), "prompts or caps"),
    "silly caps": (lambda t, o: rewritten(t, o, caps={"floor": "x", "depth": 1, "width": 1, "nodes": 1}), "prompts or caps"),
    "empty": (lambda t, o: rewritten(t, o, lambda x: x.slice(0, 0), prompts=[]), "is empty"),
    "rows lost": (lambda t, o: rewritten(t, o, lambda x: x.slice(0, 100)), "is damaged"),
    "a wild parent": (lambda t, o: rewritten(t, o, column("parent", lambda c: pa.array(np.where(np.arange(len(c)) == 3, 9999, c.to_numpy()).astype(np.int16)))), "is damaged"),
    "a probability above 1": (lambda t, o: rewritten(t, o, column("logp", lambda c: pa.array(-c.to_numpy()))), "is damaged"),
    "nulls": (lambda t, o: rewritten(t, o, column("rank", lambda c: pa.nulls(len(c), pa.int16()))), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_trace_is_one_sentence(trace, tmp_path, treespec, kind):
    make, words = BAD[kind]
    bad = tmp_path / "bad.parquet"
    make(trace, bad)
    with pytest.raises(TraceError, match=words):
        Trace.load(bad)
    code, out, err = treespec("replay", bad, "--policy", "linear")
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1
    code, out, err = treespec("merge", bad, "--out", tmp_path / "m.parquet")
    assert code in (0, 2) and (tmp_path / "m.parquet").exists() == (code == 0)


def test_nothing_is_overwritten_and_other_settings_do_not_mix(toy, trace, tmp_path):
    was = trace.read_bytes()
    with pytest.raises(TraceError, match="exists"):
        record(toy, PROMPTS, trace, sampling=SHORT, caps=CAPS)
    assert trace.read_bytes() == was
    record(toy, PROMPTS, trace, sampling=SHORT, caps=Caps(0.1, 3, 8, 16), force=True)
    assert trace.read_bytes() != was

    def stop(done, total, what):
        if done == 3:
            raise KeyboardInterrupt

    out = tmp_path / "half.parquet"
    with pytest.raises(KeyboardInterrupt):
        record(toy, PROMPTS, out, sampling=SHORT, caps=CAPS, progress=stop)
    assert not out.exists() and len(list((tmp_path / "half.parquet.parts").glob("0*.parquet"))) == 3
    for other in (dict(sampling=Sampling(max_new_tokens=9)), dict(caps=Caps(0.2, 4, 8, 16))):
        with pytest.raises(TraceError, match="was made with"):
            record(toy, PROMPTS, out, **{"sampling": SHORT, "caps": CAPS, **other})
    with pytest.raises(TraceError, match="asked"):
        record(toy, PROMPTS[:4], out, sampling=SHORT, caps=CAPS)
    record(toy, PROMPTS, out, sampling=SHORT, caps=CAPS)
    assert out.read_bytes() == was and not (tmp_path / "half.parquet.parts").exists()


@pytest.mark.thorough
def test_the_commands(treespec, file, tmp_path):
    out = tmp_path / "t.parquet"
    common = ("record", "--prompts", file, "--out", out, "--target", "toy", "--draft", "model", "--max-new-tokens", 8)
    code, text, err = treespec(*common, "--depth", 3, "--limit", 4, "--json")
    told = json.loads(text)
    assert code == 0 and told["prompts"] == 4 and told["positions"] == 28 and told["bytes"] == out.stat().st_size
    code, text, err = treespec(*common)
    assert code == 2 and text == "" and "exists" in err and "--force" in err
    code, text, err = treespec("replay", out, "--policy", "bestfirst:budget=6,depth=3", "--json")
    totals = json.loads(text)
    assert code == 0 and {
        "positions",
        "steps",
        "tokens_per_step",
        "nodes",
        "speedup",
        "truncated_share",
        "seconds",
    } <= set(totals)
    assert totals["truncated_share"] == 0 and totals["positions"] == 28
    steps = tmp_path / "s.csv"
    code, text, err = treespec("replay", out, "--policy", "bestfirst:budget=6,depth=3", "--out", steps)
    assert code == 0 and len(pd.read_csv(steps)) == totals["steps"] and "tokens a step" in text
    code, text, err = treespec("replay", out, "--policy", "linear:gamma=9", "--out", tmp_path / "s.parquet")
    assert code == 0 and pd.read_parquet(tmp_path / "s.parquet").truncated.any() and "does not hold" in err
    assert treespec("replay", out, "--policy", "linear", "--out", steps)[0] == 2
    code, text, err = treespec(
        *common, "--sample", "coupled", "--temperature", 0.7, "--top-p", 0.9, "--force", "--json"
    )
    assert code == 0 and json.loads(text)["prompts"] == 7
    assert Trace.load(out).about["temperature"] == 0.7


@pytest.mark.parametrize("arguments, words", [
    (("--sample", "magic"), "unknown sampling"), (("--temperature", "0"), "temperature"), (("--top-p", "2"), "top-p"),
    (("--floor", "2"), "floor"), (("--depth", "0"), "depth"), (("--width", "0"), "width"), (("--nodes", "0"), "nodes"),
    (("--draft", "none"), "give a draft"), (("--prompts", "/no/such/file"), "No such file"),
])  # fmt: skip
def test_bad_settings_are_one_sentence(treespec, tmp_path, arguments, words):
    code, out, err = treespec("record", "--out", tmp_path / "t.parquet", "--target", "toy", *arguments)
    assert code == 2 and out == "" and words in err and len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_texts_without_positions(toy, tmp_path):
    """A text of one token has no root; alone it makes an empty trace, among others it is only counted."""
    one = Sampling(max_new_tokens=1)
    record(toy, PROMPTS, tmp_path / "t.parquet", sampling=one, caps=CAPS)
    with pytest.raises(TraceError, match="is empty"):
        Trace.load(tmp_path / "t.parquet")
    record(toy, PROMPTS[:2], tmp_path / "two.parquet", sampling=Sampling(max_new_tokens=2), caps=CAPS)
    trace = Trace.load(tmp_path / "two.parquet")
    assert len(trace) == 2 and trace.index.room.tolist() == [0, 0]
    assert replay(trace, "bestfirst").totals["tokens_per_step"] == 1.0


def test_help_teaches(treespec):
    for command in ("record", "merge", "replay"):
        code, out, _ = treespec(command, "--help")
        assert code == 0 and "Example" in out
