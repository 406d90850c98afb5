"""200 streams at once over real sockets, and between them clients that leave, give up, read slowly or talk nonsense.

Ten rounds on one server, in this process so that its tasks, objects and memory can be counted. The clients are bare
sockets: they cost little, and they can misbehave. The fake model says each prompt backwards, so every client knows what
it has to get.
"""
import asyncio
import gc
import json
import random
import resource
import socket
import sys
from pathlib import Path

from test_server import CHAT, TEXT, listening

from miniengine.server import ServerConfig

ROUNDS, STREAMS = 10, 200
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
BAD = [b"{", b"[]", b'{"prompt": ""}', b'{"prompt": "a", "n": 0}', b'{"prompt": [-1]}', b'{"prompt": "\\ud800"}',
       b'{"prompt": "a", "max_tokens": 100000}', b'{"prompt": "a", "suffix": "x"}', b"\xff", b'{"messages": 5}']


async def connect(url, path, body, read_buffer=None):
    "A connection that has sent its request: (reader, writer)"
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    if read_buffer: sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
                 b"content-length: %d\r\n\r\n%s" % (path.encode(), len(content), content))
    return reader, writer


async def finish(reader, writer, pause=0.0, piece=1 << 16):
    "(status, what came), read to the end in pieces with pauses in between"
    got = []
    while data := await reader.read(piece):
        got.append(data)
        if pause: await asyncio.sleep(pause)
    writer.close()
    await writer.wait_closed()
    data = b"".join(got)
    return int(data[9:12]), data


def events(data):
    "The events of a stream, which must be whole"
    lines = [x[6:] for x in data.split(b"\n") if x.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]" and data.endswith(b"0\r\n\r\n")
    return [json.loads(x) for x in lines[:-1]]


async def streams(url, i, rng):
    "A stream that behaves: it gets exactly its tokens, and just one event for each"
    text, chat = f"request number {i}: " + "x" * rng.randrange(40), i % 4 == 0
    ask = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    status, data = await finish(*await connect(url, CHAT if chat else TEXT, ask | USAGE | {"max_tokens": 99}))
    *evs, last = events(data)
    want = ("[user]" + text + "\n[assistant]" if chat else text)[::-1]
    said = "".join(c["delta"]["content"] if chat else c["text"] for e in evs for c in e["choices"])
    assert status == 200 and said == want[:99]
    assert last["usage"]["completion_tokens"] == min(len(want) + 1, 99) >= len(evs)


async def reads_slowly(url, i, rng):
    "A stream of 250 kB, read through a small window in small pieces: nothing is lost"
    body = {"prompt": f"{i}", "ignore_eos": True, "max_tokens": 1000} | USAGE
    status, data = await finish(*await connect(url, TEXT, body, 4096), 0.001, 2048)
    *evs, last = events(data)
    n, word = 1000, f"{i}"[::-1]
    want = (word * n)[: n - n // (len(word) + 1)]  # the end token says nothing
    said = "".join(c["text"] for e in evs for c in e["choices"])
    assert said == want and last["usage"]["completion_tokens"] == n


async def leaves(url, i, rng):
    "A stream that is closed after some bytes, or before its first"
    body = {"prompt": f"{i}", "ignore_eos": True, "max_tokens": 400} | USAGE
    reader, writer = await connect(url, TEXT, body)
    for _ in range(rng.randrange(4)): await reader.read(300)
    if i % 2: writer.transport.abort()  # a reset rather than a proper end
    writer.close()


async def gives_up(url, i, rng):
    "A client that waits for the whole answer, perhaps in the queue, and loses patience"
    reader, writer = await connect(url, TEXT, {"prompt": f"{i}", "ignore_eos": True, "max_tokens": 400, "n": 1 + i % 3})
    try: await asyncio.wait_for(reader.read(1), rng.random())
    except TimeoutError: pass
    writer.close()


async def talks_nonsense(url, i, rng):
    "A bad body, which is a 400 with OpenAI's error"
    status, data = await finish(*await connect(url, TEXT, rng.choice(BAD)))
    error = json.loads(data[data.index(b"\r\n\r\n") + 4:])["error"]
    assert status == 400 == error["code"]


def resident():
    "Memory of this process in bytes"
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1])*resource.getpagesize() if pages.exists() else 0


async def test_ten_rounds_of_200_streams_with_faults_in_between():
    rng, blocks, memory, most = random.Random(0), [], [], 0
    config, preempted = ServerConfig(log_requests=False), 0
    async with listening(config, max_num_seqs=256, num_blocks=500, max_model_len=1200) as (url, e, u):
        tasks = asyncio.all_tasks()
        for r in range(ROUNDS):
            kinds = [streams]*STREAMS + [reads_slowly]*6 + [leaves]*30 + [gives_up]*30 + [talks_nonsense]*30
            rng.shuffle(kinds)
            e.engine.overlap, e.step_time = r % 4 < 2, 0.1  # slow until all are there
            jobs = [asyncio.create_task(kind(url, i, rng)) for i, kind in enumerate(kinds)]
            while not all(j.done() for j in jobs):
                await asyncio.sleep(0.005)
                if len(e.streams) >= STREAMS: e.step_time = (0.0, 0.002)[r % 2]
                most = max(most, len(e.scheduler.running))
            for j in jobs: j.result()
            async with asyncio.timeout(5):  # what was aborted is gone, what is closed has no task
                while e.scheduler.has_work or e.streams or asyncio.all_tasks() != tasks: await asyncio.sleep(0.01)
            assert e.scheduler.pool.free == e.scheduler.pool.usable, "all blocks are free"
            e.scheduler.pool.check([])
            e.runner.said.clear()  # the fake model's own memory, and the cache, which keeps what it can
            e.scheduler.cache.clear()
            del jobs
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            memory.append(resident())
        preempted = e.scheduler.num_preemptions
    assert most >= STREAMS and preempted > 0, f"{most} at once, {preempted} preemptions"
    counts = u.server.metrics.counts
    assert counts["error"] == 0 and counts["stop"] == ROUNDS*STREAMS
    assert counts["length"] >= ROUNDS*6 and counts["abort"] > 100
    requests = (ROUNDS - 3)*(STREAMS + 96)  # after the first three rounds, in which pools and caches fill
    assert blocks[-1] - blocks[2] < requests/2, f"pieces of Python memory after each round: {blocks}"
    assert memory[-1] - memory[2] < 16 << 20, f"bytes after each round: {memory}"
