"""A short soak; ``python -m benchmarks.soak`` is the long one."""

import random

import pytest
import torch

from benchmarks import soak

pytestmark = pytest.mark.thorough


def test_many_generations_leave_everything_as_it_was():
    found = soak.soak(40, seed=5)
    assert [
        fault for fault in found["faults"] if "memory" not in fault
    ] == []  # forty are too few to judge the memory by
    assert found["compared"] >= 5 and sum(found["outcomes"].values()) == 40
    assert any(outcome.startswith("interrupted") for outcome in found["outcomes"])


def test_what_it_looks_at_sees_a_change():
    model = soak._llama(1, 1)
    before = soak.fingerprint(model)
    assert soak.fingerprint(model) == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert soak.fingerprint(model) != before
    before = soak.fingerprint(model)
    hook = model.register_forward_hook(lambda *_: None)
    assert soak.fingerprint(model) != before
    hook.remove()
    assert soak.fingerprint(model) == before
    model.train()
    assert soak.fingerprint(model) != before


def test_a_generator_that_moves_is_a_fault(monkeypatch):
    one = soak._one

    def careless(*args):
        random.random()
        return one(*args)

    monkeypatch.setattr(soak, "_one", careless)
    assert soak.soak(2)["faults"] == ["a global random generator moved"]
