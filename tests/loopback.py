"A real uvicorn on loopback, in a thread of its own"
import asyncio
import threading
from contextlib import contextmanager

import uvicorn

from miniengine.server import Uvicorn


@contextmanager
def serving(server, wait=60):
    "Run `server` (a `miniengine.server.Server`): its URL. At the end nothing may be left of any request"
    up = threading.Event()
    u = Uvicorn(uvicorn.Config(server.app(), port=0, log_level="error", lifespan="off"), server, up.set)
    thread = threading.Thread(target=lambda: asyncio.run(u._serve()), daemon=True)
    thread.start()
    assert up.wait(wait)
    yield f"http://127.0.0.1:{u.servers[0].sockets[0].getsockname()[1]}"
    u.should_exit = True
    thread.join(30)
    s = server.engine.scheduler
    assert not thread.is_alive() and not s.has_work and s.pool.free == s.pool.usable
