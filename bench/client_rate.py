#!/usr/bin/env python3
"""How many stream events a second can a benchmark client take on one core?

    python bench/client_rate.py                                    # ours
    python bench/client_rate.py --vllm vllm --tokenizer DIR        # and vLLM's

A trivial server (asyncio, pre-built bytes, no HTTP framework) runs in a process of its own and sends every open stream
one event per tick, in a chunk of its own. The client runs in another. Its CPU time between the first request and the
last event, as the system counts it, divided by the events, says what one core carries. With `--rate 0` the server sends
as fast as the sockets take it; then several events come in one read, cheaper for the client.
"""
import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(obj) -> bytes:
    data = b"data: " + (obj if isinstance(obj, bytes) else json.dumps(obj, separators=(",", ":")).encode()) + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(finish=None) -> bytes:
    "An event as vLLM sends it: 205 bytes"
    choice = dict(index=0, text=" harbour", logprobs=None, finish_reason=finish, stop_reason=None,
                  prompt_token_ids=None, token_ids=None)
    return chunk(dict(id="cmpl-0123456789abcdef", object="text_completion", created=1700000000, model="fake",
                      choices=[choice]))


class Server(asyncio.Protocol):
    "Streams `tokens` events to every POST, one per tick of the common clock"
    streams, tokens, requests, begun, ended = set(), 1, 1, 0, 0

    def connection_made(self, transport): self.transport, self.data = transport, b""

    def data_received(self, data):
        self.data += data
        head, sep, body = self.data.partition(b"\r\n\r\n")
        if not sep: return
        length = next((int(s[15:]) for s in head.lower().split(b"\r\n") if s.startswith(b"content-length:")), 0)
        if len(body) < length: return
        self.data = b""
        if not head.startswith(b"POST /v1/completions"):
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        if not Server.begun: print("first", flush=True)
        Server.begun += 1
        self.transport.write(HEAD)
        self.left = self.tokens
        self.streams.add(self)

    def connection_lost(self, error): self.streams.discard(self)

    def tick(self):
        self.left -= 1
        self.transport.write(MIDDLE if self.left else LAST)
        if self.left: return
        self.streams.discard(self)
        Server.ended += 1
        if Server.ended == Server.requests: print("last", flush=True)


USAGE = dict(prompt_tokens=7, total_tokens=8, completion_tokens=1)
MIDDLE, LAST = event(), b""


async def serve(port: int, tokens: int, tick: float, requests: int):
    global LAST
    Server.tokens, Server.requests = tokens, requests
    usage = dict(USAGE, completion_tokens=tokens)
    LAST = event("length") + chunk(dict(id="cmpl-0", choices=[], usage=usage)) + chunk(b"[DONE]") + b"0\r\n\r\n"
    await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    while True:                            # one pass over the streams takes `tick` seconds, spread evenly
        begin, batch = time.perf_counter(), list(Server.streams)
        step = max(1, len(batch) // 16)
        for i in range(0, len(batch), step):
            for s in batch[i:i + step]: s.tick()
            late = begin + tick * min(1, (i + step) / len(batch)) - time.perf_counter()
            await asyncio.sleep(max(late, 0))
        if not batch: await asyncio.sleep(.001)


def cpu_seconds(pid: int) -> float:
    "CPU time of a process so far, all threads"
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(client: list[str], streams: int, tokens: int, tick: float, port: int, tokenizer: str) -> dict:
    "Run the server and one client, twice as many requests as streams; rates, CPU time and reported latencies"
    requests, (tmp, name) = 2 * streams, (tempfile.mkdtemp(), "run.json")
    options = ["--serve", port, "--tokens", tokens, "--tick", tick, "--requests", requests]
    me = [sys.executable, HERE/"client_rate.py", *map(str, options)]
    server = subprocess.Popen(me, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "ready\n"
        options = ["--port", port, "--model", "fake", "--tokenizer", tokenizer, "--num-prompts", requests,
                   "--random-input-len", 8, "--random-output-len", tokens, "--max-concurrency", streams,
                   "--disable-tqdm", "--temperature", 0, "--save-result", "--result-dir", tmp, "--result-filename",
                   name]
        with subprocess.Popen([*client, *map(str, options)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as p:
            server.stdout.readline()
            before = cpu_seconds(p.pid)
            server.stdout.readline()
            cpu = cpu_seconds(p.pid) - before
    finally:
        server.terminate()
        server.wait()
    d, events = json.loads((Path(tmp)/name).read_text()), requests * tokens
    assert d["total_output_tokens"] == events, d
    return dict(streams=streams, events=events, seconds=round(d["duration"], 2), client_cpu_s=round(cpu, 2),
                events_per_s=round(events / d["duration"]), events_per_cpu_s=round(events / cpu),
                cpu_us_per_event=round(cpu / events * 1e6, 1), tick_ms=tick * 1e3,
                mean_itl_ms=round(d["mean_itl_ms"], 2), p99_itl_ms=round(d["p99_itl_ms"], 2))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--ours", default=f"{sys.executable} {HERE/'bench_serve.py'}", help="command that runs our client")
    p.add_argument("--vllm", help="command that runs vLLM's CLI, to measure its client, too")
    p.add_argument("--repeat", type=int, default=3, help="runs of which the median is taken; the clients take turns")
    p.add_argument("--tokenizer", default="smollm2")
    p.add_argument("--streams", type=int, nargs="*", default=[64, 256, 1024])
    p.add_argument("--rate", type=float, default=20000, help="events a second offered, over all streams; 0 = no limit")
    p.add_argument("--seconds", type=float, default=10, help="about how long each measurement lasts")
    p.add_argument("--port", type=int, default=8390)
    p.add_argument("--json")
    p.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    p.add_argument("--tokens", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--requests", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--tick", type=float, default=0, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve:
        try: import uvloop
        except ImportError: uvloop = asyncio
        return uvloop.run(serve(a.serve, a.tokens, a.tick, a.requests))
    clients = {"ours": shlex.split(a.ours)} | ({"vllm": shlex.split(a.vllm) + ["bench", "serve"]} if a.vllm else {})
    rows, port = [], a.port
    for streams in a.streams:
        tokens = int((a.rate or 20000) * a.seconds / streams / 2)
        tick, runs = streams / a.rate if a.rate else 0, []
        for _ in range(a.repeat):
            for name, command in clients.items():
                for _ in range(9):                       # again, if other work on the machine held it up
                    port += 1
                    d = dict(client=name) | measure(command, streams, tokens, tick, port, a.tokenizer)
                    print(json.dumps(d), flush=True)
                    if d["mean_itl_ms"] <= 1.1 * tick * 1e3 or not tick: break
                runs.append(d)
        for name in clients:
            mine = sorted((r for r in runs if r["client"] == name), key=lambda r: r["cpu_us_per_event"])
            rows.append(mine[len(mine) // 2] | dict(runs_us_per_event=[r["cpu_us_per_event"] for r in mine]))
    if a.json: Path(a.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__": main()
