"""Sampling: C10, C11 and C13 as rules, and the distribution against a plain softmax."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniengine.config import SamplingParams
from miniengine.sampler import Sampler, filter_probs
from miniengine.scheduler import Request, Row

V = 50


def row(index=0, **kw):
    "A row that samples output token number `index` of a request with one prompt token"
    req = Request("r", [1]*(index + 1), SamplingParams(**kw))
    req.num_prompt = 1
    return Row(req, index, 1, True)


def logits(seed, n): return torch.randn(n, V + 7, generator=torch.Generator().manual_seed(seed))*3


@given(seed=st.integers(0, 1000),
       temperatures=st.lists(st.sampled_from([0, 0, 0.01, 0.7, 1.0, 2.0]), min_size=1, max_size=8))
@settings(deadline=None, derandomize=True)
def test_greedy_rows_are_the_argmax_in_any_mixture(seed, temperatures):
    "C10, C13: and no row gets a token that the tokenizer doesn't know, even if its score is the highest"
    x = logits(seed, len(temperatures))
    x[:, V:] += 100
    tokens, _ = Sampler(V)(x, [row(temperature=t) for t in temperatures])
    assert tokens.max() < V and tokens.min() >= 0
    for t, token, l in zip(temperatures, tokens, x):
        if t == 0: assert token == l[:V].argmax()


@given(seed=st.integers(0, 1000), n=st.integers(1, 6), at=st.integers(0, 5), index=st.integers(0, 40))
@settings(deadline=None, derandomize=True)
def test_a_seeded_row_depends_on_its_scores_seed_and_index_only(seed, n, at, index):
    "C11: alone, beside others, at any place in the batch"
    x, mine = logits(seed, n + 1), dict(temperature=1.0, seed=42, top_p=0.9)
    alone, _ = Sampler(V, seed=1)(x[-1:], [row(index, **mine)])
    order = list(range(n))
    order.insert(min(at, n), n)
    rows = [row(index, **mine) if i == n else row(i, temperature=1.3) for i in order]
    together, _ = Sampler(V, seed=2)(x[order], rows)
    assert together[order.index(n)] == alone[0]


@pytest.mark.parametrize("kw", [dict(), dict(temperature=0.5), dict(top_k=3), dict(top_p=0.6), dict(min_p=0.2),
                                dict(temperature=1.7, top_k=9, top_p=0.8, min_p=0.05)], ids=str)
def test_frequencies_are_those_of_the_filtered_softmax(kw):
    "20,000 draws with different seeds: within five standard deviations of the probabilities, and never a dropped token"
    n, x, p = 20_000, logits(5, 1)[:, :V], SamplingParams(**dict(temperature=1.0) | kw)
    probs = (x/p.temperature).softmax(-1)[0]
    order = probs.argsort(descending=True)
    if p.top_k: probs[order[p.top_k:]] = 0
    probs /= probs.sum()
    probs[probs < p.min_p*probs.max()] = 0
    probs /= probs.sum()
    if p.top_p < 1: probs[order[(probs[order].cumsum(0) - probs[order] >= p.top_p)]] = 0
    probs /= probs.sum()
    tokens, _ = Sampler(V)(x.expand(n, V), [row(seed=i, **dict(temperature=1.0) | kw) for i in range(n)])
    got = torch.bincount(tokens, minlength=V)/n
    assert (got[probs == 0] == 0).all()
    assert ((got - probs).abs() <= 5*(probs*(1 - probs)/n).sqrt() + 1e-9).all()


def test_filters_never_drop_every_token_whatever_the_scores():
    "All equal, infinite gaps, and -inf for most: the best token always stays, and nothing is NaN"
    one = torch.full((1, V), -torch.inf)
    one[0, 3] = 0
    for x in torch.zeros(1, V), torch.eye(V)[:1]*1e9, one:
        for k, top_p, min_p in ((1, 1.0, 0.0), (V, 1e-9, 0.0), (V, 1.0, 1.0), (5, 0.5, 0.5)):
            col = lambda v: torch.tensor([[v]], dtype=torch.float32)
            probs = filter_probs(x, col(k), col(top_p), col(min_p))
            assert not probs.isnan().any() and probs.sum() > 0 and (probs > 0)[0, x.argmax()]


def test_a_request_without_a_seed_keeps_the_one_it_was_given():
    s, r = Sampler(V), row(temperature=1.0)
    assert s.seed_of(r.req) == s.seed_of(r.req) != s.seed_of(row(temperature=1.0).req)


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, derandomize=True, max_examples=15)
def test_the_kernel_draws_what_the_reference_draws(seed):
    "All combinations of rules, rows with forbidden tokens, scores that tie, a vocabulary that ends inside of a block"
    pytest.importorskip("triton")
    from miniengine.sampler import draw
    from miniengine.triton_sampler import draw as fused
    rng, (rows, vocab) = np.random.default_rng(seed), (6, 2500)
    x = rng.normal(size=(rows, vocab)).astype(np.float32)*rng.choice([1, 4], (rows, 1)).astype(np.float32)
    x[0, rng.permutation(vocab)[3:]] = -np.inf
    x[1] = np.round(x[1])
    rules = np.stack([rng.choice([0.01, 0.7, 2], rows), rng.choice([1, 3, 50, vocab], rows),
                      rng.choice([1e-3, 0.3, 0.95, 1], rows), rng.choice([0, 0.1, 1], rows), rng.random(rows)], 1)
    x, device = torch.from_numpy(x), "cuda" if torch.cuda.is_available() else "cpu"
    got, want = fused(x.to(device), rules).cpu(), draw(x, rules)
    kept = [filter_probs(row[None]/r[0], *(torch.tensor([[v]]).float() for v in r[1:4]))[0]
            for row, r in zip(x, rules)]
    for i, (a, b) in enumerate(zip(got.tolist(), want.tolist())):
        cdf = kept[i].double().cumsum(0)
        border = (cdf/cdf[-1] - rules[i, 4]).abs().min() < 1e-5  # u hits the border between two tokens
        assert kept[i][a] > 0 and (a == b or border), (i, a, b, rules[i])


def test_host_values_reach_the_device_in_order():
    from miniengine.sampler import send
    assert send([3, 1, 2], torch.device("cpu")).tolist() == [3, 1, 2]
    assert send([[0.5], [2]], torch.device("cpu"), torch.float64).dtype == torch.float64
