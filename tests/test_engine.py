"""The whole engine on tiny random models, against `transformers`: however it batches, chunks, caches or preempts.

Independent here: the weights are made and run by transformers; the engine reads them from the files transformers saved.
"""
import asyncio
import random
import threading

import pytest
import torch
from tiny_models import ARCHS, hf_greedy, make_model, saved_eos

from miniengine.config import EngineConfig, RequestError, SamplingParams
from miniengine.engine import LLM, AsyncEngine, Engine, EngineError
from miniengine.runner import Runner

ASCII = {t: 50.0 for t in range(90)}  # as a logit_bias: the answer is plain text, a token a character


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A function: arch -> (directory, the model in transformers, prompts, output lengths, greedy outputs, their logits)"
    made = {}
    def get(arch="llama3"):
        if arch not in made:
            rng, path = random.Random(arch), tmp_path_factory.mktemp(arch)
            model = make_model(arch, path)
            heads = [[rng.randrange(300) for _ in range(70)] for _ in range(4)]
            cuts = [rng.choice([0, 8, 16, 33, 64]) for _ in range(32)]
            prompts = [heads[i % 4][:k] + rng.choices(range(300), k=rng.randint(1, 7)) for i, k in enumerate(cuts)]
            lengths = [rng.choice([1, 2, 5, 9, 20]) for _ in prompts]
            results = [hf_greedy(model, p, n) for p, n in zip(prompts, lengths)]
            made[arch] = path, model, prompts, lengths, *zip(*results)
        return made[arch]
    return get


def engine_of(path, kind=LLM, **kw):
    kw = dict(dtype="float32", device="cpu", max_model_len=96, max_num_seqs=8, num_blocks=200) | kw
    if kind is LLM: return LLM(str(path), progress=False, **kw)
    return Engine(EngineConfig(str(path), **kw), progress=False)


def greedy(n=16, **kw): return SamplingParams(**dict(temperature=0, max_tokens=n, ignore_eos=True) | kw)


def tokens(llm, prompts, params):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def path(saved): return saved()[0]


@pytest.fixture(scope="module")
def llm(path): return engine_of(path)


# --- the same tokens as transformers ---

TIGHT = dict(num_blocks=13, block_size=8)  # 96 tokens: one request at its longest


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_transformers_for_any_batch_chunk_cache_and_pool(saved, arch, cache, batching):
    path, _, prompts, lengths, want, _ = saved(arch)
    cases = [(batch, budget, room) for batch in (1, 8, 32) for budget in (16, 64, 4096) for room in ({}, TIGHT)]
    if arch != "llama3": cases = [(1, 16, {}), (8, 64, TIGHT), (8, 16, TIGHT), (32, 4096, {}), (32, 64, TIGHT)]
    for batch, budget, room in cases:
        llm = engine_of(path, max_num_seqs=batch, max_num_batched_tokens=max(budget, batch), prefix_caching=cache,
                        batching=batching, **room)
        got = tokens(llm, prompts, [greedy(n) for n in lengths])
        assert got == list(want), f"batch {batch}, budget {budget}, {room}"
        s = llm.engine.scheduler
        assert s.pool.free == s.pool.usable and not llm.engine.streams
        assert not room or batch == 1 or batching == "static" or s.num_preemptions, "the pool was meant to be too small"
        assert bool(s.prefix_hits) == cache


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_are_within_1e_4_of_transformers(saved, arch, chunked):
    path, _, prompts, lengths, want, logits = saved(arch)
    llm = engine_of(path, max_num_batched_tokens=96, chunked_prefill=chunked, **TIGHT)
    sampler, seen = llm.engine.runner.sampler, {}
    def spy(out, rows):
        for r, l in zip(rows, out): seen[r.req.id, r.start + r.n - r.req.num_prompt] = l.clone()
        return sampler(out, rows)
    llm.engine.runner.sampler = spy
    assert tokens(llm, prompts, [greedy(n) for n in lengths]) == list(want)
    for i, theirs in enumerate(logits):
        ours = torch.stack([seen[f"{i}-0", k] for k in range(len(theirs))])
        assert (ours - theirs).abs().max() < 1e-4


def test_repetition_penalty_equals_transformers(saved, llm):
    _, model, prompts, _, _, _ = saved()
    for p in prompts[:4]:
        want = model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), do_sample=False,
                              max_new_tokens=20, repetition_penalty=1.5, pad_token_id=0)[0, len(p):].tolist()
        assert tokens(llm, [p], greedy(20, repetition_penalty=1.5)) == [want] != tokens(llm, [p], greedy(20))


def test_logprobs_are_those_of_the_model_whatever_the_sampling(saved, llm):
    _, _, prompts, lengths, want, logits = saved()
    i = lengths.index(9)
    for params in greedy(9, logprobs=3), SamplingParams(max_tokens=1, temperature=2.0, seed=1, top_k=5, logprobs=3):
        out = llm.generate([prompts[i], prompts[0]], [params, greedy()], use_tqdm=False)[0].outputs[0]
        theirs = logits[i].log_softmax(-1)
        for k, (lp, top) in enumerate(out.logprobs):
            assert lp == pytest.approx(theirs[k, out.token_ids[k]].item(), abs=1e-4)
            assert [t for t, _ in top] == theirs[k].topk(3).indices.tolist()
            assert [v for _, v in top] == pytest.approx(theirs[k].topk(3).values.tolist(), abs=1e-4)
        assert len(out.logprobs) == len(out.token_ids)


# --- where it ends ---

@pytest.fixture
def ended(saved, path):
    "A function: end tokens -> an engine whose generation_config.json names them"
    yield lambda eos, **kw: (saved_eos(path, eos), engine_of(path, **kw))[1]
    saved_eos(path, None)


def test_generation_ends_at_any_token_of_the_set(saved, ended):
    "C14: generation_config names several; each ends the answer, and its text is not shown"
    _, _, prompts, lengths, want, _ = saved()
    i = max((i for i, n in enumerate(lengths) if n == 20), key=lambda i: len(set(want[i])))
    ref = want[i]
    for k in range(2, 12, 3):
        end = next(j for j, t in enumerate(ref) if t in (ref[k], ref[k + 5]))
        llm = ended([ref[k], ref[k + 5]])
        out, = llm.generate([prompts[i]], greedy(20, ignore_eos=False), use_tqdm=False)[0].outputs
        assert (out.token_ids, out.finish_reason) == (ref[:end + 1], "stop")
        assert out.text == llm.get_tokenizer().decode(ref[:end])
        out, = llm.generate([prompts[i]], greedy(20), use_tqdm=False)[0].outputs
        assert (out.token_ids, out.finish_reason) == (ref, "length"), "ignore_eos"


def test_the_tokenizers_end_token_ends_too_when_the_config_names_others(ended):
    llm = ended([7])
    end = llm.get_tokenizer().eos_ids[0]
    out, = llm.generate([[1, 2, 3]], greedy(9, ignore_eos=False, logit_bias={end: 100}), use_tqdm=False)[0].outputs
    assert (out.token_ids, out.finish_reason, out.text) == ([end], "stop", "")


def test_a_stop_token_of_the_request_ends_it_and_is_named(saved, llm):
    _, _, prompts, lengths, want, _ = saved()
    i = lengths.index(20)
    out, = llm.generate([prompts[i]], greedy(20, stop_token_ids=[want[i][4]]), use_tqdm=False)[0].outputs
    end = want[i].index(want[i][4])
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (want[i][:end + 1], "stop", want[i][4])


def test_the_end_never_comes_before_min_tokens(llm):
    end = llm.get_tokenizer().eos_ids[0]
    for least in 0, 1, 2, 7:
        params = greedy(12, ignore_eos=False, min_tokens=least, logit_bias={end: 100})
        out, = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs
        assert out.finish_reason == "stop" and out.token_ids.index(end) == len(out.token_ids) - 1 == least
    params = greedy(5, min_tokens=5, stop_token_ids=[end], logit_bias={end: 100})
    out, = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs
    assert (out.finish_reason, len(out.token_ids)) == ("length", 5)


def test_stop_strings_across_tokens_end_the_text_before_them(llm):
    "D6, D7: every stretch of the answer of 1 to 6 characters, wherever the token boundaries lie"
    tok, prompt = llm.get_tokenizer(), [1, 2, 3]
    full, = llm.generate([prompt], greedy(24, logit_bias=ASCII), use_tqdm=False)[0].outputs
    assert full.text.isascii() and len(set(full.text)) > 8 and full.finish_reason == "length"
    cases = [(at, full.text[at:at + size]) for at in range(0, len(full.text) - 6, 3) for size in (1, 2, 4, 6)]
    for include in False, True:
        params = [greedy(24, logit_bias=ASCII, stop=["never", s], include_stop_str_in_output=include) for _, s in cases]
        for (_, s), o in zip(cases, llm.generate([prompt]*len(cases), params, use_tqdm=False)):
            out, at = o.outputs[0], full.text.index(s)
            assert (out.finish_reason, out.stop_reason) == ("stop", s)
            assert out.text == full.text[:at + len(s)*include]
            assert len(tok.decode(out.token_ids[:-1])) < at + len(s) <= len(tok.decode(out.token_ids)), "stops at once"
    s = llm.engine.scheduler
    assert s.pool.free == s.pool.usable and not llm.engine.streams


def test_text_held_back_for_a_stop_string_that_never_comes_is_delivered(llm):
    "D8"
    full, = llm.generate([[1, 2, 3]], greedy(24, logit_bias=ASCII), use_tqdm=False)[0].outputs
    params = greedy(24, logit_bias=ASCII, stop=[full.text[-4:] + "!!"])
    out, = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs
    assert (out.text, out.finish_reason) == (full.text, "length")


def test_stop_strings_do_not_count_among_the_first_min_tokens(llm):
    full, = llm.generate([[1, 2, 3]], greedy(24, logit_bias=ASCII), use_tqdm=False)[0].outputs
    params = greedy(24, logit_bias=ASCII, stop=[full.text[1:3]], min_tokens=24)
    out, = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs
    assert (out.text, out.finish_reason) == (full.text, "length")


def test_the_end_inside_a_character_loses_no_whole_one(llm):
    "D3: what the stream says equals a decode of the tokens at once, for any number of tokens"
    for n in range(1, 25):
        out, = llm.generate([[9, 8, 7]], greedy(n), use_tqdm=False)[0].outputs
        assert out.text == llm.get_tokenizer().decode(out.token_ids) and len(out.token_ids) == n


# --- sampling ---

def test_a_seeded_request_does_not_depend_on_its_neighbours_or_on_how_it_is_computed(path, llm):
    "C11"
    prompt, sampled = [5]*40, dict(temperature=1.0, max_tokens=20, ignore_eos=True)
    seeded, free = SamplingParams(seed=42, **sampled), SamplingParams(**sampled)
    alone, = tokens(llm, [prompt], seeded)
    assert tokens(llm, [prompt, [7]*9], [seeded, free])[0] == alone
    assert tokens(llm, [[7]*9, [8]*3, prompt], [free, greedy(), seeded])[2] == alone
    for kw in dict(max_num_batched_tokens=8), dict(TIGHT), dict(prefix_caching=False, batching="static"):
        assert tokens(engine_of(path, **kw), [[7]*30, prompt, [3]*9], [free, seeded, free])[1] == alone
    assert tokens(llm, [prompt], SamplingParams(seed=43, **sampled)) != [alone] != tokens(llm, [prompt], greedy(20))
    assert tokens(llm, [prompt], free) != tokens(llm, [prompt], free)


def test_an_engines_seed_makes_unseeded_requests_repeatable(path):
    params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    runs = [tokens(engine_of(path, seed=s), [[1], [1], [2]], params) for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


def test_n_answers_to_one_prompt_are_seeded_apart(llm):
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=12, ignore_eos=True)
    a, b = (llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [o.index for o in a] == [0, 1, 2] and len({tuple(o.token_ids) for o in a}) == 3
    assert [o.token_ids for o in a] == [o.token_ids for o in b]


@pytest.mark.parametrize("arch", ["llama3", "qwen2"])
def test_rows_beyond_the_tokenizer_are_never_sampled(arch, tmp_path):
    "C13: the padded rows get the highest scores, and still"
    model = make_model(arch, tmp_path, extra_rows=20)
    with torch.no_grad():
        model.lm_head.weight[300:] = 20*model.lm_head.weight[:20]
    model.save_pretrained(tmp_path)
    llm = engine_of(tmp_path)
    assert llm.engine.model_config.vocab_size == 320
    for t, n in ((0, 1), (1.0, 4), (2.0, 4)):
        params = SamplingParams(n=n, temperature=t, max_tokens=20, ignore_eos=True)
        for out in llm.generate([[i] for i in range(8)], params, use_tqdm=False):
            assert all(max(o.token_ids) < 300 for o in out.outputs)


# --- requests in and out ---

def test_what_comes_in_is_checked_and_a_refusal_leaves_no_trace(llm):
    e = llm.engine
    for bad in [-1], [300], [10**9], [], [1]*96:
        with pytest.raises(RequestError): llm.generate([[1, 2], bad], greedy(2), use_tqdm=False)
    for kw in dict(stop_token_ids=[300]), dict(logit_bias={300: 1.0}):
        with pytest.raises(RequestError): llm.generate([[1, 2]], greedy(2, **kw), use_tqdm=False)
    with pytest.raises(RequestError): llm.generate([[1], [2]], [greedy()], use_tqdm=False)
    assert not e.has_work and not e.streams and e.pool.free == e.pool.usable
    assert [len(t) for t in tokens(llm, [[1]*95], greedy(5))] == [1]


def test_texts_token_ids_and_chats_are_one_thing(llm):
    tok = llm.get_tokenizer()
    messages = [{"role": "user", "content": "the lazy dog"}]
    ids = tok.chat(messages)
    assert tok.decode(ids, skip_special=False) == "<|start|>user\nthe lazy dog<|end|><|start|>assistant\n"
    a, b = llm.chat(messages, greedy(6), use_tqdm=False), llm.generate([ids], greedy(6), use_tqdm=False)
    assert a[0].outputs[0].token_ids == b[0].outputs[0].token_ids and a[0].prompt_token_ids == ids
    text = "the quick fox"
    a, b = (llm.generate(p, greedy(6), use_tqdm=False) for p in (text, [tok.encode(text)]))
    assert a[0].outputs[0].text == b[0].outputs[0].text and a[0].prompt == text and b[0].prompt is None
    assert [o.prompt for o in llm.generate(["a", "b", "c"], greedy(1), use_tqdm=False)] == ["a", "b", "c"]
    assert llm.generate([], use_tqdm=False) == []


def test_the_next_turn_finds_the_last_one_in_the_cache(path):
    llm = engine_of(path)
    first = llm.generate([[3]*20], greedy(30), use_tqdm=False)[0]
    again = llm.generate([first.prompt_token_ids + first.outputs[0].token_ids + [9]], greedy(5), use_tqdm=False)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 6, 7, 9])
def test_a_request_aborted_at_any_moment_leaves_nothing_behind(saved, after):
    "A10: 90 tokens in chunks of 16; then the next request is right"
    path, _, prompts, lengths, want, _ = saved()
    e = engine_of(path, Engine, max_num_batched_tokens=16)
    s = e.add([1]*90, greedy(6))
    for _ in range(after): e.step()
    s.abort()
    s.abort()
    assert not e.scheduler.has_work and e.pool.free == e.pool.usable and s.take().finish_reason == "abort"
    assert not e.streams, "the engine must forget the stream"
    t = e.add(prompts[0], greedy(lengths[0]))
    while e.has_work: e.step()
    assert t.take().token_ids == want[0]


# --- failures ---

class Broken(RuntimeError): pass


def break_once(monkeypatch, obj, name, error=None, when=1):
    "Make `obj.name` raise at its `when`-th call, and only then"
    real, calls = getattr(obj, name), []
    def f(*a, **kw):
        calls.append(0)
        if len(calls) == when: raise error or Broken("for the test")
        return real(*a, **kw)
    monkeypatch.setattr(obj, name, f)
    return calls


@pytest.mark.parametrize("when", [1, 2, 5])
def test_after_a_failed_generate_the_next_one_is_right(saved, monkeypatch, when):
    "Blocks of a step that never ran are findable for nobody"
    path, _, prompts, lengths, want, _ = saved()
    llm = engine_of(path, max_num_batched_tokens=40)
    for error in Broken("for the test"), KeyboardInterrupt():
        break_once(monkeypatch, llm.engine.runner, "run", error, when)
        with pytest.raises(type(error)): tokens(llm, prompts[:6], greedy(20))
        monkeypatch.undo()
        assert not llm.engine.has_work and not llm.engine.streams and llm.engine.pool.free == llm.engine.pool.usable
        assert tokens(llm, prompts, [greedy(n) for n in lengths]) == list(want)


async def collect(stream):
    "All of a stream: its deltas, or the error that ended it"
    out = []
    try:
        async for d in stream: out.append(d)
    except EngineError as e: return e
    return out


def ids_of(deltas): return [t for d in deltas for t in d.token_ids]


@pytest.fixture
async def serve(path):
    "A function that starts an AsyncEngine; all are stopped at the end"
    started = []
    async def start(**kw):
        a = AsyncEngine(engine_of(path, Engine, **kw))
        await a.start()
        started.append(a)
        return a
    yield start
    for a in started: await a.stop()


def idle(a): return not (a.engine.has_work or a.engine.streams) and a.engine.pool.free == a.engine.pool.usable


@pytest.mark.parametrize("when", [1, 3, 8])
async def test_a_failed_step_fails_its_own_requests_and_the_engine_goes_on(saved, serve, monkeypatch, when):
    _, _, prompts, lengths, want, _ = saved()
    a = await serve(max_num_seqs=3, max_num_batched_tokens=40)
    calls = break_once(monkeypatch, a.engine.runner, "run", when=when)
    got = await asyncio.gather(*[collect(a.add(p, greedy(n))) for p, n in zip(prompts, lengths)])
    failed = [i for i, g in enumerate(got) if isinstance(g, EngineError)]
    assert 1 <= len(failed) <= 3 and len(calls) > when
    assert all("for the test" in str(got[i]) for i in failed)
    assert all(ids_of(g) == w for i, (g, w) in enumerate(zip(got, want)) if i not in failed)
    assert a.healthy and idle(a)
    assert ids_of(await collect(a.add(prompts[failed[0]], greedy(lengths[failed[0]])))) == want[failed[0]]


@pytest.mark.parametrize("what", ["prepare", "retire"])
async def test_a_failure_outside_of_the_device_hangs_nobody(saved, serve, monkeypatch, what):
    _, _, prompts, lengths, want, _ = saved()
    a = await serve(max_num_seqs=3)
    break_once(monkeypatch, a.engine.runner if what == "prepare" else a.engine, what, when=2)
    got = await asyncio.wait_for(asyncio.gather(*[collect(a.add(p, greedy(20))) for p in prompts[:5]]), 20)
    assert any(isinstance(g, EngineError) for g in got) and a.healthy and idle(a)
    assert ids_of(await collect(a.add(prompts[0], greedy(lengths[0])))) == want[0]


async def test_a_lost_device_ends_everybody_and_refuses_newcomers(saved, serve, monkeypatch):
    _, _, prompts, *_ = saved()
    a = await serve(max_num_seqs=2)
    break_once(monkeypatch, a.engine.runner, "run", RuntimeError("CUDA error: an illegal memory access"), when=3)
    got = await asyncio.wait_for(asyncio.gather(*[collect(a.add(p, greedy(20))) for p in prompts[:6]]), 20)
    assert all(isinstance(g, EngineError) for g in got) and not a.healthy
    with pytest.raises(RequestError) as e: a.add([1], greedy())
    assert e.value.status == 503


async def test_a_request_aborted_before_is_not_failed_afterwards(serve, monkeypatch):
    a = await serve()
    s = a.add([1]*20, greedy(50))
    await s.__anext__()
    s.abort()
    break_once(monkeypatch, a.engine.runner, "prepare")
    assert isinstance(await collect(a.add([2], greedy())), EngineError)
    assert (await collect(s))[-1].finish_reason == "abort"


# --- streaming ---

async def test_streams_say_what_transformers_says_one_delta_a_token(saved, serve):
    _, _, prompts, lengths, want, _ = saved()
    a = await serve()
    tok = a.engine.tokenizer
    got = await asyncio.gather(*[collect(a.add(p, greedy(n))) for p, n in zip(prompts, lengths)])
    for deltas, w in zip(got, want):
        assert ids_of(deltas) == w and "".join(d.text for d in deltas) == tok.decode(w)
        assert [len(d.token_ids) for d in deltas] == [1]*len(w)
        assert [d.finish_reason for d in deltas] == [None]*(len(w) - 1) + ["length"]
    assert idle(a)


async def test_a_slow_reader_gets_the_same_in_fewer_pieces(saved, serve):
    _, _, prompts, lengths, want, _ = saved()
    a, i = await serve(), lengths.index(20)
    s = a.add(prompts[i], greedy(20, logprobs=0))
    await asyncio.sleep(0)
    while a.engine.scheduler.has_work: await asyncio.sleep(0.01)
    deltas = await collect(s)
    assert len(deltas) == 1 and ids_of(deltas) == want[i] and len(deltas[0].logprobs) == 20
    assert (deltas[0].text, deltas[0].finish_reason) == (a.engine.tokenizer.decode(want[i]), "length")


async def test_an_aborted_stream_ends_and_its_neighbour_does_not_notice(saved, serve):
    "E9, for one that runs, one in the middle of its prompt, and one that waits"
    _, _, prompts, lengths, want, _ = saved()
    a, i = await serve(max_num_seqs=2, max_num_batched_tokens=16), lengths.index(20)
    keep, runs = a.add(prompts[i], greedy(20)), a.add([1], greedy(90))
    first = await runs.__anext__()
    chunk, waits = a.add([2]*90, greedy(6)), a.add([3]*30, greedy(6))
    runs.abort()
    await asyncio.sleep(0.002)
    chunk.abort(), waits.abort()
    got = await asyncio.wait_for(asyncio.gather(*map(collect, (keep, runs, chunk, waits))), 20)
    assert ids_of(got[0]) == want[i] and len(first.token_ids) == 1
    assert [g[-1].finish_reason for g in got] == ["length", "abort", "abort", "abort"]
    assert idle(a)


async def test_on_a_cpu_one_thread_does_all_tensor_work_and_it_is_not_the_loops(path, monkeypatch):
    "OpenMP has a team of workers for each thread that runs a loop, and two teams are slower than one"
    seen = []
    def spy(name):
        f = getattr(Runner, name)
        def noted(*a, **kw):
            seen.append((name, threading.current_thread()))
            return f(*a, **kw)
        monkeypatch.setattr(Runner, name, noted)
    for name in "__init__", "size_cache", "allocate", "run": spy(name)
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", num_blocks=40, max_model_len=128)
    a = AsyncEngine.load(config, progress=False)
    await a.start()
    await collect(a.add([1, 2, 3], greedy(4)))
    await a.stop()
    assert {name for name, _ in seen} == {"__init__", "size_cache", "allocate", "run"}
    assert len({t for _, t in seen}) == 1 and threading.current_thread() not in {t for _, t in seen}


async def test_a_reader_that_waits_is_woken_by_the_abort(serve):
    a = await serve(max_num_seqs=1)
    a.add([1], greedy(90))
    s = a.add([2], greedy(9))
    reader = asyncio.create_task(collect(s))
    await asyncio.sleep(0.01)
    s.abort()
    assert [d.finish_reason for d in await asyncio.wait_for(reader, 5)] == ["abort"]


async def test_stop_lets_running_requests_end_within_the_time_given(path, saved):
    _, _, prompts, lengths, want, _ = saved()
    a, i = AsyncEngine(engine_of(path, Engine)), lengths.index(20)
    await a.start()
    s = a.add(prompts[i], greedy(20))
    stop = asyncio.create_task(a.stop(30))
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as e: a.add([1], greedy())
    assert e.value.status == 503
    assert ids_of(await collect(s)) == want[i]
    await asyncio.wait_for(stop, 20)
    assert a.task.done() and idle(a)


async def test_stop_without_time_cuts_them_off(path):
    a = AsyncEngine(engine_of(path, Engine))
    await a.start()
    streams = [a.add([i], greedy(90)) for i in range(12)]
    await streams[0].__anext__()
    await asyncio.wait_for(a.stop(0), 10)
    got = await asyncio.wait_for(asyncio.gather(*map(collect, streams)), 5)
    assert {g[-1].finish_reason for g in got} == {"abort"} and idle(a)


# --- building ---

def test_the_context_is_what_fits_and_more_than_fits_is_an_error(path):
    e = engine_of(path, Engine, num_blocks=5, max_model_len=None)
    assert (e.max_model_len, e.pool.usable) == (64, 4)
    with pytest.raises(ValueError, match="max_model_len=96 needs 6 KV blocks"): engine_of(path, Engine, num_blocks=5)
    with pytest.raises(ValueError, match="made for 256"): engine_of(path, Engine, max_model_len=257)


def test_dummy_weights_run(path):
    out, = tokens(engine_of(path, load_format="dummy"), [[1, 2, 3]], greedy(5))
    assert len(out) == 5
