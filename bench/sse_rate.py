#!/usr/bin/env python3
"""What a streamed token costs the host: CPU time per event of a server whose model costs nothing.

    python bench/sse_rate.py --streams 250 1000 --tokens 300

The server runs in a process of its own: uvicorn, uvloop and httptools as `miniengine serve` sets them up, with the
real engine, scheduler, cache
and detokenizer, on a runner that only makes up tokens (tests/fake_engine.py). This process opens N connections over
loopback and counts events. CPU time is the server process's, from the moment all streams run to the moment the first
ends, so that connecting and parsing requests isn't in it. `engine alone` is the same engine in this process with
readers instead of a server: the difference is what HTTP costs.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
TICKS = os.sysconf("SC_CLK_TCK")
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True, "temperature": 0}


def make_engine(streams, tokens):
    from fake_engine import FakeEngine

    class Together(FakeEngine):
        "Begins when all streams are there"

        async def _loop(self):
            while len(self.streams) < streams:
                await asyncio.sleep(0.01)
            await super()._loop()

    e = Together(max_num_seqs=streams, num_blocks=streams * (tokens // 16 + 4), max_model_len=tokens + 64)
    e.answer = lambda r: b"token "
    return e


def server(streams, tokens, port):
    import uvicorn

    from miniengine.server import Server, Uvicorn, finished_log

    finished_log.disabled = True
    s = Server(make_engine(streams, tokens))
    u = Uvicorn(uvicorn.Config(s.app(), port=0, access_log=False, log_level="warning", lifespan="off", backlog=4096), s)
    u.ready = lambda: port.send(u.servers[0].sockets[0].getsockname()[1])
    u.run()


def cpu(pid):
    "User and system time of a process, in seconds"
    f = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(f[11]) / TICKS, int(f[12]) / TICKS


class Client(asyncio.Protocol):
    "Sends one request and counts the events that come back"

    def __init__(self, request, m):
        self.request, self.m, self.rest, self.events = request, m, b"", 0

    def connection_made(self, transport):
        transport.write(self.request)

    def data_received(self, data):
        n = (self.rest + data).count(b"data: {")
        self.rest = data[-6:]
        self.m.started += not self.events and n > 0
        self.events += n
        self.m.events += n
        self.m.ended += b"data: [DONE]" in data
        if self.m.started == self.m.streams and len(self.m.marks) == 0 or self.m.ended and len(self.m.marks) == 1:
            self.m.mark()


class Measure:
    def __init__(self, pid, streams):
        self.pid, self.streams, self.started, self.events, self.ended, self.marks = pid, streams, 0, 0, 0, []

    def mark(self):
        self.marks.append((self.events, cpu(self.pid), perf_counter(), process_time()))


async def drive(port, pid, streams, tokens):
    body = json.dumps(BODY | {"max_tokens": tokens}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    m, loop = Measure(pid, streams), asyncio.get_running_loop()
    for _ in range(streams):
        await loop.create_connection(lambda: Client(head.encode() + body, m), "127.0.0.1", port)
    while m.ended < streams:
        await asyncio.sleep(0.05)
    (n0, c0, t0, p0), (n1, c1, t1, p1) = m.marks
    n = n1 - n0
    return dict(
        user_us=1e6 * (c1[0] - c0[0]) / n,
        kernel_us=1e6 * (c1[1] - c0[1]) / n,
        client_us=1e6 * (p1 - p0) / n,
        events_per_s=n / (t1 - t0),
        events_per_token=m.events / streams / tokens,
    )


async def alone(streams, tokens):
    "CPU seconds per token of the engine and its readers, without a server"
    from miniengine.config import SamplingParams

    engine = make_engine(streams, tokens)
    await engine.start()

    async def read(s):
        async for _ in s:
            pass

    readers = [
        asyncio.create_task(read(engine.add([1] * 20, SamplingParams(max_tokens=tokens, ignore_eos=True))))
        for _ in range(streams)
    ]
    await asyncio.sleep(0)
    start = process_time()
    await asyncio.gather(*readers)
    used = process_time() - start
    await engine.stop()
    return used / streams / tokens


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--streams", type=int, nargs="+", default=[250, 1000])
    p.add_argument("--tokens", type=int, default=300)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--json", help="write the results here")
    a = p.parse_args()
    out, spawn = [], mp.get_context("spawn")
    for n in a.streams:
        for _ in range(a.repeat):
            mine, theirs = spawn.Pipe()
            child = spawn.Process(target=server, args=(n, a.tokens, theirs))
            child.start()
            try:
                r = uvloop.run(drive(mine.recv(), child.pid, n, a.tokens))
            finally:
                child.terminate()
                child.join()
            r = dict(streams=n, tokens=a.tokens, **r, engine_alone_us=1e6 * uvloop.run(alone(n, a.tokens)))
            out.append(r)
            print(
                f"{n:5} streams: {r['user_us'] + r['kernel_us']:5.1f} µs of server CPU per event "
                f"({r['user_us']:.1f} user, {r['kernel_us']:.1f} kernel; engine alone {r['engine_alone_us']:.1f}), "
                f"client {r['client_us']:.1f}, {r['events_per_s']:,.0f} events/s, "
                f"{r['events_per_token']:.3f} events per token",
                flush=True,
            )
        mid = median(r["user_us"] + r["kernel_us"] for r in out if r["streams"] == n)
        print(f"{n:5} streams: median {mid:.1f} µs per event, {1e6 / mid:,.0f} events/s and core")
    if a.json:
        from importlib.metadata import version

        cpu_name = next(x.split(": ")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name"))
        env = {k: version(k) for k in ("uvicorn", "uvloop", "httptools", "fastapi", "orjson")}
        env |= dict(cpu=cpu_name, cores=os.cpu_count(), python=sys.version.split()[0], load=os.getloadavg()[0])
        Path(a.json).parent.mkdir(parents=True, exist_ok=True)
        Path(a.json).write_text(json.dumps(dict(env=env, command=" ".join(sys.argv), runs=out), indent=1) + "\n")


if __name__ == "__main__":
    main()
