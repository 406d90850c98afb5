#!/usr/bin/env python3
"""What prefix affinity is worth at H replicas and P prefixes: the engine's own scheduler, block pool and prefix cache,
hundreds of times, with a clock of step times and no model.

    python bench/affinity.py record ShareGPT.json      # lengths -> bench/traces/lengths.json
    python bench/affinity.py run                       # -> bench/results/affinity.json
    python bench/affinity.py like bench/results/cpu/replicas_vllm_router.json      # the measured run's load, simulated

A session is a conversation with one of P agents: the agent's system prompt first, then turns, each with the whole
history; the lengths are recorded, the tokens are made up. As many sessions are open as `active` says, per replica, and
between an answer and the next turn somebody reads it or runs a tool, for `think` seconds on average.
"""
import argparse
import heapq
import json
import random
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT), str(ROOT/"bench")) if p not in sys.path]

from deploy.prefix_affinity import Affinity, beginnings  # noqa: E402
from miniengine.config import SamplingParams  # noqa: E402
from miniengine.kv_blocks import BlockPool  # noqa: E402
from miniengine.prefix_cache import PrefixCache  # noqa: E402
from miniengine.scheduler import Request, Scheduler  # noqa: E402

LENGTHS = ROOT/"bench/traces/lengths.json"
POLICIES = "round robin", "least loaded", "affinity"


class Session:
    "A conversation: `ask(tokens so far)` is the next prompt, how many tokens to answer, and how many of it are new"
    def __init__(self, rng, prefix: list[int], turns: list[tuple[int, int]]):
        self.rng, self.prefix, self.turns = rng, prefix, iter(turns)

    def ask(self, tokens: list[int]|None):
        if (lengths := next(self.turns, None)) is None: return None
        user = self.rng.choices(range(256), k=lengths[0])
        return (self.prefix if tokens is None else tokens) + user, lengths[1], lengths[0]


class Scripted:
    "A conversation whose prompts are given, as in a trace"
    def __init__(self, prompts: list[list[int]], output: int): self.prompts, self.output = iter(prompts), output

    def ask(self, tokens):
        prompt = next(self.prompts, None)
        return None if prompt is None else (prompt, self.output, 0)


def sessions(n: int, prefixes: int, turns: int = 4, seed: int = 0):
    "`n` sessions, each with one of `prefixes` system prompts, lengths as recorded"
    rng, recorded = random.Random(seed), json.loads(LENGTHS.read_text())
    heads = [rng.choices(range(256), k=recorded["system"]) for _ in range(prefixes)]
    short = [p for p in recorded["pairs"] if sum(p) <= 1024]      # four of them and the system prompt are a context
    return [Session(rng, rng.choice(heads), rng.sample(short, turns)) for _ in range(n)]


class Cluster:
    "H replicas and the rule by which requests are given to them"
    def __init__(self, H: int, policy: str, blocks: int, seqs: int, step: tuple[float, float], slack: int, chunk: int):
        self.step, self.chunk, self.policy = step, chunk, policy
        self.rule, self.turn, self.rng = Affinity(slack), count(), random.Random(1)
        self.going, self.nodes = dict.fromkeys(range(H), 0), []
        for _ in range(H):
            pool = BlockPool(blocks)
            self.nodes.append(Scheduler(pool, PrefixCache(pool), seqs, 8192, max_model_len=8192))

    def choose(self, tokens: list[int]) -> int:
        if self.policy == "round robin": return next(self.turn) % len(self.nodes)
        if self.policy == "affinity": return self.rule.order(beginnings(tuple(tokens), self.chunk), self.going)[0]
        least = min(self.going.values())
        return self.rng.choice([r for r, n in self.going.items() if n == least])


def step_time() -> tuple[float, float]:
    "Seconds of a decode step, and more for each prompt token: Qwen2.5-7B on the H200, from the stored results"
    import report
    runs = report.sweep()["7b"]["miniengine"]
    return runs["1"]["mean_itl_ms"]/1e3, 1/report.prefill_rate(runs["inf"])


def simulate(todo: list, H: int, policy: str, active: int = 8, blocks: int = 2048, seqs: int = 256, slack: int = 16,
             chunk: int = 64, step: tuple[float, float] = (5e-3, 3e-5), think: float = 1.0) -> dict:
    "Run the sessions of `todo`, `active*H` at a time; hits, tokens computed again, waiting times, and what it cost us"
    begin, events, order = time.process_time(), [], count()
    cluster = Cluster(H, policy, blocks, seqs, step, slack, chunk)
    idle, todo, ttft, heads, unavoidable, steps, rows = set(range(H)), iter(todo), [], set(), 0, 0, 0
    rng = random.Random(2)
    def start(r, now):
        "Begin a step of replica `r`"
        batch = cluster.nodes[r].schedule()
        prompt = batch.num_tokens - sum(row.n == 1 for row in batch.rows)
        heapq.heappush(events, (now + step[0] + prompt*step[1], next(order), r, batch))
    def submit(session, tokens, now):
        "The next turn of `session`, or a new session in its place"
        nonlocal unavoidable
        if (asked := session.ask(tokens)) is None:
            if (session := next(todo, None)) is None: return
            asked = session.ask(None)
            tokens = None
        prompt, output, new = asked
        if tokens is None and isinstance(session, Session) and id(session.prefix) not in heads:
            heads.add(id(session.prefix))
            new += len(session.prefix)
        unavoidable += new
        r = cluster.choose(prompt)
        req = Request("r", prompt, SamplingParams(temperature=0, max_tokens=output))
        req.session, req.asked, req.seen = session, now, False
        cluster.nodes[r].add(req)
        cluster.going[r] += 1
        if r in idle: idle.discard(r); heapq.heappush(events, (now, next(order), r, None))
    for i in range(active*H):
        if (s := next(todo, None)) is not None: heapq.heappush(events, (0.01*i/H, next(order), -1, (s, None)))
    while events:
        now, _, r, batch = heapq.heappop(events)
        if r < 0: submit(*batch, now); continue
        if batch is not None:
            s, made = cluster.nodes[r], sum(row.sample for row in batch.rows)
            steps, rows = steps + 1, rows + len(batch.rows)
            for req, _ in s.commit(batch, rng.choices(range(256), k=made)):
                if not req.seen: req.seen = True; ttft.append(now - req.asked)
                if req.finish_reason is None: continue
                cluster.going[r] -= 1
                later = now + (rng.expovariate(1/think) if think else 0)
                heapq.heappush(events, (later, next(order), -1, (req.session, req.tokens)))
        if cluster.nodes[r].has_work: start(r, now)
        else: idle.add(r)
    queries, hits = (sum(getattr(s, k) for s in cluster.nodes) for k in ("prefix_queries", "prefix_hits"))
    again = queries - hits - unavoidable
    return dict(H=H, policy=policy, requests=len(ttft), queries=queries, hits=hits, hit_rate=hits/queries,
                again_per_request=again/len(ttft), ttft_mean_ms=1e3*sum(ttft)/len(ttft),
                ttft_p95_ms=1e3*sorted(ttft)[int(0.95*len(ttft))], makespan_s=now, steps=steps, rows=rows,
                preemptions=sum(s.num_preemptions for s in cluster.nodes), cpu_s=time.process_time() - begin)


def like(measured: dict, policy: str, seed: int = 0) -> dict:
    "The load of a measured run (bench/replicas.py), token by token, through simulated replicas"
    import replicas
    from agent_trace import prompt_ids

    from miniengine.bench_load import load_tokenizer
    shape = SimpleNamespace(**{k: measured[k] for k in ("agents", "conversations", "turns", "max_tokens")})
    tok, talks = load_tokenizer("smollm2"), replicas.load(shape, seed)
    todo = [Scripted(prompt_ids(t, tok), measured["max_tokens"]) for t in talks]
    slow = 0.06, 1/250           # seconds per step and per prompt token of the demo model on one CPU core, roughly
    return simulate(todo, measured["replicas"], policy, active=len(todo), blocks=8192, step=slow, think=0)


def record(path: str):
    "Lengths of 1,000 ShareGPT questions and answers, and of the agent trace's system prompt"
    import report

    from miniengine.bench_load import load_tokenizer, sharegpt
    options = SimpleNamespace(dataset_path=path, seed=0, disable_shuffle=False, num_prompts=1000,
                              sharegpt_output_len=None, request_id_prefix="", no_oversample=False)
    pairs = [[s.prompt_len, s.output_len] for s in sharegpt(options, load_tokenizer("smollm2"))]
    a, b = (ids for turn, ids in report.trace_ids()[:2])
    common = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    what = "tokens of the demo model: a system prompt (bench/traces/agent.jsonl); ShareGPT prompts and answers"
    LENGTHS.write_text(json.dumps(dict(what=what, system=common, pairs=pairs)) + "\n")


def run(hosts: list[int], prefixes: list[int], per_host: int):
    "The two sweeps of chapter 17: over H at a fixed number of prefixes, over prefixes at a fixed H"
    step, out = step_time(), []
    for H, P in [*((H, 64) for H in hosts), *((16, P) for P in prefixes if P != 64)]:
        for policy in POLICIES:
            out.append(simulate(sessions(per_host*H, P), H, policy, step=step) | {"P": P})
            r = out[-1]
            print(f"H {H:4} P {P:4} {policy:12} hit rate {r['hit_rate']:.3f}, again {r['again_per_request']:6.0f} "
                  f"tokens a request, TTFT {r['ttft_mean_ms']:6.1f} ms, {r['steps']:,} steps, {r['cpu_s']:.1f} s",
                  flush=True)
    path = ROOT/"bench/results/affinity.json"
    d = dict(command="python bench/affinity.py run", step_s=step, sessions_per_replica=per_host, active=8, blocks=2048,
             think_s=1.0, turns=4, system=json.loads(LENGTHS.read_text())["system"], runs=out)
    path.write_text(json.dumps(d, indent=1) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["record", "run", "like"])
    p.add_argument("file", nargs="?")
    p.add_argument("--hosts", type=int, nargs="+", default=[2**i for i in range(9)])
    p.add_argument("--prefixes", type=int, nargs="+", default=[1, 8, 64, 512])
    p.add_argument("--per-host", type=int, default=16)
    a = p.parse_args()
    if a.what == "record": return record(a.file)
    if a.what == "run": return run(a.hosts, a.prefixes, a.per_host)
    measured = json.loads(Path(a.file).read_text())
    for policy in "affinity", "round robin":
        print(policy, f"measured {measured['policies'][policy]['hit_rate']:.3f},",
              f"simulated {like(measured, policy)['hit_rate']:.3f}")


if __name__ == "__main__": main()
