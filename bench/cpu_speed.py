"""Single-stream decoding on a CPU: this engine beside `transformers` generate, in one run.

    python bench/cpu_speed.py [--tokens 64] [--rounds 3] [--out bench/results/cpu/single_stream.json]

Both with the same weights, dtype and threads, `transformers` eager. Rounds alternate between the two; the median of
each counts, and the ratio of medians is the result. Prefill is not part of the time (the first token is excluded). The
floor is the time to read every weight once at the rate a plain sum over a large array reaches.
"""
import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine
from miniengine.weights import iter_weights, resolve


def reference(engine):
    "A `transformers` model of the engine's weights"
    from transformers import LlamaConfig, LlamaForCausalLM
    m = engine.model_config
    cfg = LlamaConfig(
        hidden_size=m.hidden_size, intermediate_size=m.intermediate_size, num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_heads, num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim,
        vocab_size=m.vocab_size, rms_norm_eps=m.rms_norm_eps, max_position_embeddings=m.max_position,
        rope_parameters=dict(rope_type="default", rope_theta=m.rope_theta), tie_word_embeddings=m.tie_embeddings)
    hf, weights = LlamaForCausalLM(cfg).eval(), iter_weights(resolve(engine.config.model), m)
    hf.load_state_dict({k: torch.as_tensor(v).float() for k, v in weights}, strict=False)
    hf.tie_weights()
    return hf.to(engine.dtype)


def ours(engine, ids, n):
    "Seconds per decoded token, and the tokens"
    s = engine.add(ids, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
    while s.request.num_output < 1: engine.step()
    t = time.perf_counter()
    while engine.has_work: engine.step()
    return (time.perf_counter() - t)/(n - 1), s.request.output_ids


def theirs(hf, ids, n):
    "The same through `generate`: the time for n tokens less the time for one"
    x = torch.tensor([ids])
    kw = dict(do_sample=False, pad_token_id=0, eos_token_id=None, attention_mask=torch.ones_like(x))
    with torch.inference_mode():
        t0 = time.perf_counter(); hf.generate(x, max_new_tokens=1, **kw)
        t1 = time.perf_counter(); out = hf.generate(x, max_new_tokens=n, **kw)
        t2 = time.perf_counter()
    return ((t2 - t1) - (t1 - t0))/(n - 1), out[0, len(ids):].tolist()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tokens", type=int, default=64); ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--dtype", default="auto"); ap.add_argument("--out", default="bench/results/cpu/single_stream.json")
    a = ap.parse_args()
    e = Engine(EngineConfig(model="smollm2", device="cpu", dtype=a.dtype, prefix_caching=False), progress=False)
    hf = reference(e)
    question = "Write a story about a lighthouse keeper and the sea, as long as you can."
    ids = e.tokenizer.chat([dict(role="user", content=question)])
    big = torch.ones(64 << 20)
    rate = big.numel()*4/min(_timed(lambda: big.sum()) for _ in range(5))
    weights = sum(p.numel()*p.element_size() for p in e.runner.model.parameters())
    times = dict(ours=[], transformers=[])
    for k in range(a.rounds):
        for name in (("ours", "transformers"), ("transformers", "ours"))[k % 2]:
            t, toks = ours(e, ids, a.tokens) if name == "ours" else theirs(hf, ids, a.tokens)
            times[name].append(t)
            if name == "ours": mine = toks
            print(f"{name}: {1/t:.1f} tok/s", flush=True)
    med = {k: statistics.median(v) for k, v in times.items()}
    import transformers
    out = dict(what="batch 1 greedy decoding, SmolLM2-135M", dtype=str(e.dtype)[6:], threads=torch.get_num_threads(),
               tokens_equal=mine == theirs(hf, ids, a.tokens)[1],
               tok_s={k: 1/v for k, v in med.items()}, all_tok_s={k: [1/x for x in v] for k, v in times.items()},
               ratio=med["transformers"]/med["ours"], floor_ms=weights/rate*1e3, ours_ms=med["ours"]*1e3,
               read_gb_s=rate/1e9,
               machine=f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
               versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
               command="python " + " ".join(sys.argv))
    print(json.dumps(out, indent=1))
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    Path(a.out).write_text(json.dumps(out, indent=1) + "\n")


def _timed(f):
    t = time.perf_counter()
    f()
    return time.perf_counter() - t


if __name__ == "__main__": main()
