"""Tiny seeded models of many families, and what tests share. Everything here is instant and needs no download."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers as T
from hypothesis import Phase, settings

settings.register_profile("repo", deadline=None, max_examples=60, derandomize=True)
# every mutant pays for every example, and nobody reads the smallest one: see make mutants
settings.register_profile(
    "mutants", settings.get_profile("repo"), max_examples=4, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("repo")

torch.set_num_threads(1)  # tiny models are slower on two

VOCAB = 97
BASE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
OLD = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=None)


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


# name -> (config class, arguments); every one must decode exactly as model.generate does
SUPPORTED = {
    "llama": ("LlamaConfig", BASE),
    "llama-one-kv-head": ("LlamaConfig", {**BASE, "num_key_value_heads": 1}),
    "llama-dynamic-16": ("LlamaConfig", {**BASE, "max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=2.0)}),
    "llama3-rope": ("LlamaConfig", {**BASE, "rope_parameters": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)}),
    "qwen2": ("Qwen2Config", BASE),
    "qwen3": ("Qwen3Config", {**BASE, "head_dim": 8}),
    "mistral-window-8": ("MistralConfig", {**BASE, "sliding_window": 8}),
    "gemma2-window-8": ("Gemma2Config", {**BASE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3-window-8": ("Gemma3TextConfig", {**BASE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": MIXED}),
    "phi3-longrope-16": ("Phi3Config", {**BASE, "original_max_position_embeddings": 16, "rope_parameters": rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=16)}),
    "gpt2": ("GPT2Config", {**OLD, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("OPTConfig", {**OLD, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    "falcon-rope": ("FalconConfig", {**OLD, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "gpt_neox": ("GPTNeoXConfig", {**OLD, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}),
    "gptj": ("GPTJConfig", {**OLD, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256}),
    "mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**BASE, **MOE, "head_dim": 8}),
    "gpt_oss-window-8": ("GptOssConfig", {**BASE, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED, "rope_parameters": rope("default")}),
    "cohere2-window-8": ("Cohere2Config", {**BASE, "sliding_window": 8, "layer_types": MIXED}),
}  # fmt: skip

# name -> (config class, arguments, a word the refusal must hold)
REFUSED = {
    "bloom": ("BloomConfig", {**OLD, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "position_ids"),
    "mpt": ("MptConfig", dict(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=256), "position_ids"),
    "falcon-alibi": ("FalconConfig", {**OLD, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, "ALiBi"),
    "gpt_neo": ("GPTNeoConfig", {**OLD, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 256}, "slot"),
    "mamba": ("MambaConfig", {**OLD, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "recurrent"),
    "lfm2": ("Lfm2Config", {**BASE, "layer_types": ["conv", "full_attention"]}, "conv"),
    "jamba": ("JambaConfig", {**BASE, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False, "mamba_d_state": 8}, "recurrent|hybrid"),
    "qwen3_next": ("Qwen3NextConfig", {**BASE, **MOE, "head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, "recurrent"),
}  # fmt: skip


def build(name, attn="sdpa", seed=1, scale=4.0, dtype=torch.float32, **changes):
    """An eval-mode model whose weights are scaled so that a wrong mask moves the logits visibly."""
    kind, arguments = (SUPPORTED.get(name) or REFUSED[name])[:2]
    config = getattr(T, kind)(**{**arguments, **changes})
    torch.manual_seed(seed)
    try:
        model = T.AutoModelForCausalLM.from_config(config, attn_implementation=attn)
    except ValueError:  # soft-capped attention has no sdpa
        model = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return model.to(dtype).eval()


def prompt(length, seed=0, vocabulary=VOCAB):
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(min(3, vocabulary - 1), vocabulary, (1, length), generator=generator)


def reference(model, ids, new=24, **kwargs):
    """What transformers generates, greedily."""
    options = dict(do_sample=False, pad_token_id=0, max_new_tokens=new) | kwargs
    return model.generate(ids, **options)


@pytest.fixture(scope="session")
def llama():
    return build("llama")


@pytest.fixture(scope="session")
def twin():
    """A second copy of ``llama``: as a draft it is always right."""
    return build("llama")


@pytest.fixture(scope="session")
def stranger():
    """Another model: as a draft it is mostly wrong."""
    return build("llama", seed=5, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def _quiet():
    T.logging.set_verbosity_error()


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that none of them is left for one process at the end of ``make test``."""
    slow = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in slow)
