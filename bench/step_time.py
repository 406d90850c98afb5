"""Time of a decode step on a GPU beside its floor (bytes over copy bandwidth), for each attention backend.

    python bench/step_time.py MODEL_DIR [--attn flashinfer triton] [--rows 1 8 32 128 256] [--context 1024] [--out FILE]

The model's weights are random. `step` is the wall time of a step of the running engine (schedule, pack, replay, commit,
overlapped), the median of many; `graph` is the replay alone between two CUDA events. The floor counts every weight and
every key and value once.
"""
import argparse
import json
import random
import statistics
import time

import torch

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine


def copy_rate(gib=2):
    "Bytes read and written per second by a device-to-device copy"
    a = torch.empty(gib << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(8):
        e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        e0.record(); b.copy_(a); e1.record(); e1.synchronize()
        best = max(best, 2*a.numel()/(e0.elapsed_time(e1)/1e3))
    return best


def measure(engine, rows, context, steps=60):
    "Median wall time per step and graph replay time, ms, with `rows` requests of about `context` tokens"
    rng, vocab = random.Random(rows), engine.model_config.vocab_size - 2000
    params = SamplingParams(temperature=0, max_tokens=steps + 400, ignore_eos=True)
    streams = [engine.add([rng.randrange(vocab) for _ in range(context)], params) for _ in range(rows)]
    while engine.scheduler.waiting or any(r.num_computed < context for r in engine.scheduler.running): engine.step()
    for _ in range(10): engine.step()
    torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        t = time.perf_counter(); engine.step(); times.append((time.perf_counter() - t)*1e3)
    torch.cuda.synchronize()
    size, replay = next((s for s in engine.runner.graphs if s >= rows), 0), []
    if size:
        graph = engine.runner.graphs[size][0]
        for _ in range(20):
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record(); graph.replay(); e1.record(); e1.synchronize(); replay.append(e0.elapsed_time(e1))
    for s in streams: s.abort()
    while engine.has_work: engine.step()
    return statistics.median(times), statistics.median(replay) if replay else None


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model"); ap.add_argument("--attn", nargs="+", default=["flashinfer", "triton"])
    ap.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    ap.add_argument("--context", type=int, default=1024)
    ap.add_argument("--enforce-eager", action="store_true"); ap.add_argument("--out")
    a = ap.parse_args()
    rate, out = copy_rate(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies {rate/1e12:.2f} TB/s")
    for attn in a.attn:
        t0 = time.perf_counter()
        e = Engine(EngineConfig(model=a.model, load_format="dummy", attn=attn, max_num_seqs=max(a.rows),
                                max_model_len=a.context + 1024, prefix_caching=False, enforce_eager=a.enforce_eager))
        ready, m = time.perf_counter() - t0, e.model_config
        weights = sum(p.numel()*p.element_size() for p in e.runner.model.parameters())
        if not m.tie_embeddings: weights -= m.vocab_size*m.hidden_size*2  # of the embedding a step reads a few rows
        print(f"{attn}: ready in {ready:.1f} s, weights read per step {weights/1e9:.2f} GB")
        for rows in a.rows:
            step, graph = measure(e, rows, a.context)
            floor = (weights + rows*(a.context + 60)*m.kv_bytes_per_token())/rate*1e3
            out.append(dict(attn=attn, rows=rows, context=a.context, floor_ms=floor, step_ms=step, graph_ms=graph,
                            ratio=step/floor, ready_s=ready))
            print(f"  rows {rows:4d}: floor {floor:.2f} ms, graph {graph or float('nan'):.2f} ms, step {step:.2f} ms, "
                  f"step/floor {step/floor:.2f}", flush=True)
        del e
        torch.cuda.empty_cache()
    if a.out:
        report = dict(machine=torch.cuda.get_device_name(), torch=torch.__version__, copy_tb_s=rate/1e12, model=a.model,
                      results=out)
        with open(a.out, "w") as f: json.dump(report, f, indent=1)


if __name__ == "__main__": main()
