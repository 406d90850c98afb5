"""Static against continuous batching: the same requests, the same model, the real clock.

    python bench/batching.py [--model smollm2] [--requests 48] [--seqs 8] [--out bench/results/cpu/batching.json]

Prompt and output lengths are drawn once (log-normal, medians 60 and 40 tokens, like short chat turns); all requests
arrive at the start, and every output has its full drawn length. Both modes run twice in alternating order, the faster
run counts.
"""
import argparse
import json
import math
import os
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine


def workload(n, vocab, seed=0):
    "`(prompt ids, output length)` pairs"
    rng = random.Random(seed)
    draw = lambda median, hi: min(hi, max(4, round(median*math.exp(0.9*rng.gauss(0, 1)))))
    return [([rng.randrange(100, vocab - 100) for _ in range(draw(60, 400))], draw(40, 250)) for _ in range(n)]


def run(engine, work):
    "Serve all of `work`; seconds, and each request's time to first token"
    t0 = time.perf_counter()
    streams = [engine.add(ids, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)) for ids, n in work]
    while engine.has_work: engine.step()
    took = time.perf_counter() - t0
    assert all(s.request.num_output == n for s, (_, n) in zip(streams, work))
    return took, [s.request.first_token_at - t0 for s in streams]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="smollm2"); ap.add_argument("--load-format", default="auto")
    ap.add_argument("--requests", type=int, default=48); ap.add_argument("--seqs", type=int, default=8)
    ap.add_argument("--out", default="bench/results/cpu/batching.json")
    a = ap.parse_args()
    runs = {"static": [], "continuous": []}
    engines = {}
    for mode in runs:
        config = EngineConfig(model=a.model, load_format=a.load_format, batching=mode, max_num_seqs=a.seqs,
                              max_model_len=1024, prefix_caching=False)
        engines[mode] = Engine(config, progress=False)
    work = workload(a.requests, engines["static"].model_config.vocab_size)
    for order in (("static", "continuous"), ("continuous", "static")):
        for mode in order:
            runs[mode].append(run(engines[mode], work))
            print(f"{mode}: {runs[mode][-1][0]:.1f} s", flush=True)
    total, modes = sum(n for _, n in work), {}
    for mode, rs in runs.items():
        took, ttft = min(rs, key=lambda r: r[0])
        modes[mode] = dict(output_tok_s=total/took, ttft_mean_ms=1e3*float(np.mean(ttft)),
                           ttft_p95_ms=1e3*float(np.percentile(ttft, 95)), duration_s=took,
                           all_durations_s=[r[0] for r in rs])
    e = engines["static"]
    name = f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    if e.device.type == "cuda": name = torch.cuda.get_device_name()
    what = (f"{a.requests} requests at once, {sum(len(i) for i, _ in work):,} prompt and {total:,} output tokens, "
            f"{a.seqs} rows, {a.model} {str(e.dtype)[6:]}.")
    out = dict(what=what, machine=name, versions=f"torch {torch.__version__}, Python {platform.python_version()}",
               command="python " + " ".join(sys.argv), modes=modes)
    print(json.dumps(out, indent=1))
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    Path(a.out).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__": main()
