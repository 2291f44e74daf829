"""The same promises on CUDA: equal texts on one GPU, two, a GPU and the CPU; memory as planned; one wait a step.

Skipped, visibly, without a GPU. ``python -m benchmarks.gpu`` runs these first.
"""

import subprocess
import sys

import pytest
import torch
from conftest import SUPPORTED, build, prompt, reference
from test_api import characters

import treespec
from treespec.model import TreeModel
from treespec.pairs import load_pair
from treespec.placement import plan
from treespec.placement.needs import model_needs

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 1, reason="needs a CUDA GPU")]
two = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA GPUs")
POLICIES = ["plain", "linear:gamma=3", "uniform:depth=3,width=2", "bestfirst:budget=10", "dynamic:tau=0.01,high=9"]
LAYERS = 4


@pytest.fixture(scope="module", autouse=True)
def _exact():
    """float32 products without TF32, or one row and many round differently."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    build("llama", num_hidden_layers=LAYERS).save_pretrained(where)
    characters().save_pretrained(where)
    return where


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_equals_generate(name, policy):
    target, draft = build(name).cuda(), build(name, seed=5).cuda()
    ids = prompt(7).cuda()
    got = treespec.generate(target, draft, ids, policy=policy, do_sample=False, max_new_tokens=20, pad_token_id=0)
    assert torch.equal(got.sequences, reference(target, ids, 20))


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_coupled_text_is_plain_decodings(policy):
    target, draft = build("llama").cuda(), build("llama", seed=5).cuda()
    options = dict(rule="coupled", do_sample=True, temperature=0.9, top_k=0, seed=3, max_new_tokens=20)
    got, want = (
        treespec.generate(target, d, prompt(7).cuda(), policy=p, **options)
        for d, p in ((draft, policy), (None, "plain"))
    )
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("rule, policy", [
    ("match", "bestfirst:budget=10"), ("rrs", "uniform:depth=2,width=2"), ("hybrid", "uniform:depth=2,width=2"),
    ("traversal", "uniform:depth=2,width=2"), ("block", "linear:gamma=3"),
])  # fmt: skip
def test_drawn_texts_repeat_and_a_twin_is_believed(rule, policy):
    """Here tests and draws are computed on the GPU for all nodes and read at once; their law is tested on the CPU."""
    target, twin = build("llama").cuda(), build("llama").cuda()
    options = dict(rule=rule, policy=policy, do_sample=True, temperature=0.8, top_p=0.9, top_k=0, max_new_tokens=24)
    one, again, other = (treespec.generate(target, twin, prompt(7).cuda(), seed=s, **options) for s in (3, 3, 4))
    assert one.tokens == again.tokens != other.tokens
    assert rule in ("match", "hybrid") or min(len(e.tokens) for e in one.steps[1:-1]) == (4 if rule == "block" else 3)


@pytest.mark.parametrize("lean", [False, True], ids=["own", "lean"])
def test_a_loaded_pair_lies_on_the_gpu_and_writes_the_cpus_text(folder, lean):
    on_gpu = load_pair(str(folder), "self", fast="lean" if lean else "off", device="cuda:0")
    on_cpu = load_pair(str(folder), "none", device="cpu")
    assert {p.device.type for p in on_gpu.target.parameters()} == {"cuda"}
    for text in ("Tree?", "A long one, with more words."):
        got = on_gpu.generate(text, policy="uniform:depth=3,width=2", max_new_tokens=12)
        assert got.tokens == on_cpu.generate(text, policy="plain", max_new_tokens=12).tokens


PARTS = [
    "model.embed_tokens",
    *(f"model.layers.{i}" for i in range(LAYERS)),
    "model.norm",
    "model.rotary_emb",
    "lm_head",
]


@pytest.mark.parametrize("away", ["cpu", "disk", pytest.param(1, marks=two)])
def test_layers_elsewhere_write_the_same_text(folder, away):
    split = {part: away if part.endswith(("1", "2", "lm_head")) else 0 for part in PARTS}
    pair = load_pair(str(folder), "self", device=split)
    alone = load_pair(str(folder), "none", device="cuda:0")
    for policy in POLICIES:
        got = pair.generate("Tree?", policy=policy, max_new_tokens=12)
        assert got.tokens == alone.generate("Tree?", policy="plain", max_new_tokens=12).tokens
    devices = {layer.device for layer in got.cache.layers}
    assert devices == ({torch.device("cuda:0"), torch.device("cuda:1")} if away == 1 else {torch.device("cuda:0")})


def test_memory_is_as_planned(tmp_path):
    build("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, vocab_size=4096).save_pretrained(
        tmp_path
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    pair = load_pair(str(tmp_path), "none", "bfloat16", device="cuda:0")
    taken = torch.cuda.memory_allocated(0) - before
    assert taken == pytest.approx(model_needs(str(tmp_path), "bfloat16").weight_bytes, rel=0.02)
    session = TreeModel.of(pair.target).session(256)
    with torch.no_grad():
        session.extend([1] * 200, logits="none")
    needs = model_needs(str(tmp_path), "bfloat16")
    assert session.cache.nbytes == needs.cache(256)


def test_this_machines_plan_is_followed(folder):
    found = plan(str(folder), "self", dtype="float32")
    assert found.fits and found.draft_device.startswith("cuda")
    pair = load_pair(str(folder), "self", device=found)
    assert pair.generate("Tree?", policy="linear", max_new_tokens=8).stats.tokens_per_step > 2


def test_a_step_waits_for_the_gpu_few_times(folder):
    """The verification's own synchronisation and one read; torch says where it waits."""
    pair = load_pair(str(folder), "ngram", device="cuda:0")
    pair.generate("Tree?", policy="plain", max_new_tokens=4)
    import warnings

    counts = []
    decoding = treespec.start(
        pair.target, None, pair.prompt_ids("Tree?"), policy="plain", do_sample=False, max_new_tokens=12
    )
    torch.cuda.set_sync_debug_mode("warn")
    try:
        steps = iter(decoding)
        next(steps)
        for _ in range(6):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                next(steps)
            counts.append(sum("synchroniz" in str(w.message) for w in seen))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # ids and positions go up, the chosen token comes down; torch.cuda.synchronize itself is not counted
    assert max(counts) <= 3, counts


@two
def test_two_ranks_over_nccl_write_what_one_gpu_does(folder, tmp_path):
    common = [
        "generate",
        "--prompt",
        "Tree?",
        "--target",
        str(folder),
        "--draft",
        str(folder),
        "--max-new-tokens",
        "12",
        "--json",
    ]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "treespec.cli",
    ]
    both = subprocess.run([*launch, *common], capture_output=True, text=True, timeout=300)
    assert both.returncode == 0, both.stderr[-2000:]
    alone = subprocess.run([sys.executable, "-m", "treespec.cli", *common], capture_output=True, text=True, timeout=300)
    import json

    assert json.loads(both.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]
