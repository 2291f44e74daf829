"""Every option of every command with hostile values: success, or exit code 2 and one sentence, never a traceback.

The options are read off the command line itself, so a new one is covered by being there. By hand, over everything:
``TREESPEC_FUZZ=1 pytest tests/test_fuzz_cli.py``.
"""

import json
import os
import random
import shutil
import sys

import pytest
from conftest import build
from hostile import TEXTS, Hang, check_sentence, clock
from typer.main import get_command

from treespec import cli, pairs
from treespec.pairs import load_pair
from treespec.prompts import Prompt
from treespec.toy import WORDS, toy_tokenizer
from treespec.trace import Caps, Sampling, record

pytestmark = pytest.mark.thorough

ALL = bool(os.environ.get("TREESPEC_FUZZ"))
# values per option; 4 of others
SHARE = {"distill": 1, "tune": 2, "table": 2, "report": 1, "record": 3, "compare": 3, "measure": 3}
TREE = get_command(cli.app).commands
PAIR = ("--target", "toy", "--draft", "model")
SHORT = (*PAIR, "--max-new-tokens", "3")
# what loading itself has to judge; all else is cheap and has to be judged before
LOADING = {"target", "draft", "dtype", "fast", "device", "start", "answers_dir", "parallel"}
BASE = {
    "generate": ["--prompt", "the cat", *SHORT],
    "compare": ["--prompts", "p.jsonl", *SHORT, "--policies", "linear"],
    "policies": [],
    "record": ["--prompts", "p.jsonl", *SHORT, "--out", "o.parquet"],
    "merge": ["t.parquet", "--out", "o.parquet"],
    "replay": ["t.parquet", "--policy", "linear", "--out", "o.csv"],
    "measure": [*PAIR, "--out", "o.json", "--sizes", "1,2", "--contexts", "8", "--widths", "1", "--rounds", "1"],
    "tune": ["t.parquet", "--settings", "2", "--policy", "linear", "--out", "o.json"],
    "table": ["t.parquet"],
    "bench": ["--prompts", "p.jsonl", *SHORT, "--out", "o.jsonl", "--rounds", "1", "--policies", "linear"],
    "export": ["linear:gamma=4"],
    "report": ["t.parquet", "--out", "o.html", "--settings", "2", "--policy", "linear"],
    "plan": ["--target", "tiny", "--draft", "none", "--gpus", "1x8GB"],
    "doctor": [],
    "distill": ["--out", "o", "--target", "tiny", "--prompts", "p.jsonl", "--answers", "3", "--epochs", "0.01", "--max-new-tokens", "4"],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a trace, prompts and a tiny model."""
    folder = tmp_path_factory.mktemp("cli")
    prompts = [Prompt(f"p{i}", "ab"[i % 2], [text]) for i, text in enumerate(["the cat sat", "a dog ran", "the tree"])]
    (folder / "p.jsonl").write_text("".join(json.dumps(vars(p)) + "\n" for p in prompts))
    record(
        load_pair("toy", "model"),
        prompts,
        folder / "t.parquet",
        sampling=Sampling(max_new_tokens=6),
        caps=Caps(1e-2, 3, 4, 8),
    )
    build("llama", vocab_size=len(WORDS), hidden_size=64).save_pretrained(folder / "tiny")
    toy_tokenizer().save_pretrained(folder / "tiny")
    return folder


@pytest.fixture
def treespec(place, capsys, monkeypatch):
    """Runs a command in a fresh folder; ``(code, stdout, stderr, whether a model was loaded)``."""
    loads = []

    def noting(load):
        def noted(*arguments, **options):
            loads.append(arguments)
            return load(*arguments, **options)

        return noted

    for name in ("load_pair", "load_model"):
        monkeypatch.setattr(pairs, name, noting(getattr(pairs, name)))

    def run(*arguments):
        loads.clear()
        monkeypatch.setattr(sys, "argv", ["treespec", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err, bool(loads)

    return run


@pytest.fixture
def fresh(place, tmp_path, monkeypatch):
    """A working folder that holds what the base arguments name."""
    for name in ("p.jsonl", "t.parquet", "tiny"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(folder):
    """Empty a working folder of what a command wrote."""
    for path in folder.iterdir():
        if not path.is_symlink():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def arguments_with(command, option, value):
    """The base arguments with one of them given a hostile value."""
    base, flag = list(BASE[command]), max(option.opts, key=len)
    if option.param_type_name == "argument":
        return [value, *base[1:]]
    if option.is_flag:
        return [*base, flag]
    if flag in base:
        at = base.index(flag)
        del base[at : at + 2]
    return [*base, f"{flag}={value}"]


def faults(treespec, folder, command, option, value):
    """What is wrong with how the command took the value; "" if nothing."""
    arguments = arguments_with(command, option, value)
    much = value.isascii() and value.isdigit() and 4 < len(value) < 4300
    try:
        with clock(0.3 if much else 20):
            code, out, err, loaded = treespec(command, *arguments)
    except Hang:
        return "" if much else "hangs"  # a large number of rounds is asked for, and begun
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        left = [p.name for p in folder.iterdir() if not p.is_symlink()]
        sweep(folder)
    if code == 0:
        return ""
    if code != 2:
        return f"exit code {code}: {err[-200:]}"
    try:
        check_sentence(err.rpartition("treespec: ")[2].strip())  # behind the bar of work under way
    except AssertionError as error:
        return str(error)
    if left:
        return f"left {left} behind ({err.strip()[:120]})"
    return f"a model was loaded before {err.strip()[:120]}" if loaded and option.name not in LOADING else ""


def test_every_command_has_its_base_arguments():
    assert set(BASE) == set(TREE)


def picked(command, option):
    """The values that an option is tried with: all by hand, else some of them, other ones for every option."""
    return TEXTS if ALL else random.Random(f"{command} {option.name}").sample(TEXTS, SHARE.get(command, 4))


@pytest.mark.parametrize("command", BASE)
def test_hostile_values(command, treespec, fresh):
    code, _, err, _ = treespec(command, *BASE[command])
    assert code == 0, err
    sweep(fresh)
    bad = []
    for option in TREE[command].params:
        for value in picked(command, option):
            if found := faults(treespec, fresh, command, option, value):
                bad.append(f"--{option.name}={value[:40]!r}: {found}")
    assert not bad, "\n".join(bad)
