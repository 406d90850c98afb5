#!/usr/bin/env python3
"""Agent traces: make one, say what a prefix cache can find in it, and replay it against a server.

    python bench/agent_trace.py make --out bench/traces/agent.jsonl
    python bench/agent_trace.py expect bench/traces/agent.jsonl --tokenizer smollm2 --block-size 16
    python bench/agent_trace.py replay bench/traces/agent.jsonl --base-url http://127.0.0.1:8000 --tokenizer smollm2

An agent sends the same system prompt, the same list of tools and the whole history again at every turn. A trace is a
JSONL file in order of time, turn by turn; the replies in it are scripted, so that every engine gets the same bytes.
Replay modes: `turn` sends the conversations of a turn at once and waits for all of them, `seq` sends one request at a
time, `open` sends each at its `at_s`. The hit rate of a turn is the growth of the server's counters
`vllm:prefix_cache_hits_total` / `vllm:prefix_cache_queries_total` in it (both engines have them); in `open` mode turns
overlap, and only the total is known.
"""
import argparse
import asyncio
import json
import math
import random
import re
import sys
from pathlib import Path

import numpy as np
from servers import environment, fetch

from miniengine.bench_load import Sample, load_tokenizer
from miniengine.bench_serve import Result, get, open_session, parse_counters, request_body, run_load, send

ADJECTIVES = "old new slow warm cold bright narrow public private stale fresh silent loose tight early late".split()
NOUNS = ("queue scheduler branch socket folder buffer window journal planner worker cursor ladder mirror table border "
         "signal packet bridge archive orchard").split()
VERBS = "opens reads merges sorts drops checks moves copies counts renames locks splits follows measures".split()
LINKS = "while because before after unless until".split()


def sentence(rng) -> str:
    a, b, c, d = (rng.choice(ADJECTIVES) + " " + rng.choice(NOUNS) for _ in range(4))
    return f"The {a} {rng.choice(VERBS)} the {b} {rng.choice(LINKS)} the {c} {rng.choice(VERBS)} the {d}."


def make(conversations: int, turns: int, tools: int, rules: int, max_tokens: int, gap: float, seed: int) -> list[dict]:
    "The requests of a trace in the order they are sent"
    rng = random.Random(seed)
    names = [f"{v}_{n}" for v, n in zip(rng.sample(VERBS, tools), rng.sample(NOUNS, tools))]
    system = ("You are a careful agent that works on a small repository. You answer briefly and call one tool at a "
              "time.\nTools:\n" + "\n".join(f"- {name}(path, line): {sentence(rng)}" for name in names) + "\nRules:\n"
              + "\n".join(f"{i + 1}. {sentence(rng)}" for i in range(rules)))
    def user(head):
        return {"role": "user", "content": f"{head} {sentence(rng)} {sentence(rng)} {sentence(rng)} What is next?"}
    talks = [[{"role": "system", "content": system}, user(f"Task {c + 1}:")] for c in range(conversations)]
    rows = []
    for t in range(turns):
        for c, talk in enumerate(talks):
            rows.append(dict(id=f"c{c}t{t}", conversation=c, turn=t, at_s=gap * (t * conversations + c),
                             messages=list(talk), max_tokens=max_tokens, temperature=0))
            reply = f"Step {t + 1}: {sentence(rng)} I call {rng.choice(names)}."
            talk += [{"role": "assistant", "content": reply}, user(f"Result of step {t + 1}:")]
    return rows


def prompt_ids(rows: list[dict], tok) -> list[list[int]]:
    texts = [tok.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False) for r in rows]
    return tok(texts, add_special_tokens=False).input_ids


def expected(rows: list[dict], tok, block: int) -> list[dict]:
    """Per turn: prompt tokens, and those that an unlimited cache of full blocks finds, prompts only.

    A lower bound: blocks of generated tokens that come back in a later prompt are found, too.
    """
    seen, turns = set(), [dict(turn=t, queries=0, hits=0) for t in range(max(r["turn"] for r in rows) + 1)]
    for r, ids in zip(rows, prompt_ids(rows, tok)):
        prefixes, hit = [tuple(ids[:k]) for k in range(block, len(ids) + 1, block)], 0
        for p in prefixes:
            if p not in seen or len(p) == len(ids): break           # at least one token is always computed
            hit = len(p)
        turns[r["turn"]]["queries"] += len(ids)
        turns[r["turn"]]["hits"] += hit
        seen.update(prefixes)
    return turns


def block_size(base: str) -> int:
    "The server's KV block size: from its metrics (vLLM) or its settings (ours)"
    m = re.search(r'vllm:cache_config_info\{(?:.*,)?block_size="(\d+)"', fetch(f"{base}/metrics")[1])
    return int(m[1]) if m else json.loads(fetch(f"{base}/server_info")[1])["engine_config"]["block_size"]


def measured(turn, before: dict, after: dict, results: list[Result]) -> dict:
    "Counters and latencies of one turn"
    if bad := [r.error or "an answer without a token" for r in results if not r.output_tokens]: sys.exit(bad[0])
    def grew(what): return int(after.get(f"prefix_cache_{what}_total", 0) - before.get(f"prefix_cache_{what}_total", 0))
    ttft, itl = np.array([r.ttft for r in results]) * 1e3, np.concatenate([r.itl for r in results]) * 1e3
    return dict(turn=turn, queries=grew("queries"), hits=grew("hits"), ttft_mean_ms=round(float(ttft.mean()), 2),
                ttft_p95_ms=round(float(np.percentile(ttft, 95)), 2), itl_mean_ms=round(float(itl.mean()), 2),
                prompt_tokens=sum(r.prompt_len for r in results), output_tokens=sum(r.output_tokens for r in results))


async def replay(base: str, model: str, rows: list[dict], mode: str) -> list[dict]:
    "One dict per turn; in `open` mode one for all"
    parts = [[r for r in rows if r["turn"] == t] for t in range(rows[-1]["turn"] + 1)] if mode != "open" else [rows]
    async with open_session() as session:
        async def call(s: Sample) -> Result:
            body = request_body(s, model, True, extra={"temperature": 0})
            return await send(session, f"{base}/v1/chat/completions", body)
        async def counters(): return parse_counters(await get(session, f"{base}/metrics"))
        out = []
        for t, part in enumerate(parts):
            samples = [Sample(r["messages"], 0, r["max_tokens"], r["id"]) for r in part]
            times, before = [r["at_s"] if mode == "open" else 0.0 for r in part], await counters()
            if mode == "seq": results = [await call(s) for s in samples]
            else: results, _, _ = await run_load(call, samples, times, [math.inf] * len(part))
            out.append(measured(t if mode != "open" else "all", before, await counters(), results))
    return out


def rate(t: dict) -> float: return t["hits"] / max(t["queries"], 1)


def total(turns: list[dict]) -> dict:
    return dict(turn="all", queries=sum(t["queries"] for t in turns), hits=sum(t["hits"] for t in turns))


def table(turns: list[dict], want: list[dict]) -> str:
    "Hit rates per turn, measured beside those by arithmetic (of the same turns)"
    lines = ["turn  prompt tokens    found  hit rate  by arithmetic  TTFT mean (ms)"]
    for t, w in zip([*turns, total(turns)], [*want, total(want)]):
        line = f"{t['turn']!s:>4}  {t['queries']:13,}  {t['hits']:7,}  {rate(t):8.2%}  {rate(w):13.2%}"
        lines.append(line + (f"  {t['ttft_mean_ms']:14.1f}" if "ttft_mean_ms" in t else ""))
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sub = p.add_subparsers(dest="what", required=True)
    m = sub.add_parser("make")
    for name, default in dict(conversations=8, turns=6, tools=9, rules=14, max_tokens=32, seed=0).items():
        m.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    m.add_argument("--gap", type=float, default=0.5, help="seconds between requests in open mode")
    m.add_argument("--out", required=True)
    for name in ("expect", "replay"):
        c = sub.add_parser(name)
        c.add_argument("trace")
        c.add_argument("--tokenizer", default="smollm2")
        c.add_argument("--block-size", type=int, help="default: the server's, or 16")
    c.add_argument("--base-url", default="http://127.0.0.1:8000")
    c.add_argument("--mode", choices=["turn", "seq", "open"], default="turn")
    c.add_argument("--model", help="default: the first that the server names")
    c.add_argument("--json", help="write the outcome here")
    a = p.parse_args()
    if a.what == "make":
        names = "conversations turns tools rules max_tokens gap seed".split()
        rows = make(**{k: getattr(a, k) for k in names})
        Path(a.out).parent.mkdir(parents=True, exist_ok=True)
        Path(a.out).write_text("".join(json.dumps(r) + "\n" for r in rows))
        return print(f"{len(rows)} requests in {a.out}")
    rows, tok = [json.loads(s) for s in Path(a.trace).read_text().splitlines()], load_tokenizer(a.tokenizer)
    if a.what == "expect": return print(table(want := expected(rows, tok, a.block_size or 16), want))
    status, _ = fetch(f"{a.base_url}/reset_prefix_cache", body={})        # vLLM has it in its development mode
    block = a.block_size or block_size(a.base_url)
    model = a.model or json.loads(fetch(f"{a.base_url}/v1/models")[1])["data"][0]["id"]
    want, turns = expected(rows, tok, block), asyncio.run(replay(a.base_url, model, rows, a.mode))
    if a.mode == "open": want = [total(want)]
    print(f"block size {block}; the cache was {'emptied' if status == 200 else 'taken as it was'} before")
    print(table(turns, want))
    if rate(turns[0]) > rate(want[0]) + .01: print("warning: too much for a first turn: was the cache empty?")
    outcome = dict(trace=Path(a.trace).name, mode=a.mode, block_size=block, model=model, turns=turns, expected=want,
                   environment=environment())
    if a.json: Path(a.json).write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__": main()
