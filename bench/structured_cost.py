"""What neighbours pay for structured output and for log-probabilities: a step of the same rows, with and without.

    python bench/structured_cost.py [--model smollm2] [--load-format auto] [--out bench/results/structured_cost.json]

Eight plain requests run throughout. In turns, four more join them, which sample freely, have a grammar, or ask for
log-probabilities; the median step of each turn is compared with that of the free turn of the same round. A second free
turn tells what chance does to such a ratio, and `spread` is the standard error of the median ratio. On a CPU a
step's time is the CPU time of the whole process, grammar threads included: one engine thread does nearly all of it, and
other programs on the machine don't count. On a GPU it is the time that passes.
"""
import argparse
import json
import platform
import statistics
from time import perf_counter, process_time

import torch

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine
from miniengine.structured import Grammars, Matcher

SCHEMA = {"type": "object", "required": ["name", "age", "notes"], "additionalProperties": False, "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"},
    "notes": {"type": "array", "items": {"type": "string"}, "minItems": 40}}}


def turn(engine, steps, extra):
    "Median step in ms while four requests with parameters `extra` run beside the eight"
    ids = engine.tokenizer.chat([{"role": "user", "content": "Describe a person as JSON, with many notes."}])
    streams = [engine.add(ids, SamplingParams(max_tokens=400, seed=k, **extra)) for k in range(4)]
    for _ in range(4): engine.step()
    times, clock = [], perf_counter if engine.device.type == "cuda" else process_time
    for _ in range(steps):
        t = clock(); engine.step()
        times.append((clock() - t) * 1e3)
    assert all(s.request.finish_reason is None for s in streams)
    for s in streams: s.abort()
    while engine.inflight: engine.step()
    return statistics.median(times)


def micro(grammar, vocab, device="cpu", rows=4):
    "Best time, in us: the event loop hands a token to a matcher; the sampler applies `rows` masks"
    held, logits = [(i, Matcher(grammar.start)) for i in range(rows)], torch.zeros(12, vocab, device=device)
    hand = apply = 1e9
    for _ in range(300):
        for _, m in held: m.bits.result()
        t = perf_counter(); Matcher.mask(logits, held); apply = min(apply, perf_counter() - t)
        t = perf_counter(); held[0][1].advance(-1 % vocab); hand = min(hand, perf_counter() - t)
    return dict(hand_over_us=hand * 1e6, apply_us=apply * 1e6, apply_rows=rows)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="smollm2"); ap.add_argument("--load-format", default="auto")
    ap.add_argument("--out")
    ap.add_argument("--rounds", type=int, default=30); ap.add_argument("--steps", type=int, default=8)
    a = ap.parse_args()
    config = EngineConfig(model=a.model, load_format=a.load_format, max_num_seqs=16, max_model_len=2048)
    engine = Engine(config, progress=False)
    grammar = Grammars(engine.tokenizer, engine.model_config.eos_ids).compile("json", SCHEMA)
    extras = {"four sample freely": {}, "four sample freely, once more": {},
              "four follow a JSON schema": dict(structured=grammar), "four want 5 log-probabilities": dict(logprobs=5)}
    prompt, found = engine.tokenizer.encode("Once upon a time"), {k: [] for k in extras}
    for r in range(-1, a.rounds):  # the first round warms up
        rules = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        plain = [engine.add(prompt + [1000 + k], rules) for k in range(8)]
        for name in (list(extras), list(extras)[::-1])[r % 2]:
            ms = turn(engine, a.steps, extras[name])
            if r >= 0: found[name].append(ms)
        for s in plain: s.abort()
        while engine.has_work: engine.step()
    base, cases = found["four sample freely"], []
    for name, ms in found.items():
        ratios = [x / y for x, y in zip(ms, base)]
        middle = statistics.median(ratios)
        spread = 1.25*statistics.stdev(ratios)/len(ratios)**0.5
        cases.append(dict(name=name, step_ms=statistics.median(ms), ratio=middle, spread=spread, low=min(ratios),
                          high=max(ratios), rounds=len(ms)))
        print(f"{name:32} {cases[-1]['step_ms']:7.2f} ms a step, ratio {middle:.3f} +- {spread:.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")
    cuda, vocab = engine.device.type == "cuda", engine.model_config.vocab_size
    models = (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    cpu = f"{next(models, platform.machine())}, {torch.get_num_threads()} thread(s)"
    out = dict(command="python bench/structured_cost.py", machine=torch.cuda.get_device_name() if cuda else cpu,
               torch=torch.__version__, clock="wall" if cuda else "CPU time of the process",
               what=f"{a.model}, {str(engine.dtype)[6:]}, vocabulary {vocab:,}, 8 plain requests and 4 others",
               cases=cases, **micro(grammar, vocab, engine.device))
    if a.out:
        with open(a.out, "w") as f: json.dump(out, f, indent=1)


if __name__ == "__main__": main()
