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
    from loopback import serving

    from miniengine.config import EngineConfig
    from miniengine.engine import AsyncEngine
    from miniengine.server import Server
    config = EngineConfig(max_num_seqs=16, max_model_len=1024)
    with serving(Server(AsyncEngine.load(config, progress=False))) as url: yield url
