"""Prompt files: ours, Spec-Bench's layout, and broken ones."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespec.errors import InputError
from treespec.prompts import mixed_prompts, read_prompts


def test_the_repos_own_prompts():
    prompts = read_prompts(mixed_prompts())
    count = collections.Counter(p.category for p in prompts)
    assert len(prompts) >= 60 and len({p.id for p in prompts}) == len(prompts)
    assert set(count) == {"dialogue", "code", "structured", "story", "reasoning", "summarising", "translation", "long"}
    assert all(p.turns and all(t.strip() for t in p.turns) for p in prompts)
    assert all(len(p.turns[0]) > 3500 for p in prompts if p.category == "long")


def test_question_id_is_an_id(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 81, "category": "writing", "turns": ["Hi", "More"], "reference": []}\n\n')
    assert read_prompts(file)[0].id == "81"


@pytest.mark.parametrize("text, words", [
    ("", "empty"), ("\n \n", "empty"), ("{", "line 1: not JSON"), ('{"id":1,"turns":["a"]}\nnope', "line 2: not JSON"),
    ('{"id":1,"turns":["a"]}\n\n{"id":"1","turns":["b"]}', "line 3: the id 1 is that of line 1 too; give every"),
    ("[]", "line 1: no turns"), ('{"id": 1}', "no turns"), ('{"id": 1, "turns": []}', "no turns"),
    ('{"id": 1, "turns": [3]}', "non-empty text"), ('{"id": 1, "turns": ["  "]}', "non-empty text"),
    ('{"turns": ["a"]}', "no id"), ("[" * 100_000, "line 1"),
])  # fmt: skip
def test_malformed_files_name_the_line(tmp_path, text, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=words) as error:
        read_prompts(file)
    assert "\n" not in str(error.value)


def test_missing_folders_and_binary_files(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (tmp_path / "b.jsonl", "UTF-8")):
        with pytest.raises(InputError, match=words):
            read_prompts(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_prompts_or_one_sentence(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("fuzz") / "f.jsonl"
    file.write_bytes(data)
    try:
        assert read_prompts(file)
    except InputError as error:
        assert "\n" not in str(error)
