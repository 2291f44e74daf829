"""What the doctor says: true of this machine, and of a model that cannot be used."""

import json

import pytest
import torch
from conftest import build
from test_cli import treespec  # noqa: F401

from treespec import doctor
from treespec.doctor import _findings, examine


def test_the_machine_as_it_is():
    found = examine()
    assert found["versions"]["torch"] == torch.__version__ and found["model"] is None
    assert found["threads"]["torch"] == torch.get_num_threads() and found["devices"][-1]["name"] == "cpu"
    assert found["devices"][-1]["free_bytes"] > 0 and json.dumps(found)
    assert any("runs on the CPU" in line for line in found["findings"]) == (not torch.cuda.is_available())


def test_a_model_is_checked_and_timed():
    found = examine("toy")["model"]
    assert found["self_check"] and set(found["forward_ms"]) == {1, 16} and min(found["forward_ms"].values()) > 0


def test_a_model_that_cannot_verify_a_tree_fails(treespec, tmp_path):  # noqa: F811
    build("falcon-alibi").save_pretrained(tmp_path)
    code, out, err = treespec("doctor", "--target", str(tmp_path), "--json")
    found = json.loads(out)
    assert code == 1 and not found["model"]["self_check"] and "ALiBi" in found["model"]["reason"]
    assert any("cannot be used" in line for line in found["findings"])


def test_a_llama_is_timed_with_both_forwards(treespec, tmp_path):  # noqa: F811
    build("llama").save_pretrained(tmp_path)
    code, out, _ = treespec("doctor", "--target", str(tmp_path))
    assert code == 0 and "self-check" in out and "passes" in out and "ms for one node" in out
    code, out, err = treespec("doctor", "--target", "/no/such/folder")
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("change, words", [
    (dict(kernel={"compiler": None, "works": False}), "no C compiler"),
    (dict(kernel={"compiler": "cc", "works": False}), "could not be built"),
    (dict(peer_access=[{"from": "cuda:0", "to": "cuda:1", "direct": False}]), "cuda:0 cannot read cuda:1 directly"),
    (dict(embedded_target=False), "93 MB"),
    (dict(threads={"torch": 1, "cores": 64, "load": 99.5, "omp_wait_policy": None, "vector": "x"}), "1 of 64 cores"),
    (dict(threads={"torch": 4, "cores": 4, "load": 99.5, "omp_wait_policy": None, "vector": "x"}), "The load is 99.5"),
])  # fmt: skip
def test_what_is_slow_is_said_with_its_reason(change, words):
    quiet = {
        "devices": [{"name": "cpu"}], "peer_access": [], "kernel": {"compiler": "cc", "works": True}, "model": None,
        "threads": {"torch": 4, "cores": 4, "load": 0.1, "omp_wait_policy": None, "vector": "x"}, "embedded_target": True,
    }  # fmt: skip
    assert not any(words in line for line in _findings(quiet))
    assert any(words in line for line in _findings({**quiet, **change}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_no_gpu_is_said_once():
    assert doctor._peer_access() == []


def test_peer_access_is_reported_in_one_line(capsys):
    found = examine()
    found["peer_access"] = [{"from": "cuda:0", "to": "cuda:1", "direct": i == 0} for i in range(2)]
    doctor.print_report(found)
    assert "peer access: 1 of 2 pairs of GPUs reach each other directly" in capsys.readouterr().out
