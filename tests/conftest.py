"""Markers: `cuda` tests are skipped where there is no GPU, `slow` ones unless asked for with --slow."""
import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    marked = [i for i in items if i.get_closest_marker("cuda")]
    if marked:
        import torch
        if not torch.cuda.is_available():
            for i in marked: i.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if not config.getoption("--slow"):
        for i in items:
            if i.get_closest_marker("slow"): i.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def demo_url():
    "A server in a thread with the real demo model, one for all tests; at the end nothing may be left of any request"
    import asyncio
    import threading

    import uvicorn

    from miniengine.config import EngineConfig
    from miniengine.engine import AsyncEngine, Engine
    from miniengine.server import Server, Uvicorn
    server = Server(AsyncEngine(Engine(EngineConfig(max_num_seqs=16, max_model_len=1024), progress=False)))
    up = threading.Event()
    u = Uvicorn(uvicorn.Config(server.app(), port=0, log_level="error", lifespan="off"), server, up.set)
    thread = threading.Thread(target=lambda: asyncio.run(u._serve()), daemon=True)
    thread.start()
    assert up.wait(60)
    yield f"http://127.0.0.1:{u.servers[0].sockets[0].getsockname()[1]}"
    u.should_exit = True
    thread.join(30)
    s = server.engine.scheduler
    assert not thread.is_alive() and not s.has_work and s.pool.free == s.pool.usable
