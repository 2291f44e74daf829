"""Every file that the package reads, broken in every way: taken, or refused in one sentence; never a hang."""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import build
from hostile import byte_variants, json_variants, odd_files, outcome
from hypothesis import given
from hypothesis import strategies as st

from treespec.bench import make_plan, merge_rounds, read_rounds, summary
from treespec.calibration import Calibration
from treespec.cost import At, load_cost, plain_seconds
from treespec.distill.answers import Answer, Job
from treespec.distill.loop import Plan, train
from treespec.distill.store import AnswerStore
from treespec.errors import TreespecError
from treespec.export import ENGINES, export, load_tuning
from treespec.head import FeatureHead, HeadConfig, is_head, load_head
from treespec.pairs import known_tokenizer, load_model, load_pair
from treespec.placement.needs import head_needs, model_needs
from treespec.policies import POLICIES, parse_policy
from treespec.prompts import Prompt, read_prompts
from treespec.provenance import cost_about, record_command, recorded
from treespec.toy import toy_tokenizer
from treespec.trace import Caps, Sampling, Trace, merge, record, replay
from treespec.trace.schema import COLUMNS, KEY, read_file

PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], [text]) for i, text in enumerate(["the cat sat", "a dog ran", "the tree"])]
CURVE = {
    "verify": {"rows": [1, 8, 32], "seconds": [0.01, 0.02, 0.05], "context": 128, "context_seconds": [0.0, 1e-6, 2e-6], "longest": 512},
    "draft": {"rows": [1, 8], "seconds": [0.001, 0.002]},
    "overhead": 0.0005,
    "plain": 0.0102,
    "provenance": "planted",
}  # fmt: skip
CALIBRATION = {"temperatures": [1.1, 0.9], "hit_rates": [0.8, 0.6], "provenance": "planted"}
ROW = {"policy": "linear:gamma=4", "speedup": 1.5}
TUNING = {"recommended": ROW, "by_policy": {"linear": ROW, "eagle2": {"policy": "eagle2:total=20", "speedup": 1.2}}}
LINE = {"id": "p", "category": "chat", "turns": ["the cat", "a dog"]}
BASE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
CONFIG = {"model_type": "llama", **BASE}


def use_cost(path):
    cost = load_cost(path)
    priced = At(cost, 300.0, 2)
    seconds = [cost.verify(n, context) for n in (1, 5, 40, 200) for context in (None, 0, 1000)]
    seconds += [cost.draft(w) for w in (0, 1, 9)] + [cost.overhead, plain_seconds(cost), priced.plain, priced.verify(3)]
    assert np.isfinite(seconds).all() and min(seconds) >= 0
    assert all(cost.verify(n + 1) >= cost.verify(n) for n in range(1, 50)), "more rows never cost less"
    cost_about(cost)
    parse_policy(f"throughput:cost={path}")


def use_calibration(path):
    found = Calibration.load(path)
    logp = found.apply(1, torch.tensor([-0.5, -torch.inf]), torch.tensor([1.0]))
    assert not logp.isnan().any() and 0 <= found.hit_rate(3) <= 1


def use_tuning(path):
    tuned = load_tuning(path)
    for engine in ENGINES:
        export(tuned, engine)


def use_acceptance(path):
    parse_policy(f"sequoia:acceptance={path}")


def use_prompts(path):
    for prompt in read_prompts(path):
        assert isinstance(prompt.id, str) and prompt.turns
        prompt.id.encode(), prompt.category.encode()
        toy_tokenizer()(prompt.turns[0])


def use_config(path):
    model_needs(str(path), "bfloat16")


JSON_FILES = {
    "cost": (CURVE, use_cost),
    "calibration": (CALIBRATION, use_calibration),
    "tuning": (TUNING, use_tuning),
    "acceptance": ({"acceptance": [0.5, 0.2]}, use_acceptance),
    "prompts": (LINE, use_prompts),
}


def said_of(use, variants, path, bad):
    """What was said of every variant; what was neither taken nor refused is collected in ``bad``."""
    said = {}
    for label, content in variants:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        try:
            said[label] = outcome(lambda: use(path))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            bad.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    return said


@pytest.mark.parametrize("kind", JSON_FILES)
def test_wrong_json_at_every_path(kind, tmp_path):
    valid, use = JSON_FILES[kind]
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(valid))
    assert outcome(lambda: use(path)) == "", "the valid file is taken"
    bad = []
    said_of(use, json_variants(valid), path, bad)
    said_of(use, byte_variants(json.dumps(valid).encode()), path, bad)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind", JSON_FILES)
def test_what_is_no_file(kind, tmp_path):
    use, bad = JSON_FILES[kind][1], []
    with odd_files(tmp_path) as files:
        for label, path in files.items():
            try:
                assert outcome(lambda: use(path)), f"{label} was taken"
            except BaseException as error:
                bad.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    assert not bad, "\n".join(bad)
