"""Settings for other engines against lines written by hand, and what each says it cannot express."""

import json

import pytest
from test_cli import run

from treespec.errors import InputError, PolicyError
from treespec.export import ENGINES, Tree, choices, export, load_tuning
from treespec.policies import parse_policy

TUNED = {
    "recommended": {"policy": "bestfirst:budget=24,depth=6", "speedup": 2.0},
    "by_policy": {
        "bestfirst": {"policy": "bestfirst:budget=24,depth=6", "speedup": 2.0},
        "eagle2": {"policy": "eagle2:total=20,depth=4,top_k=4", "speedup": 1.9},
        "specinfer": {"policy": "specinfer:expansion=2/1", "speedup": 1.5},
        "linear": {"policy": "linear:gamma=4,confidence=0.3", "speedup": 1.4},
        "uniform": {"policy": "uniform:depth=2,width=2", "speedup": 1.2},
        "plain": {"policy": "plain", "speedup": 1.0},
    },
}
EXPECTED = {
    "transformers": '{"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", '
    '"assistant_confidence_threshold": 0.3}',
    "sglang": "--speculative-algorithm EAGLE --speculative-num-steps 4 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 20",
    "tensorrt-llm": "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 4\n  use_dynamic_tree: true\n"
    "  dynamic_tree_max_topK: 4\n  max_total_draft_tokens: 19",
    "vllm": '{"num_speculative_tokens": 4}',
    "llama.cpp": "--spec-draft-n-max 4 --spec-draft-n-min 0 --spec-draft-p-min 0.3",
    "openvino": '{"branching_factor": 4, "tree_depth": 4, "num_assistant_tokens": 19}',
    "eagle": "[[0], [1], [0, 0], [1, 0]]",
}


@pytest.fixture
def tuned(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(TUNED))
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_the_best_that_the_engine_can_run(tuned, engine):
    out = export(load_tuning(tuned), engine)
    assert out.text == EXPECTED[engine] and set(ENGINES) == set(EXPECTED)
    assert "cannot run the recommended bestfirst" in out.notes[0] and "entropy" in out.notes[-1]
    assert len(out.notes) >= 3 and all("\n" not in note for note in out.notes)


@pytest.mark.parametrize("engine, policy, text", [
    ("sglang", "linear:gamma=3", "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
     "--speculative-num-draft-tokens 4"),
    ("sglang", "eagle2:total=60,depth=2,top_k=3", "--speculative-algorithm EAGLE --speculative-num-steps 2 "
     "--speculative-eagle-topk 3 --speculative-num-draft-tokens 13"),
    ("tensorrt-llm", "specinfer:expansion=2/1", "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 2\n"
     "  eagle_choices: [[0], [1], [0, 0], [1, 0]]"),
    ("openvino", "linear:gamma=3,confidence=0.4", '{"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.4}'),
    ("openvino", "dynamic:budget=16", '{"branching_factor": 3, "tree_depth": 8, "num_assistant_tokens": 16}'),
    ("eagle", "uniform:depth=2,width=2", "[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]"),
    ("eagle", "linear:gamma=3", "[[0], [0, 0], [0, 0, 0]]"),
    ("vllm", "linear:gamma=7", '{"num_speculative_tokens": 7}'),
    ("llama.cpp", "linear:gamma=7", "--spec-draft-n-max 7 --spec-draft-n-min 0 --spec-draft-p-min 0"),
])  # fmt: skip
def test_a_policy_by_name(engine, policy, text):
    assert export(load_tuning(policy), engine).text == text


def test_what_is_lost_is_said():
    said = " ".join(export(load_tuning("linear:gamma=4,cumulative=0.1,svip=0.3,confidence=0.2"), "vllm").notes)
    assert "early stop by confidence and cumulative and svip" in said
    said = export(load_tuning("dynamic"), "transformers").notes[0]
    assert "tune again with --policy linear" in said
    said = " ".join(export(load_tuning("bestfirst:budget=8,depth=3"), "eagle").notes)
    assert "sequoia:budget=8,depth=3" in said


def test_slower_than_plain_is_said(tmp_path):
    slow = {"recommended": TUNED["recommended"], "by_policy": {"linear": {"policy": "linear", "speedup": 0.8}}}
    (tmp_path / "t.json").write_text(json.dumps(slow))
    assert "slower than plain decoding (0.80×)" in " ".join(export(load_tuning(tmp_path / "t.json"), "vllm").notes)
    out = export(load_tuning("plain"), "sglang")
    assert out.text == "" and "leave speculation off" in out.notes[0]


def test_bounds_of_trees():
    assert Tree.of(parse_policy("eagle2")) == Tree(6, 10, 59) and Tree.of(parse_policy("linear:gamma=4")) == Tree(
        4, 1, 4
    )
    assert Tree.of(parse_policy("uniform:depth=2,width=3")) == Tree(2, 3, 12)
    assert Tree.of(parse_policy("bestfirst:budget=5")) == Tree(5, 5, 5)
    assert len(choices(parse_policy("uniform"))) == 120 and len(choices(parse_policy("sequoia:budget=9"))) == 9


@pytest.mark.parametrize(
    "content, wrong", [("{", "not JSON"), ("{}", "no tuning"), ('{"recommended": 3}', "no tuning")]
)
def test_bad_files_get_one_sentence(tmp_path, content, wrong):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(InputError, match=wrong) as error:
        load_tuning(tmp_path / "t.json")
    assert "\n" not in str(error.value)


def test_unknown_engines_policies_and_files():
    with pytest.raises(InputError, match="known: transformers"):
        export(load_tuning("linear"), "mlx")
    with pytest.raises(PolicyError, match="unknown policy"):
        load_tuning("lineer")
    with pytest.raises(InputError, match="cannot read"):
        load_tuning("missing.json")


def test_the_command(capsys, monkeypatch, tuned):
    code, out, err = run(capsys, monkeypatch, "export", str(tuned), "--to", "sglang")
    assert code == 0 and out == EXPECTED["sglang"] + "\n" and "cannot run the recommended" in err
    code, out, _ = run(capsys, monkeypatch, "export", str(tuned), "--to", "vllm", "--json")
    assert code == 0 and json.loads(out)["text"] == EXPECTED["vllm"]
    code, out, err = run(capsys, monkeypatch, "export", str(tuned), "--to", "mlx")
    assert code == 2 and out == "" and "unknown engine" in err
