"""The engine's loop around the real scheduler, with a device that remembers what was written into every KV slot.

`Device` stands for model and KV cache. What it stores for a token is a fingerprint of the whole sequence up to it, as
real keys and values depend on all tokens before them; and every row checks that through its block table it reads
exactly the fingerprints of its own sequence. What a sequence must be is computed from the prompt alone (`Sequence`),
without any scheduler. `Loop` turns the crank as the engine does, with overlap if asked for (step N+1 is scheduled and
launched before step N is committed), and checks every promise that must hold after every step.
"""
from miniengine.config import SamplingParams
from miniengine.kv_blocks import BlockPool, blocks_needed
from miniengine.prefix_cache import PrefixCache
from miniengine.scheduler import Request, Scheduler

VOCAB, STOP = 8, 7


def prints(tokens, before=0):
    "Fingerprints of all prefixes of `tokens`, which follow a text with fingerprint `before`"
    out = []
    for t in tokens: out.append(before := hash((before, int(t))))
    return out


class Sequence:
    "A prompt and what the fake model says to it, as long as anybody wants to know: no scheduler involved"
    def __init__(self, prompt): self.tokens, self.prints = list(prompt), prints(prompt)

    def upto(self, n):
        while len(self.tokens) < n:
            self.tokens.append(next_token(self.prints[-1]))
            self.prints.append(hash((self.prints[-1], self.tokens[-1])))
        return self.tokens[:n]


def next_token(fingerprint): return (fingerprint >> 7) % VOCAB


class Device:
    "KV memory and the tokens that were sampled last, one per slot, like the runner's buffers"
    def __init__(self, num_blocks, block_size, num_slots):
        self.bs, self.mem, self.last = block_size, [None]*num_blocks*block_size, [None]*num_slots

    def pack(self, batch, sequence_of):
        "All that a step needs, copied now: the host may change its mind before the step runs"
        job = []
        for r in batch.rows:
            known = r.req.tokens[r.start:r.start + r.n]
            assert len(known) == r.n or (len(known), r.n) == (0, 1), "only the last token may be unknown to the host"
            job.append((r.req.slot, list(r.req.blocks), r.start, known or None, r.n, r.sample, sequence_of(r.req)))
        return job

    def slot(self, table, p):
        assert p//self.bs < len(table), f"position {p} is outside of the block table {table}"
        return table[p//self.bs]*self.bs + p % self.bs

    def run(self, job):
        "All rows write, then all rows read, as each layer does; a token for each row that samples"
        written, out = set(), []
        for s, table, start, ids, n, _, seq in job:
            before = self.mem[self.slot(table, start - 1)] if start else 0
            for p, f in enumerate(prints(ids or [self.last[s]], before), start):
                at = self.slot(table, p)
                assert at not in written and table[p//self.bs] != 0, "two rows write one slot, or the reserved block"
                written.add(at)
                self.mem[at] = f
        for s, table, start, _, n, sample, seq in job:
            seq.upto(start + n)
            read = [self.mem[self.slot(table, p)] for p in range(start + n)]
            assert read == seq.prints[:start + n], f"positions 0..{start + n - 1} through {table} are not its own"
            if sample: out.append(next_token(read[-1]))
        for (s, *_), token in zip([j for j in job if j[5]], out): self.last[s] = token
        return out

    def fail(self, job):
        "A step that dies half way: its slots hold garbage"
        for _, table, start, _, n, *_ in job:
            for p in range(start, start + n): self.mem[self.slot(table, p)] = None


class Loop:
    "Scheduler, device, and the checks; `add`, `step`, `abort`, `drain`"
    def __init__(self, blocks=16, bs=4, cache=True, overlap=False, max_num_seqs=4, budget=16, max_model_len=64, **kw):
        self.pool, self.overlap, self.inflight = BlockPool(blocks, bs), overlap, None
        self.cache = PrefixCache(self.pool) if cache else None
        self.s = Scheduler(self.pool, self.cache, max_num_seqs, budget, max_model_len, **kw)
        self.device = Device(blocks, bs, max_num_seqs)
        self.requests, self.sequences, self.events, self.log = [], {}, {}, []
        self.content = {0: 0}  # cache entry number -> fingerprint of the text up to its end

    def add(self, prompt, max_tokens=4, stop=True, salt=0, **kw):
        "Queue a request; RequestError as the scheduler raises it"
        p = SamplingParams(temperature=0, max_tokens=max_tokens, **kw)
        r = Request(f"r{len(self.requests)}", prompt, p, {STOP: None} if stop else {}, salt)
        self.s.add(r)
        self.requests.append(r)
        self.sequences[r], self.events[r] = Sequence(prompt), []
        return r

    def abort(self, r, reason="abort"):
        self.s.finish(r, reason)
        self.check()

    def step(self, fails=False):
        "One turn of the engine; True if it launched something"
        before = [(r, len(r.tokens) + r.pending - r.num_computed, self.must_wait(r)) for r in self.s.running]
        batch, job, handle = self.s.schedule(), None, None
        self.check_batch(batch, before)
        if batch is not None and batch.rows:
            job = self.device.pack(batch, self.sequences.get)
            if fails:  # what `Engine.fail` does
                self.device.fail(job)
                if self.cache is not None: self.cache.clear()
                for r in batch.rows: self.s.finish(r.req, "error")
            else: handle = batch, self.device.run(job)
        done, self.inflight = (self.inflight, handle) if self.overlap else (handle, None)
        if done is not None: self.retire(*done)
        self.check()
        return job is not None

    def retire(self, batch, tokens):
        live = [r.req for r in batch.rows if r.sample and r.req.finish_reason is None]
        events = self.s.commit(batch, tokens)
        assert [r for r, _ in events] == live, "each live row that sampled yields one token, no other does"
        for r, token in events: self.events[r].append(token)

    def drain(self, limit=3000):
        "Step until nothing is left; the pool must be whole again"
        while self.s.has_work or self.inflight is not None:
            self.step()
            limit -= 1
            assert limit, "the scheduler makes no progress"
        assert self.pool.free == self.pool.usable and sorted(self.s.slots) == list(range(self.s.max_num_seqs))
        assert all(r.finish_reason is not None for r in self.requests), "a request was lost"
        return self

    def run(self, *prompts, **kw):
        "Add, drain, and hand back the requests"
        reqs = [self.add(p, **kw) for p in prompts]
        self.drain()
        return reqs

    @staticmethod
    def must_wait(r):
        "Rows that a step leaves out: the token under way is the last one, or sampling has to see it first"
        return r.pending and (len(r.tokens) + r.pending >= r.max_total or r.needs_last)

    def check_batch(self, batch, before):
        "What a schedule promises"
        rows, s = batch.rows if batch else [], self.s
        out, ran = [r.req for r in rows], [r for r, *_ in before]
        preempted = batch.preempted if batch else []
        self.log.append(([(r.req, r.start, r.n, r.sample) for r in rows], list(preempted)))
        assert len(set(out)) == len(out) <= s.max_num_seqs and set(out) <= set(s.running)
        if batch: assert batch.num_tokens == sum(r.n for r in rows)
        assert sum(r.n for r in rows) <= s.budget or (not s.chunked and len(rows) == 1), "over the token budget"
        assert len({r.slot for r in s.running}) == len(s.running) and min([r.slot for r in s.running], default=0) >= 0
        for r in rows:
            have, bs = len(r.req.tokens) + r.req.pending - r.sample, self.pool.block_size
            assert r.n >= 1 and r.start + r.n == r.req.num_computed <= have and r.sample == (r.start + r.n == have)
            assert s.chunked or r.sample, "a prompt in pieces"
            assert len(r.req.blocks) == blocks_needed(r.start + r.n, bs), "a table has a block too many or too few"
        for r, behind, waits in before:  # nobody who talks is passed over
            row = next((x for x in rows if x.req is r), None)
            if r in preempted or waits: assert row is None
            else: assert row is not None and (row.sample if behind == 1 else row.n >= 1)
        k = len(ran) - len(preempted)
        assert preempted == ran[k:][::-1], "the newest requests are the victims"
        new = [r for r in out if r not in ran]
        if preempted or (s.static and ran): assert not new, "admitted in a step that preempted, or into a static batch"
        if preempted: assert list(s.waiting)[:len(preempted)] == preempted[::-1], "victims wait at the front, in order"
        started = [r.first_scheduled is not None for r in self.requests if r.finish_reason is None]
        assert started == sorted(started, reverse=True), "a later arrival overtook an earlier one"

    def check(self):
        "What must hold at any time"
        s, pool = self.s, self.pool
        pool.check([r.blocks for r in s.running])
        assert sorted(s.slots + [r.slot for r in s.running]) == list(range(s.max_num_seqs)), "a slot leaked"
        for r in self.requests:
            assert (r in s.waiting) + (r in s.running) + (r.finish_reason is not None) == 1, "lost, or in two places"
            assert r in s.running or (r.blocks == [] and r.slot == -1)
            n = len(r.tokens)
            assert r.tokens == self.sequences[r].upto(n) and self.events[r] == r.output_ids and n <= r.max_total
            stopped = [t for t in r.output_ids if t in r.stop_ids]
            assert stopped == (r.output_ids[-1:] if r.finish_reason == "stop" else [])
            if r.finish_reason == "length": assert n == r.max_total
            assert r.num_cached % pool.block_size == 0 and r.num_cached < max(r.num_prompt, 1)
        for b in range(1, pool.num_blocks):
            salts = {r.salt for r in s.running if b in r.blocks}
            assert len(salts) <= 1, "requests with different salts share a block"
        if self.cache is not None: self.check_cache()

    def check_cache(self):
        "Every entry's block holds the tokens that the entry claims, below the text of its parent"
        c, bs = self.cache, self.pool.block_size
        assert {e[0]: k for k, e in c.entries.items()} == c.keys and len(c.keys) == len(c.entries)
        for (parent, tokens, _), (block, number) in sorted(c.entries.items(), key=lambda e: e[1][1]):
            assert len(tokens) == bs and block != 0
            want = prints(tokens, self.content[parent])
            assert self.device.mem[block*bs:(block + 1)*bs] == want, f"block {block} does not hold what its entry says"
            assert self.content.setdefault(number, want[-1]) == want[-1], "an entry number was used twice"
