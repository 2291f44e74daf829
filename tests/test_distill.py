"""The distillation pipeline: answers are the model's own, stores survive a kill, a resumed run is the run."""

import json
import re
from collections import Counter

import pytest
import torch
from conftest import VOCAB, build

from treespec import cli
from treespec.distill import collect as collecting
from treespec.distill.answers import AnswerWriter, Job
from treespec.distill.collect import collect, make_jobs
from treespec.distill.loop import Plan, batches, held_out, rate_factor, train
from treespec.distill.pipeline import Recipe, distill
from treespec.distill.prompts import training_prompts
from treespec.distill.store import AnswerStore, Text
from treespec.distill.train_head import HeadData, measure, new_head, unrolled_loss
from treespec.distill.train_lm import LmShape, new_lm
from treespec.errors import InputError, UnsupportedModelError
from treespec.fast import slow_down, speed_up
from treespec.head import load_head
from treespec.prompts import mixed_prompts, read_prompts
from treespec.toy import toy_tokenizer

ABOUT = {"target": "tiny", "seed": 0}


def jobs(count=9, temperature=0.0):
    generator = torch.Generator().manual_seed(0)
    return [
        Job(i, torch.randint(3, VOCAB, (3 + (5 * i) % 7,), generator=generator).tolist(), temperature)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral-window-8", "llama-dynamic-16"])
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_greedy_answers_are_the_models_own(name, slots):
    changes = {"sliding_window": 64} if "window" in name else {}
    changes |= {"max_position_embeddings": 64} if "dynamic" in name else {}
    model = build(name, **changes)
    answers = list(AnswerWriter(model, slots, 10).run(jobs()))
    assert sorted(a.job.index for a in answers) == list(range(9))
    for answer in answers:
        prompt = torch.tensor([answer.job.prompt])
        want = model.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)[0]
        assert answer.tokens == want.tolist()
        with torch.no_grad():
            hidden = model(want[None, :-1], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(answer.features.float(), hidden, rtol=2e-3, atol=2e-3)


def test_an_answer_ends_with_its_end_token():
    model = build("llama")
    free = {a.job.index: a.tokens for a in AnswerWriter(model, 4, 12).run(jobs())}
    end = free[0][len(jobs()[0].prompt) + 3]
    model.generation_config.eos_token_id = [end, 1]
    for answer in AnswerWriter(model, 4, 12).run(jobs()):
        new = answer.tokens[len(answer.job.prompt) :]
        whole = free[answer.job.index][len(answer.job.prompt) :]
        stop = next((i for i, t in enumerate(whole) if t in (end, 1)), 11)
        assert new == whole[: stop + 1]


def test_sampled_answers_do_not_depend_on_the_batch_and_follow_the_law():
    model = build("llama", scale=2.0)
    alone, together = (
        {a.job.index: a.tokens for a in AnswerWriter(model, slots, 8, seed=3).run(jobs(8, 0.7))} for slots in (1, 5)
    )
    assert alone == together
    prompt = jobs()[0].prompt
    with torch.no_grad():
        law = (model(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    draws = Counter(a.tokens[-1] for a in AnswerWriter(model, 64, 1).run([Job(i, prompt, 0.7) for i in range(1500)]))
    top = law.topk(5)
    for p, token in zip(top.values.tolist(), top.indices.tolist()):
        assert abs(draws[token] / 1500 - p) < 4.5 * (p * (1 - p) / 1500) ** 0.5 + 1e-3


def test_a_prompt_that_does_not_fit_is_named():
    with pytest.raises(InputError, match="prompt 7 has 250 tokens"):
        list(AnswerWriter(build("llama"), 2, 10).run([Job(7, [5] * 250)]))


def test_interrupted_collection_goes_on(tmp_path, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(collecting, "PART", 3)
    honest, seen = AnswerWriter.run, []

    def stop_after_five(self, some):
        for answer in honest(self, some):
            if len(seen) == 5:
                raise KeyboardInterrupt
            seen.append(answer)
            yield answer

    monkeypatch.setattr(AnswerWriter, "run", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        collect(model, jobs(), tmp_path, ABOUT, slots=3, new_tokens=6)
    assert len(AnswerStore(tmp_path).done()) == 5
    monkeypatch.setattr(AnswerWriter, "run", honest)
    store = collect(model, jobs(), tmp_path, ABOUT, slots=3, new_tokens=6)
    assert [t.index for t in store.texts()] == list(range(9))
    whole = collect(model, jobs(), tmp_path / "whole", ABOUT, slots=3, new_tokens=6)
    for one, other in zip(store.texts(), whole.texts()):
        assert torch.equal(one.tokens, other.tokens) and one.prompt == other.prompt
        torch.testing.assert_close(one.features, other.features, rtol=1e-2, atol=1e-2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_store_of_other_answers_is_refused(tmp_path):
    AnswerStore(tmp_path, ABOUT)
    with pytest.raises(InputError, match="seed=0, not 1"):
        AnswerStore(tmp_path, {**ABOUT, "seed": 1})
    with pytest.raises(InputError, match="holds no answers"):
        AnswerStore(tmp_path / "none")
    (tmp_path / "part-00000.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        AnswerStore(tmp_path).texts()


def test_training_prompts():
    prompts = training_prompts(3000)
    text = [p.turns[0] for p in prompts]
    assert len(set(text)) == len({p.id for p in prompts}) == 3000
    assert not [t for t in text if re.search(r"\{[a-z_0-9]+\}", t)]
    assert [p.turns for p in training_prompts(3000)] == [p.turns for p in prompts]
    assert len({p.category for p in prompts}) == 14
    assert training_prompts(50, seed=1) != training_prompts(50, seed=0)
    assert not set(text) & {turn for p in read_prompts(mixed_prompts()) for turn in p.turns}
    assert training_prompts(0) == []
    with pytest.raises(InputError, match="-1 training prompts"):
        training_prompts(-1)


def test_a_target_whose_logits_are_capped_is_refused():
    with pytest.raises(UnsupportedModelError, match="scaled or capped"):
        AnswerWriter(build("gemma2-window-8", sliding_window=64))


def test_jobs_put_like_lengths_together_and_leave_out_the_long():
    tokenizer = toy_tokenizer()
    prompts = training_prompts(600)
    made = make_jobs(prompts, tokenizer, 10_000, 0)
    assert sorted(j.index for j in made) == list(range(600))
    first = [len(j.prompt) for j in made[:512]]
    assert first == sorted(first)
    assert {j.temperature for j in made} == {0.0, 0.5, 0.9}
    short = make_jobs(prompts, tokenizer, first[100], 0)
    assert 0 < len(short) < 600 and max(len(j.prompt) for j in short) <= first[100]


def text_of(prompt, answer, index=1):
    return Text(index, torch.zeros(prompt + answer, dtype=torch.int32), prompt, 0.0, None)


def test_batches_are_seeded_whole_and_bounded():
    some = [text_of(5 + i % 30, 3 + i % 9, i) for i in range(200)]
    made = batches(some, 40, 0, 0)
    assert sorted(i for rows in made for i in rows) == list(range(200))
    assert made == batches(some, 40, 0, 0) != batches(some, 40, 0, 1)
    assert all(len(rows) == 1 or len(rows) * max(3 + i % 9 for i in rows) <= 40 for rows in made)


def test_rate_warms_up_and_ends_at_zero():
    rates = [rate_factor(step, 1000) for step in range(1000)]
    assert rates[0] < 0.05 and max(rates) == 1.0 and rates[-1] < 0.01
    assert rates[500] == 1.0 and rates == sorted(rates[:500]) + sorted(rates[500:], reverse=True)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    model = build("llama", scale=2.0)
    return model, collect(model, jobs(60), tmp_path_factory.mktemp("store"), ABOUT, slots=16, new_tokens=16).texts()


def run(learnt, folder, epochs=3.0, stop=None):
    model, some = learnt
    head = new_head(model, "tiny", [t for t in some if not held_out(t)], 64, seed=0)
    data = HeadData(head, some)
    calls = []

    def loss(rows, share):
        if stop is not None and len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(rows)
        return unrolled_loss(head, data.batch([data.train[i] for i in rows]), 2)

    return head, data, train(head, data.train, loss, Plan(epochs=epochs, tokens=64, rate=3e-3), folder, ABOUT)


@pytest.mark.thorough
def test_training_learns(learnt, tmp_path):
    head, data, report = run(learnt, tmp_path, epochs=12.0)
    texts = [t for t in data.train if t.temperature == 0]
    data.test = texts
    before = measure(new_head(learnt[0], "tiny", data.train, 64, seed=0), data, 2)["recall_by_depth"]
    after = measure(head, data, 2)["recall_by_depth"]
    assert after[0]["top1"] > before[0]["top1"] + 0.1
    assert after[1]["top4"] > before[1]["top4"]
    assert report["losses"][-1][0] == report["steps"]


@pytest.mark.thorough
def test_a_resumed_run_is_the_run(learnt, tmp_path, monkeypatch):
    from treespec.distill import loop

    monkeypatch.setattr(loop, "EVERY", 4)
    whole, _, report = run(learnt, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(learnt, tmp_path / "cut", stop=10)
    resumed, _, again = run(learnt, tmp_path / "cut")
    assert report == again
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters()):
        assert torch.equal(one, other), name
    with pytest.raises(InputError, match="belongs to another run"):
        run(learnt, tmp_path / "cut", epochs=5.0)


SMALL = LmShape(hidden=16, layers=1, heads=2, inner=24, context=64)


def test_a_draft_wider_than_its_target_is_refused():
    with pytest.raises(InputError, match="width 192 would be wider"):
        new_lm(build("llama"), torch.arange(40), LmShape(), 0)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    words = ["one two three", "the cat sat", "tell me more", "why is it so", "a b c d e"]
    rows = [{"id": i, "category": "x", "turns": [f"{words[i % 5]} {i}"]} for i in range(55)]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return path


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_the_whole_pipeline_on_a_tiny_target(kind, tmp_path, prompt_file):
    from transformers import AutoModelForCausalLM

    from treespec import generate

    model, tokenizer = build("llama", scale=2.0), toy_tokenizer()
    recipe = Recipe(
        kind=kind, answers=55, new_tokens=8, slots=8, unroll=2, draft_vocabulary=48, plan=Plan(epochs=1.0), shape=SMALL
    )
    out = tmp_path / "draft"
    report = distill(model, tokenizer, "tiny", out, recipe, prompts=prompt_file, command="treespec distill …")
    assert report["data"]["answers"] == 55 and report["data"]["held_out"] == 2
    assert {"README.md", "training.json", "config.json", "model.safetensors"} <= {p.name for p in out.iterdir()}
    assert "treespec distill …" in (out / "README.md").read_text()
    draft = load_head(out, model) if kind == "head" else AutoModelForCausalLM.from_pretrained(out).float().eval()
    ids = torch.tensor([[5, 9, 11]])
    want = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    got = generate(model, draft, ids, policy="bestfirst:budget=6", max_new_tokens=20, pad_token_id=0)
    assert torch.equal(got.sequences, want) and got.stats.nodes > 1.5
    if kind == "lm":  # the very same draft serves transformers' own assisted generation
        assisted = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, assistant_model=draft)
        assert torch.equal(assisted, want)


def test_fast_and_slow_targets_give_the_same_answers():
    model = build("llama")
    slow = {a.job.index: a.tokens for a in AnswerWriter(model, 4, 10).run(jobs())}
    speed_up(model, "cpu")
    assert slow == {a.job.index: a.tokens for a in AnswerWriter(model, 4, 10).run(jobs())}
    slow_down(model)


def test_command_line_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["treespec", "distill", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr()
        return end.value.code, out.out + out.err

    code, said = call("--out", str(tmp_path), "--kind", "tree")
    assert code == 2 and "unknown kind of draft 'tree'" in said
    (tmp_path / "training.json").write_text("{}")
    code, said = call("--out", str(tmp_path))
    assert code == 2 and "holds a finished draft" in said
    assert "Ctrl-C" in call("--help")[1]
