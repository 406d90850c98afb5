"""How many sequences of up to 8,192 tokens run at once in 24 GiB, for real, beside the contiguous count.

    python bench/capacity.py MODEL_DIR [--limit 24GiB] [--out bench/results/h200/capacity.json]

Random weights (their values don't matter), prompt and output lengths log-normal around several means. For each: as many
requests as there are rows wait from the start, and the peak of those that run at once before the first preemption is
noted; then a number that fits runs to its end, which must take no preemption. `used` is what the driver says the
process takes, KV cache, weights, graphs and libraries together.
"""
import argparse
import json
import random

import torch
from report import MEANS, draw_lengths

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine


def start(e, pairs, rng):
    "Add a request of random tokens for each (prompt, output) length"
    vocab = e.model_config.vocab_size - 2000
    params = [SamplingParams(temperature=0, max_tokens=o, ignore_eos=True) for _, o in pairs]
    return [e.add([rng.randrange(vocab) for _ in range(p)], s) for (p, _), s in zip(pairs, params)]


def peak(e, pairs, rng):
    "Sequences running at once before the first preemption"
    most, before = 0, e.scheduler.num_preemptions
    streams = start(e, pairs, rng)
    while e.has_work and e.scheduler.num_preemptions == before:
        most = max(most, len(e.scheduler.running))
        e.step()
    for s in streams: s.abort()
    while e.has_work: e.step()
    return most


def through(e, pairs, rng):
    "(most running at once, preemptions) of requests that all run to their end"
    before, streams, most = e.scheduler.num_preemptions, start(e, pairs, rng), 0
    while e.has_work:
        e.step()
        most = max(most, len(e.scheduler.running))
    assert all(s.request.num_output == o for s, (_, o) in zip(streams, pairs))
    return most, e.scheduler.num_preemptions - before


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model"); ap.add_argument("--limit", default="24GiB"); ap.add_argument("--out")
    a = ap.parse_args()
    free = torch.cuda.mem_get_info()[0]
    e = Engine(EngineConfig(model=a.model, load_format="dummy", gpu_memory_limit=a.limit, max_model_len=8192,
                            max_num_seqs=256, prefix_caching=False))
    n, rng, rows = e.pool.usable, random.Random(0), []
    contiguous = n//512
    for means in MEANS:
        pairs = draw_lengths(256, *means)
        blocks = sum(-(-(p + o)//16) for p, o in pairs)/len(pairs)
        fits = min(256, int(.9*n/blocks))  # all at their final length, with a tenth to spare
        r = dict(means=means, tokens=sum(p + o for p, o in pairs)/len(pairs), peak=peak(e, pairs, rng), fits=fits)
        r["most"], r["preemptions"] = through(e, pairs[:fits], rng)
        rows.append(r)
        print(f"mean {r['tokens']:,.0f} tokens: {r['peak']} at once before the first preemption; {r['most']} of {fits} "
              f"ran at once to their end with {r['preemptions']} preemptions; contiguous {contiguous}", flush=True)
    used = (free - torch.cuda.mem_get_info()[0])/2**30
    print(f"{n:,} blocks ({n*16:,} tokens), {used:.2f} GiB used of {a.limit}")
    if a.out:
        out = dict(machine=torch.cuda.get_device_name(), torch=torch.__version__, command="python bench/capacity.py "
                   f"Qwen2.5-7B-Instruct --limit {a.limit}", limit=a.limit, used_gib=used, blocks=n,
                   contiguous=contiguous, rows=rows)
        with open(a.out, "w") as f: json.dump(out, f, indent=1)


if __name__ == "__main__": main()
