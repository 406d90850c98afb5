#!/usr/bin/env python3
"""What a streamed token costs the server: CPU time per event, with an engine that makes tokens from nothing.

    python bench/sse_rate.py --streams 250 1000 --tokens 200

The server runs in a process of its own (uvicorn, uvloop, httptools, as `miniengine serve` sets them up), with an engine whose step gives one token to each of N
streams and returns. This process opens N connections over loopback and counts events. CPU time is the server process's, from the moment all
streams run to the moment the first ends, so that accepting and parsing requests isn't in it. `engine alone` is the same engine with readers
in its own process and no HTTP: the difference is the server's part.
"""
import argparse
import asyncio
import json
import multiprocessing as mp
import os
import sys
from pathlib import Path
from time import perf_counter, process_time

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent/"tests"))
from fake_engine import Delta, FakeEngine

TICKS = os.sysconf("SC_CLK_TCK")
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}


class Quick:
    "A stream whose tokens come from `Ticker`"
    def __init__(self, request): self.request, self.queue, self.waiter = request, [], None

    def abort(self): self.request.finish_reason = self.request.finish_reason or "abort"
    def __aiter__(self): return self

    def push(self, delta):
        self.queue.append(delta)
        if (w := self.waiter) is not None and not w.done(): w.set_result(None)

    async def __anext__(self):
        if not self.queue:
            if self.request.finish_reason: raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
            if not self.queue: raise StopAsyncIteration
        return self.queue.pop()


class Ticker(FakeEngine):
    "Gives every stream a token per step, once `expect` streams are there"
    def __init__(self, expect): super().__init__(max_num_seqs=expect, num_blocks=100*expect, max_model_len=10**6); self.expect, self.live = expect, []

    def add(self, prompt_ids, params, request_id=None, salt=0):
        from miniengine.scheduler import Request
        r = Request("x", prompt_ids, params, {}, salt)
        r.max_total, r.first_scheduled = r.num_prompt + params.max_tokens, perf_counter()
        self.live.append(s := Quick(r))
        self.wake.set()
        return s

    async def run(self):
        while True:
            self.wake.clear()
            if len(self.live) < self.expect: await self.wake.wait()
            else:
                await asyncio.sleep(0.2)
                while self.live:
                    for s in self.live:
                        r = s.request
                        r.tokens.append(7)
                        r.first_token_at = r.first_token_at or perf_counter()
                        if len(r.tokens) == r.max_total: r.finish_reason, r.finished_at = "length", perf_counter()
                        s.push(Delta(" token", [7], None, r.finish_reason, None))
                    self.live = [s for s in self.live if not s.request.finish_reason]
                    await asyncio.sleep(0)


def server(streams, port):
    import uvicorn

    from miniengine.server import Server, ServerConfig, Uvicorn, finished_log
    finished_log.disabled = True
    s = Server(Ticker(streams), ServerConfig())
    u = Uvicorn(uvicorn.Config(s.app(), port=0, access_log=False, log_level="warning", lifespan="off", backlog=4096), s)
    u.ready = lambda: port.send(u.servers[0].sockets[0].getsockname()[1])
    u.run()


def cpu(pid):
    "User and system time of a process, in seconds"
    f = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(f[11])/TICKS, int(f[12])/TICKS


class Client(asyncio.Protocol):
    "Sends one request and counts the events that come back"
    def __init__(self, request, shared): self.request, self.shared, self.rest = request, shared, b""
    def connection_made(self, transport): transport.write(self.request)

    def data_received(self, data):
        data = self.rest + data
        n = data.count(b"data: {")
        self.rest = data[-6:] if b"data: {"[:1] in data[-6:] and n == 0 else b""
        self.shared.events += n
        if b"[DONE]" in data[-40:]: self.shared.ended += 1
        self.shared.look()


class Measure:
    def __init__(self, pid, streams, tokens):
        self.pid, self.low, self.high = pid, streams*tokens//10, streams*(tokens - 2)
        self.events = self.ended = 0
        self.marks = []

    def look(self):
        if len(self.marks) == 0 and self.events >= self.low or len(self.marks) == 1 and self.events >= self.high:
            self.marks.append((self.events, cpu(self.pid), perf_counter(), process_time()))


async def drive(port, pid, streams, tokens):
    body = json.dumps(BODY | {"max_tokens": tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    m, loop = Measure(pid, streams, tokens), asyncio.get_running_loop()
    for _ in range(streams): await loop.create_connection(lambda: Client(head.encode() + body, m), "127.0.0.1", port)
    while m.ended < streams: await asyncio.sleep(0.05)
    assert m.events == streams*tokens, f"{m.events} events for {streams*tokens} tokens"
    (n0, c0, t0, p0), (n1, c1, t1, p1) = m.marks
    n = n1 - n0
    return dict(user_us=1e6*(c1[0] - c0[0])/n, system_us=1e6*(c1[1] - c0[1])/n, client_us=1e6*(p1 - p0)/n, events_per_s=n/(t1 - t0))


async def alone(streams, tokens):
    "CPU per token of the engine and its readers, without a server"
    from miniengine.config import SamplingParams
    engine = Ticker(streams)
    await engine.start()

    async def read(s):
        async for _ in s: pass
    readers = [asyncio.create_task(read(engine.add([1], SamplingParams(max_tokens=tokens)))) for _ in range(streams)]
    await asyncio.sleep(0.1)
    start = process_time()
    await asyncio.gather(*readers)
    await engine.stop()
    return (process_time() - start)/streams/tokens


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--streams", type=int, nargs="+", default=[250, 1000])
    p.add_argument("--tokens", type=int, default=200)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--json", help="write the results here")
    a = p.parse_args()
    out = []
    for n in a.streams:
        for _ in range(a.repeat):
            mine, theirs = mp.get_context("spawn").Pipe()
            child = mp.get_context("spawn").Process(target=server, args=(n, theirs))
            child.start()
            try: r = uvloop.run(drive(mine.recv(), child.pid, n, a.tokens))
            finally: child.terminate(); child.join()
            r = dict(streams=n, tokens=a.tokens, **r, engine_alone_us=1e6*uvloop.run(alone(n, a.tokens)))
            out.append(r)
            print(f"{n:5} streams: {r['user_us'] + r['system_us']:5.1f} µs of server CPU per event ({r['user_us']:.1f} user, {r['system_us']:.1f} kernel; "
                  f"engine alone {r['engine_alone_us']:.1f}), client {r['client_us']:.1f}, {r['events_per_s']:,.0f} events/s", flush=True)
    if a.json: Path(a.json).write_text(json.dumps(out, indent=1))


if __name__ == "__main__": main()
