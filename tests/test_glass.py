"The step trace, its formats and feed, and the page in a real browser"
import asyncio
import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path

import httpx
import pytest
from fake_engine import EOS, FakeEngine
from jsonschema import Draft202012Validator
from test_server import CHAT, HI, listening, running

from miniengine.config import RequestError, SamplingParams, ServerConfig
from miniengine.glass import Feed, Trace, device_times, perfetto, save
from miniengine.kv_blocks import blocks_needed

TESTS = Path(__file__).resolve().parent


def replay(entries, bs=16):
    "After each entry: (entry, {lane: block table}, findable blocks), from nothing but the entries, as the page does it"
    tables, cached, admitted = {}, set(), set()
    for e in entries:
        kind, lane = e["kind"], e.get("lane")
        if kind == "queue": assert lane not in tables
        elif kind == "admit": tables[lane] = list(e["blocks"]); admitted.add(lane)
        elif kind == "preempt": assert tables.pop(lane) == e["blocks"]
        elif kind == "finish": assert tables.pop(lane, []) == e["blocks"]; cached |= set(e["cached"])
        elif kind == "clear": cached -= set(e["blocks"])
        elif kind == "step":
            cached = (cached - set(e["evicted"])) | set(e["cached"])
            grown = iter(e["grown"])
            for lane, start, n in zip(e["lanes"], e["starts"], e["counts"]):
                if lane not in admitted and blocks_needed(start + n, bs) > blocks_needed(start, bs):
                    tables[lane] += next(grown)
            assert next(grown, None) is None
            admitted = set()
        yield e, tables, cached


def check_replay(trace):
    "What the entries say must be what the pool and the cache are"
    *_, (_, tables, cached) = replay(trace.entries())
    s = trace.scheduler
    assert tables == {r.lane: r.blocks for r in s.running} and cached == set(s.cache.keys)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_entries_say_what_the_pool_does(seed, overlap):
    rng, fake = random.Random(seed), FakeEngine(num_blocks=15, max_num_seqs=6, max_model_len=200, overlap=overlap)
    e = fake.engine
    e.scheduler.budget = 40
    trace, streams = Trace(e, most=100_000), []
    fake.answer = lambda r: [r.lane % 100]*rng.randint(5, 60) + [EOS]
    for i in range(300):
        if rng.random() < .2:
            prompt = [rng.choice([1, 2])]*rng.randint(1, 60) + [rng.randrange(200)]*rng.randint(0, 30)
            streams.append(e.add(prompt, SamplingParams(temperature=0, max_tokens=rng.randint(1, 60)), "same id"))
        if streams and rng.random() < .05: rng.choice(streams).abort()
        fake.fail_at = fake.steps + 1 if rng.random() < .01 else None
        try: e.step()
        except ValueError as error: e.fail([r for r in e.streams], error); e.inflight = None
        if trace.count: check_replay(trace)
    while e.has_work: e.step()
    check_replay(trace)
    kinds = Counter(x["kind"] for x in trace.entries())
    assert kinds["preempt"] == e.scheduler.num_preemptions > 0 and kinds["finish"] == len(streams) and kinds["clear"]
    steps = [x for x in trace.entries() if x["kind"] == "step"]
    assert sum(len(x["evicted"]) for x in steps) > 10
    assert [x["step"] for x in steps] == list(range(1, len(steps) + 1))
    assert 0 < kinds["done"] <= len(steps)


def small(overlap=False, **kw):
    "(trace, report) of a small run with a hit, a preemption and a chunked prompt"
    fake = FakeEngine(num_blocks=12, max_num_seqs=4, max_model_len=150, overlap=overlap, **kw)
    e = fake.engine
    e.scheduler.budget = 32
    trace = Trace(e)
    fake.answer = lambda r: [5]*40 + [EOS]
    for i, n in enumerate((70, 20, 50)): e.add([i % 2]*n, SamplingParams(temperature=0, max_tokens=60), f"r{i}")
    while e.has_work: e.step()
    return trace, trace.report()


@pytest.mark.parametrize("overlap", [False, True])
def test_report_adds_up(overlap):
    trace, r = small(overlap)
    assert json.loads(json.dumps(r))["format"] == "miniengine trace 1"
    for s in r["steps"]:
        assert s["tokens"] == sum(n for _, _, n, _ in s["rows"]) <= r["budget"] and len(s["rows"]) <= s["running"]
        t = list(s["times"].values())
        assert t == sorted(t) and len(t) == 7, "schedule, pack, packed, launch, launched, ready, end"
    computed = Counter()
    for s in r["steps"]:
        for lane, cached in s["admitted"]: computed[lane] = cached
        for lane, start, n, _ in s["rows"]:
            assert start == computed[lane]
            computed[lane] += n
    assert computed == {1: 70 + 40, 2: 20 + 40, 3: 50 + 40} or overlap
    assert [x["reason"] for x in r["requests"]] == ["stop"]*3
    assert sum(len(s["preempted"]) for s in r["steps"]) == trace.scheduler.num_preemptions > 0
    usable, held = r["num_blocks"] - 1, 0
    for s in r["steps"]:  # only blocks found in the cache while nobody held them come without being allocated
        held += s["allocated"] - s["freed"]
        assert held <= usable - s["free"] <= held + 12
    assert r["steps"][-1]["hits"] <= r["steps"][-1]["queries"]


def test_the_ring_is_bounded_and_keeps_the_newest():
    trace, _ = small()
    full, e = trace.entries(), trace.engine
    few = Trace(e, most=10)
    e.add([1]*20, SamplingParams(temperature=0, max_tokens=30), "x")
    while e.has_work: e.step()
    assert len(few.ring) == 10 < few.count and few.entries()[-1]["kind"] == "done"
    assert few.entries(few.count - 3) == few.entries()[-3:] and few.entries(0, 2) == few.entries()[:2]
    assert few.report()["requests"][0]["id"] == "x" and few.report()["steps"]
    few.close(); trace.close()
    assert len(full) < len(trace.ring), "the first recorder went on under the second"


def test_off_means_absent():
    e = FakeEngine().engine
    before = {id(o): set(vars(o)) for o in (e, e.runner, e.scheduler, e.pool, e.scheduler.cache)}
    evict = e.pool.on_evict
    Trace(e).close()
    assert before == {id(o): set(vars(o)) for o in (e, e.runner, e.scheduler, e.pool, e.scheduler.cache)}
    assert e.pool.on_evict == evict


def test_the_recorder_never_asks_the_device():
    "A handle that is waited for more than once a step, or asked whether it is ready, would be a host sync of ours"
    e = FakeEngine(overlap=True).engine
    asked, run = Counter(), e.runner.run
    def spied(job):
        h = run(job)
        for name in ("wait", "ready"):
            def call(name=name, own=getattr(h, name)):
                asked[name] += 1
                return own()
            setattr(h, name, call)
        return h
    e.runner.run = spied
    trace = Trace(e)
    e.add([1]*20, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    while e.has_work: e.step()
    assert asked == {"wait": trace.steps}


# --- Chrome's trace-event format, from its published description ---

NUMBER, ID = {"type": "number", "minimum": 0}, {"type": "integer", "minimum": 0}
def event(ph, needs, **more):
    return {"if": {"properties": {"ph": {"const": ph}}}, "then": {"required": needs, "properties": more}}

EVENTS = {
    "type": "object", "required": ["traceEvents"],
    "properties": {"displayTimeUnit": {"enum": ["ms", "ns"]}, "traceEvents": {"type": "array", "minItems": 1, "items": {
        "type": "object", "required": ["name", "ph", "ts", "pid", "tid"],
        "properties": {"name": {"type": "string"}, "ph": {"enum": ["X", "i", "C", "M"]}, "ts": NUMBER, "pid": ID,
                       "tid": ID, "args": {"type": "object"}},
        "allOf": [event("X", ["dur"], dur=NUMBER), event("i", ["s"], s={"enum": ["g", "p", "t"]}),
                  event("C", ["args"], args={"minProperties": 1, "additionalProperties": {"type": "number"}}),
                  event("M", ["args"], name={"enum": ["process_name", "thread_name"]}, args={
                      "required": ["name"], "properties": {"name": {"type": "string"}}})]}}}}


def check_events(trace):
    "Valid, each track is named, and the boxes of a track follow one another"
    Draft202012Validator.check_schema(EVENTS)
    Draft202012Validator(EVENTS).validate(trace)
    events = trace["traceEvents"]
    named = {(x["pid"], x["tid"]) for x in events if x["name"] == "thread_name"}
    tracks = {}
    for x in events:
        if x["ph"] == "X": tracks.setdefault((x["pid"], x["tid"]), []).append((x["ts"], x["ts"] + x["dur"]))
    assert tracks.keys() <= named and {(1, 1), (1, 2)} <= tracks.keys()
    for boxes in tracks.values():
        boxes.sort()
        assert all(b[0] >= a[1] - .2 for a, b in zip(boxes, boxes[1:])), "boxes overlap"


@pytest.mark.parametrize("overlap", [False, True])
def test_perfetto_events_follow_the_format(overlap):
    _, r = small(overlap, step_time=.0005)
    p = json.loads(json.dumps(perfetto(r)))
    check_events(p)
    tracks = {x["args"]["name"] for x in p["traceEvents"] if x["name"] == "thread_name"}
    assert tracks == {"host", "device", "1: r0, 70 tokens", "2: r1, 20 tokens", "3: r2, 50 tokens"}
    names = Counter(x["name"].split()[0] for x in p["traceEvents"])
    assert names["decode"] > 50 and names["prefill"] >= 5 and names["preempted"] and names["stop"] == 3
    assert names["step"] == len(list(device_times(r))) == len(r["steps"]) == names["commit"]
    assert json.loads(json.dumps(perfetto(json.loads(json.dumps(r))))) == p, "a stored report gives the same"


def test_the_schema_can_say_no():
    _, r = small()
    spoils = lambda x: x.pop("ts"), lambda x: x.update(ph="?"), lambda x: x.update(dur=-1), lambda x: x.pop("dur")
    for spoil in spoils:
        p = perfetto(r)
        spoil(next(x for x in p["traceEvents"] if x["ph"] == "X"))
        assert not Draft202012Validator(EVENTS).is_valid(p)


def test_saved_files_are_whole(tmp_path):
    _, r = small()
    save(r, tmp_path/"a.json"); save(r, tmp_path/"a.json.gz"); save(r, str(tmp_path/"a.perfetto.json"))
    assert json.loads((tmp_path/"a.json").read_bytes()) == json.loads(json.dumps(r))
    assert gzip.decompress((tmp_path/"a.json.gz").read_bytes()) == (tmp_path/"a.json").read_bytes()
    check_events(json.loads((tmp_path/"a.perfetto.json").read_bytes()))
    assert len(list(tmp_path.iterdir())) == 3


# --- the server ---


async def test_without_glass_there_is_no_route_and_no_recorder():
    async with running() as (c, e):
        assert c.server.trace is None and "begin" not in vars(e.engine)
        for path in "/debug/trace", "/debug/events", "/glass": assert (await c.get(path)).status_code == 404
    async with running(ServerConfig(trace="x.json")) as (c, e):
        assert c.server.trace and (await c.get("/debug/trace")).status_code == 404, "recorded for the file only"


async def test_debug_routes_obey_the_key_and_the_page_holds_no_data():
    async with running(ServerConfig(glass=True, api_key=["k"])) as (c, e):
        for path in "/debug/trace", "/debug/events", "/debug/trace?format=perfetto":
            assert (await c.get(path)).status_code == 401
        key = {"authorization": "Bearer k"}
        assert (await c.post(CHAT, json={"messages": HI, "max_tokens": 4}, headers=key)).status_code == 200
        r = (await c.get("/debug/trace", headers=key)).json()
        assert r["requests"][0]["reason"] == "length" and len(r["steps"]) == 4
        check_events((await c.get("/debug/trace?format=perfetto", headers=key)).json())
        bad = await c.get("/debug/trace?format=xml", headers=key)
        assert bad.status_code == 400 and "json or perfetto" in bad.json()["error"]["message"]
        page = await c.get("/glass")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "://" not in page.text, "the page loads nothing from anywhere"


async def feed_of(trace, blocked, enough):
    "Messages that a reader gets which takes none while `blocked()`, until `enough(messages)`"
    got, done = [], asyncio.Event()
    async def send(m):
        if body := m.get("body"):
            while blocked(): await asyncio.sleep(.001)
            assert body.startswith(b"data: ") and body.endswith(b"\n\n")
            got.append(json.loads(body[6:]))
            if enough(got): done.set()
    async def receive():
        await done.wait()
        return {"type": "http.disconnect"}
    await asyncio.wait_for(Feed(trace, every=.005)({}, receive, send), 20)
    return got


async def test_a_slow_reader_starts_over_and_holds_nothing():
    fake = FakeEngine(num_blocks=100)
    e, stuck = fake.engine, True
    trace = Trace(e, most=50)
    async def work():
        nonlocal stuck
        for i in range(60):
            e.add([i % 3]*40, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            while e.has_work: e.step()
            await asyncio.sleep(.001)
        stuck = False
    task = asyncio.create_task(work())
    got = await feed_of(trace, lambda: stuck, lambda got: "state" in got[-1] and not stuck and len(got) > 1)
    await task
    assert got[0]["about"]["num_blocks"] == 100
    assert "about" in got[1] and len(got[1]["entries"]) <= 50 < trace.count, "what it missed isn't kept for it"
    assert set(got[-1]["state"]["cached"]) == set(e.scheduler.cache.keys)


async def test_a_feed_brings_every_entry_once_and_a_state_to_start_from():
    fake = FakeEngine(num_blocks=100)
    e = fake.engine
    trace = Trace(e)
    e.add([1]*40, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    for _ in range(200): e.step()
    async def work():
        for _ in range(50): await asyncio.sleep(.001); e.step()  # done with the last step, before the feed's next turn
    task = asyncio.create_task(work())
    def all_there(got): return task.done() and sum(len(m["entries"]) for m in got) == trace.count
    got = await feed_of(trace, lambda: False, all_there)
    assert [x for m in got for x in m["entries"]] == json.loads(json.dumps(trace.entries()))
    assert ["about" in m for m in got].count(True) == ["state" in m for m in got].count(True) == 1
    assert max(len(m["entries"]) for m in got) <= 128
    (lane, _, prompt, _, _, blocks), = next(m["state"] for m in got if "state" in m)["requests"]
    assert (lane, prompt, blocks[0]) == (1, 40, 1)
    for s in list(e.streams.values()): s.abort()


async def test_an_open_page_does_not_hold_up_the_shutdown():
    async with listening(ServerConfig(glass=True, drain=5)) as (url, e, u):
        async with httpx.AsyncClient(base_url=url) as c, c.stream("GET", "/debug/events") as r:
            lines = r.aiter_lines()
            assert (await anext(lines)).startswith('data: {"about"')
            start = time.monotonic()
            u.should_exit = True
            async for _ in lines: pass
        assert time.monotonic() - start < 8, "it would wait for the page without end"


SERVE = """
import sys; sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from miniengine.server import ServerConfig, serve
config = ServerConfig(port=0, trace={file!r}, drain=.1)
serve(lambda: FakeEngine(step_time=.002), config, lambda url, s: print(url, flush=True))
"""


def test_the_trace_file_is_whole_when_the_server_is_stopped_amid_work(tmp_path):
    file = tmp_path/"run.json.gz"
    code = SERVE.format(tests=str(TESTS), file=str(file))
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        url = p.stdout.readline().strip()
        body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body) as r:
            lines = r.iter_lines()
            for _ in range(5): next(lines)
            p.send_signal(signal.SIGTERM)
            for _ in lines: pass
        assert p.wait(20) == 0
    finally: p.kill()
    r = json.loads(gzip.decompress(file.read_bytes()))
    assert r["requests"][0]["reason"] == "abort" and len(r["steps"]) > 3
    check_events(perfetto(r))


def test_a_trace_file_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path):
    with pytest.raises(RequestError, match="trace must be in a directory"): ServerConfig(trace=f"{tmp_path}/no/x.json")
    assert ServerConfig(trace="here.json").trace and ServerConfig(trace=str(tmp_path/"x.json")).trace


# --- the page, in a browser ---

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
async def browser():
    "A headless Chromium"
    if CHROMIUM is None: pytest.skip("no chromium on the PATH")
    api = pytest.importorskip("playwright.async_api", reason="playwright isn't installed (pip install -e '.[dev]')")
    async with api.async_playwright() as p:
        b = await p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield b
        await b.close()


async def opened(browser, url, width=1280, height=900, **kw):
    "A page at `url`, whose errors are collected in `page.errors`"
    page = await browser.new_page(viewport=dict(width=width, height=height), **kw)
    page.errors = []
    page.on("console", lambda m: page.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: page.errors.append(str(e)))
    await page.goto(url)
    return page


async def until(page, condition, what=""):
    try: await page.wait_for_function(condition, timeout=30_000)
    except Exception as e: raise AssertionError(f"never: {what or condition}; errors {page.errors}") from e


def shown(id):
    "JavaScript for the number that the page shows in the element `id`"
    return f"+document.querySelector('#{id}').textContent"


async def numbers(page):
    "What the page shows"
    ids = "free live shared cached reserved".split()
    text = {i: int(await page.inner_text(f"#n-{i}")) for i in ids}
    return text | {i: int(await page.inner_text(f"#{i}")) for i in ("running", "waiting", "preemptions", "step")}


async def metrics(url):
    async with httpx.AsyncClient() as c: text = (await c.get(url + "/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:")]
    return {k.split("{")[0].removeprefix("vllm:"): float(v) for k, v in lines}


async def agree(page, url, engine):
    "Once it has drawn what it was sent, the grid's counts are those of /metrics, and of the pool, which stand still"
    m, pool = await metrics(url), engine.pool
    shared = sum(r > 1 for r in pool.refs)
    live, cached = pool.usable - pool.free, sum(pool.refs[b] == 0 for b in engine.scheduler.cache.keys)
    want = dict(free=pool.free - cached, live=live - shared, shared=shared, cached=cached, reserved=1,
                running=m["num_requests_running"], waiting=m["num_requests_waiting"],
                preemptions=m["num_preemptions_total"])
    assert live == round(m["kv_cache_usage_perc"]*pool.usable)
    for _ in range(100):
        n = await numbers(page)
        if n == want | {"step": n["step"]}: return n
        await asyncio.sleep(.1)
    raise AssertionError(f"{n} instead of {want}; errors {page.errors}")


async def test_three_prompts_seen_in_the_browser(browser, tmp_path):
    async with listening(ServerConfig(glass=True), num_blocks=60, max_num_seqs=2, step_time=.02) as (url, e, u):
        page = await opened(browser, url + "/glass")
        e.answer = lambda r: list(b"a word, ")
        await page.fill("#most", "400")
        for text in "I ask about rivers", "I ask about rivers and lakes", "I ask about the sea":
            await page.fill("#prompt", text)
            await page.click("#ask button")
        await until(page, "document.querySelectorAll('#lanes button').length == 3", "three lanes")
        await until(page, f"{shown('n-shared')} > 0 && {shown('step')} > 30")
        assert sorted(await page.locator(".answer .tag").all_inner_texts()) == ["A", "B", "C"]
        e.step_time = 600  # the engine stands still; two run and one waits
        await until(page, "log.at(-1).kind == 'step' && cursor == base + log.length")
        n = await agree(page, url, e)
        assert (n["running"], n["waiting"]) == (2, 1) and n["shared"] >= 1
        await page.hover("#lanes button >> nth=0")
        await until(page, "detail.textContent.includes('(shared)')", "the block table of A")
        table = ", ".join(f"{b} (shared)" if e.pool.refs[b] > 1 else str(b) for b in e.scheduler.running[0].blocks)
        assert f"Block table: {table}." in await page.inner_text("#detail")
        e.step_time = .02
        for handle, *_ in u.server.trace.open: handle.done_at = 0  # and goes on

        await page.click("#pause")
        assert await page.inner_text("#status") == "paused" and await page.inner_text("#pause") == "Go live"
        before = await numbers(page)
        seen = await page.evaluate("log.length")
        await until(page, f"log.length > {seen} + 20", "the log goes on while the page is paused")
        assert await numbers(page) == before

        for _ in range(5): await page.keyboard.press("ArrowLeft")
        await page.click("#back10")
        await until(page, f"{shown('step')} == {before['step'] - 15}")
        n, trace = await numbers(page), {s["step"]: s for s in u.server.trace.report()["steps"]}
        then = trace[n["step"]]
        assert (n["free"] + n["cached"], n["running"], n["waiting"]) == (then["free"], then["running"], then["waiting"])
        await page.evaluate("show(0)")
        await until(page, f"{shown('step')} == 1")
        assert (await numbers(page))["free"] + (await numbers(page))["cached"] == trace[1]["free"]
        for s in random.Random(0).sample(sorted(trace), 12):  # there and back again
            await page.evaluate(f"show({s} - 1)")
            await until(page, f"{shown('step')} == {s}")
            n = await numbers(page)
            assert (n["free"] + n["cached"], n["running"]) == (trace[s]["free"], trace[s]["running"])

        await page.evaluate("document.activeElement.blur()")  # on a button, Space presses that
        await page.keyboard.press("Space")
        await until(page, "document.querySelector('#status').textContent == 'live'")
        e.answer = lambda r: [*b"a word, ", EOS]
        await until(page, f"{shown('running')} + {shown('waiting')} == 0")
        await until(page, "cursor == base + log.length && log.at(-1).kind == 'done'")
        await agree(page, url, e)
        said = await page.locator(".answer").all_inner_texts()
        assert len(said) == 3 and all("a word, " in s for s in said)
        assert page.errors == []


async def test_preemption_failure_and_a_second_page(browser):
    small = dict(num_blocks=14, max_num_seqs=4, max_model_len=150, step_time=.003)
    async with listening(ServerConfig(glass=True), **small) as (url, e, u):
        page = await opened(browser, url + "/glass")
        async with httpx.AsyncClient(base_url=url) as c:
            body = {"max_tokens": 80, "ignore_eos": True, "temperature": 0}
            await asyncio.gather(*(c.post("/v1/completions", json=body | {"prompt": "abc"*(i + 5)}) for i in range(5)))
            assert e.scheduler.num_preemptions
            e.fail_at = e.steps + 5
            assert (await c.post("/v1/completions", json=body | {"prompt": "x"*40})).status_code == 500
            await c.post("/v1/completions", json=body | {"prompt": "y"*40})
        late = await opened(browser, url + "/glass")
        for p in page, late:
            await until(p, "synced && log.some(e => e.kind == 'clear') && log.at(-1).kind == 'done' && !dirty")
            await agree(p, url, e)
        for k in (0, 20, 40):  # what a page computes backwards from the state is what another saw happen
            got = []
            for p in page, late:
                await p.evaluate(f"show({k})")
                await until(p, f"{shown('step')} == {k + 1}")
                got.append(await numbers(p))
            assert got[0] == got[1]
        assert page.errors == late.errors == []


async def test_a_page_left_open_forgets_the_oldest_steps_only(browser):
    async with listening(ServerConfig(glass=True), num_blocks=30, max_num_seqs=4, step_time=.001) as (url, e, u):
        page = await opened(browser, url + "/glass")
        await until(page, "synced")
        await page.evaluate("KEEP = 300")
        body = {"max_tokens": 90, "ignore_eos": True, "temperature": 0}
        async with httpx.AsyncClient(base_url=url, timeout=60) as c:
            for i in range(8):
                asks = (c.post("/v1/completions", json=body | {"prompt": "abc"*(i + k)}) for k in range(1, 4))
                await asyncio.gather(*asks)
                if i == 5: await page.evaluate("show(0)")  # it falls out of what is kept while the page stands there
        await until(page, "log.at(-1).kind == 'done' && base > 300 && cursor >= base && !dirty")
        assert await page.evaluate("log.length <= KEEP && steps.every(i => i >= base) && stepOf.size == steps.length")
        trace = {s["step"]: s for s in u.server.trace.report()["steps"]}
        for k in 0, 30:
            await page.evaluate(f"show({k})")
            await until(page, "!dirty")
            n = await numbers(page)
            assert n["step"] > 300 and n["free"] + n["cached"] == trace[n["step"]]["free"]
        await page.click("#pause")
        await agree(page, url, e)
        assert page.errors == []


async def test_a_page_opened_late_knows_requests_older_than_the_ring(browser):
    async with listening(ServerConfig(glass=True), step_time=.002) as (url, e, u):
        u.server.trace.ring = deque(maxlen=100)
        streams = [e.add([i]*40, SamplingParams(max_tokens=n, ignore_eos=True)) for i, n in ((1, 400), (2, 150))]
        while streams[1].request.num_output < 100: await asyncio.sleep(0)
        e.step_time = 600  # the engine stands still
        page = await opened(browser, url + "/glass")
        await until(page, "synced && document.querySelectorAll('#lanes button').length == 2", "two lanes")
        await until(page, f"{shown('running')} == 2")
        await page.hover("#lanes button >> nth=0")
        await until(page, "detail.textContent.includes('prompt of 40 tokens')")
        assert await page.evaluate("ttft.length") == 0, "when they began isn't known"
        e.step_time = .002
        for handle, *_ in u.server.trace.open: handle.done_at = 0
        for s in streams: s.abort()
        e.add([3]*40, SamplingParams(max_tokens=3, ignore_eos=True))
        await until(page, f"log.at(-1).kind == 'done' && {shown('running')} == 0 && ttft.length == 1")
        await agree(page, url, e)
        assert page.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_shows_everything_without_overflow_and_takes_the_key(browser, scheme):
    async with listening(ServerConfig(glass=True, api_key=["secret"]), num_blocks=3000, step_time=.002) as (url, e, u):
        page = await opened(browser, url + "/glass", 360, 740, color_scheme=scheme, has_touch=True)
        await until(page, "!document.querySelector('#locked').hidden", "a box for the key")
        assert "401" in " ".join(page.errors), "the browser itself reports the refused request"
        page.errors.clear()
        await page.fill("#key", "secret")
        await page.keyboard.press("Enter")
        await until(page, "synced", "unlocked")
        await page.fill("#prompt", "a"*200)
        await page.click("#ask button")
        await until(page, "document.querySelector('.answer').textContent.length > 210", "an answer")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        everything = "[...document.querySelectorAll('main *, header *, #bar *')]"
        wide = everything + ".filter(x => x.getBoundingClientRect().right > innerWidth).map(x => x.outerHTML)"
        assert await page.evaluate(wide) == []
        assert "a cell is" in await page.inner_text("#scale"), "a large pool is drawn with several blocks to a cell"
        by_url = await opened(browser, url + "/glass#key=secret", 360, 740)
        await until(by_url, "synced")
        assert "secret" not in by_url.url and by_url.errors == page.errors == []


async def test_the_page_by_keyboard_alone(browser):
    async with listening(ServerConfig(glass=True), num_blocks=50, step_time=.002) as (url, e, u):
        page = await opened(browser, url + "/glass")
        await until(page, "synced")
        await page.focus("#prompt")
        await page.keyboard.press("Enter")
        await until(page, "log.at(-1)?.kind == 'done' && document.querySelector('#running').textContent == '0'")
        reached = []
        await page.focus("#pause")
        for _ in range(12):
            reached.append(await page.evaluate("document.activeElement.id || document.activeElement.dataset.lane"))
            await page.keyboard.press("Tab")
        assert {"pause", "back", "next", "at", "1", "prompt", "most", "pool"} <= set(reached)
        assert (await page.inner_text("#detail")).startswith("A is chatcmpl-"), "focus shows the lane's details"
        await page.focus("#pool")
        for key in ("ArrowRight", "ArrowRight"): await page.keyboard.press(key)
        assert (await page.inner_text("#block")).startswith("Block 2: ")
        assert await page.inner_text("#status") == "live", "arrows in the grid don't step"
        label = await page.get_attribute("#pool", "aria-label")
        assert "49 free" in label or "cached" in label
        assert page.errors == []
