"""The block pool and the prefix cache: the faults others had (B1 ... B13) as rules."""
import random

import pytest
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st

from miniengine.config import SamplingParams
from miniengine.kv_blocks import BlockPool, blocks_needed, fragmentation
from miniengine.prefix_cache import PrefixCache
from miniengine.scheduler import Request

QUICK = dict(deadline=None, derandomize=True)


# --- the pool ---

@given(n=st.integers(0, 300), bs=st.integers(1, 32))
@settings(**QUICK)
def test_blocks_needed_is_the_least_number_that_holds_the_tokens(n, bs):
    k = blocks_needed(n, bs)
    assert (k - 1)*bs < n <= k*bs or n == k == 0


@given(st.lists(st.integers(1, 100), max_size=9), st.integers(1, 32))
@settings(**QUICK)
def test_fragmentation_is_below_one_block_per_request(lengths, bs):
    slots = sum(blocks_needed(n, bs) for n in lengths)*bs
    assert 0 <= fragmentation(lengths, bs)*slots < max(1, len(lengths)*bs)


@pytest.mark.parametrize("bs", [4, 16])
@given(ops=st.lists(st.tuples(st.sampled_from("alloc share release double".split()), st.integers(0, 9)), max_size=60),
       blocks=st.integers(2, 12))
@settings(max_examples=60, **QUICK)
def test_queue_and_tables_account_for_every_block_after_every_operation(bs, ops, blocks):
    "B10, B11, B13: ids handed out are distinct, held by nobody else, never 0; what nobody holds can't be released"
    pool, tables, evicted = BlockPool(blocks, bs), [], []
    pool.on_evict = evicted.append
    for op, k in ops:
        if op == "alloc":
            held = {b for t in tables for b in t}
            if k > pool.free:
                with pytest.raises(ValueError): pool.alloc(k)
            else:
                tables.append(pool.alloc(k))
                assert not held & set(tables[-1]) and evicted[len(evicted) - k:] == tables[-1]
        elif op == "share" and tables:
            tables.append(list(tables[k % len(tables)]))
            for b in tables[-1]: pool.ref(b)
        elif op == "release" and tables: pool.release(tables.pop(k % len(tables)))
        elif op == "double":
            free = [b for b in range(blocks) if pool.refs[b] == 0]
            with pytest.raises(ValueError): pool.release([free[k % len(free)]])  # block 0 is always among them
        pool.check(tables)
        assert pool.free + len({b for t in tables for b in t}) == pool.usable == blocks - 1


def test_a_cached_block_can_be_taken_back_from_the_queue_until_it_is_handed_out_again():
    pool = BlockPool(4)
    table = pool.alloc(3)
    pool.release(table)
    for b in table: pool.ref(b)
    assert pool.free == 0 and pool.refs[1:] == [1]*3
    pool.check([table])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_eviction_takes_the_longest_released_chain_first_and_its_tail_before_its_head(n):
    pool, order = BlockPool(1 + 2*n), []
    pool.on_evict = order.append
    a, b = pool.alloc(n), pool.alloc(n)
    pool.release(b)
    pool.release(a)
    del order[:]
    pool.alloc(2*n)
    assert order == b[::-1] + a[::-1]


@pytest.mark.parametrize("bs", [4, 16])
def test_blocks_handed_out_under_eviction_never_overlap(bs):
    "B13: the queue is empty but for a cached chain of two; one block, and one more"
    pool = BlockPool(5, bs)
    cache, r = PrefixCache(pool), Request("r", list(range(2*bs)), SamplingParams())
    hog = pool.alloc(2)
    r.blocks = pool.alloc(2)
    cache.insert(r, 2*bs)
    pool.release(r.blocks)
    first, second = pool.alloc(1), pool.alloc(1)
    assert set(first + second) == set(r.blocks) and len(cache) == 0
    pool.check([hog, first, second])


# --- the cache ---

class Clash(int):
    "A token id whose hash tells nothing, so that all keys of the cache collide"
    def __hash__(self): return 0


@pytest.mark.parametrize("bs", [4, 16])
def test_a_hash_collision_is_a_miss(bs):
    "B1: `Loop` compares every row with its own text; no prompt may find another's block"
    loop = Loop(blocks=60, bs=bs, max_model_len=5*bs, budget=100)
    for k in range(6): loop.run([Clash(k)]*bs + [Clash(7 - k)]*bs, max_tokens=2)
    assert loop.s.prefix_hits == 0
    loop.run([Clash(3)]*bs + [Clash(4)]*bs + [1])
    assert loop.s.prefix_hits == 2*bs


@given(common=st.integers(0, 40), rest=st.integers(1, 20), bs=st.sampled_from([4, 16]),
       budget=st.sampled_from([5, 16, 99]), overlap=st.booleans())
@settings(max_examples=80, **QUICK)
def test_a_hit_is_the_common_whole_blocks_and_leaves_a_token_to_compute(common, rest, bs, budget, overlap):
    "B3, B4, B9: exact counts, for a prompt that is cached whole as for one that goes on; same tokens every time"
    loop = Loop(blocks=80, bs=bs, overlap=overlap, budget=budget, max_model_len=100)
    head = [i % 5 for i in range(common)]
    first, = loop.run(head + [6]*rest, max_tokens=3)
    again, other, longer = [loop.run(p, max_tokens=3)[-1] for p in
                            (head + [6]*rest, head + [5]*rest, head + [6]*rest + [1, 2])]
    whole = lambda n: n//bs*bs
    assert again.num_cached == whole(common + rest - 1) < common + rest and again.tokens == first.tokens
    assert longer.num_cached == whole(common + rest + (first.tokens[common + rest:] + [9])[:1].count(1))
    assert other.num_cached == whole(common)


@pytest.mark.parametrize("bs", [4, 16])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_recomputing_the_last_cached_block_does_not_break_the_chain(bs, k):
    "B4: a prompt of exactly k blocks, twice; then one that is longer hits all k"
    loop = Loop(blocks=60, bs=bs, max_model_len=6*bs, budget=100)
    prompt = [i % 7 for i in range(k*bs)]
    assert [loop.run(prompt, max_tokens=1)[-1].num_cached for _ in range(3)] == [0, (k - 1)*bs, (k - 1)*bs]
    assert loop.run(prompt + [3]*bs, max_tokens=1)[-1].num_cached == k*bs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [8, 9, 13, 24, 100])
@pytest.mark.parametrize("bs", [4, 16])
def test_a_hit_reads_only_what_was_written_before_or_in_the_same_step(bs, budget, overlap):
    "B5: eight together with a common prefix, the budget cutting the first one's prefill anywhere"
    loop = Loop(blocks=80, bs=bs, overlap=overlap, max_num_seqs=8, budget=budget, max_model_len=4*bs)
    loop.run(*[[1, 2]*bs + [i % 8] for i in range(8)], max_tokens=4)
    assert [r.num_cached for r in loop.requests] == [0] + [2*bs]*7


@pytest.mark.parametrize("evicted", [0, 1, 2, 3])
def test_a_hit_stops_at_the_first_block_that_is_gone(evicted):
    "B7"
    loop = Loop(blocks=60, budget=100)
    prompt = [i % 7 for i in range(17)]
    loop.run(prompt, max_tokens=1)
    chain = loop.cache.match(prompt)
    assert len(chain) == 4
    loop.cache.evict(chain[evicted])
    assert loop.run(prompt, max_tokens=1)[-1].num_cached == 4*evicted
    assert len(loop.cache.match(prompt)) == 4, "what was computed again is found again, down to the old end"


def test_a_cached_block_is_found_only_where_it_stands():
    "B7: the same tokens after another block, or one block later, are a miss"
    loop, a, b, c = Loop(blocks=60, budget=100), [1, 2, 3, 4], [5, 6, 5, 6], [0, 0, 0, 0]
    loop.run(a + b + [7])
    for prompt, want in (b + a, 0), (c + a + b, 0), (a + c + b, 4), (a + b + c, 8), (b + b + a, 4):
        assert loop.run(prompt + [7], max_tokens=1)[-1].num_cached == want
    assert loop.s.resumed_hits == 0, "nobody was preempted"


@pytest.mark.parametrize("bs", [4, 16])
def test_the_cache_changes_no_token_and_a_warm_one_saves_the_common_blocks(bs):
    "B9"
    prompt = [i % 6 for i in range(3*bs + 1)]
    runs = {on: Loop(blocks=40, bs=bs, cache=on, max_model_len=5*bs).run(*[prompt]*3, max_tokens=bs)
            for on in (True, False)}
    assert len({tuple(r.tokens) for rs in runs.values() for r in rs}) == 1
    assert [r.num_cached for r in runs[True]] == [0, 3*bs, 3*bs] and {r.num_cached for r in runs[False]} == {0}


def test_requests_with_different_salts_find_nothing_of_each_other():
    loop = Loop(blocks=60, max_model_len=60)
    for salt, want in (0, 0), (0, 8), (1, 0), (2, 0), (1, 8):
        assert loop.run([1]*11, max_tokens=6, salt=salt)[-1].num_cached == want
    mixed = [loop.add([2]*11, 6, salt=i % 2) for i in range(4)]
    loop.drain()
    assert [r.num_cached for r in mixed] == [0, 0, 8, 8]


def test_generated_blocks_are_found_by_the_next_turn():
    loop = Loop(blocks=60, bs=4, max_model_len=100, budget=100)
    text = [1, 2, 3]
    for _ in range(5):
        r = loop.run(text, max_tokens=7, stop=False)[-1]
        assert r.num_cached == max(0, len(text) - 3)//4*4  # all the last turn computed: not its final token
        text = r.tokens + [4, 5]


def test_two_requests_that_computed_the_same_prefix_keep_their_own_blocks():
    "A block table never changes under a running request; its later blocks chain on below the entry that came first"
    loop = Loop(blocks=60, max_num_seqs=2, budget=4, max_model_len=60)
    a, b = loop.add([1, 1, 1], 9, stop=False), loop.add([1, 1, 1], 9, stop=False)
    seen = {}
    while loop.s.has_work:
        loop.step()
        for r in (a, b):
            if r.blocks: assert r.blocks[:len(seen.get(r, []))] == seen.get(r, []); seen[r] = list(r.blocks)
    assert not set(seen[a]) & set(seen[b]) and a.tokens == b.tokens
    assert len(loop.cache.match(a.tokens[:-1])) == 2


def test_a_failed_step_leaves_nothing_to_be_found():
    loop = Loop(blocks=60, budget=100)
    loop.run([1]*12)
    loop.add([1]*12)
    loop.step(fails=True)
    assert len(loop.cache) == 0 and loop.run([1]*12)[-1].num_cached == 0


def test_the_agent_trace_hits_exactly_the_common_blocks():
    "A conversation re-sent with its history: the number of cached tokens can be computed by hand, at any block size"
    for bs in 4, 16:
        rng, loop, seen, exact = random.Random(bs), Loop(blocks=3000, bs=bs, budget=500, max_model_len=1000), set(), 0
        histories = [[i % 8 for i in range(90)] for _ in range(4)]
        for _ in range(5):
            for h in histories:
                h += [rng.randrange(8) for _ in range(rng.randint(5, 40))]
                r = loop.run(list(h), max_tokens=1)[-1]
                known = [k for k in range(bs, len(h), bs) if tuple(h[:k]) in seen]
                exact += max(known, default=0)
                assert r.num_cached == max(known, default=0)
                seen |= {tuple(h[:k]) for k in range(bs, len(h) + 1, bs)}
        assert loop.s.prefix_hits == exact > 0
