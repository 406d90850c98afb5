"""Our Triton kernels on one GPU: checked against float32 PyTorch, timed beside FlashInfer and the bytes they must move.

    python bench/kernels.py [--out FILE.json] [--seconds 240] [--no-flashinfer] [--tune]

`us` is the time of one layer: a CUDA graph of many calls over different layers' caches (so that the L2 cache can't
help), divided by their number; the work list is planned inside the graph, once, as in the engine. FlashInfer plans on
the host, outside the graph; it is timed with its plan made for exactly this batch (`fi`) and with its CUDA-graph mode
(`fi_graph`), the one an engine uses. `--tune` also tries tile shapes and variants of the kernel and prints which wins.
"""
import argparse
import importlib.util
import itertools
import json
import math
import platform
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")
import torch  # noqa: E402

T0 = time.time()
DEV, DT = "cuda", torch.bfloat16
MODELS = {"qwen2.5-7b": (28, 4, 128), "qwen2.5-1.5b": (12, 2, 128), "llama-3.2-1b": (32, 8, 64)}
SHAPES = [*MODELS.values(), (9, 3, 64), (16, 8, 128), (8, 1, 128), (10, 2, 64), (4, 4, 128), (16, 1, 64)]
log = lambda *a: print(f"[{time.time() - T0:5.1f}s]", *a, flush=True)


class Step:
    "Rows of (context, new tokens): q, index arrays, and caches of several layers cut out of one pool of random numbers"
    pool = None

    def __init__(self, rows, shape, seed=0, dtype=DT, max_layers=28):
        from miniengine.model import StepMeta
        self.rows, self.shape = rows, shape
        Hq, Hkv, D = shape
        if Step.pool is None or Step.pool.dtype != dtype:
            Step.pool = torch.empty(9 << 29, dtype=dtype, device=DEV)                        # 9 GiB of bf16
            for part in Step.pool.split(1 << 28): part.normal_()
        blocks = [-(-(c + n)//16) for c, n in rows]
        size = (sum(blocks) + 1)*32*Hkv*D
        self.layers = max(1, min(max_layers, Step.pool.numel()//size))
        self.caches = [Step.pool[i*size:(i + 1)*size].view(-1, 2, 16, Hkv, D) for i in range(self.layers)]
        g = torch.Generator().manual_seed(seed)
        ids = torch.randperm(sum(blocks), generator=g).int() + 1
        i32 = lambda a: torch.tensor(a, dtype=torch.int32)
        self.host = dict(cu_q=i32([0, *itertools.accumulate(n for _, n in rows)]),
                         kv_lens=i32([c + n for c, n in rows]),
                         indptr=i32([0, *itertools.accumulate(blocks)]), indices=ids)
        nd = next((i for i, (_, n) in enumerate(rows) if n > 1), len(rows))
        pos = torch.cat([torch.arange(c, c + n) for c, n in rows]).int().to(DEV)
        self.meta = StepMeta(positions=pos, slots=pos, **{k: v.to(DEV) for k, v in self.host.items()}, num_decodes=nd,
                             max_q=max(n for _, n in rows), host={k: v.numpy() for k, v in self.host.items()})
        self.T = sum(n for _, n in rows)
        self.q = torch.randn(self.T, Hq, D, device=DEV, dtype=dtype)
        self.out = torch.empty_like(self.q)

    @property
    def bytes(self):  # keys and values once; q and out
        return sum(c + n for c, n in self.rows)*self.shape[1]*self.shape[2]*2*2 + 2*self.q.numel()*2

    @property
    def flops(self): return sum(4*self.shape[0]*self.shape[2]*(n*c + n*(n + 1)//2) for c, n in self.rows)

    def reference(self, cache):
        "float32, row by row, on the GPU"
        out, G = torch.empty(self.q.shape, device=DEV), self.shape[0]//self.shape[1]
        for r, (c, n) in enumerate(self.rows):
            a, p, L = int(self.host["cu_q"][r]), self.host["indptr"][r:r + 2].tolist(), c + n
            t = cache[self.host["indices"][p[0]:p[1]].long().to(DEV)].float()
            k, v = (t[:, i].flatten(0, 1)[:L].transpose(0, 1).repeat_interleave(G, 0) for i in (0, 1))  # (Hq, L, D)
            for b in range(0, n, 256):
                m = min(256, n - b)
                s = torch.einsum("qhd,hkd->hqk", self.q[a + b:a + b + m].float(), k)*self.shape[2]**-0.5
                future = torch.arange(L, device=DEV) > torch.arange(c + b, c + b + m, device=DEV)[:, None]
                s.masked_fill_(future, -torch.inf)
                out[a + b:a + b + m] = torch.einsum("hqk,hkd->qhd", s.softmax(-1), v)
        return out


def timed(fn, calls, budget_ms=25):
    "Median time in us of one of `calls` calls that `fn()` makes, replayed in a CUDA graph"
    fn(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): fn()
    e = lambda: torch.cuda.Event(enable_timing=True)
    a, b = e(), e()
    for _ in range(2): graph.replay()
    a.record(); graph.replay(); b.record(); b.synchronize()
    n = max(3, min(20, int(budget_ms/max(a.elapsed_time(b), 1e-3))))
    pairs = [(e(), e()) for _ in range(n)]
    for a, b in pairs: a.record(); graph.replay(); b.record()
    torch.cuda.synchronize()
    t = sorted(a.elapsed_time(b) for a, b in pairs)
    return t[n//2]*1e3/calls


def calls_for(step, most=28):
    "How many layers to put into a graph: as an engine has, fewer where one takes long"
    us = max(step.bytes/4e6, step.flops/2e8)
    return max(4, min(most, int(8000/us) if us > 0 else most))


def ours(step, ta, shape=None, prefill_shape=None):
    "us per layer of our kernel; `shape` overrides the tile shape of the decode rows, `prefill_shape` of the others"
    b, n = ta.TritonAttention(), calls_for(step)
    b.plan(step.meta)
    real = ta.tiling
    def tiling(tokens, *a): return ((shape if tokens == 1 else prefill_shape) or real(tokens, *a))
    def fn():
        launches = list(b._launches(step.q, step.caches[0]))
        for i in range(n):
            for l in launches: ta.run(l, step.q, step.caches[i % step.layers], step.meta.indices, step.out)
    ta.tiling = tiling
    try: return timed(fn, n)
    finally: ta.tiling = real


class FlashInfer:
    "FlashInfer's wrappers for one step"
    def __init__(self):
        import flashinfer
        self.fi, self.ws = flashinfer, torch.zeros(256 << 20, dtype=torch.uint8, device=DEV)

    def decode(self, step, graph):
        h, B = step.host, len(step.rows)
        kw = {}
        if graph:
            i32 = lambda n: torch.zeros(n, dtype=torch.int32, device=DEV)
            kw = dict(use_cuda_graph=True, paged_kv_indptr_buffer=i32(B + 1),
                      paged_kv_indices_buffer=i32(len(h["indices"])), paged_kv_last_page_len_buffer=i32(B))
        w = self.fi.BatchDecodeWithPagedKVCacheWrapper(self.ws, "NHD", use_tensor_cores=True, **kw)
        last = (h["kv_lens"] - 1) % 16 + 1
        w.plan(h["indptr"], step.meta.indices, last, *step.shape, 16, q_data_type=DT, kv_data_type=DT)
        return w

    def prefill(self, step, backend):
        h = step.host
        w = self.fi.BatchPrefillWithPagedKVCacheWrapper(self.ws, "NHD", backend=backend)
        last = (h["kv_lens"] - 1) % 16 + 1
        w.plan(h["cu_q"], h["indptr"], step.meta.indices, last, *step.shape, 16, causal=True,
               q_data_type=DT, kv_data_type=DT)
        return w

    def time(self, step, w):
        n = calls_for(step)
        def fn():
            for i in range(n): w.run(step.q, step.caches[i % step.layers], out=step.out)
        return timed(fn, n)


def warm_flashinfer(kind):
    "In a process of its own: compile one FlashInfer module into its cache"
    backend, D = kind.split("-")
    fi, step = FlashInfer(), Step([(20, 16)], (8, 2, int(D)), max_layers=1)
    fi.prefill(step, backend).run(step.q, step.caches[0])
    torch.cuda.synchronize()


def rel(got, want): return float((got.float() - want).norm()/want.norm())


def correctness(ta, res):
    "Random ragged batches of real shapes in bf16, twice for reproducibility; a graph that follows changing lengths"
    import random
    rng, bad = random.Random(0), []
    for shape, kind in itertools.product(SHAPES, ("decode", "chunks", "mixed", "one", "graph")):
        lens = [rng.choice([0, 1, 14, 15, 16, 17, 63, 64, 65, 127, 500, 1000, rng.randrange(4000)]) for _ in range(17)]
        rows = [(c, 1) for c in lens] if kind in ("decode", "mixed", "graph") else [(8000, 1)] if kind == "one" else []
        if kind in ("chunks", "mixed"): rows += [(0, 300), (700, 33), (16, 2), (3000, 12), (1, 700), (0, 17)]
        step = Step(rows, shape, seed=len(rows), max_layers=1)
        cache = step.caches[0].clone()
        ends = step.host["indptr"][1:].tolist()
        last = [(step.host["indices"][p - 1], (c + n) % 16) for p, (c, n) in zip(ends, step.rows)]
        for b, o in last:
            if o: cache[int(b), :, o:] = torch.nan                       # slots behind the end are nobody's
        want, b = step.reference(cache), ta.TritonAttention()
        b.plan(step.meta)
        out = [b(step.q, cache, torch.full_like(step.q, torch.nan)) for _ in range(2)]
        if kind == "graph":
            graph, o = torch.cuda.CUDAGraph(), torch.empty_like(step.q)
            step.meta.kv_lens.fill_(1)
            with torch.cuda.graph(graph): b(step.q, cache, o)
            graph.replay()
            step.meta.kv_lens.copy_(step.host["kv_lens"])
            for _ in range(20): o.fill_(torch.nan); graph.replay()
            out = [o, out[0]]
        e = rel(out[0], want)
        same, zero = torch.equal(*out), all(int(s[2].abs().max()) == 0 for s in b.memory.values())
        if not (e < 1e-2 and same and zero): bad.append((shape, kind, e, same, zero))
        res["correct"].append(dict(shape=shape, kind=kind, rel_error=e, same_bits=same))
    worst = max(c["rel_error"] for c in res["correct"])
    log(f"attention: {len(res['correct'])} batches, worst relative error {worst:.1e}, wrong: {bad or 'none'}")
    res["wrong"] = [str(b) for b in bad]


def check_small(ta, res):
    from miniengine.model import StepMeta, TorchOps
    i32, worst = dict(dtype=torch.int32, device=DEV), 0
    sizes = [(1, 3584, (28, 4, 128)), (7, 1536, (12, 2, 128)), (300, 2048, (32, 8, 64)), (5, 576, (9, 3, 64))]
    for T, H, (Hq, Hkv, D) in sizes:
        r = lambda *s: torch.randn(*s, device=DEV, dtype=DT)
        x, res_, w, gu, qkv, n1, n2 = r(T, H), r(T, H), r(H), r(T, 2*H), r(T, (Hq + 2*Hkv)*D), r(D), r(D)
        positions = torch.randint(0, 4096, (T,), generator=torch.Generator(DEV).manual_seed(1), **i32)
        meta = lambda: StepMeta(positions, torch.arange(T, **i32)*3 + 5, None, None, None, None, 0, 1)
        table = torch.randn(4096, D, device=DEV)
        both = []
        for ops in (TorchOps(), ta.TritonOps()):
            kv = torch.zeros(2, T*3//16 + 2, 2, 16, Hkv, D, device=DEV, dtype=DT)
            both.append([ops.rms_norm(x, w, 1e-6), *ops.add_rms_norm(x, res_.clone(), w, 1e-6), ops.silu_mul(gu),
                         ops.rope_and_cache(qkv, meta(), table, kv[0]),
                         ops.rope_and_cache(qkv, meta(), table, kv[1], (n1, n2, 1e-6)), kv])
        worst = max(worst, *(rel(b, a.float()) for a, b in zip(*both)))
    res["small_rel_error"] = worst
    log(f"small kernels: worst relative error {worst:.1e}")
    if not worst < 1e-2: res["wrong"].append(f"small kernels {worst}")


def bandwidth():
    from step_time import copy_rate
    return copy_rate()/1e12


# (keys a tile, warps, stages), for prompts with the queries a tile before
DECODE_CONFIGS = [(32, 2, 4), (32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3),
                  (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3)]
PREFILL_CONFIGS = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2),
                   (128, 128, 8, 2), (128, 32, 8, 3)]
VARIANTS = {  # text of the module, changed
    "as is": [],
    "no merge (wrong results)": [("== splits - 1:", "== -1:")],
    "merge 3 in flight": [("6 if BLOCK_M == 16", "3 if BLOCK_M == 16")],
    "merge 10 in flight": [("6 if BLOCK_M == 16", "10 if BLOCK_M == 16")],
    "block ids in place": [
        ("key, block = start + n, ahead.to(tl.int64)",
         "key = start + n\n        block = tl.load(ids + (key >> 4), mask=key < hi, other=0).to(tl.int64)"),
        ("        ahead = tl.load(ids + (key + BLOCK_N >> 4), mask=key + BLOCK_N < hi, other=0)\n", ""),
        ("    ahead = tl.load(ids + (lo + n >> 4), mask=lo + n < hi, other=0)\n", "")],
    "plain sum": [("D, BLOCK_N, True, True)", "D, BLOCK_N, True, False)"),
                  ("l = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)", "l = tl.zeros([BLOCK_M], tl.float32)"),
                  ("        l = tl.sum(l, 1)\n    else", "    else")],
    "L2 only loads": [("mask=live[:, None], other=0.)",
                       'mask=live[:, None], other=0., eviction_policy="evict_first")')],
}


def variant(name):
    "The kernel module with some of its text replaced"
    text = (ROOT/"miniengine/triton_attention.py").read_text()
    text = text.replace("from .model import", "from miniengine.model import")
    for a, b in VARIANTS[name]:
        assert a in text, f"variant {name!r}: {a!r} isn't in the module any more"
        text = text.replace(a, b)
    f = Path(tempfile.mkdtemp())/f"variant_{list(VARIANTS).index(name)}.py"
    f.write_text(text)
    spec = importlib.util.spec_from_file_location(f.stem, f)
    m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
    return m


UNFUSED = '''
import triton, triton.language as tl
@triton.jit
def reduce(items, part, stat, out, hkv, sot, soh, GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    item, head = items + tl.program_id(1) * 8, tl.program_id(0)
    tok, slot, split, splits = tl.load(item), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    if (splits < 2) | (split != 0): return
    s, d = tl.arange(0, S), tl.arange(0, D)
    src, ok = (slot + s) * hkv + head // GROUP, s < splits
    m = tl.load(stat + src * 32 + head % GROUP, mask=ok, other=-1e30)
    l = tl.load(stat + src * 32 + 16 + head % GROUP, mask=ok, other=0.)
    a = tl.load(part + (src * 16 + head % GROUP)[:, None] * D + d[None, :], mask=ok[:, None], other=0.)
    w = tl.exp2(m - tl.max(m, 0))
    o = tl.sum(a * w[:, None], 0) / tl.maximum(tl.sum(l * w, 0), 1e-30)
    tl.store(out + tok * sot + head * soh + d, o.to(out.dtype.element_ty))
'''


def unfused(step, ta, nomerge):
    "Two launches per layer: the kernel without its merge, then a reduction over (item, query head)"
    f = Path(tempfile.gettempdir())/"unfused_reduce.py"; f.write_text(UNFUSED)
    spec = importlib.util.spec_from_file_location("unfused_reduce", f)
    m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
    b, n, (Hq, Hkv, D) = nomerge.TritonAttention(), calls_for(step), step.shape
    b.plan(step.meta)
    def fn():
        (l,) = b._launches(step.q, step.caches[0])
        S = 1 << (l.shape.programs//Hkv + 1).bit_length()
        for i in range(n):
            nomerge.run(l, step.q, step.caches[i % step.layers], step.meta.indices, step.out)
            m.reduce[(Hq, len(l.items))](l.items, l.scratch[0], l.scratch[1], step.out, Hkv, *step.out.stride()[:2],
                                         Hq//Hkv, D, S, num_warps=4)
    us = timed(fn, n)
    return us, rel(step.out, step.reference(step.caches[(n - 1) % step.layers]))


def precompile(part, parts, tune):
    "In a process of its own: compile a share of the tile shapes into Triton's cache, without launching them"
    from miniengine import triton_attention as ta
    jobs = [("as is", m, ta.tiling(n, m[0]//m[1])) for m in SHAPES for n in (1, 9, 512)]
    if tune:
        jobs += [("as is", m, ta.Tiling(16, bn, w, s, 264, 64)) for m in MODELS.values() for bn, w, s in DECODE_CONFIGS]
        jobs += [("as is", MODELS["qwen2.5-7b"], ta.Tiling(bm, bn, w, s, 132, 256)) for bm, bn, w, s in PREFILL_CONFIGS]
    for name, (Hq, Hkv, D), t in jobs[part::parts]:
        mod = ta if name == "as is" else variant(name)
        bf, i, f = (torch.empty(1 << 16, dtype=d, device=DEV) for d in (DT, torch.int32, torch.float32))
        sb = 32*Hkv*D
        strides = (Hq*D, D, sb, sb//2, Hkv*D, D, Hq*D, D)
        try: mod._attention.warmup(bf, bf, bf, i, i, f, f, i, 0.1, *strides, Hq//Hkv, D, t.block_m, t.block_n,
                                   grid=(1,), num_warps=t.warps, num_stages=t.stages)
        except Exception as e: print("precompile", name, t, type(e).__name__, str(e)[:200])


def tune(ta, res, deadline):
    "Tile shapes, then how finely to cut, then variants of the kernel; all on a few decode batches"
    cases = [("qwen2.5-7b", 1, 512), ("qwen2.5-7b", 1, 1024), ("qwen2.5-7b", 1, 8192)]
    cases += [("qwen2.5-7b", b, 1024) for b in (8, 32, 64, 128)] + [("qwen2.5-7b", 256, 2048)]
    cases += [("qwen2.5-1.5b", b, 1024) for b in (1, 32)] + [("llama-3.2-1b", b, 1024) for b in (1, 32, 128)]
    steps = {c: Step([(c[2] - 1, 1)]*c[1], MODELS[c[0]]) for c in cases}
    table = {}
    def attempt(key, case, fn):
        if time.time() - T0 > deadline: return
        try: table.setdefault(key, {})[case] = fn()
        except Exception as e:
            table.setdefault(key, {})[case] = math.inf
            res["tune_errors"].append(f"{key} {case} {type(e).__name__}: {str(e)[:150]}")
    for case, step in steps.items():
        for bn, w, s in DECODE_CONFIGS:
            attempt(("tile", bn, w, s), case, lambda: ours(step, ta, ta.Tiling(16, bn, w, s, 264, 64)))
    fastest = lambda kind, c: min(table[k].get(c, math.inf) for k in table if k[0] == kind)
    score = lambda k, cs: sum(math.log(table[k].get(c, math.inf)/fastest(k[0], c)) for c in cs)
    def ranking(kind, cs, n):
        keys = sorted((k for k in table if k[0] == kind), key=lambda k: score(k, cs))[:n]
        return ", ".join(f"{k[1:]} {100*(math.exp(score(k, cs)/len(cs)) - 1):.1f}%" for k in keys)
    best = {}
    for D in (128, 64):
        cs = [c for c in cases if MODELS[c[0]][2] == D]
        best[D] = min((k for k in table if k[0] == "tile"), key=lambda k: score(k, cs))
        log(f"tiles for D={D}, best first (mean loss against the best of each case):", ranking("tile", cs, 5))
    for case, step in steps.items():
        bn, w, s = best[MODELS[case[0]][2]][1:]
        for programs, least in itertools.product((66, 132, 264, 528, 1056), (64, 128, 256, 512)):
            attempt(("cut", programs, least), case, lambda: ours(step, ta, ta.Tiling(16, bn, w, s, programs, least)))
    log("cuts, best first:", ranking("cut", cases, 6))
    mods = {n: variant(n) for n in VARIANTS}
    for case, step in steps.items():
        for n, m in mods.items(): attempt(("variant", n), case, lambda: ours(step, m))
        if case[1] <= 32:
            errs = []
            def two_launches():
                us, err = unfused(step, ta, mods["no merge (wrong results)"])
                errs.append(err)
                return us
            attempt(("variant", "two launches"), case, two_launches)
            if errs and errs[0] > 1e-2: res["tune_errors"].append(f"two launches {case}: relative error {errs[0]:.1e}")
    pre = {f"{n}+{c}{f' x{r}' if r > 1 else ''}": Step([(c, n)]*r, MODELS["qwen2.5-7b"])
           for c, n, r in ((0, 512, 1), (0, 2048, 1), (2048, 512, 4), (8192, 64, 1))}
    for name, step in pre.items():
        for tile in PREFILL_CONFIGS:
            attempt(("prefill", *tile), name, lambda: ours(step, ta, None, ta.Tiling(*tile, 132, 256)))
    short = lambda c: c if isinstance(c, str) else f"{c[0].split('-')[-1]} {c[1]}x{c[2]}"
    for kind in ("tile", "cut", "variant", "prefill"):
        cols = list(pre) if kind == "prefill" else cases
        print(f"\n{kind} (us)" + " "*16 + " ".join(f"{short(c):>11}" for c in cols))
        for k in (k for k in table if k[0] == kind):
            right = [j for j in table if j[0] == kind and "wrong" not in str(j)]
            least = [min(table[j].get(c, math.inf) for j in right) for c in cols]
            star = lambda c, m: "*" if table[k].get(c) == m else " "
            times = [f"{table[k].get(c, math.nan):10.1f}{star(c, m)}" for c, m in zip(cols, least)]
            print(f"{' '.join(map(str, k[1:])):24s}" + " ".join(times))
    res["tune"] = [dict(kind=k[0], config=k[1:], case=short(c), us=u)
                   for k, row in table.items() for c, u in row.items()]
    for e in res["tune_errors"][:6]: log(e)


def decode(ta, fi, res, bw, deadline):
    for name, shape in MODELS.items():
        for rows, context in itertools.product((1, 8, 32, 128, 256), (512, 1024, 2048, 8192)):
            if time.time() - T0 > deadline: return
            step = Step([(context - 1, 1)]*rows, shape)
            r = dict(model=name, rows=rows, context=context, us=ours(step, ta), floor_us=step.bytes/bw/1e6)
            if fi and READY.get(f"fa2-{shape[2]}"):
                for key, g in (("fi_us", False), ("fi_graph_us", True)):
                    try: r[key] = fi.time(step, fi.decode(step, g))
                    except Exception as e:
                        res["errors"].append(f"flashinfer {name} {rows}x{context} graph={g}: {str(e)[:200]}")
            res["decode"].append(r)


def prefill(ta, fi, res, deadline):
    cases = [("qwen2.5-7b", c, n, r) for c, n, r in
             ((0, 512, 1), (2048, 512, 1), (0, 2048, 1), (2048, 2048, 1), (2048, 512, 4), (8192, 64, 1))]
    cases += [(m, c, n, 1) for m in ("qwen2.5-1.5b", "llama-3.2-1b") for c, n in ((0, 512), (2048, 512), (0, 2048))]
    for name, c, n, r in cases:
        if time.time() - T0 > deadline: return
        step = Step([(c, n)]*r, MODELS[name])
        x = dict(model=name, context=c, new=n, rows=r, us=ours(step, ta))
        x["tflops"] = step.flops/x["us"]/1e6
        for backend in ("fa2", "fa3") if fi else ():
            if READY.get(f"{backend}-{step.shape[2]}"):
                try:
                    w = fi.prefill(step, backend)
                    x[f"{backend}_us"] = fi.time(step, w)
                    x[f"{backend}_rel_diff"] = rel(step.out, ta_out(ta, step).float())
                except Exception as e: res["errors"].append(f"flashinfer {backend} {name} {n}+{c}: {str(e)[:200]}")
        res["prefill"].append(x)
    step = Step([(1023, 1)]*32 + [(0, 512)], MODELS["qwen2.5-7b"])
    x = dict(model="qwen2.5-7b", what="32 decodes at 1024 and a chunk of 512", us=ours(step, ta))
    step.meta.num_decodes = 0
    x["one_launch_us"] = ours(step, ta)
    res["mixed"] = x


def ta_out(ta, step):
    b, n = ta.TritonAttention(), calls_for(step)
    b.plan(step.meta)
    return b(step.q, step.caches[(n - 1) % step.layers])


def small(ta, res, bw):
    "The small kernels of one layer of Qwen2.5-7B"
    from miniengine.model import StepMeta
    H, I, (Hq, Hkv, D), ops = 3584, 18944, MODELS["qwen2.5-7b"], ta.TritonOps
    kv = Step.pool[:4096*32*Hkv*D].view(-1, 2, 16, Hkv, D)
    table, w = torch.randn(8192, D, device=DEV), torch.randn(H, device=DEV, dtype=DT)
    for T in (1, 32, 256, 2048):
        r = lambda *s: [torch.randn(*s, device=DEV, dtype=DT) for _ in range(8)]
        x, y, gu, qkv = r(T, H), r(T, H), r(T, 2*I), r(T, (Hq + 2*Hkv)*D)
        positions, slots = torch.arange(T, device=DEV).int(), torch.randperm(T, device=DEV).int() + 16
        meta = StepMeta(positions, slots, None, None, None, None, 0, 1)
        kernels = (("rms_norm", lambda i: ops.rms_norm(x[i], w, 1e-6), 2*T*H),
                   ("add_rms_norm", lambda i: ops.add_rms_norm(x[i], y[i], w, 1e-6), 4*T*H),
                   ("silu_mul", lambda i: ops.silu_mul(gu[i]), 3*T*I),
                   ("rope_and_cache", lambda i: ops.rope_and_cache(qkv[i], meta, table, kv), 2*T*(Hq + 2*Hkv)*D))
        for name, fn, size in kernels:
            us = timed(lambda: [fn(i) for i in range(8)], 8)
            torch.cuda.synchronize(); t = time.perf_counter()
            for i in range(40): fn(i % 8)
            host = (time.perf_counter() - t)/40*1e6
            torch.cuda.synchronize()
            res["small"].append(dict(kernel=name, tokens=T, us=us, floor_us=2*size/bw/1e6, host_us=host))
    step = Step([(1023, 1)]*8, MODELS["qwen2.5-7b"])
    b = ta.TritonAttention(); b.plan(step.meta)
    launches = list(b._launches(step.q, step.caches[0]))
    res["plan_us"] = timed(lambda: [list(b._launches(step.q, step.caches[0])) for _ in range(8)], 8)
    torch.cuda.synchronize(); t = time.perf_counter()
    for i in range(40): ta.run(launches[0], step.q, step.caches[0], step.meta.indices, step.out)
    res["attention_host_us"] = (time.perf_counter() - t)/40*1e6
    torch.cuda.synchronize()


READY = {}


def background(kinds, out):
    "Compile FlashInfer's modules and our tile shapes in other processes meanwhile"
    def go(name, args):
        t = time.time()
        with open(out/f"compile_{name}.log", "w") as f:
            rc = subprocess.run([sys.executable, __file__, *args], stdout=f, stderr=subprocess.STDOUT).returncode
        READY[name] = rc == 0
        if rc == 0: log(f"compiled {name} in {time.time() - t:.0f} s")
        else: log(f"compiling {name} FAILED, see compile_{name}.log")
    threads = [threading.Thread(target=go, args=a, daemon=True) for a in kinds]
    for t in threads: t.start()
    return threads


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", default="kernels.json"); ap.add_argument("--seconds", type=float, default=240)
    ap.add_argument("--no-flashinfer", action="store_true"); ap.add_argument("--tune", action="store_true")
    ap.add_argument("--warm"); ap.add_argument("--precompile", type=int, nargs=3)
    a = ap.parse_args()
    if a.warm: return warm_flashinfer(a.warm)
    if a.precompile: return precompile(*a.precompile)
    out = Path(a.out); out.parent.mkdir(parents=True, exist_ok=True)
    use_fi = not a.no_flashinfer and importlib.util.find_spec("flashinfer") is not None
    logs = Path(tempfile.mkdtemp())
    fi_jobs = background([(k, ["--warm", k]) for k in ("fa2-128", "fa3-128", "fa2-64")], logs) if use_fi else []
    our_jobs = background([(f"tiles{i}", ["--precompile", str(i), "8", str(int(a.tune))]) for i in range(8)], logs)
    import triton
    from miniengine import triton_attention as ta
    p = torch.cuda.get_device_properties(0)
    smi = "nvidia-smi --query-gpu=driver_version --format=csv,noheader".split()
    driver = subprocess.run(smi, capture_output=True, text=True).stdout.strip()
    res = dict(machine=dict(gpu=p.name, multiprocessors=p.multi_processor_count, driver=driver,
                            cpu=platform.processor()),
               versions=dict(python=platform.python_version(), torch=torch.__version__, triton=triton.__version__,
                             cuda=torch.version.cuda),
               command=" ".join(sys.argv), date=time.strftime("%Y-%m-%d"),
               tilings=dict(decode=ta.tiling(1, 7)._asdict(), prefill=ta.tiling(512, 7)._asdict()),
               correct=[], wrong=[], decode=[], prefill=[], small=[], errors=[], tune_errors=[])
    def save():
        text = json.dumps(res, indent=1, default=str)
        out.write_text(text.replace("Infinity", "null").replace("NaN", "null"))
    def stage(name, fn, *args):
        try: fn(*args)
        except Exception as e:
            import traceback
            res["errors"].append(f"{name}: {traceback.format_exc()[-1500:]}")
            log(f"{name} FAILED: {type(e).__name__}: {str(e)[:600]}")
        save()
    for t in our_jobs: t.join(max(1, 70 + T0 - time.time()))
    stage("correctness", correctness, ta, res)
    stage("small kernels", check_small, ta, res)
    Step([(1, 1)], MODELS["qwen2.5-7b"])
    bw = res["copy_TBps"] = bandwidth()
    log(f"{p.name}: copy {bw:.2f} TB/s, torch {torch.__version__}, triton {triton.__version__}")
    if a.tune:
        stage("tune", tune, ta, res, a.seconds*0.6)
    stage("small timings", small, ta, res, bw)
    fi = None
    if use_fi:
        for t in fi_jobs: t.join(max(1, a.seconds*0.65 + T0 - time.time()))
        try: fi = FlashInfer(); import flashinfer; res["versions"]["flashinfer"] = flashinfer.__version__
        except Exception as e: res["errors"].append(f"flashinfer: {e}"); log("flashinfer:", e)
    stage("prefill", prefill, ta, fi, res, a.seconds - 25)
    stage("decode", decode, ta, fi, res, bw, a.seconds - 5)
    report(res)
    log("wrong results:", res["wrong"] or "none", "| errors:", [e[-300:] for e in res["errors"]] or "none")
    for f in logs.glob("*.log"):
        if not READY.get(f.stem[8:], True): print(f.name, f.read_text()[-800:])


def report(res):
    plan, host = res.get("plan_us", math.nan), res.get("attention_host_us", math.nan)
    print("\nsmall kernels of a 7B layer, us (floor) [host us to launch]   "
          f"plan {plan:.1f} us, attention launch on the host {host:.0f} us")
    for T in (1, 32, 256, 2048):
        print(f"{T:5d} tokens", *(f"{s['kernel']} {s['us']:.1f} ({s['floor_us']:.1f}) [{s['host_us']:.0f}]"
                                  for s in res["small"] if s["tokens"] == T), sep="  ")
    print("\nprefill, us and TFLOP/s: ours, fa2, fa3")
    for x in res["prefill"]:
        fa2, fa3 = x.get("fa2_us", math.nan), x.get("fa3_us", math.nan)
        best = min(x.get("fa2_us", math.inf), x.get("fa3_us", math.inf))
        print(f"{x['model']:14s}{x['rows']}x{x['new']:4d} over {x['context']:5d}: {x['us']:7.1f} ({x['tflops']:.0f})  "
              f"fa2 {fa2:7.1f}  fa3 {fa3:7.1f}  best/ours {best/x['us']:.2f}")
    if "mixed" in res: print(res["mixed"])
    print("\ndecode, us per layer (share of the copy bandwidth), and how many times FlashInfer's best of its two modes "
          "takes; contexts 512, 1k, 2k, 8k")
    fi = lambda d: min(d.get("fi_us", math.inf), d.get("fi_graph_us", math.inf))
    for key, group in itertools.groupby(res["decode"], lambda d: (d["model"], d["rows"])):
        cells = (f"{d['us']:7.1f} ({100*d['floor_us']/d['us']:3.0f}%) {fi(d)/d['us']:5.2f}x" for d in group)
        print(f"{key[0]:13s}{key[1]:4d} rows", *cells, sep=" | ")


if __name__ == "__main__": main()
