"""Do grammars hold on a GPU? Masks against the CPU's, answers that must be valid, and neighbours who must not notice.

    python bench/gpu_structured.py [MODEL] [--dtype float32 bfloat16] [--attn triton] [--out FILE.json]

1. Masks: many of them are queued behind a busy device, with no wait in between, and compared with those of the CPU.
   A copy whose source was overwritten too early would show here.
2. Answers: eight requests that follow a JSON schema, a pattern or a choice, half of them greedy and half at
   temperature 1, run beside eight free greedy ones, with the overlapped loop and CUDA graphs. All eight must be valid.
3. Neighbours: the eight free texts are those that come out without any neighbour. Steps of another size round
   otherwise, so where a text parts, the two tokens' logits must nearly tie: the gaps are listed and have a limit.

Runs on a CPU too (without overlap), to try the script.
"""
import argparse
import json
import re

import numpy as np
import torch

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine
from miniengine.structured import Grammars, Matcher

SCHEMA = {"type": "object", "required": ["name", "age", "sex", "towns"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "sex": {"enum": ["f", "m", None]}, "towns": {"type": "array", "maxItems": 2, "items": {"enum": ["Rome", "Oslo"]}}}}
PATTERN, CHOICES = r"[A-Z][a-z]{2,9}, [0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]", ["red", "green", "blue", "grey-green"]
QUESTIONS = ["What is the capital of France?", "Explain what a hash table is.", "List three uses of a paper clip.",
             "Count from one to twenty.", "Why is the sky blue?", "Give me a recipe for pancakes.",
             "Name five animals that can fly.", "How do I boil an egg?"]
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 0.5}  # logit gap of two tokens that may change places


def is_person(text):
    v = json.loads(text)
    return (set(v) == {"name", "age", "sex", "towns"} and len(v["name"]) <= 8 and 0 <= v["age"] <= 150
            and v["sex"] in ("f", "m", None) and len(v["towns"]) <= 2 and set(v["towns"]) <= {"Rome", "Oslo"})


KINDS = {"json": (SCHEMA, is_person), "regex": (PATTERN, lambda s: re.fullmatch(PATTERN, s)),
         "choice": (CHOICES, lambda s: s in CHOICES)}


def check_masks(grammars, vocab, device, times=60):
    "Queue `times` masks behind a busy device; the number of logits that were compared with the CPU's"
    starts, jobs = [grammars.compile(kind, spec).start for kind, (spec, _) in KINDS.items()], []
    for k in range(times):  # other rows, another order and another width each time
        held = [(i, Matcher(starts[(i + k) % 3])) for i in range(k % 2, 12, 1 + k % 3)][::(-1)**k]
        for n, (_, m) in enumerate(held):
            for _ in range((n + k) % 4):  # some way into the answer
                m.advance(int(np.unpackbits(np.frombuffer(m.bits.result(), np.uint8), bitorder="little").argmax()))
        jobs.append((torch.randn(12, vocab - k % 40), held))
    there = [logits.to(device) for logits, _ in jobs]
    for logits, held in jobs: Matcher.mask(logits, held)
    if device.type == "cuda": torch.cuda._sleep(500_000_000)
    for logits, (_, held) in zip(there, jobs): Matcher.mask(logits, held)
    for got, (expected, _) in zip(there, jobs): assert torch.equal(got.cpu(), expected), "a mask isn't the CPU's"
    return sum(logits.numel() for logits, _ in jobs)


def run(engine, jobs):
    "The answers to `[(prompt ids, params), ...]`, all together; and in how many steps both kinds of rows were"
    streams, mixed = [engine.add(*job) for job in jobs], 0
    def see(batch, now):
        nonlocal mixed
        mixed += len({r.req.params.structured is None for r in batch.rows}) == 2
    engine.observers.append(see)
    while engine.has_work: engine.step()
    engine.observers.remove(see)
    return [s.take() for s in streams], mixed


def gap(engine, prompt, ours, other):
    "How far the logits of the tokens lie apart with which two answers to `prompt` part; 0 if they don't"
    at = next((i for i, (a, b) in enumerate(zip(ours, other)) if a != b), None)
    if at is None: return 0.0
    look = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    top = dict(run(engine, [(prompt + ours[:at], look)])[0][0].logprobs[0][1])
    return abs(top.get(ours[at], torch.inf) - top.get(other[at], -torch.inf))


def check(model="smollm2", dtype="auto", attn="auto", **config):
    "All three checks on one engine; what was found, or an AssertionError"
    e = Engine(EngineConfig(model=model, dtype=dtype, attn=attn, max_num_seqs=32, max_model_len=512,
                            gpu_memory_utilization=0.3, **config), progress=False)
    assert e.overlap == (e.device.type == "cuda")
    def chat(text): return e.tokenizer.chat([dict(role="user", content=text)])
    grammars = Grammars(e.tokenizer, e.model_config.eos_ids)
    out = dict(dtype=str(e.dtype)[6:], attn=type(e.runner.attn).__name__, overlap=e.overlap,
               masked_logits=check_masks(grammars, e.runner.sampler.vocab_size, e.device), kinds={})
    free = [(chat(q), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)) for q in QUESTIONS]
    alone, _ = run(e, free)
    for name in (*KINDS, "all kinds"):
        kinds = [name]*8 if name in KINDS else [*KINDS]*2 + ["json", "regex"]
        jobs = []
        for i, kind in enumerate(kinds):
            rules = dict(temperature=i % 2, seed=i, structured=grammars.compile(kind, KINDS[kind][0]))
            prompt = chat(f"Invent person number {i}: name, age, sex, towns, date, colour.")
            jobs.append((prompt, SamplingParams(max_tokens=100, **rules)))
        both = [job for pair in zip(jobs, free) for job in pair]  # rows of both kinds alternate
        answers, mixed = run(e, both)
        held, beside = answers[::2], answers[1::2]
        for kind, d in zip(kinds, held):
            assert d.finish_reason == "stop" and KINDS[kind][1](d.text), f"{kind}: {d.text!r} ({d.finish_reason})"
        assert mixed >= 2, "grammar and neighbours must have been in one batch"
        gaps = [g for (p, _), a, b in zip(free, alone, beside) if (g := gap(e, p, a.token_ids, b.token_ids))]
        assert all(g <= LIMITS[e.dtype] for g in gaps), f"{name}: free texts part where logits don't tie: {gaps}"
        out["kinds"][name] = dict(valid=len(held), different=len({d.text for d in held}), steps_together=mixed,
                                  equal_neighbours=8 - len(gaps), gaps=gaps, example=held[1].text)
    assert e.pool.free == e.pool.usable
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", nargs="?", default="smollm2"); ap.add_argument("--out")
    ap.add_argument("--attn", default="triton")
    ap.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    a, results = ap.parse_args(), []
    cuda = torch.cuda.is_available()
    for dtype in a.dtype:
        results.append(check(a.model, dtype, a.attn if cuda else "torch"))
        r = results[-1]
        print(f"{r['dtype']}, {r['attn']}, overlap {r['overlap']}: {r['masked_logits']:,} masked logits are the CPU's")
        for name, k in r["kinds"].items():
            print(f"  {name:10} {k['valid']} of 8 answers valid, e.g. {k['example']!r}; {k['steps_together']} steps "
                  f"together with neighbours: {k['equal_neighbours']} of 8 equal, the others part where logits differ "
                  f"by {[round(g, 4) for g in k['gaps']]}", flush=True)
        if cuda: torch.cuda.empty_cache()
    if a.out:
        found = dict(command="python bench/gpu_structured.py", torch=torch.__version__, results=results,
                     machine=torch.cuda.get_device_name() if cuda else "a CPU")
        with open(a.out, "w") as f: json.dump(found, f, indent=1)


if __name__ == "__main__": main()
