"""Every file that the package reads, broken in every way: taken, or refused in one sentence; never a hang."""

import json
import os
import shutil
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

from treespec import native
from treespec.bench import make_plan, merge_rounds, read_rounds, summary
from treespec.calibration import Calibration
from treespec.cost import At, load_cost, plain_seconds
from treespec.distill.answers import Answer, Job
from treespec.distill.loop import Plan, train
from treespec.distill.store import AnswerStore
from treespec.export import ENGINES, export, load_tuning
from treespec.head import FeatureHead, HeadConfig, is_head, load_head
from treespec.known import known_tokenizer
from treespec.pairs import load_model, load_pair
from treespec.placement.needs import head_needs, model_needs
from treespec.policies import POLICIES, parse_policy
from treespec.prompts import Prompt, read_prompts
from treespec.provenance import cost_about, record_command, recorded
from treespec.toy import toy_tokenizer
from treespec.trace import Caps, Sampling, Trace, merge, record, replay
from treespec.trace.schema import COLUMNS, KEY, read_file

pytestmark = pytest.mark.thorough

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
BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
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
                assert outcome(lambda path=path: use(path)), f"{label} was taken"
            except BaseException as error:
                bad.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    assert not bad, "\n".join(bad)


def attempts(cases, bad):
    """Try ``(label, call)``; what came out as anything but a TreespecError goes to ``bad``. What was said, by label."""
    said = {}
    for label, call in cases:
        try:
            said[label] = outcome(call)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            bad.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    return said


@given(st.binary(max_size=300), st.sampled_from(sorted(JSON_FILES)))
def test_any_bytes(tmp_path_factory, content, kind):
    path = tmp_path_factory.getbasetemp() / f"any.{kind}.json"
    path.write_bytes(content)
    outcome(lambda: JSON_FILES[kind][1](path))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda s: st.lists(s, max_size=3) | st.dictionaries(st.sampled_from(["verify", "draft", "rows", "seconds", "overhead", "turns", "id", "recommended", "by_policy", "policy", "speedup", "temperatures", "acceptance", "model_type"]), s, max_size=4), max_leaves=12), st.sampled_from(sorted(JSON_FILES)))  # fmt: skip
def test_any_json(tmp_path_factory, content, kind):
    path = tmp_path_factory.getbasetemp() / f"any.{kind}.json"
    path.write_text(json.dumps(content))
    outcome(lambda: JSON_FILES[kind][1](path))


# ---------------------------------------------------------------------------------------------------- traces


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    record(load_pair("toy", "model"), PROMPTS, path, sampling=Sampling(max_new_tokens=6), caps=Caps(1e-2, 3, 4, 8))
    return path


def use_trace(path, policies=("dynamic",)):
    found = Trace.load(path)
    repr(found), recorded(found), record_command(found), found.tree(len(found) - 1)
    for name in policies:
        totals = replay(found, parse_policy(name), "article").totals
        assert totals["tokens_per_step"] >= 1 and np.isfinite(totals["speedup"])
    known_tokenizer(str(found.about.get("target", "")))


def rewritten(trace, path, columns=None, about=None, table=None):
    """The trace with other columns or another text about it, as anybody could write it."""
    table = pq.read_table(trace) if table is None else table
    metadata = dict(table.schema.metadata)
    for name, values in (columns or {}).items():
        table = table.set_column(table.column_names.index(name), name, values)
    if about is not None:
        metadata[KEY] = about if isinstance(about, bytes) else about.encode("utf-8", "surrogatepass")
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_what_a_trace_says_of_itself(trace, tmp_path):
    about = json.loads(pq.read_schema(trace).metadata[KEY])
    path, bad = tmp_path / "t.parquet", []
    values = (None, [], {}, "\ud800", -1, 1.5, 10**400, "@@deep@@")

    def cases():
        rewritten(trace, path)
        yield "as it is", lambda: use_trace(path, POLICIES)
        for label, text in json_variants(about, values):
            rewritten(trace, path, about=text)
            yield label, lambda: use_trace(path)

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert said["as it is"] == "" and all(said[f"('{key}',) missing"] for key in ("schema", "caps", "prompts"))
    rewritten(trace, path, about=b"\xff\xfe")
    assert "not a treespec trace" in outcome(lambda: use_trace(path))


def test_columns_of_other_types_and_values(trace, tmp_path):
    table, path, bad = pq.read_table(trace), tmp_path / "t.parquet", []
    n = len(table)

    def column_cases():
        for field in COLUMNS:
            kinds = {
                "int64": pa.int64(),
                "double": pa.float64(),
                "string": pa.string(),
                "null": pa.null(),
                "binary": pa.binary(),
                "list": pa.list_(pa.int16()),
            }
            for name, kind in kinds.items():
                if kind != field.type:
                    yield f"{field.name} as {name}", {field.name: pa.array([None] * n, kind)}
            yield f"{field.name} null", {field.name: pa.array([None] * n, field.type)}
            if pa.types.is_string(field.type) or pa.types.is_boolean(field.type):
                same = ["x"] * n if pa.types.is_string(field.type) else [False] * n
                yield f"{field.name} all alike", {field.name: pa.array(same, field.type)}
                continue
            values = table[field.name].to_numpy().copy()
            info = np.iinfo(values.dtype) if values.dtype.kind in "iu" else np.finfo(values.dtype)
            extremes = [0, 1, info.max, info.min] + ([np.nan, np.inf, -np.inf] if values.dtype.kind == "f" else [])
            for extreme in extremes:
                yield (
                    f"{field.name} all {extreme}",
                    {field.name: pa.array(np.full(n, extreme, values.dtype), field.type)},
                )
                for at in (1, n - 1):
                    changed = values.copy()
                    changed[at] = extreme
                    yield f"{field.name}[{at}] = {extreme}", {field.name: pa.array(changed, field.type)}

    def cases():
        for label, columns in column_cases():
            rewritten(trace, path, columns)
            yield label, lambda: use_trace(path)
        for label, other in (
            ("one row less", table.slice(0, n - 1)),
            ("no first row", table.slice(1)),
            ("no rows", table.slice(0, 0)),
            ("rows twice", pa.concat_tables([table, table])),
            ("backwards", table.take(pa.array(range(n - 1, -1, -1)))),
            ("a column less", table.drop_columns(["rank"])),
            ("a column more", table.append_column("more", pa.array([1] * n))),
            ("a column twice", table.append_column("rank", table["rank"])),
            ("other order", table.select(table.column_names[::-1])),
        ):
            rewritten(trace, path, table=other.replace_schema_metadata(table.schema.metadata))
            yield label, lambda: use_trace(path)

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    for label in (
        "one row less",
        "no rows",
        "rows twice",
        "backwards",
        "a column less",
        "logp all nan",
        "token[1] = -2147483648",
        "is_true all alike",
    ):
        assert said[label], f"{label} was taken"


def test_cuts_and_flips_of_a_trace(trace, tmp_path):
    """Whatever byte is lost or changed: read as it was, or refused; page checksums tell."""
    path, bad = tmp_path / "t.parquet", []
    valid, columns = trace.read_bytes(), pq.read_table(trace).to_pandas()

    def use(changed):
        path.write_bytes(changed)
        table, _, _ = read_file(path)
        assert table.to_pandas().equals(columns), "other numbers were read"

    spread = [
        (label, changed) for label, changed in byte_variants(valid) if label not in ("noise behind", "NUL behind")
    ]
    said = attempts(((label, lambda changed=changed: use(changed)) for label, changed in spread), bad)
    assert not bad, "\n".join(bad)
    assert all(said[label] for label in said if label.startswith("cut"))
    (tmp_path / "odd").mkdir()
    with odd_files(tmp_path / "odd") as files:
        for label, odd in files.items():
            assert outcome(lambda odd=odd: Trace.load(odd)), f"{label} was taken"
            assert outcome(lambda odd=odd: merge([trace, odd], tmp_path / "m.parquet")), f"{label} was merged"
    assert not (tmp_path / "m.parquet").exists()


# ---------------------------------------------------------------------------------------------------- rounds of a benchmark


def round_line(plan, number=0):
    row = {
        "tokens": 3,
        "steps": 2,
        "step_tokens": 2,
        "step_nodes": 2,
        "prefill_seconds": 0.1,
        "draft_seconds": 0.1,
        "prune_seconds": 0.0,
        "verify_seconds": 0.1,
        "step_seconds": 0.3,
    }
    rows = [{"policy": spec, "same_text": True, "stats": row} for spec in plan.policies]
    return {"round": number, "config": plan.hash, "prompt": "p0", "category": "a", "input_tokens": 3, "text": "00", "rows": rows}  # fmt: skip


def test_rounds_of_a_benchmark(tmp_path):
    plan = make_plan([parse_policy("linear:gamma=2")], PROMPTS)
    path, bad = tmp_path / "r.jsonl", []
    first, second = round_line(plan), round_line(plan, 1)

    def use():
        summary(read_rounds(path, plan), plan)

    def merged():
        merge_rounds([path], tmp_path / "m.jsonl")

    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    assert outcome(use) == "" and outcome(merged) == ""

    def cases():
        for label, text in json_variants(second):
            path.write_bytes((json.dumps(first) + "\n" + text + "\n").encode("utf-8", "surrogatepass"))
            yield label, use
            yield f"merge {label}", merged
        for label, content in byte_variants((json.dumps(first) + "\n").encode()):
            path.write_bytes(content)
            yield label, use
            yield f"merge {label}", merged
        for number in ("1e999", "1.5", '"1"', "null"):
            path.write_text(json.dumps(second).replace('"round": 1', f'"round": {number}') + "\n")
            yield f"round {number}", use
            yield f"merge round {number}", merged

    attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    strange = json.dumps({**first, "prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    path.write_text(strange + "\n", encoding="utf-8")
    assert outcome(use) == "" and outcome(merged) == "", "a line is what ends with a line feed"
    assert (tmp_path / "m.jsonl").read_text(encoding="utf-8") == strange + "\n"


def test_a_line_of_prompts_ends_with_a_line_feed_alone(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({**LINE, "turns": ["a\u2028b\u0085c"]}, ensure_ascii=False).encode() + b"\r\n"
    )
    assert [p.turns for p in read_prompts(path)] == [["a\u2028b\u0085c"]]


# ---------------------------------------------------------------------------------------------------- answers, checkpoints


ABOUT = {"target": "t", "dtype": "float32", "prompts": "0" * 64, "new_tokens": 4, "seed": 0}


@pytest.fixture
def answers(tmp_path):
    store = AnswerStore(tmp_path / "answers", ABOUT)
    store.add([Answer(Job(i, [5, 6]), [5, 6, 7, 8], torch.ones(3, 4, dtype=torch.float16)) for i in range(2)])
    return store.folder


def test_stored_answers(answers):
    from safetensors.torch import load_file, save_file

    note, part, bad = answers / "about.json", answers / "part-00000.safetensors", []
    about, content, tensors = note.read_bytes(), part.read_bytes(), load_file(part)

    def use():
        store = AnswerStore(answers, ABOUT)
        for text in store.texts():
            assert len(text.features) == len(text.tokens) - 1 and 0 < text.prompt < len(text.tokens)
        assert store.done() == {0, 1}

    def cases():
        yield "as it is", use
        for label, text in json_variants(ABOUT):
            note.write_bytes(text.encode("utf-8", "surrogatepass"))
            yield f"about {label}", use
        note.write_bytes(about)
        for label, changed in byte_variants(content):
            part.write_bytes(changed)
            yield f"part {label}", lambda: AnswerStore(answers, ABOUT).texts()
        for name in tensors:
            for label, value in (("missing", None), ("empty", tensors[name][:0]), ("longer", torch.cat([tensors[name]] * 2)), ("flat", tensors[name].flatten()[0]),
                                 ("negative", -tensors[name].abs() - 1), ("float", tensors[name].float()), ("huge", tensors[name] * 0 + 60000)):  # fmt: skip
                save_file({k: v.contiguous() for k, v in {**tensors, name: value}.items() if v is not None}, part)
                yield f"{name} {label}", lambda: AnswerStore(answers, ABOUT).texts()
                yield f"{name} {label}, done", lambda: AnswerStore(answers, ABOUT).done()

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert said["as it is"] == "" and all(said[f"{name} missing"] for name in tensors)
    assert all(said[f"{name} empty"] for name in tensors)
    part.unlink()
    (answers / "part-x.safetensors").touch()  # not one of ours
    assert AnswerStore(answers, ABOUT).texts() == []


def test_checkpoints(answers, tmp_path):
    model = torch.nn.Linear(2, 2)
    texts = AnswerStore(answers, ABOUT).texts()
    loss = lambda rows, share: (model(torch.ones(1, 2)).square().sum(), {})  # noqa: E731
    folder, bad = tmp_path / "run", []
    run = lambda: train(model, texts, loss, Plan(epochs=1), folder, {"kind": "x"})  # noqa: E731
    run()
    path = folder / "checkpoint.pt"
    content, state = path.read_bytes(), torch.load(path, weights_only=True)

    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    def cases():
        for label, changed in byte_variants(content):
            if label != "noise behind":
                path.write_bytes(changed)
                yield label, run
        for key in state:
            for value in (
                None,
                [],
                {},
                "x",
                -1,
                10**30,
                float("nan"),
                {"weight": torch.ones(3)},
                {"other": torch.ones(2, 2)},
            ):
                torch.save({**state, key: value}, path)
                yield f"{key} = {value}", run
            torch.save({k: v for k, v in state.items() if k != key}, path)
            yield f"{key} missing", run
        torch.save({**state, "losses": Attack()}, path)
        yield "code", run

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert "checkpoint" in said["code"] and not (tmp_path / "executed").exists()
    assert all(said[f"{key} missing"] for key in state)


# ---------------------------------------------------------------------------------------------------- heads and models


@pytest.fixture(scope="module")
def target():
    return build("llama")


@pytest.fixture
def head(target, tmp_path):
    weight = target.get_input_embeddings().weight
    config = HeadConfig("t", 32, 48, 4, 2, 8, 97, 40)
    folder = tmp_path / "head"
    FeatureHead(config, weight, weight, torch.arange(40), torch.ones(32)).save(folder)
    return folder


def test_heads(head, target, tmp_path):
    from safetensors.torch import load_file, save_file

    config, weights, bad = head / "config.json", head / "model.safetensors", []
    about, content, tensors = config.read_bytes(), weights.read_bytes(), load_file(weights)

    def use():
        is_head(head)
        load_head(head, target)

    def cases():
        yield "as it is", use
        for label, text in json_variants(json.loads(about)):
            config.write_bytes(text.encode("utf-8", "surrogatepass"))
            yield label, use
            head_needs.cache_clear()
            yield f"plan {label}", lambda: head_needs(str(head), "float32")
        config.write_bytes(about)
        for label, changed in byte_variants(content):
            weights.write_bytes(changed)
            yield label, use
        for name in ("token_of", "spread", "mix.weight", "norm1.weight"):
            for label, value in (("missing", None), ("empty", tensors[name][:0]), ("negative", -tensors[name] - 1), ("huge", tensors[name] * 0 + 2**30), ("flat", tensors[name].flatten()[0])):  # fmt: skip
                save_file({k: v.contiguous() for k, v in {**tensors, name: value}.items() if v is not None}, weights)
                yield f"{name} {label}", use

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert said["as it is"] == "" and all(
        said[f"token_of {label}"] for label in ("missing", "empty", "negative", "huge")
    )
    assert said["spread negative"] and said["mix.weight empty"]
    huge = {**json.loads(about), "intermediate_size": 2**30}  # no memory is taken for what the file does not hold
    config.write_text(json.dumps(huge))
    assert "holds no readable feature head" in outcome(lambda: load_head(head, target))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def test_configs(tmp_path):
    path, bad = tmp_path / "config.json", []
    values = (None, [], "x", -1, 0, 1.5, 10**12, 10**400)

    def cases():
        yield "as it is", None
        yield from json_variants({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, values)
        for more in ({"torch_dtype": "x"}, {"dtype": 3}, {"quantization_config": 3}, {"quantization_config": {"quant_method": "x"}}, {"layer_types": ["x"]}, {"auto_map": {"AutoConfig": "x.Y"}},
                     {"self": 1}, {"cls": 1}, {"model_type": "bert"}, {"model_type": "t5"}, {"num_hidden_layers": 10**9}, {"model_type": "mixtral", "num_local_experts": 10**9}):  # fmt: skip
            yield str(more), json.dumps({**CONFIG, **more})

    def tried():
        for label, text in cases():
            path.write_bytes((text or json.dumps(CONFIG)).encode("utf-8", "surrogatepass"))
            yield label, lambda: use_config(path)

    said = attempts(tried(), bad)
    assert not bad, "\n".join(bad)
    assert said["as it is"] == "" and "at most" in said["{'num_hidden_layers': 1000000000}"]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_files_of_a_model(model, name):
    file, bad = model / name, []
    content = file.read_bytes()

    def cases():
        for label, changed in list(byte_variants(content))[:: 6 if name == "model.safetensors" else 3]:
            file.write_bytes(changed)
            yield label, lambda: load_model(str(model), "float32")
        file.unlink()
        os.mkfifo(file)
        yield "pipe", lambda: load_model(str(model), "float32")

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert "no regular file" in said["pipe"]


def test_gguf_paths(tmp_path):
    path, bad = tmp_path / "m.gguf", []
    start = b"GGUF" + struct.pack("<IQQ", 3, 2, 2)

    def cases():
        for label, content in (("empty", b""), ("noise", bytes(range(256)) * 8), ("magic alone", b"GGUF"), ("no tensors", start), ("huge counts", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)),
                               ("huge text", start + struct.pack("<Q", 2**62) + b"x"), ("zip", b"PK\x03\x04" * 50)):  # fmt: skip
            path.write_bytes(content)
            yield label, lambda: load_model(str(path), "float32")
        with odd_files(tmp_path / "odd") as files:
            for label, odd in files.items():
                if not label.startswith("nul"):
                    name = f"{odd}.gguf"
                    yield f"odd {label}", lambda name=name: load_model(name, "float32")

    (tmp_path / "odd").mkdir()
    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert all(said.values()), said


def test_a_broken_kernel_in_the_cache_is_made_again(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setenv("TREESPEC_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda compiler, to: compiled.append(to.write_bytes(b"a library" * 1000)))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    made = native._built()
    whole, note = made.read_bytes(), made.with_suffix(".sha256")
    assert native._built() == made and len(compiled) == 1, "what is whole is not made twice"
    for broken in (b"", whole[:5000], whole[:99] + b"\0" + whole[100:]):
        made.write_bytes(broken)
        assert native._built() == made and made.read_bytes() == whole and note.read_text() == native._digest(made)
    note.unlink()  # of an older treespec
    native._built()
    assert len(compiled) == 5


def test_embedded_target_without_a_place_to_keep_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TREESPEC_HOME", str(tmp_path / "file" / "home"))
    assert "cannot keep the embedded target" in outcome(lambda: load_pair("smollm2"))


def test_parts_of_a_recording(tmp_path):
    pair, out, bad = load_pair("toy", "model"), tmp_path / "t.parquet", []
    options = {"sampling": Sampling(max_new_tokens=4), "caps": Caps(1e-1, 2, 2, 4)}
    record(pair, PROMPTS[:1], tmp_path / "whole.parquet", **options)
    valid, parts = (tmp_path / "whole.parquet").read_bytes(), tmp_path / "t.parquet.parts"

    def cases():
        for label, content in [("valid", valid), *list(byte_variants(valid))[::7]]:
            parts.mkdir(exist_ok=True)
            (parts / "000000.parquet").write_bytes(content)
            yield label, lambda: record(pair, PROMPTS, out, **options)

    said = attempts(cases(), bad)
    assert not bad, "\n".join(bad)
    assert "--out" in said["valid"] and not out.exists(), "a part of other prompts is not gone on with"
    shutil.rmtree(parts)
    parts.touch()
    assert "parts" in outcome(lambda: record(pair, PROMPTS, out, **options)) and not out.exists()
