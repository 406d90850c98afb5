"""Packing, padding and the sizes of captured graphs: C1 ... C8 as rules. What needs a GPU is tested elsewhere."""
import pytest
import torch
from fake_device import Loop, next_token, prints
from hypothesis import given, settings
from hypothesis import strategies as st

from miniengine.attention import TorchAttention, step_meta
from miniengine.config import ModelConfig
from miniengine.model import Model
from miniengine.runner import Runner, graph_sizes, layout
from miniengine.sampler import Sampler

CFG = ModelConfig("llama", 32, 48, 2, 4, 2, 8, 50, 1e-5, 10000.0, None, 256, True, False, False)


def runner(bs=4, num_seqs=5, budget=64, num_blocks=40, max_blocks=20):
    torch.manual_seed(0)
    model = Model(CFG)
    for p in model.parameters(): p.normal_(0, 0.3) if p.ndim > 1 else p.fill_(1)
    r = Runner(model, TorchAttention(bs), Sampler(50), num_seqs, budget, bs)
    r.allocate(num_blocks, max_blocks)
    return r


@given(st.integers(1, 1100))
@settings(deadline=None, derandomize=True)
@pytest.mark.parametrize("extra", [3, 4, 12, 100, 200, 300])
def test_captured_sizes_reach_the_largest_batch_and_no_further(extra, n):
    "C1, C2: for every number of rows there is a size, of at least that and at most the limit"
    for most in n, extra:
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
        for rows in range(1, most + 1): assert next(s for s in sizes if s >= rows) < rows + 64


@given(T=st.integers(1, 3000), R=st.integers(1, 300))
@settings(deadline=None, derandomize=True)
def test_the_arrays_of_a_step_lie_apart_in_the_packed_buffer(T, R):
    where, end = layout(T, R)
    parts = sorted((s.start, s.stop) for s in where.values())
    assert parts[0][0] == 0 and all(a[1] <= b[0] for a, b in zip(parts, parts[1:])) and parts[-1][1] <= end
    assert {k: s.stop - s.start for k, s in where.items()} == dict(
        ids=T, positions=T, slots=T, cu_q=R + 1, kv_lens=R, indptr=R + 1, sample=R, row_slot=R)


class PackedDevice:
    """Like `fake_device.Device`, but it knows of a step only what `Runner.prepare` packed for the device. With `padded`
    the runner believes that it has captured graphs, and pads to their sizes."""
    def __init__(self, plain, runner, padded):
        self.runner, self.bs, self.mem, self.last = runner, plain.bs, plain.mem, [None]*runner.max_num_seqs
        if padded: runner.graphs, runner.mixed = {1: None, 4: None, runner.max_num_seqs: None}, {8: None, 16: None}
        self.seen = set()

    def pack(self, batch, sequence_of):
        batch, rows, dev, meta, size, plain = self.runner.prepare(batch)
        m = {k: getattr(meta, k).tolist() for k in ("positions", "slots", "cu_q", "kv_lens", "indptr", "indices")}
        assert all(meta.host[k].tolist() == m[k] for k in ("cu_q", "kv_lens", "indptr", "indices"))
        if not size:  # exactly what the attention chapter's naive rule says
            naive = step_meta([(list(r.req.blocks), r.start, r.n) for r in batch.rows], self.bs)
            for k in m: assert getattr(naive, k).tolist() == m[k], k
            assert (meta.max_q, meta.num_decodes) == (naive.max_q, naive.num_decodes)
        n = dev["n"]
        assert n == len(rows) and plain == all(r.sample and r.n == 1 for r in batch.rows) and len(m["slots"]) == (
            size or batch.num_tokens)
        self.seen.add((bool(size), plain))
        lists = {k: dev[k].tolist() for k in ("ids", "sample", "row_slot")}
        return lists, m, [sequence_of(r.req) for r in batch.rows], n, plain

    def run(self, job):
        dev, m, sequences, n, plain = job
        ids, R = [self.last[-1 - i] if i < 0 else i for i in dev["ids"]], len(sequences)
        spans = list(zip(m["cu_q"], m["cu_q"][1:]))
        tables = [m["indices"][a:b] for a, b in zip(m["indptr"], m["indptr"][1:])]
        at = lambda table, p: table[p//self.bs]*self.bs + p % self.bs
        T = spans[R - 1][1]
        assert min(m["slots"][:T]) >= self.bs and len(set(m["slots"][:T])) == T
        assert all(s < self.bs for s in m["slots"][T:]), "C3: padding writes to block 0 only"
        for (a, b), table, kv in zip(spans, tables, m["kv_lens"][:R]):
            assert m["positions"][a:b] == list(range(kv - (b - a), kv)), "C7, C8: keys end where the new tokens end"
            assert m["slots"][a:b] == [at(table, p) for p in m["positions"][a:b]]
            before = self.mem[at(table, kv - (b - a) - 1)] if kv > b - a else 0
            for slot, f in zip(m["slots"][a:b], prints(ids[a:b], before)): self.mem[slot] = f
        for table, kv, seq in zip(tables, m["kv_lens"], sequences):
            seq.upto(kv)
            assert [self.mem[at(table, p)] for p in range(kv)] == seq.prints[:kv]
        for (a, b), table, kv in zip(spans[R:], tables[R:], m["kv_lens"][R:]):
            assert (b - a, table, kv) == ((1, [0], 1) if plain else (0, [], 0)), "padding reads a token of block 0"
        out = [next_token(self.mem[m["slots"][i]]) for i in dev["sample"][:n]]
        for slot, token in zip(dev["row_slot"][:n], out): self.last[slot] = token
        return out

    def fail(self, job):
        for slot in job[1]["slots"]: self.mem[slot] = None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bs, blocks, budget", [(4, 12, 8), (4, 30, 64), (16, 8, 20), (16, 30, 64)])
def test_the_packed_step_reads_and_writes_the_same_slots_as_the_naive_one(bs, blocks, budget, overlap, padded):
    "C3, C7, C8 over workloads with preemption, reuse of slots and blocks, chunks, aborts and pending tokens"
    loop = Loop(blocks=blocks, bs=bs, overlap=overlap, max_num_seqs=5, budget=budget, max_model_len=min(7*bs, 70))
    loop.device = PackedDevice(loop.device, runner(bs, 5, max(budget, 16)), padded)
    for i in range(40):
        loop.add([i % 3]*(i*7 % (3*bs) + 1) + [i % 8], 3 + i*5 % (2*bs), stop=i % 2)
        for _ in range(i % 4): loop.step(fails=i == 22)
        if i % 9 == 8: loop.abort(next(r for r in loop.requests[::-1] if r.finish_reason is None))
    loop.drain()
    assert (loop.s.num_preemptions or blocks == 30) and {(padded, True), (padded, False)} <= loop.device.seen


@pytest.mark.parametrize("budget", [16, 7, 1])
@pytest.mark.parametrize("n", [40, 16, 17])
def test_keys_of_a_chunk_are_those_up_to_its_end(n, budget):
    "C7, and C8 for the decodes after it: positions go on from the prompt"
    loop = Loop(blocks=40, max_num_seqs=1, budget=budget)
    loop.run([1]*n, max_tokens=4, stop=False)
    ends = [start + k for rows, _ in loop.log for _, start, k, _ in rows]
    chunks = [min(e, n) for e in range(budget, n + budget, budget)]
    assert ends == chunks + [n + 1, n + 2, n + 3]
    assert [(s, k) for rows, _ in loop.log for _, s, k, _ in rows][-3:] == [(n, 1), (n + 1, 1), (n + 2, 1)]


@pytest.mark.parametrize("decodes", [True, False])
def test_padded_rows_touch_block_0_only_and_change_no_result(decodes):
    "C3: the cache is filled with a pattern; three rows alone, and in a bucket of eight"
    results = []
    for padded in False, True:
        loop, r = Loop(blocks=20, max_num_seqs=3), runner(num_seqs=8)
        for i in range(3): loop.add([i + 1]*(i + 1 + decodes), 9, stop=False)
        if decodes: loop.s.commit(loop.s.schedule(), [7, 8, 9])
        if padded: r.graphs, r.mixed = {8: None}, {16: None}
        r.kv.copy_(torch.arange(r.kv.numel()).view_as(r.kv) % 7 - 3.0)
        before = r.kv.clone()
        batch, rows, dev, meta, size, plain = r.prepare(loop.s.schedule())
        assert (size, plain, len(rows)) == (padded*(8 if decodes else 16), decodes, 3)
        if not plain:  # the reference backend has no rows without tokens
            for k, n in dict(cu_q=4, indptr=4, kv_lens=3).items(): meta.host[k] = meta.host[k][:n]
        with torch.inference_mode():
            r.attn.plan(meta)
            hidden = r.model(dev["ids"], meta, r.attn, r.kv)
        changed = (r.kv != before).any(0).flatten(3).any(-1)  # (blocks, 2, block_size) over all layers
        slots = {(b.item(), s.item()) for b, _, s in changed.nonzero()}
        mine = {(row.req.blocks[p//4], p % 4) for row in batch.rows for p in range(row.start, row.start + row.n)}
        assert mine <= slots and {b for b, _ in slots - mine} <= {0}
        results.append(hidden[dev["sample"][:3]])
    assert torch.allclose(*results, atol=1e-5)
