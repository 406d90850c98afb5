#!/usr/bin/env python3
"""What the benchmark's prompts are like, and what the host pays for them: lengths, empty cache slots, tokenizing time.

    python bench/prompts.py ShareGPT.json [--out bench/results/cpu/prompts.json]

The first 1,000 questions of ShareGPT as `bench serve` draws them, with the demo model's tokenizer. Tokenizing is timed
as the server does it, one prompt after the other on one core.
"""
import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

from miniengine.bench_load import load_tokenizer, sharegpt
from miniengine.kv_blocks import fragmentation
from miniengine.text import Tokenizer

BLOCKS = 1, 8, 16, 32, 64, 128, 256


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("dataset")
    p.add_argument("--num-prompts", type=int, default=1000)
    p.add_argument("--out", type=Path, default=Path("bench/results/cpu/prompts.json"))
    a = p.parse_args()
    hf = load_tokenizer("smollm2")
    options = SimpleNamespace(dataset_path=a.dataset, seed=0, disable_shuffle=False, num_prompts=a.num_prompts,
                              sharegpt_output_len=None, request_id_prefix="", no_oversample=False)
    samples, tok, times = sharegpt(options, hf), Tokenizer(hf), []
    for _ in range(3):
        each = []
        for s in samples:
            t = time.perf_counter()
            tok.encode(s.prompt)
            each.append(time.perf_counter() - t)
        times.append(sum(each))
    total = [s.prompt_len + s.output_len for s in samples]
    what = f"{len(samples):,} ShareGPT prompts as `bench serve` draws them (seed 0), the demo model's tokenizer"
    out = dict(what=what,
               machine=f"{platform.machine()} CPU, {os.cpu_count()} cores",
               versions=f"tokenizers {version('tokenizers')}",
               command="python bench/prompts.py ShareGPT.json",
               prompts=len(samples), mean_prompt=mean(s.prompt_len for s in samples),
               mean_output=mean(s.output_len for s in samples), median_total=median(total), max_total=max(total),
               tokenize_s=median(times), all_tokenize_s=times, slowest_ms=1e3 * max(each),
               empty={b: fragmentation(total, b) for b in BLOCKS})
    print(json.dumps(out, indent=1))
    a.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__": main()
