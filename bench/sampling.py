"""Random sampling on a GPU: the kernel of chapter 8b beside chapter 8's PyTorch, and the bytes it must read.

    python bench/sampling.py [--vocab 151936] [--out FILE.json]

Right first: both pick the same tokens (but where the random number falls on the border between two). Then the time of
256, 32 and 1 rows, each version called in turns, and the floor: the kernel's passes over the scores at copy bandwidth.
"""
import argparse
import json
from statistics import median

import numpy as np
import torch
from step_time import copy_rate

from miniengine.sampler import draw, uniform
from miniengine.triton_sampler import draw as fused

RULES = {"temperature": (0.8, 0, 1, 0), "top-p 0.9": (0.8, 0, .9, 0), "top-k 50": (0.8, 50, 1, 0),
         "top-k 50, top-p 0.9": (0.8, 50, .9, 0)}


def milliseconds(f, n):
    f()
    out = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); b.synchronize(); out.append(a.elapsed_time(b))
    return median(out)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--vocab", type=int, default=151_936); ap.add_argument("--out")
    a = ap.parse_args()
    rate, out, V = copy_rate(), [], a.vocab
    for S in (1, 32, 256):
        x = torch.randn(S, V, device="cuda")*3
        for name, (t, k, p, m) in RULES.items():
            rules = np.array([(t, k or V, p, m, u) for u in uniform(range(S), [0]*S)])
            same = (fused(x, rules) == draw(x, rules)).float().mean().item()
            passes = 3 + 10*(k > 0) + 9*(p < 1)
            r = dict(rows=S, vocab=V, rules=name, equal=same, torch_ms=milliseconds(lambda: draw(x, rules), 5),
                     triton_ms=milliseconds(lambda: fused(x, rules), 10), floor_ms=passes*4*S*V/rate*1e3)
            out.append(r)
            print(f"{S:4d} rows, {name:20s} PyTorch {r['torch_ms']:.2f} ms, Triton {r['triton_ms']:.2f} ms, floor "
                  f"{r['floor_ms']:.2f} ms, {same:.1%} equal", flush=True)
    if a.out:
        report = dict(machine=torch.cuda.get_device_name(), torch=torch.__version__, command="python bench/sampling.py",
                      copy_tb_s=rate/1e12, results=out)
        with open(a.out, "w") as f: json.dump(report, f, indent=1)


if __name__ == "__main__": main()
