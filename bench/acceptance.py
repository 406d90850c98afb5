#!/usr/bin/env python3
"""The acceptance criteria on this machine: what is required, what was measured, passed or not.

    python bench/acceptance.py [--out bench/results/MACHINE/acceptance.md]

What can be run here and now is, against a server that is started for it (demo model, about two minutes on a CPU; with a
GPU also the 24 GB test: --model DIR). The rest is read from stored results: of the sweep, of the trace replays and of
the comparison of clients. A criterion without a measurement is open, not passed.
"""
import argparse
import asyncio
import json
import re
import sys
import threading
from pathlib import Path
from statistics import median

from agent_trace import expected, rate, replay, total
from servers import ROOT, bench, environment, fetch, machine_name, running, sharegpt

from miniengine.bench_load import load_tokenizer
from miniengine.bench_serve import parse_counters

RESULTS = ROOT/"bench"/"results"
PROMPTS = ["What is the capital of France? Answer in one sentence.", "Count from one to twenty.",
           "Write 'naïve café' in capitals, then add three emojis: 🙂🚀🎉", "List three uses of a paper clip.",
           "Write a Python function that adds two numbers.", "日本語で挨拶してください。"]
STAGES = "arrive token schedul block prefix prefill decode detoken stream free".split()
ROWS = []


class Open(Exception):
    "Nothing here can decide a criterion; says what is missing"


def criterion(number: str, required: str):
    "Register a check: a function of the arguments that returns (passed, what was measured) or raises Open"
    def add(f):
        ROWS.append((number, required, f))
        return f
    return add


def stored(path: Path) -> dict:
    if not path.exists(): raise Open(f"no {path.relative_to(ROOT)}")
    return json.loads(path.read_text())


def swept(model: str) -> Path:
    "The results of a model's sweep, those of this machine first"
    found = [p for p in RESULTS.glob(f"*/{model}") if any(p.glob("miniengine/*.json")) and any(p.glob("vllm/*.json"))]
    if not found: raise Open(f"no sweep of both engines with {model} in bench/results")
    return min(found, key=lambda p: p.parent.name != machine_name())


def figure(folder: Path, engine: str, rate_: str, key: str) -> float:
    "Median of a figure over the rounds of a sweep"
    files = [f for f in (folder/engine).glob(f"{rate_}*.json") if re.fullmatch(rf"{rate_}(\.\d+)?", f.stem)]
    if not files: raise Open(f"no rate {rate_} of {engine} in {folder.relative_to(ROOT)}")
    return median(json.loads(f.read_text())[key] for f in files)


def measured_capacity() -> tuple:
    "What bench/capacity.py left: at every mean length, so many at once before the first preemption"
    found = sorted(RESULTS.glob("*/capacity.json"))
    if not found: raise Open("needs a GPU and --model DIR (a Qwen2.5-7B folder), or a stored run of bench/capacity.py")
    d = json.loads(found[0].read_text())
    text = ", ".join(f"{r['peak']} at a mean of {r['tokens']:,.0f} tokens" for r in d["rows"])
    return min(r["peak"] for r in d["rows"]) >= 50, (f"at once before the first preemption: {text}; contiguous "
                                                     f"{d['contiguous']} ({d['machine']} held to {d['limit']})")


@criterion("1", "≥ 50 concurrent sequences, Qwen2.5-7B, 8k context, 24 GB")
def concurrency(a):
    if machine_name() == "cpu" or not a.model: return measured_capacity()
    url, most, stop = "http://127.0.0.1:8131", [0, 0], threading.Event()
    def watch():
        while not stop.wait(0.1):
            c = parse_counters(fetch(f"{url}/metrics")[1])
            if not c.get("num_preemptions_total"): most[0] = max(most[0], int(c.get("num_requests_running", 0)))
            most[1] = int(c.get("num_preemptions_total", 0))
    command = (f"miniengine serve {a.model} --served-model-name m --load-format dummy --gpu-memory-limit 24GiB "
               "--max-model-len 8192 --port 8131")
    with running(command, url, a.logs/"24g.log"):
        thread = threading.Thread(target=watch)
        thread.start()
        options = ["--model", "m", "--tokenizer", a.model, "--dataset-name", "sharegpt", "--dataset-path", a.sharegpt]
        bench(url, [*options, "--num-prompts", "400", "--ignore-eos", "--disable-tqdm"], a.logs/"24g.json")
        stop.set()
        thread.join()
    return most[0] >= 50, f"{most[0]} running at once before the first preemption ({most[1]} preemptions in all)"


@criterion("2", "streams that the `openai` client parses to byte-identical text")
def byte_identical(a):
    import openai
    client, same = openai.OpenAI(base_url=f"{a.url}/v1", api_key="x"), 0
    for prompt in PROMPTS:
        kw = dict(model="smollm2", temperature=0, max_tokens=48)
        chat = dict(kw, messages=[{"role": "user", "content": prompt}])
        whole = client.chat.completions.create(**chat).choices[0].message.content
        stream = client.chat.completions.create(**chat, stream=True)
        parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
        text = client.completions.create(**kw, prompt=prompt).choices[0].text
        texts = [c.choices[0].text for c in client.completions.create(**kw, prompt=prompt, stream=True) if c.choices]
        same += "".join(parts).encode() == whole.encode()
        same += "".join(texts).encode() == text.encode()
    n = 2 * len(PROMPTS)
    return same == n, f"{same} of {n} answers equal, chat and completions, openai {openai.__version__}"


@criterion("3", "ShareGPT at 8 req/s: within 3× of vLLM's throughput")
def throughput(a):
    folder = swept("qwen2.5-7b")
    ours, theirs = (figure(folder, e, "8", "output_throughput") for e in ("miniengine", "vllm"))
    flat = [figure(folder, e, "inf", "output_throughput") for e in ("miniengine", "vllm")]
    return ours >= theirs / 3, (f"{ours:,.0f} against {theirs:,.0f} tok/s: {ours / theirs:.2f}×; all at once "
                                f"{flat[0] / flat[1]:.2f}× ({folder.parent.name})")


@criterion("4", "prefix hit rate on a repeated-prefix trace within 5 % of vLLM's")
def hit_rate(a):
    rows = [json.loads(s) for s in (ROOT/"bench"/"traces"/"agent.jsonl").read_text().splitlines()]
    turns, want = asyncio.run(replay(a.url, "smollm2", rows, "turn")), expected(rows, load_tokenizer("smollm2"), 16)
    ours, text = rate(total(turns)), f"{rate(total(turns)):.2%} here, {rate(total(want)):.2%} by arithmetic"
    found = sorted(RESULTS.glob("*/trace_vllm.json"), key=lambda p: p.parent.name != machine_name())
    if not found: raise Open(f"{text}; no replay against vLLM in bench/results")
    theirs, d = rate(total(json.loads(found[0].read_text())["turns"])), json.loads(found[0].read_text())
    return abs(ours - theirs) <= .05, f"{text}; vLLM {theirs:.2%} with blocks of {d['block_size']}"


@criterion("5", "`bench_serve.py` prints what `vllm bench serve` prints")
def same_output(a):
    cases = stored(RESULTS/"cpu"/"compare_clients.json")
    same = sum(c["same"] for c in cases.values())
    return same == len(cases), f"{same} of {len(cases)} sets of options: same requests, console output and JSON keys"


@criterion("6", "repository, write-up, reproducible commands")
def repository(a):
    need = ["README.md", "LICENSE", "nbs/16_benchmarks.ipynb", "nbs/90_blog.ipynb"]
    if missing := [f for f in need if not (ROOT/f).exists()]: raise Open(f"no {', '.join(missing)}")
    readme = (ROOT/"README.md").read_text()
    missing = [c for c in ("bench/sweep.py", "bench/agent_trace.py", "bench/acceptance.py") if c not in readme]
    return not missing, f"README lacks {', '.join(missing)}" if missing else "files and commands are there"


@criterion("7", "the life of a request can be told from the book alone")
def life(a):
    nb = stored(ROOT/"nbs"/"00_tour.ipynb")
    text = "\n".join("".join(c["source"]) for c in nb["cells"]).lower()
    missing = [s for s in STAGES if s not in text]
    ran = sum(bool(c.get("outputs")) for c in nb["cells"])
    return ran > 5 and not missing, f"tour: {ran} cells with output, all stages but: {', '.join(missing) or 'none'}"


@criterion("+", "continuous batching against a static baseline")
def static(a):
    here, cpu = (RESULTS/m/"batching.json" for m in (machine_name(), "cpu"))
    path = here if here.exists() else cpu
    modes = stored(path)["modes"]
    fast, slow, soon, late = (modes[m][k] for k in ("output_tok_s", "ttft_p95_ms") for m in ("continuous", "static"))
    text = (f"{fast / slow:.1f}× the throughput, TTFT p95 {soon / 1e3:.2f} s against {late / 1e3:.2f} s "
            f"(offline, {path.parent.name})")
    try:
        folder = swept("qwen2.5-7b")
        for r in ("8", "32"):
            x, y = (figure(folder, e, r, "output_throughput") for e in ("miniengine", "miniengine-static"))
            text += f"; the 7B at {r} req/s {x / y:.1f}× ({folder.parent.name})"
    except Open: pass
    return fast > slow, text


@criterion("+", "latency and throughput at six rates, both engines")
def six_rates(a):
    folder = swept("qwen2.5-7b")
    n = [len({f.stem.split(".")[0] for f in (folder/e).glob("*.json")}) for e in ("miniengine", "vllm")]
    return min(n) >= 6, f"{n[0]} and {n[1]} rates ({folder.parent.name})"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, help="write the table here, too")
    p.add_argument("--model", help="folder of Qwen2.5-7B for the 24 GB test (weights aren't read)")
    p.add_argument("--sharegpt", default=sharegpt())
    p.add_argument("--logs", type=Path, default=Path("/tmp/acceptance"))
    a = p.parse_args()
    a.url, lines, bad = "http://127.0.0.1:8130", ["| | required | measured | |", "|---|---|---|---|"], 0
    with running("miniengine serve smollm2 --port 8130 --dtype float32", a.url, a.logs/"server.log"):
        for number, required, check in ROWS:
            try: ok, text = check(a)
            except Open as e: ok, text = None, str(e)
            bad += ok is False
            lines.append(f"| {number} | {required} | {text} | {'open' if ok is None else 'pass' if ok else 'FAIL'} |")
            print(lines[-1], flush=True)
    e = environment()
    where = ", ".join(e["gpu"]) or f"{e['cpus']} cores of {e['cpu']}"
    head = [f"`python bench/acceptance.py` on {where}; {e['date']}, commit {e['git']}, Python {e['python']}, "
            + ", ".join(f"{k} {v}" for k, v in e["versions"].items()) + ".", ""]
    if a.out: a.out.write_text("\n".join(head + lines) + "\n")
    return bad


if __name__ == "__main__": sys.exit(main())
