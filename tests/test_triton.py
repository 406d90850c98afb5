"""The Triton kernels against plain PyTorch.

On a CPU under Triton's interpreter (float32, float16), on a GPU compiled (bfloat16 too).
"""
import os

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA: os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
from miniengine import triton_attention as ta  # noqa: E402
from miniengine.attention import step_meta  # noqa: E402
from miniengine.model import StepMeta, TorchOps  # noqa: E402

DEV = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16]*CUDA      # the interpreter's bf16 products are wrong
EPS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_step(seed, rows, Hq, Hkv, D, dtype=torch.float32, spare=3):
    "q, cache and meta of `(context, new tokens)` rows over blocks in random order; slots that are nobody's hold NaN"
    rng = np.random.default_rng(seed)
    n = [-(-(c + m)//16) for c, m in rows]
    ids = list(1 + rng.permutation(sum(n) + spare))
    tables = [[int(ids.pop()) for _ in range(k)] for k in n]
    g = torch.Generator().manual_seed(seed)
    cache = torch.full((sum(n) + spare + 1, 2, 16, Hkv, D), torch.nan)
    for t, (c, m) in zip(tables, rows):
        for i, b in enumerate(t):
            used = min(16, c + m - 16*i)
            cache[b, :, :used] = torch.randn(2, used, Hkv, D, generator=g)
    q = torch.randn(sum(m for _, m in rows), Hq, D, generator=g)
    return q.to(DEV, dtype), cache.to(DEV, dtype), step_meta([(t, c, m) for t, (c, m) in zip(tables, rows)], device=DEV)


def naive(q, cache, meta):
    "The definition, in float32, row by row"
    h, out, G = meta.host, torch.empty(q.shape, device=q.device), q.shape[1]//cache.shape[3]
    for r, L in enumerate(h["kv_lens"].tolist()):
        a, b = h["cu_q"][r:r + 2].tolist()
        table = cache[h["indices"][h["indptr"][r]:h["indptr"][r + 1]].tolist()].float()
        k, v = (table[:, i].flatten(0, 1)[:L].repeat_interleave(G, 1) for i in (0, 1))
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k)*q.shape[2]**-0.5
        s.masked_fill_((torch.arange(L) > torch.arange(L - (b - a), L)[:, None]).to(q.device), -torch.inf)
        out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
    return out


def attend(q, cache, meta, backend=None):
    backend = backend or ta.TritonAttention()
    backend.plan(meta)
    out = backend(q, cache, torch.full_like(q, torch.nan))
    assert all((s[2] == 0).all() for s in backend.memory.values()), "a launch must leave its arrival counters at zero"
    return out


def check(q, cache, meta):
    torch.testing.assert_close(attend(q, cache, meta).float(), naive(q, cache, meta), rtol=0, atol=EPS[q.dtype])


EDGES = [0, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 300]
HEADS = [(2*g, 2, 64) for g in (1, 2, 3, 4, 5, 6, 8)] + [(7, 1, 128), (7, 1, 64), (12, 2, 128), (8, 2, 32)]


HALF_HEADS = HEADS if CUDA else HEADS[3:4] + HEADS[7:9]
CASES = [(h, torch.float32) for h in HEADS] + [(h, t) for t in DTYPES[1:] for h in HALF_HEADS]


@pytest.mark.parametrize("heads,dtype", CASES, ids=str)
def test_mixed_batches_agree_with_the_definition(heads, dtype):
    rng = np.random.default_rng(sum(heads))
    rows = [(int(c), 1) for c in rng.choice(EDGES, 4)]
    rows += [(int(c), n) for c, n in zip(rng.choice(EDGES[:8], 2), (2, 33))]
    check(*random_step(sum(heads), rows, *heads, dtype))


@pytest.mark.parametrize("context", EDGES)
def test_decodes_at_every_block_boundary(context):
    check(*random_step(context, [(context, 1), (context + 1, 1)], 7, 1, 64))


@pytest.mark.parametrize("n", [2, 9, 10, 16, 17, 40, 100])
def test_chunks_of_any_length_over_a_context(n):
    check(*random_step(n, [(37, n)], 7, 1, 64))


def test_short_chunk_over_a_long_context_is_split():
    q, cache, meta = random_step(0, [(1500, 12)], 7, 1, 32)
    b = ta.TritonAttention()
    b.plan(meta)
    out = b(q, cache)
    assert CUDA or b.launches[0].items[:, 6].max() > 2
    torch.testing.assert_close(out, naive(q, cache, meta), rtol=0, atol=1e-5)


def test_one_long_row_beside_many_short_ones():
    check(*random_step(3, [(2000, 1)] + [(9, 1)]*12, 4, 2, 32))


def test_padded_rows_write_zeros_and_disturb_nobody():
    q, cache, meta = random_step(1, [(40, 1), (20, 1)], 4, 2, 64)
    alone = attend(q, cache, meta)
    pad = lambda t, v: torch.cat([t, torch.full((3,), v, dtype=t.dtype, device=DEV)])
    zero = {k: pad(getattr(meta, k), 0) for k in ("positions", "slots", "indices", "kv_lens")}
    padded = StepMeta(**zero, cu_q=torch.arange(6, dtype=torch.int32, device=DEV),
                      indptr=pad(meta.indptr, int(meta.indptr[-1])), num_decodes=5, max_q=1)
    out = attend(torch.cat([q, q, q])[:5], cache, padded)
    torch.testing.assert_close(out[:2], alone, rtol=0, atol=1e-6)
    assert (out[2:] == 0).all()


def test_grid_depends_on_the_number_of_rows_only():
    sizes = set()
    for seed, longest in enumerate((1, 50, 900)):
        q, cache, meta = random_step(seed, [(longest, 1)] + [(5, 1)]*6, 4, 2, 32)
        b = ta.TritonAttention()
        b.plan(meta)
        b(q, cache)
        sizes.add(len(b.launches[0].items))
    assert len(sizes) == 1


@pytest.mark.parametrize("seed", range(4))
def test_work_list_covers_every_key_once_and_fits(seed):
    rng = np.random.default_rng(seed)
    R, tok, unit, programs = int(rng.integers(1, 40)), int(rng.integers(1, 20)), 32, int(rng.integers(1, 60))
    n = rng.integers(1, 60, R)
    kv = n + rng.integers(0, 3000, R)
    ints = lambda a: torch.tensor(np.asarray(a), dtype=torch.int32, device=DEV)
    cu = np.concatenate([[0], n.cumsum()])
    W = min(cu[-1], cu[-1]//tok + R) + programs
    items = torch.full((int(W) + 50, 8), -7, dtype=torch.int32, device=DEV)
    ta._plan[(R,)](ints(cu), ints(kv), ints(range(R + 1)), items, 0, R, int(W), programs, 64, tok, unit, 256)
    assert (items[W:] == -7).all(), "wrote past the list"
    spans, used = {}, []
    for q0, size, pos, base, slot, split, splits, chunk in items[:W].tolist():
        if not splits: continue
        assert chunk % unit == 0 and 0 <= split < splits
        spans.setdefault((q0, size), []).append((split*chunk, min((split + 1)*chunk, pos + size)))
        assert pos + size == kv[base] - (cu[base + 1] - (q0 + size))
        if splits > 1: used.append(slot + split)
    assert len(used) == len(set(used)) and max(used, default=0) < 2*programs
    assert sorted(t for q0, size in spans for t in range(q0, q0 + size)) == list(range(cu[-1]))
    for s in spans.values():
        s.sort()
        assert s[0][0] == 0 and all(a[1] == b[0] for a, b in zip(s, s[1:]))


def test_strided_queries_and_output():
    q, cache, meta = random_step(5, [(30, 1), (3, 9)], 4, 2, 32)
    wide = torch.full((q.shape[0], 8, 32), torch.nan, device=DEV)
    wide[:, 2:6] = q
    b, out = ta.TritonAttention(), torch.full_like(wide, torch.nan)
    b.plan(meta)
    b(wide[:, 2:6], cache, out[:, :4])
    torch.testing.assert_close(out[:, :4], attend(q, cache, meta))
    assert out[:, 4:].isnan().all()


def test_each_pass_plans_anew():
    q, cache, meta = random_step(6, [(30, 1), (20, 1)], 4, 2, 32)
    b = ta.TritonAttention()
    b.plan(meta)
    b(q, cache)
    meta.kv_lens.sub_(4)                                             # as a graph's buffers change between replays
    again = b(q, cache)
    meta.host["kv_lens"] = meta.kv_lens.cpu().numpy()
    torch.testing.assert_close(again, naive(q, cache, meta), rtol=0, atol=1e-5)


def test_unsupported_shapes_are_refused():
    q, cache, meta = random_step(7, [(5, 1)], 4, 2, 48)
    with pytest.raises(ValueError, match="heads of 32, 64, 128 or 256, got 16 and 48"): attend(q, cache, meta)
    with pytest.raises(ValueError, match="17 query heads per KV head"): ta.tiling(1, 17)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(14, 2, 64), (4, 4, 128), (9, 3, 32)], ids=str)
def test_rope_and_cache_write(heads, norm, dtype):
    (Hq, Hkv, D), g = heads, torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=g).to(DEV, dtype)
    qkv, qw, kw = rand(6, (Hq + 2*Hkv)*D), rand(D), rand(D)
    table = torch.randn(50, D, generator=g).to(DEV)
    ints = lambda *a: torch.tensor(a, dtype=torch.int32, device=DEV)
    meta = lambda: StepMeta(positions=ints(3, 0, 49, 7, 0, 0), slots=ints(16, 40, 79, 33, 0, 1), cu_q=None,
                            kv_lens=None, indptr=None, indices=None, num_decodes=0, max_q=1)
    a, b = torch.zeros(2, 5, 2, 16, Hkv, D, device=DEV, dtype=dtype)
    norms = (qw, kw, 1e-5) if norm else None
    want = TorchOps().rope_and_cache(qkv, meta(), table, a, norms)
    got = ta.TritonOps.rope_and_cache(qkv, meta(), table, b, norms)
    tol = dict(rtol=EPS[dtype], atol=EPS[dtype])
    torch.testing.assert_close(got, want, **tol)
    torch.testing.assert_close(b, a, **tol)
    assert ((b == 0) == (a == 0)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T,H", [(1, 64), (5, 200), (3, 1537)])
def test_norms_and_silu(T, H, dtype):
    g = torch.Generator().manual_seed(T)
    rand = lambda *s: torch.randn(*s, generator=g).to(DEV, dtype)
    x, r, w, gu = rand(T, H), rand(T, H), rand(H), rand(T, 2*H)
    tol = dict(rtol=EPS[dtype], atol=EPS[dtype])
    torch.testing.assert_close(ta.TritonOps.rms_norm(x, w, 1e-5), TorchOps.rms_norm(x, w, 1e-5), **tol)
    (want, res), r2 = TorchOps.add_rms_norm(x, r.clone(), w, 1e-5), r.clone()
    got, res2 = ta.TritonOps.add_rms_norm(x, r2, w, 1e-5)
    assert res2 is r2
    torch.testing.assert_close(res2, res, rtol=0, atol=0)
    torch.testing.assert_close(got, want, **tol)
    torch.testing.assert_close(ta.TritonOps.silu_mul(gu), TorchOps.silu_mul(gu), **tol)
    heads = rand(T, 3, H)                                            # per head, as Qwen3 norms q and k
    torch.testing.assert_close(ta.TritonOps.rms_norm(heads, w, 1e-5), TorchOps.rms_norm(heads, w, 1e-5), **tol)


def test_module_can_be_imported_without_triton(tmp_path):
    import subprocess
    import sys
    code = ("import sys; sys.modules['triton'] = None\n"
            "from miniengine import triton_attention as ta, model\nimport torch\n"
            "try: ta.TritonOps.silu_mul(torch.zeros(1, 2))\nexcept ImportError as e: print(e)")
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "this needs the `triton` package" in r.stdout, r.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(28, 4, 128), (12, 2, 128), (32, 8, 64), (9, 3, 64)], ids=str)
def test_cuda_graph_replays_follow_the_lengths(heads):
    q, cache, meta = random_step(0, [(3000, 1), (40, 1), (500, 1), (17, 1)], *heads, torch.bfloat16)
    b, out = ta.TritonAttention(), torch.empty_like(q)
    b.plan(meta)
    for _ in range(2): b(q, cache, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): b(q, cache, out)
    for shrink in (0, 7, 30):
        meta.kv_lens.copy_(torch.tensor([3001 - 50*shrink, 41 - shrink, 501, 18 - shrink//2], device="cuda"))
        meta.host["kv_lens"] = meta.kv_lens.cpu().numpy()
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out.float(), naive(q, cache, meta), rtol=0, atol=EPS[torch.bfloat16])
