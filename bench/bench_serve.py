#!/usr/bin/env python3
"""Benchmark a server: `python bench/bench_serve.py --port 8000 ...` is `miniengine bench serve --port 8000 ...`"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from miniengine.bench_serve import main  # noqa: E402

if __name__ == "__main__": sys.exit(main(["serve", *sys.argv[1:]]))
