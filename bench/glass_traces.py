"""Record the step traces that the book draws: the demo model on a CPU, requests added at fixed steps.

    python bench/glass_traces.py [NAME ...] [--out bench/traces]

`crowd`: eight requests on six rows with a budget of 48 tokens a step and a pool that is too small for them, so that
prompts are cut into chunks and requests are preempted. `agents`: two conversations of four turns with one system
prompt; each turn sends everything said before. `agents_uncached`: the same without the prefix cache. `static` and
`continuous`: twelve requests on four rows, in both ways of batching. The schedule depends on the plan alone, the times
on the machine.
"""
import argparse
import random
from pathlib import Path

from miniengine.config import EngineConfig, SamplingParams
from miniengine.engine import Engine
from miniengine.glass import Trace, save

HERE = Path(__file__).resolve().parent


def words(rng, n): return [rng.randrange(1000, 9000) for _ in range(n)]


def crowd(e, rng):
    "(step, prompt, output tokens) of eight requests"
    plan = [(0, 20, 40), (0, 30, 30), (2, 130, 12), (4, 16, 44), (10, 60, 24), (12, 40, 30), (14, 25, 20), (16, 90, 10)]
    step = 0
    while plan or e.has_work:
        while plan and plan[0][0] <= step:
            _, prompt, output = plan.pop(0)
            e.add(words(rng, prompt), SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), f"r{step}")
        e.step()
        step += 1


def agents(e, rng, turns=4):
    "Two conversations; a turn is 20 new tokens and an answer of 12"
    system = words(rng, 64)
    said, streams = [system + words(rng, 20) for _ in range(2)], [None, None]
    left = [turns, turns]
    while any(left) or e.has_work:
        for i in range(2):
            if (s := streams[i]) is not None and s.request.finish_reason:
                said[i], streams[i] = s.request.tokens + words(rng, 20), None
            if streams[i] is None and left[i]:
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                streams[i] = e.add(said[i], params, f"agent {i + 1}, turn {turns - left[i] + 1}")
                left[i] -= 1
        e.step()


def twelve(e, rng):
    "Twelve requests at once, prompts of 8 to 40 tokens, answers of very different length"
    for i in range(12):
        prompt = words(rng, rng.randint(8, 40))
        output = rng.choice([3, 5, 8, 20])
        e.add(prompt, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), f"r{i}")
    while e.has_work: e.step()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("names", nargs="*", help="which ones; all if none is named")
    ap.add_argument("--out", default=str(HERE/"traces"))
    a = ap.parse_args()
    common = dict(device="cpu", dtype="float32", max_model_len=320)
    for name, work, config in (
            ("crowd", crowd, dict(num_blocks=21, max_num_seqs=6, max_num_batched_tokens=48)),
            ("agents", agents, roomy := dict(num_blocks=80, max_num_seqs=4, max_num_batched_tokens=64)),
            ("agents_uncached", agents, roomy | dict(prefix_caching=False)),
            ("static", twelve, four := dict(num_blocks=80, max_num_seqs=4, max_num_batched_tokens=160,
                                               batching="static")),
            ("continuous", twelve, four | dict(batching="continuous"))):
        if a.names and name not in a.names: continue
        e = Engine(EngineConfig(**common, **config), progress=False)
        trace = Trace(e)
        work(e, random.Random(0))
        save(r := trace.report(), Path(a.out)/f"{name}.json.gz")
        print(f"{name}: {len(r['steps'])} steps, {sum(len(s['preempted']) for s in r['steps'])} preemptions, "
              f"{sum(s['tokens'] for s in r['steps'])} tokens computed, "
              f"{sum(c for s in r['steps'] for _, c in s['admitted'])} found in the cache")


if __name__ == "__main__": main()
