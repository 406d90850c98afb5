"""Decode steps on a CPU with the model loaded in the thread that runs it, or in another (chapter 12).

    python bench/step_thread.py [--rounds 4] [--tokens 24] [--out bench/results/cpu/step_thread.json]

Each run is a process of its own, since OpenMP's workers stay for a process's life; the ways alternate. The demo model,
one row and 16 rows of 200 prompt tokens; the median step of each run, and the median of the runs.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def measure(loaded_elsewhere, tokens):
    "Median milliseconds of a decode step by number of rows, run in a helper thread"
    from miniengine.config import EngineConfig, SamplingParams
    from miniengine.engine import Engine
    config = EngineConfig(model="smollm2", device="cpu", dtype="float32", prefix_caching=False)
    thread, out = ThreadPoolExecutor(1), {}
    e = Engine(config, False) if loaded_elsewhere else thread.submit(Engine, config, False).result()
    run = e.runner.run
    e.runner.run = lambda job: thread.submit(run, job).result()
    for rows in 1, 16:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        streams = [e.add([i + 1]*200, params) for i in range(rows)]
        while min(s.request.num_output for s in streams) < 1: e.step()
        steps = []
        while e.has_work:
            t = time.perf_counter()
            e.step()
            steps.append(time.perf_counter() - t)
        out[rows] = 1e3*statistics.median(steps)
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--tokens", type=int, default=24)
    ap.add_argument("--out", default="bench/results/cpu/step_thread.json")
    ap.add_argument("--one", choices=("same", "other"), help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.one: return print(json.dumps(measure(a.one == "other", a.tokens)))
    runs = dict(same=[], other=[])
    for k in range(a.rounds):
        for way in (("same", "other"), ("other", "same"))[k % 2]:
            r = subprocess.run([sys.executable, __file__, "--one", way, "--tokens", str(a.tokens)], check=True,
                               text=True, stdout=subprocess.PIPE)
            runs[way].append(json.loads(r.stdout.splitlines()[-1]))
            print(way, runs[way][-1], flush=True)
    import torch
    ms = {way: {n: statistics.median(r[n] for r in rs) for n in ("1", "16")} for way, rs in runs.items()}
    result = dict(what="median decode step in ms by rows; model loaded in the thread that runs the steps or in another",
                  threads=torch.get_num_threads(), versions=f"torch {torch.__version__}", runs=runs, ms=ms,
                  ratio={n: ms["other"][n]/ms["same"][n] for n in ("1", "16")},
                  command=f"python bench/step_thread.py --rounds {a.rounds} --tokens {a.tokens}")
    Path(a.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratio"]))


if __name__ == "__main__": main()
