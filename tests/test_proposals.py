"""Children and entropies from logits, against plain formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treespec import proposals
from treespec.proposals import BLOCK, propose, top_k


@pytest.fixture(scope="module", params=["C kernel", "torch"], autouse=True)
def way(request):
    """Everything here holds both ways."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(proposals, "kernel", lambda: None)
        elif proposals.kernel() is None:
            pytest.skip("no C compiler here")
        yield


@given(st.integers(1, 5), st.integers(2, 30), st.integers(1, 12), st.integers(0, 2**20))
def test_small_rows_against_torch(rows, size, k, seed):
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    got = propose(x, k)
    logp = x.log_softmax(-1)
    k = min(k, size)
    torch.testing.assert_close(got.logp, logp.topk(k).values)
    torch.testing.assert_close(got.logp, logp.gather(-1, got.token))
    want = -(logp.double().exp() * logp.double()).sum(-1) / math.log(2)
    torch.testing.assert_close(got.entropy.double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2 * BLOCK, 49152, 49153, 128256, 50257])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_through_blocks_is_exact(size, k):
    x = torch.randn(7, size, generator=torch.Generator().manual_seed(size + k))
    x[0, -1] = 99.0  # the ragged tail is looked at
    x[1, :BLOCK] += 50.0  # all winners in one block
    torch.testing.assert_close(x.gather(-1, top_k(x, k)), x.topk(k).values)


def test_many_rows_go_in_chunks_and_come_back_in_order():
    x = torch.randn(40, 49152, generator=torch.Generator().manual_seed(3))
    whole, single = propose(x, 3), [propose(row[None], 3) for row in x]
    assert torch.equal(whole.token, torch.cat([p.token for p in single]))
    torch.testing.assert_close(whole.entropy, torch.cat([p.entropy for p in single]))


@pytest.mark.parametrize("sharpness, offset", [(1.0, 0.0), (3.0, 20.0), (6.0, -30.0)])
def test_entropy_and_probabilities_hold_to_four_digits_on_big_vocabularies(sharpness, offset):
    x = offset + sharpness * torch.randn(16, 49152, generator=torch.Generator().manual_seed(5))
    got, logp = propose(x, 4), x.double().log_softmax(-1)
    want = -(logp.exp() * logp).sum(-1) / math.log(2)
    assert float((got.entropy - want).abs().max()) < 2e-4
    assert float((got.logp - logp.topk(4).values).abs().max()) < 1e-4


def test_impossible_tokens_neither_count_nor_win():
    x = torch.tensor([[1.0, -torch.inf, 1.0, -torch.inf]])
    got = propose(x, 4)
    assert float(got.entropy[0]) == pytest.approx(1.0, abs=1e-6)
    assert sorted(got.token[0, :2].tolist()) == [0, 2] and bool(torch.isinf(got.logp[0, 2:]).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_rows_propose_nothing_and_leave_others_alone(bad):
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    x[1, 4] = bad
    got = propose(x, 2)
    assert bool(torch.isinf(got.logp[1]).all()) and float(got.entropy[1]) == math.inf
    torch.testing.assert_close(got.logp[[0, 2]], x[[0, 2]].log_softmax(-1).topk(2).values)


def test_no_probability_exceeds_one():
    x = torch.tensor([[60.0, -60.0, -60.0]])
    assert bool((propose(x, 3).logp <= 0).all()) and float(propose(x, 3).entropy) >= 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_worked_in_float32(dtype):
    x = torch.randn(2, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = propose(x, 5)
    assert got.logp.dtype == torch.float32
    torch.testing.assert_close(got.logp, x.float().log_softmax(-1).topk(5).values)


def test_noise_orders_the_children_and_leaves_their_probabilities():
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(50, generator=torch.Generator().manual_seed(2))
    got = propose(x, 4, noise)
    assert torch.equal(got.token, (x + noise).topk(4).indices)
    torch.testing.assert_close(got.logp, x.log_softmax(-1).gather(-1, got.token))


@pytest.mark.parametrize("sharpness, most_bits", [(6.0, 0.15), (4.0, 0.6), (1.0, 15.7)])
def test_the_articles_cut_off_changes_entropy_by_little_where_it_decides(sharpness, most_bits):
    """The article sums p·log2 p over p > 1e-5 only. Near its bands that loses a tenth of a bit, on flat rows all of it."""
    x = sharpness * torch.randn(64, 49152, generator=torch.Generator().manual_seed(7))
    p = x.double().softmax(-1)
    cut = -(torch.where(p > 1e-5, p * p.log2(), 0.0)).sum(-1)
    lost = propose(x, 1).entropy.double() - cut
    assert float(lost.min()) > -1e-4 and float(lost.max()) < most_bits
