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
