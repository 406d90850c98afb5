"""The scheduler under random workloads, and the faults other schedulers had (A1 ... A12) as rules.

`fake_device.Loop` checks after every step: blocks, slots, cache contents, what each row reads, order, progress.
"""
import random

import pytest
from fake_device import STOP, Loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from miniengine.config import RequestError, SamplingParams
from miniengine.kv_blocks import BlockPool, blocks_needed
from miniengine.scheduler import Request, Scheduler

QUICK = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# --- random workloads ---

class Workload(RuleBasedStateMachine):
    "add / step / abort / fail in any order, over a pool that is always too small"
    @initialize(bs=st.sampled_from([4, 16]), blocks=st.integers(3, 12), cache=st.booleans(), overlap=st.booleans(),
                chunked=st.booleans(), batching=st.sampled_from(["continuous", "continuous", "static"]),
                seqs=st.integers(1, 5), extra=st.integers(0, 12))
    def make(self, bs, blocks, cache, overlap, chunked, batching, seqs, extra):
        self.loop = Loop(blocks, bs, cache, overlap, max_num_seqs=seqs, budget=seqs + extra, chunked=chunked,
                         batching=batching, max_model_len=(blocks - 1)*bs)

    @rule(pieces=st.lists(st.integers(0, 2), max_size=4), tail=st.integers(0, 6), n=st.integers(0, 15),
          out=st.integers(1, 24), stop=st.booleans(), salt=st.sampled_from([0, 0, 0, 1]),
          penalty=st.sampled_from([0, 0, 0, 0.5]))
    def add(self, pieces, tail, n, out, stop, salt, penalty):
        prompt = [t for i in pieces for t in [i, *range(1, self.loop.pool.block_size)]] + [tail]*n
        try: self.loop.add(prompt, out, stop, salt, presence_penalty=penalty)
        except RequestError: pass
        self.loop.check()

    @rule(n=st.integers(1, 12))
    def steps(self, n):
        for _ in range(n): self.loop.step()

    @precondition(lambda self: self.loop.s.has_work)
    @rule(k=st.integers(0, 30))
    def abort(self, k):
        live = [r for r in self.loop.requests if r.finish_reason is None]
        self.loop.abort(live[k % len(live)])

    @precondition(lambda self: self.loop.s.has_work)
    @rule()
    def fail(self): self.loop.step(fails=True)

    def teardown(self):
        if hasattr(self, "loop"): self.loop.drain()


def test_all_invariants_hold_whatever_is_added_aborted_or_fails():
    run_state_machine_as_test(Workload, settings=settings(max_examples=60, stateful_step_count=50, **QUICK))


def grid(*names):
    "All combinations of the engine's switches"
    values = dict(bs=(4, 16), cache=(False, True), overlap=(False, True), chunked=(True, False),
                  batching=("continuous", "static"))
    cases = [{}]
    for n in names: cases = [c | {n: v} for c in cases for v in values[n]]
    return pytest.mark.parametrize("kw", cases, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()))


@grid("bs", "cache", "overlap", "chunked", "batching")
def test_hundreds_of_steps_with_random_arrivals_lose_and_repeat_nothing(kw):
    rng = random.Random(str(kw))
    bs = kw["bs"]
    budget = rng.choice([6, 16, 40]) if kw["chunked"] else 6*bs
    loop = Loop(blocks=12, max_num_seqs=5, budget=budget, max_model_len=11*bs, **kw)
    heads = [[rng.randrange(8) for _ in range(4*bs)] for _ in range(3)]
    for _ in range(400):
        if rng.random() < 0.35 and len(loop.s.waiting) < 8:
            prompt = rng.choice(heads)[:rng.randint(1, 4*bs)] + [rng.randrange(8) for _ in range(rng.randint(0, bs))]
            loop.add(prompt, rng.randint(1, 5*bs), stop=rng.random() < 0.5, salt=rng.random() < 0.1,
                     presence_penalty=0.5*(rng.random() < 0.1))
        if rng.random() < 0.05 and loop.s.has_work:
            loop.abort(rng.choice([r for r in loop.requests if r.finish_reason is None]))
        loop.step(fails=rng.random() < 0.01)
    loop.drain()
    reasons = {r.finish_reason for r in loop.requests}
    assert reasons >= {"stop", "length", "abort"} and len(loop.requests) > 20
    if kw["batching"] == "continuous": assert loop.s.num_preemptions > 0, "the pool was meant to be too small"
    assert not kw["cache"] or loop.s.prefix_hits > 0


@grid("bs", "cache", "overlap", "batching")
def test_every_way_of_running_gives_the_same_tokens(kw):
    "The same requests with room, with preemptions, in chunks; `Loop` holds each to the text of its prompt alone"
    bs, lengths = kw["bs"], {}
    for blocks, budget in (60, 1000), (60, 7), (60, 2*bs), (8, 1000), (8, 7):
        loop = Loop(blocks=blocks, max_num_seqs=6, budget=budget, max_model_len=7*bs, **kw)
        for i in range(12): loop.add([i % 3]*(1 + i*bs//2 % (4*bs)), 3*bs, stop=i % 2)
        lengths[blocks, budget] = [r.num_output for r in loop.drain().requests]
        if (blocks, kw["batching"]) == (8, "continuous"): assert loop.s.num_preemptions
    assert len(set(map(tuple, lengths.values()))) == 1


# --- A. admission and preemption ---

@settings(max_examples=150, **QUICK)
@given(bs=st.sampled_from([4, 16]), blocks=st.integers(2, 6), n=st.integers(1, 100), out=st.integers(1, 100),
       overlap=st.booleans())
def test_what_can_never_fit_is_refused_at_once_and_what_fits_alone_always_finishes(bs, blocks, n, out, overlap):
    "A1"
    loop = Loop(blocks, bs, overlap=overlap, max_num_seqs=2, max_model_len=1000)
    if blocks_needed(n + out, bs) > blocks - 1:
        with pytest.raises(RequestError) as e: loop.add([1]*n, out)
        assert str(n + out) in str(e.value) and e.value.status == 400 and not loop.s.has_work
    else:
        r, = loop.run([1]*n, max_tokens=out, stop=False)
        assert (r.finish_reason, r.num_output, r.num_preemptions) == ("length", out, 0)
    assert loop.run([2], max_tokens=2, stop=False)[-1].num_output == 2  # and the engine goes on


@pytest.mark.parametrize("limit", [4, 5, 16, 17])
def test_a_prompt_must_leave_room_for_one_token(limit):
    "A1, E3: limit-1 gives one token and ends with `length`; limit and more are refused"
    loop = Loop(blocks=10, max_model_len=limit)
    for max_tokens in 1, 50, None:
        r, = loop.run([1]*(limit - 1), max_tokens=max_tokens, stop=False)[-1:]
        assert (r.num_output, r.finish_reason) == (1, "length")
    for n in limit, limit + 1:
        with pytest.raises(RequestError, match="no room"): loop.add([1]*n)
    with pytest.raises(RequestError, match="empty"): loop.add([])


@pytest.mark.parametrize("bs", [4, 16])
@pytest.mark.parametrize("excess", [1, 4, 16, 100])
def test_a_request_that_can_never_fit_blocks_nobody(bs, excess):
    "A2"
    loop = Loop(blocks=3, bs=bs, max_model_len=1000)
    with pytest.raises(RequestError): loop.add([1]*(2*bs + excess))
    assert loop.run([1, 2], max_tokens=1)[0].num_output == 1


@grid("bs", "cache", "overlap")
def test_a_preempted_request_that_finds_its_own_blocks_goes_on_where_it_was(kw):
    "A4: what is left to compute is counted after the look-up"
    bs = kw["bs"]
    loop = Loop(blocks=6, max_num_seqs=2, budget=100, max_model_len=5*bs, **kw)
    loop.run([1]*(2*bs), [2]*(2*bs), max_tokens=2*bs, stop=False)
    old, new = loop.requests
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert [r.num_output for r in loop.requests] == [2*bs]*2
    back = [row for rows, _ in loop.log for row in rows if row[0] is new and row[1] + row[2] > 2*bs and row[2] > 1]
    assert len(back) == 1 and back[0][1] == (loop.s.resumed_hits if kw["cache"] else 0)
    assert loop.s.prefix_queries == 4*bs and loop.s.prefix_hits == 0, "a resumption does not touch the hit rate"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt, out, budget", [(3, 40, 8), (1, 30, 3), (17, 20, 16), (5, 12, 4)])
def test_a_resumed_request_is_prefilled_prompt_and_output_in_chunks(prompt, out, budget, overlap):
    "A5: there is no moment at which it is 'decoding' and the rest of its tokens forgotten"
    loop = Loop(blocks=40, overlap=overlap, cache=False, max_num_seqs=2, budget=budget, max_model_len=200)
    r = loop.add([1]*prompt, out, stop=False)
    while r.num_output < out - 2: loop.step()
    seen = len(r.tokens) + r.pending
    loop.s._preempt(loop.s.running.pop())
    mark = len(loop.log)
    loop.drain()
    rows = [row for rows, _ in loop.log[mark:] for row in rows]
    chunks = [n for _, start, n, _ in rows if start + n <= seen]
    assert sum(chunks) == seen and all(n == budget for n in chunks[:-1])
    assert [sample for _, start, n, sample in rows if start + n <= seen] == [False]*(len(chunks) - 1) + [True]
    assert r.num_output == out and r.num_prompt == prompt and len(loop.events[r]) == out


@pytest.mark.parametrize("bs", [1, 2, 4, 16])
@pytest.mark.parametrize("free", [0, 1])
def test_a_row_takes_a_block_exactly_when_it_crosses_into_one(bs, free):
    "A7: every length 1 ... 2 bs + 1, with no block left and with one"
    for n in range(1, 2*bs + 2):
        pool = BlockPool(8, bs)
        s = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=100, max_model_len=100)
        r = Request("r", [1]*n, SamplingParams(temperature=0, max_tokens=2))
        s.add(r)
        s.commit(s.schedule(), [1])
        had = len(r.blocks)
        hog = pool.alloc(pool.free - free)
        b = s.schedule()
        if n % bs: assert b.rows[0].n == 1 and len(r.blocks) == had == blocks_needed(n + 1, bs) and pool.free == free
        elif free: assert b.rows[0].n == 1 and len(r.blocks) == had + 1 and pool.free == 0
        else: assert b.rows == [] and b.preempted == [r] and r.blocks == [] and s.waiting[0] is r
        pool.check([*[r.blocks for r in s.running], hog])


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("n", [1, 7, 16, 40, 2000])
def test_running_requests_get_a_token_in_every_step_whatever_arrives(n, cache, chunked):
    "A8"
    loop = Loop(blocks=2000, bs=16, cache=cache, max_num_seqs=8, budget=32, max_model_len=4000, chunked=chunked)
    talking = [loop.add([i]*3, 30, stop=False) for i in range(4)]
    loop.step()
    for k in range(29):
        loop.add([k % 5]*n, 2, stop=False)
        loop.step()
        assert [r.num_output for r in talking] == [k + 2]*4


@pytest.mark.parametrize("max_num_seqs, budget", [(8, 8), (8, 9), (3, 64)])
def test_arrivals_wait_for_everybody_before_them_and_nobody_else(max_num_seqs, budget):
    "A8: the gap is bounded: with n requests before it, a request starts within the steps those need alone"
    loop = Loop(blocks=100, cache=False, max_num_seqs=max_num_seqs, budget=budget)
    for i in range(20): loop.add([i % 7]*9, 5, stop=False)
    for _ in range(20*(9 + 5)): loop.step()
    assert not loop.s.has_work


@grid("bs", "cache", "overlap")
def test_a_request_aborted_after_any_chunk_leaves_every_list_and_gives_all_blocks_back(kw):
    "A10"
    for after in range(8):
        loop = Loop(blocks=30, max_num_seqs=4, budget=16, max_model_len=110, **kw)
        other = loop.add([5]*4, 20, stop=False)
        r, behind = loop.add([1]*100, 3), loop.add([2]*5, 3)
        for _ in range(after): loop.step()
        loop.abort(r)
        assert r.blocks == [] and r not in loop.s.running and r not in loop.s.waiting
        loop.drain()
        assert (r.finish_reason, other.num_output, behind.finish_reason is None) == ("abort", 20, False)


@grid("cache", "overlap")
def test_a_victim_has_no_row_in_the_step_that_preempts_it(kw):
    "A12: `Loop` checks it for all steps; here everybody needs a block at once, so that one need takes several victims"
    loop = Loop(blocks=9, max_num_seqs=8, budget=64, max_model_len=32, **kw)
    loop.run(*[[i]*4 for i in range(8)], max_tokens=28, stop=False)
    assert sum(len(p) for _, p in loop.log) == loop.s.num_preemptions >= 7
    assert [r.num_output for r in loop.requests] == [28]*8 and loop.requests[0].num_preemptions == 0


def test_preemption_keeps_the_order_of_arrival_among_the_victims():
    loop = Loop(blocks=9, cache=False, max_num_seqs=8, budget=64, max_model_len=32)
    loop.run(*[[i]*4 for i in range(8)], max_tokens=28, stop=False)
    finished = sorted(loop.requests, key=lambda r: r.finished_at)
    assert finished == loop.requests


# --- ends ---

@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_ends_the_request_in_its_step_and_the_extra_row_is_dropped(overlap):
    loop = Loop(blocks=30, overlap=overlap)
    reqs = loop.run(*[[i, j] for i in range(7) for j in range(7)], max_tokens=25)
    stopped = [r for r in reqs if r.finish_reason == "stop"]
    assert len(stopped) > 10
    for r in stopped: assert r.tokens[-1] == STOP and STOP not in r.output_ids[:-1] and r.stop_reason is None


def test_the_first_token_that_ends_wins_over_the_length():
    for seed in range(40):
        loop = Loop(blocks=30)
        r, = loop.run([seed % 8, seed//8], max_tokens=1)
        assert r.finish_reason == ("stop" if r.tokens[-1] == STOP else "length")


def test_a_request_finished_twice_frees_its_blocks_once():
    "B10: abort and finish in one step, in any order"
    for first, second in ("abort", "abort"), ("abort", "error"), ("error", "abort"):
        loop = Loop()
        r = loop.add([1]*9, 5)
        loop.step()
        loop.abort(r, first)
        loop.abort(r, second)
        assert r.finish_reason == first and loop.pool.free == loop.pool.usable
        loop.drain()


def test_a_token_that_arrives_after_the_abort_is_dropped():
    loop = Loop(overlap=True)
    r = loop.add([1]*5, 9)
    loop.step()
    loop.abort(r)
    loop.drain()
    assert r.output_ids == [] and r.finish_reason == "abort"


def test_a_budget_below_the_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(BlockPool(4), max_num_seqs=8, max_num_batched_tokens=7)


def test_requests_that_must_see_their_last_token_skip_a_step_under_overlap_and_only_they():
    loop = Loop(blocks=40, overlap=True)
    plain, needs = loop.add([1]*4, 8, stop=False), loop.add([2]*4, 8, stop=False, presence_penalty=1.0)
    loop.drain()
    steps = {r: [i for i, (rows, _) in enumerate(loop.log) if any(x[0] is r for x in rows)] for r in (plain, needs)}
    assert steps[plain] == list(range(8)) and steps[needs] == list(range(0, 16, 2))


def test_a_static_batch_runs_to_its_end_before_the_next_begins():
    loop = Loop(blocks=60, batching="static", max_num_seqs=4, budget=64)
    loop.run(*[[i]*5 for i in range(8)], max_tokens=10, stop=False)
    who = [{r for r, *_ in rows} for rows, _ in loop.log]
    assert all(w <= set(loop.requests[:4]) or w <= set(loop.requests[4:]) for w in who)
