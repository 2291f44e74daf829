"""Tree forwards against an uncached oracle, for every family; and who is refused, with what words."""

import gc
import weakref

import pytest
import torch
import transformers as T
from conftest import REFUSED, SUPPORTED, build, prompt, reference

import treespec
from treespec.errors import UnsupportedModelError
from treespec.model import TreeModel
from treespec.selfcheck import self_check
from treespec.tree import TokenTree

TREE = TokenTree.from_lists([11, 22, 33, 44, 55], [-1, 0, 0, 1, 2])


@torch.no_grad()
def oracle(model, ids, tree, node):
    """Logits at a node from a plain forward over prompt and path, no cache, no mask of ours."""
    path = tree.token[tree.path(node)][None]
    return model(torch.cat([ids, path], 1)).logits[0, -1]


@torch.no_grad()
def tree_logits(model, ids, tree=TREE):
    session = TreeModel.of(model).session(16)
    session.extend(ids[0].tolist(), logits="none")
    return session, session.tree(tree.token.tolist(), tree.depth.tolist(), tree.ancestors())


@pytest.mark.parametrize("length", [3, 5, 6, 7, 8, 12, 20])
@pytest.mark.parametrize("name", [n for n in SUPPORTED if "16" not in n])
def test_tree_logits_equal_the_oracle(name, length):
    model, ids = build(name), prompt(length)
    _, got = tree_logits(model, ids)
    for node in range(len(TREE)):
        torch.testing.assert_close(got[node], oracle(model, ids, TREE, node), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "gemma3-window-8"])
def test_kept_path_is_the_context_of_what_follows(name, attn):
    model, ids = build(name, attn=attn), prompt(6)
    session, _ = tree_logits(model, ids)
    session.keep([0, 2, 4])  # the second child wins at every level
    with torch.no_grad():
        got = session.extend([66])[0]
        want = model(torch.cat([ids, torch.tensor([[11, 33, 55, 66]])], 1)).logits[0, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_verify_a_tree_are_refused(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][2]) as error:
        TreeModel.of(build(name))
    assert repr(build(name).config.model_type) in str(error.value)


def test_encoder_decoder_multimodal_and_headless_models_are_refused(llama):
    small = dict(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=20)
    t5 = T.T5ForConditionalGeneration(T.T5Config(**small))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        TreeModel.of(t5)
    with pytest.raises(UnsupportedModelError, match="head"):
        TreeModel.of(llama.model)
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        TreeModel.of("gpt2")


def test_flash_attention_is_refused(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*sdpa"):
        TreeModel.of(model)


@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_self_check_catches_a_model_that_ignores_mask_or_positions(fault):
    model = build("llama")
    whole = model.model.forward

    def deaf(*args, **kwargs):
        if fault == "mask" and kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = torch.zeros_like(kwargs["attention_mask"])
        if fault == "positions":
            kwargs["position_ids"] = None
        return whole(*args, **kwargs)

    model.model.forward = deaf
    with pytest.raises(UnsupportedModelError, match="standard deviations"):
        TreeModel.of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral-window-8", "gpt2"])
def test_half_precision_passes_the_self_check_and_stays_finite(name, dtype):
    model = build(name, dtype=dtype, scale=2.0)
    self_check(TreeModel.of(model))
    _, logits = tree_logits(model, prompt(12))
    assert logits.dtype == dtype and bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("length", [31, 32, 33, 40, 64])
def test_half_precision_masks_of_any_length(length):
    """sdpa kernels are picky about mask strides; the width here runs over awkward ones."""
    model = build("llama", dtype=torch.bfloat16, scale=2.0)
    _, got = tree_logits(model, prompt(length))
    for node in range(len(TREE)):
        want = oracle(model, prompt(length), TREE, node)
        assert float((got[node] - want).abs().max()) < 0.1 * float(want.float().std())


def test_a_session_counts_and_prefill_keeps_one_row_of_logits():
    model = build("llama")
    seen = []
    model.lm_head.register_forward_hook(lambda m, i, o: seen.append(o.shape[1]))
    session = TreeModel.of(model).session(16)
    seen.clear()
    session.extend(prompt(50)[0].tolist())
    assert seen == [1] and session.length == 50 and session.cache.length == 50 and session.seconds > 0


def test_the_same_model_is_checked_once_and_a_changed_one_again():
    model, calls = build("llama"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    TreeModel.of(model)
    once = len(calls)
    TreeModel.of(model)
    assert once > 0 and len(calls) == once
    model.to(torch.bfloat16)
    assert TreeModel.of(model).dtype == torch.bfloat16 and len(calls) == 2 * once


def test_a_checked_model_can_be_freed():
    model = build("llama")
    TreeModel.of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_training_mode_survives_the_self_check():
    model = build("llama").train()
    TreeModel.of(model)
    assert model.training


@pytest.mark.parametrize(
    "where",
    [{"model.embed_tokens": "disk", "lm_head": "disk"}, {"model.layers.1": "disk", "model.layers.2": "disk"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*offload.*")
def test_offloaded_models_decode_as_whole_ones_do(tmp_path, where):
    """``model.device`` is meta there; ids must go to the embedding's execution device."""
    changes = dict(num_hidden_layers=4, tie_word_embeddings=True)
    whole = build("llama", **changes)
    whole.save_pretrained(tmp_path / "model")
    parts = [
        "model.embed_tokens",
        "lm_head",
        "model.norm",
        "model.rotary_emb",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    placed = {part: where.get(part, "cpu") for part in parts}
    target = T.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=placed, offload_folder=tmp_path / "offload"
    ).eval()
    got = treespec.generate(
        target, whole, prompt(6), policy="uniform:depth=3,width=2", do_sample=False, max_new_tokens=16
    )
    assert torch.equal(got.sequences, reference(whole, prompt(6), 16)) and got.stats.tokens_per_step > 3
