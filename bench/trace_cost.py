"""What the step trace costs: step times with the recorder off, on, and on with three readers of its event stream.

    python bench/trace_cost.py [MODEL] [--load-format dummy] [--rows 16 64] [--steps 40] [--rounds 9] [--out FILE]

One running engine, in the loop that `miniengine serve` runs, decodes a batch of long answers with `--rows` requests.
The recorder is put on and taken off in turns within that one run, and each turn's steps are timed from commit to
commit. A ratio is the median over all rounds of a round's own ratio; beside it stands what two neighbouring turns
without a recorder differ by, which is what the machine's noise alone does. The readers are one process with three
connections that read and throw away what the server sends, as pages would. `trace us` is the CPU time
that the recorder itself takes of a step: the same calls on the same batch with and without it, with the device left
out; `reader us` is what one reader's share of the stream takes.
"""
import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import uvicorn
from orjson import dumps

sys.path.insert(0, str(Path(__file__).resolve().parent))
from servers import environment  # noqa: E402

from miniengine.config import EngineConfig, SamplingParams, ServerConfig  # noqa: E402
from miniengine.engine import AsyncEngine, Engine  # noqa: E402
from miniengine.glass import Trace  # noqa: E402
from miniengine.server import Server  # noqa: E402

READER = """import select, socket, sys
socks = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3)]
for s in socks: s.sendall(b"GET /debug/events HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
first = set()
while len(first) < 3 or select.select([sys.stdin], [], [], 0)[0] == []:
    for s in select.select(socks, [], [], 0.5)[0]:
        if not s.recv(1 << 20): sys.exit()
        if s not in first:
            first.add(s)
            if len(first) == 3: print("reading", flush=True)
"""


async def turn(engine, steps):
    "Seconds of `steps` steps, from commit to commit"
    times, done = [], asyncio.Event()
    def see(batch, now):
        times.append(now)
        if len(times) > steps: done.set()
    engine.observers.append(see)
    await done.wait()
    engine.observers.remove(see)
    return [b - a for a, b in zip(times, times[1:])][:steps]


async def with_readers(port, wait):
    "Run `wait` while three connections read the event stream"
    p = await asyncio.create_subprocess_exec(sys.executable, "-c", READER, str(port), stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE)
    try:
        assert await p.stdout.readline() == b"reading\n", "the readers got nothing"
        await asyncio.sleep(0.5)  # they have caught up with the ring
        return await wait
    finally:
        p.stdin.close()
        await p.wait()


async def measure(engine, server, port, rows, a):
    "Step times in seconds: {'off': [...], 'on': [...], 'on, 3 readers': [...]}, lists of turns"
    rng, vocab = random.Random(rows), min(engine.model_config.vocab_size, engine.tokenizer.vocab_size)
    turns = {"off": [], "on": [], "on, 3 readers": []}
    room = engine.max_model_len - a.context - 1
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    def fill():
        streams = [engine.add([rng.randrange(vocab) for _ in range(a.context)], params) for _ in range(rows)]
        async def read(s):
            async for _ in s: pass
        for s in streams: readers[s] = asyncio.create_task(read(s))
    async def settled():
        while engine.scheduler.waiting or any(r.num_output < 3 for r in engine.scheduler.running):
            await asyncio.sleep(0.01)
    readers, used = {}, room
    for i in range(a.rounds):
        for kind in list(turns)[::1 if i % 2 else -1]:
            if used + 3*a.steps + 200 > room:  # the answers would end within the turn: begin new ones
                for s in readers: s.abort()
                readers.clear()
                fill()
                await settled()
                used = 3
            trace = None if kind == "off" else Trace(engine)
            server.trace = trace
            await turn(engine, 3)
            work = turn(engine, a.steps)
            turns[kind].append(await (with_readers(port, work) if "readers" in kind else work))
            used = max(r.num_output for r in engine.scheduler.running)
            if trace: trace.close()
    for s in readers: s.abort()
    while engine.scheduler.has_work: await asyncio.sleep(0.01)
    return turns


class Instant:
    "A handle whose tokens are there"
    def __init__(self, batch): self.batch, self.n = batch, sum(r.sample for r in batch.rows)
    def ready(self): return True
    def wait(self): return [504]*self.n
    def logprobs(self): return None


def own_time(e, rows, steps=5):
    """CPU microseconds of the engine's thread for schedule, pack and commit of `rows` decodes without a device, what
    the recorder adds to them, and what naming and packing a step's entries for one reader takes; a turn counts with
    its median, and the least disturbed turn is taken"""
    rounds = max(10, min(60, 2560//rows))
    run, overlap, e.overlap = e.runner.run, e.overlap, False
    e.runner.run = lambda job: Instant(job[0])
    p = SamplingParams(temperature=0, max_tokens=rounds*steps*2 + 20, ignore_eos=True)
    streams = [e.add([1, 2, 3], p) for _ in range(rows)]
    while e.scheduler.waiting: e.step()
    found, sent = {False: [], True: []}, []
    for i in range(2*rounds):
        trace = Trace(e) if i % 2 else None
        times = []
        for _ in range(steps):
            t = time.thread_time()
            e.step()
            times.append(time.thread_time() - t)
        found[bool(trace)].append(statistics.median(times))
        if trace:
            t = time.thread_time()
            dumps({"entries": trace.entries(trace.count - 2*steps)})
            sent.append((time.thread_time() - t)/steps)
            trace.close()
    assert len(e.scheduler.running) == rows, "the KV cache has no room for so many: raise --kv-cache-memory"
    for s in streams: s.abort()
    del e.runner.run
    e.overlap = overlap
    assert e.runner.run == run
    off, on, reader = (1e6*min(times) for times in (found[False], found[True], sent))
    return dict(host_us=off, trace_us=on - off, reader_us=reader)


def summary(turns):
    "Medians in ms, and the median over all rounds of a round's ratio to `off`"
    mid = {k: [statistics.median(turn) for turn in v] for k, v in turns.items()}
    ratio = {k: statistics.median(b/a for a, b in zip(mid["off"], v)) for k, v in mid.items() if k != "off"}
    noise = statistics.median([max(a, b)/min(a, b) for a, b in zip(mid["off"], mid["off"][1:])] or [1])
    return dict(step_ms={k: 1e3*statistics.median(v) for k, v in mid.items()}, ratio=ratio, noise=noise,
                steps={k: sum(map(len, v)) for k, v in turns.items()},
                turns_ms={k: [1e3*t for t in v] for k, v in mid.items()})


async def main(a):
    longest = a.context + a.steps*6 + 1000
    config = EngineConfig(model=a.model, load_format=a.load_format, max_num_seqs=max(a.rows), max_model_len=longest,
                          kv_cache_memory=a.kv_cache_memory)
    e = Engine(config, progress=False)
    engine = AsyncEngine(e)
    out = dict(what=__doc__.splitlines()[0], command="python bench/trace_cost.py " + " ".join(sys.argv[1:]),
               model=str(Path(a.model).name), device=str(e.device), dtype=str(e.dtype)[6:], overlap=e.overlap,
               context=a.context, environment=environment(), runs=[])
    for rows in a.rows: out["runs"].append(dict(rows=rows, **own_time(e, rows)))
    await engine.start()
    server = Server(engine, ServerConfig(glass=True))
    server.trace.close()
    u = uvicorn.Server(uvicorn.Config(server.app(), port=0, log_level="warning", lifespan="off"))
    u.install_signal_handlers = lambda: None
    task = asyncio.create_task(u.serve())
    while not u.started: await asyncio.sleep(0.01)
    port = u.servers[0].sockets[0].getsockname()[1]
    for run in out["runs"]:
        run |= summary(await measure(engine, server, port, run["rows"], a))
        ms, r = run["step_ms"], run["ratio"]
        print(f"{run['rows']:4} rows: step {ms['off']:.3f} ms without, with {r['on']:.4f} times that, "
              f"with 3 readers {r['on, 3 readers']:.4f} (noise {run['noise']:.4f}); the recorder itself takes "
              f"{run['trace_us']:.1f} us beside the host's {run['host_us']:.0f} us, {run['trace_us']/ms['off']/10:.2f} "
              f"% of the step, and a reader {run['reader_us']:.1f} us", flush=True)
    u.should_exit = True
    await task
    await engine.stop()
    if a.out: Path(a.out).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", nargs="?", default="smollm2")
    ap.add_argument("--load-format", default="auto")
    ap.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    ap.add_argument("--context", type=int, default=64, help="prompt tokens")
    ap.add_argument("--steps", type=int, default=40, help="steps in a turn")
    ap.add_argument("--rounds", type=int, default=9, help="turns of each kind")
    ap.add_argument("--kv-cache-memory")
    ap.add_argument("--out")
    asyncio.run(main(ap.parse_args()))
