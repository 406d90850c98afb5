#!/usr/bin/env python3
"""Replay the first turns of an agent's conversation on the demo model: TTFT and tokens found, cache on and off.

    python bench/two_turns.py [--turns 3] [--out bench/results/cpu/two_turns.json]
"""
import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median

import torch
from report import trace_ids

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine


def first_token(engine, ids):
    "Seconds to the first token, and prompt tokens found in the cache"
    t = time.perf_counter()
    stream = engine.add(list(ids), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    while stream.request.num_output == 0: engine.step()
    took = time.perf_counter() - t
    while engine.has_work: engine.step()
    return took, stream.request.num_cached


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, default=Path("bench/results/cpu/two_turns.json"))
    a = p.parse_args()
    rows = trace_ids()
    talk = [next(ids for t, ids in rows if t == turn) for turn in range(a.turns)]
    modes = {}
    for name, cache in ("cache", True), ("no cache", False):
        config = EngineConfig(model="smollm2", device="cpu", dtype="float32", prefix_caching=cache, max_model_len=2048)
        engine, runs = Engine(config, progress=False), []
        first_token(engine, [1] * 64)                     # warm up
        for _ in range(a.rounds):
            if engine.scheduler.cache is not None: engine.scheduler.cache.clear()
            runs.append([first_token(engine, ids) for ids in talk])
        modes[name] = [dict(turn=t + 1, prompt=len(ids), cached=runs[0][t][1],
                            ttft_ms=1e3 * median(r[t][0] for r in runs)) for t, ids in enumerate(talk)]
    out = dict(what=f"one conversation of bench/traces/agent.jsonl, its first {a.turns} turns one after the other, "
                    f"SmolLM2-135M float32, median of {a.rounds}",
               machine=f"{platform.machine()} CPU, {os.cpu_count()} cores", versions=f"torch {torch.__version__}",
               command=f"python bench/two_turns.py --turns {a.turns} --rounds {a.rounds}", modes=modes)
    print(json.dumps(out, indent=1))
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__": main()
