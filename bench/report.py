"""Read what was measured (`bench/results`) and make tables of it: used by the benchmark chapter, the blog post and the README.

Layout of the results, all optional, so that what is measured later shows up without a change here:

    <machine>/<model>/<engine>/<rate>.json      `bench serve` (<rate>.2.json: a second round); an engine named `miniengine-x` is a variation
    <machine>/environment.json                  machine, versions, commit, command lines
    <machine>/kernels.json, step_7b.json        bench/kernels.py, bench/step_time.py
    <machine>/trace_<engine>.json               bench/agent_trace.py replay
    <machine>/batching.json                     bench/batching.py (static against continuous)
    <machine>/capacity.json, sampling.json, trace_cost.json, check.json       bench/capacity.py, sampling.py, trace_cost.py, gpu_check.py
    sse_rate.json                               bench/sse_rate.py
"""
# ruff: noqa: E401, E501
import ast, io, json, math, os, random, sys, tokenize
from functools import lru_cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("BENCH_RESULTS") or ROOT/"bench"/"results")   # another folder, to look at results before they are kept
RATES = ["1", "2", "4", "8", "16", "32", "inf"]
MODELS = {"7b": "Qwen2.5-7B", "1.5b": "Qwen2.5-1.5B"}          # the folder of `7b` is `qwen2.5-7b`
SIDES = ["vllm", "miniengine"]
OPEN = "not measured yet"
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))


def read(path):
    "A JSON file below `bench/results`, or None if it isn't there"
    p = RESULTS/path
    return json.loads(p.read_text()) if p.exists() else None


def md(head, rows):
    "A Markdown table; the first column is text, the others are figures"
    out = ["| " + " | ".join(head) + " |", "|---|" + "---:|"*(len(head) - 1)]
    return "\n".join(out + ["| " + " | ".join(str(c) for c in r) + " |" for r in rows])


# --- the sweep ---
def _engine(folder):
    "{rate: the run, median over its rounds where there are several}"
    by = {}
    for f in sorted(folder.glob("*.json")):                        # 8.json, 8.2.json (its second round), 0.5.json, 0.5.2.json
        d = json.loads(f.read_text())
        by.setdefault(f"{d['request_rate']:g}" if d["request_rate"] != "inf" else "inf", []).append(d)
    out = {}
    for rate, runs in sorted(by.items(), key=lambda x: float(x[0])):
        d = dict(runs[0])
        for k, v in d.items():
            if isinstance(v, (int, float)) and not isinstance(v, bool): d[k] = median(r[k] for r in runs)
        out[rate] = d | {"rounds": len(runs)}
    return out


def sweep(machine="h200"):
    "{model: {engine: {rate: result}}}: Qwen2.5 by its size (`7b`), any other model by its folder's name"
    found = {p.name.removeprefix("qwen2.5-"): p for p in sorted((RESULTS/machine).glob("*")) if p.is_dir()}
    return {key: {d.name: _engine(d) for d in sorted(found[key].iterdir()) if d.is_dir()}
            for key in sorted(found, key=lambda k: [*MODELS, k].index(k))}


def environment(machine="h200"):
    """Machine, versions, commit and command lines of a sweep: machine, date, commit, versions, what, launch, client, notes

    Of a machine's `environment.json`, as written by hand for servers that were shared, or as bench/sweep.py leaves it.
    """
    d = read(f"{machine}/environment.json")
    if not d or "runs" not in d: return d
    gpu, runs = d["gpu"][0].split(",") if d["gpu"] else [d["cpu"]], d["runs"]
    return dict(machine=f"{gpu[0]}" + (f" ({gpu[1].strip()}), driver {gpu[2].strip()}" if len(gpu) > 2 else "") + f", {d['cpus']} CPU cores", date=d["date"][:10], commit=d["git"],
                versions={k.removesuffix("-python"): v for k, v in d["versions"].items()} | {"python": d["python"]},
                what=f"One server at a time, started for each engine and round ({max(r['round'] for r in runs)} rounds, the order reversed every other round), one client for all.",
                launch={f"{r['engine']}": " ".join(r["serve"].split()) for r in runs}, client="miniengine bench serve " + runs[0]["client"], notes=[])


def common(engines):
    "Rates at which both sides were measured"
    return [r for r in engines.get(SIDES[0], {}) if r in engines.get(SIDES[1], {})]


def ratio(engines, rate, key): return engines["miniengine"][rate][key]/engines["vllm"][rate][key]


METRICS = {  # key: (name, True if more is better)
    "output_throughput": ("output tok/s", True), "mean_ttft_ms": ("TTFT mean", False), "p95_ttft_ms": ("TTFT p95", False),
    "p99_ttft_ms": ("TTFT p99", False), "mean_itl_ms": ("ITL mean", False), "p95_itl_ms": ("ITL p95", False),
    "p99_itl_ms": ("ITL p99", False), "mean_tpot_ms": ("TPOT mean", False), "mean_e2el_ms": ("E2EL mean", False)}


def losses(data, tie=0.005):
    "[(model, rate, metric, vLLM, ours, ratio)] wherever we are worse by more than `tie`, worst first"
    out = []
    for m, engines in data.items():
        for r in common(engines):
            for k, (name, more) in METRICS.items():
                x = ratio(engines, r, k)
                worse = 1/x if more else x
                if worse > 1 + tie: out.append((worse, (m, r, name, engines["vllm"][r][k], engines["miniengine"][r][k], x)))
    return [row for _, row in sorted(out, key=lambda t: -t[0])]


def losses_table(data):
    rows = [(MODELS.get(m, m), r, name, f"{v:,.1f}", f"{o:,.1f}", f"**{x:.2f}**") for m, r, name, v, o, x in losses(data)]
    return md(["model", "req/s", "what", "vLLM", "ours", "ours / vLLM"], rows) if rows else "Nowhere in these results."


def ratio_table(engines, keys=tuple(METRICS)):
    "Ours over vLLM's for each rate; a bold figure is one that we lose"
    rows = []
    for r in common(engines):
        cells = []
        for k in keys:
            x, more = ratio(engines, r, k), METRICS[k][1]
            lost = (1/x if more else x) > 1.005
            cells.append(f"**{x:.2f}**" if lost else f"{x:.2f}")
        rows.append([r, *cells])
    return md(["req/s", *[METRICS[k][0] for k in keys]], rows)


def versus_table(engines, rates=None):
    "Both engines' figures side by side, for the README"
    pair = lambda r, k: f"{engines['vllm'][r][k]:,.1f} / {engines['miniengine'][r][k]:,.1f}"
    keys = ["output_throughput", "mean_ttft_ms", "p95_ttft_ms", "mean_itl_ms", "p95_itl_ms"]
    rows = []
    for r in rates or common(engines):
        cells = [f"{engines['vllm'][r][keys[0]]:,.0f} / {engines['miniengine'][r][keys[0]]:,.0f}"] + [pair(r, k) for k in keys[1:]]
        rows.append([r, f"{engines['vllm'][r]['completed']:,.0f}", *cells, f"{ratio(engines, r, keys[0]):.2f}×"])
    head = ["req/s", "requests", "output tok/s", "TTFT mean (ms)", "TTFT p95 (ms)", "ITL mean (ms)", "ITL p95 (ms)", "tok/s, ours / vLLM"]
    return md(head, rows)


def variations(engines):
    "Names of the measured variations of ours (`miniengine-triton`, ...)"
    return [e for e in engines if e.startswith("miniengine-") and engines[e]]


def ablation_table(engines, keys=tuple(METRICS)):
    names, rows = variations(engines), []
    for n in names:
        for r in [r for r in engines[n] if r in engines["miniengine"]]:
            a, b = engines[n][r], engines["miniengine"][r]
            rows.append([n.removeprefix("miniengine-").replace("-", "‑"), r] + [f"{a[k]/b[k]:.2f}" for k in keys])
    return md(["switch", "req/s", *[METRICS[k][0] for k in keys]], rows) if rows else ""


def missing_rates(data):
    "{model: rates at which not both engines were measured}"
    return {m: [r for r in RATES if r not in common(data.get(m, {}))] for m in MODELS}


# --- what the sweep says about prefill, cache and host ---
def prefill_rate(run):
    "Prompt tokens computed per second while 1,000 requests wait (rate inf): prompt minus cached, over the 99th percentile of TTFT"
    hits = run["miniengine"]["prefix_cache"]["hits"]
    return None if hits is None else (run["total_input_tokens"] - hits)/run["p99_ttft_ms"]*1e3


def parameters(cfg):
    "(all parameters, those that each token is multiplied with) of a `model_config` as a result file stores it"
    h, d = cfg["hidden_size"], cfg["head_dim"]
    qkv = h*d*(cfg["num_heads"] + 2*cfg["num_kv_heads"]); bias = d*(cfg["num_heads"] + 2*cfg["num_kv_heads"]) if cfg["qkv_bias"] else 0
    layer = qkv + bias + cfg["num_heads"]*d*h + 3*h*cfg["intermediate_size"] + 2*h
    emb = cfg["vocab_size"]*h
    return cfg["num_layers"]*layer + h + emb*(1 if cfg["tie_embeddings"] else 2), cfg["num_layers"]*layer


def model_config(data, model="7b"):
    return next(iter(data[model]["miniengine"].values()))["miniengine"]["server_info"]["model_config"]


def kv_bytes(cfg, size=2): return 2*cfg["num_layers"]*cfg["num_kv_heads"]*cfg["head_dim"]*size


def sse_cost():
    "{streams: median CPU microseconds for one streamed token on the host}, all in (engine, HTTP, kernel)"
    d = read("sse_rate.json")
    if not d: return {}
    by = {}
    for r in d["runs"]: by.setdefault(r["streams"], []).append(r["user_us"] + r["kernel_us"])
    return {n: median(v) for n, v in sorted(by.items())}


# --- kernels ---
def fastest(d, *keys): return min((d[k] for k in keys if d.get(k)), default=math.nan)


def decode_rows(k, model="qwen2.5-7b", contexts=None):
    "[(rows, context, ours us, FlashInfer us, FlashInfer / ours, share of the floor)]"
    return [(d["rows"], d["context"], d["us"], f := fastest(d, "fi_us", "fi_graph_us"), f/d["us"], d["floor_us"]/d["us"])
            for d in k["decode"] if d["model"] == model and (not contexts or d["context"] in contexts)]


def decode_table(k, model="qwen2.5-7b", contexts=None):
    rows = [(f"{r} × {c:,}", f"{u:.1f}", f"{f:.1f}", f"{x:.2f}" if x >= 1 else f"**{x:.2f}**", f"{100*s:.0f} %")
            for r, c, u, f, x, s in decode_rows(k, model, contexts)]
    return md(["rows × context", "ours (µs)", "FlashInfer (µs)", "FlashInfer / ours", "floor / ours"], rows)


def prefill_table(k):
    rows = []
    for x in k["prefill"]:
        f = fastest(x, "fa2_us", "fa3_us"); q = f/x["us"]
        rows.append((f"{x['model']}: {x['rows']} × {x['new']:,} over {x['context']:,}", f"{x['us']:.0f}", f"{x['tflops']:.0f}",
                     f"{x['fa2_us']:.0f}", f"{x['fa3_us']:.0f}" if x.get("fa3_us") else "–", f"{q:.2f}" if q >= 1 else f"**{q:.2f}**"))
    return md(["new tokens over context", "ours (µs)", "ours (TFLOP/s)", "FlashInfer fa2 (µs)", "fa3 (µs)", "best FlashInfer / ours"], rows)


def step_files(machine="h200"):
    return [json.loads(p.read_text()) for p in sorted((RESULTS/machine).glob("step_*.json"))]


def step_table(files):
    rows = [(r["attn"], f"{r['rows']} × {r['context']:,}", f"{r['floor_ms']:.2f}",
             f"{r['graph_ms']:.2f}" if r.get("graph_ms") else "–", f"{r['step_ms']:.2f}", f"{r['ratio']:.2f}") for d in files for r in d["results"]]
    return md(["attention", "rows × context", "floor (ms)", "graph (ms)", "step (ms)", "step / floor"], rows)


def step_split(k, file, cfg, rows=32):
    """Where a decode step's time above the floor goes, ms, with our kernel at `rows` rows of 1,024 tokens

    Attention and small kernels as bench/kernels.py timed them; head: its weights at copy rate; host: the step without its graph
    and head; rest: by subtraction, nearly all matrix products (`products`: their time over that of their weights; `math`: what
    their arithmetic alone takes at the data sheet's 989 TFLOP/s).
    """
    s = next(r for r in file["results"] if (r["attn"], r["rows"], r["context"]) == ("triton", rows, 1024))
    a = next(d for d in k["decode"] if (d["model"], d["rows"], d["context"]) == ("qwen2.5-7b", rows, 1024))
    small, layers, rate = {x["kernel"]: x["us"] for x in k["small"] if x["tokens"] == rows}, cfg["num_layers"], file["copy_tb_s"]*1e9
    head_params = cfg["vocab_size"]*cfg["hidden_size"]
    attention = layers*(a["us"] - a["floor_us"])/1e3
    fused = layers*(2*small["add_rms_norm"] + small["silu_mul"] + small["rope_and_cache"])/1e3
    total, host = s["step_ms"] - s["floor_ms"], s["step_ms"] - s["graph_ms"] - 2*head_params/rate
    rest, used = total - attention - fused - host, parameters(cfg)[1] + head_params
    return dict(total=total, attention=attention, fused=fused, host=host, rest=rest, step=s["step_ms"], floor=s["floor_ms"],
                products=1 + rest*rate/(2*used), math=2*used*rows/989e9)


def split_table(k, file, cfg):
    rows = [(n, f"{x['step']:.2f}", f"{x['floor']:.2f}", *(f"{x[c]:.2f}" for c in ("attention", "fused", "host", "rest")), f"{x['products']:.2f}", f"{x['math']:.2f}")
            for n in (1, 32, 256) for x in [step_split(k, file, cfg, n)]]
    return md(["rows", "step", "floor", "attention", "small kernels", "host", "the rest", "products / their bytes", "their arithmetic"], rows)


# --- the prefix cache on an agent's trace, through the real scheduler ---
@lru_cache
def trace_ids(name="agent.jsonl"):
    "((turn, token ids), ...) of a trace in bench/traces, with the demo model's tokenizer; () if trace or tokenizer are not there"
    p = ROOT/"bench"/"traces"/name
    if not p.exists(): return ()
    try:
        from miniengine.bench_load import load_tokenizer
        tok = load_tokenizer("smollm2")
    except Exception: return ()
    rows = [json.loads(s) for s in p.read_text().splitlines()]
    texts = [tok.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False) for r in rows]
    return tuple((r["turn"], tuple(ids)) for r, ids in zip(rows, tok(texts, add_special_tokens=False).input_ids))


def replay(rows, block_size=16, cache=True):
    """Send a trace through the engine's own scheduler and cache, all conversations of a turn at once; no model is needed to count hits.

    Returns per turn `(prompt tokens, tokens found)`. Replies are scripted, so what is found are prompts: a lower bound.
    """
    from miniengine.config import SamplingParams
    from miniengine.kv_blocks import BlockPool
    from miniengine.prefix_cache import PrefixCache
    from miniengine.scheduler import Request, Scheduler
    pool = BlockPool(400_000//block_size, block_size)
    s = Scheduler(pool, PrefixCache(pool) if cache else None, max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=8192)
    turns = {}
    for turn in sorted({t for t, _ in rows}):
        reqs = [Request(f"{turn}-{i}", list(ids), SamplingParams(temperature=0, max_tokens=2))
                for i, ids in enumerate(ids for t, ids in rows if t == turn)]
        for r in reqs: s.add(r)
        while s.has_work:
            b = s.schedule()
            s.commit(b, [0]*sum(r.sample for r in b.rows))
        turns[turn] = sum(r.num_prompt for r in reqs), sum(r.num_cached for r in reqs)
    return turns


def replayed_servers():
    "{(machine, engine): the outcome} of replays against running servers (bench/agent_trace.py replay --json)"
    found = {(p.parent.name, p.stem.removeprefix("trace_")): json.loads(p.read_text()) for p in sorted(RESULTS.glob("*/trace_*.json"))}
    return {k: d for k, d in found.items() if "turns" in d}


def hit_rates(turns): return {t: h/max(q, 1) for t, (q, h) in turns.items()} | {"all": sum(h for _, h in turns.values())/sum(q for q, _ in turns.values())}


def hit_table():
    "Hit rate per turn: the scheduler alone, and each replay against a server"
    rows, cols = trace_ids(), {}
    if rows: cols["our scheduler, block 16"] = hit_rates(replay(rows))
    for (machine, engine), d in replayed_servers().items():
        if d.get("mode") == "open": continue
        t = {x["turn"]: (x["queries"], x["hits"]) for x in d["turns"] if x["turn"] != "all"}
        cols[f"{engine.split('_')[0]}, block {d['block_size']} ({machine})"] = hit_rates(t)
    if not cols: return OPEN
    turns = list(next(iter(cols.values())))
    return md(["turn", *cols], [[t if t == "all" else t + 1, *[f"{100*c[t]:.1f} %" if t in c else "" for c in cols.values()]] for t in turns])


# --- capacity ---
def draw_lengths(n, prompt, output, limit=8192, seed=0, sigma=0.9):
    "`n` pairs of prompt and output length: log-normal around these means, pairs that exceed `limit` together drawn again"
    rng, out = random.Random(seed), []
    one = lambda mean: max(4, round(mean*math.exp(sigma*rng.gauss(0, 1) - sigma*sigma/2)))
    while len(out) < n:
        p, o = one(prompt), one(output)
        if p + o <= limit: out.append((p, o))
    return out


def prompts():
    "What bench/prompts.py measured on whatever machine, or None"
    return next((json.loads(p.read_text()) for p in sorted(RESULTS.glob("*/prompts.json"))), None)


def draw_waste(block, prompt=232, output=195):
    """Share of the allocated slots that hold no token, for finished sequences of ShareGPT's lengths.

    Of the real lengths if they were stored (bench/prompts.py), else of log-normal ones with these means.
    """
    if (d := prompts()) and str(block) in d["empty"]: return d["empty"][str(block)]
    from miniengine.kv_blocks import fragmentation
    return fragmentation([p + o for p, o in draw_lengths(2000, prompt, output)], block)


def capacity_rows(data, means, n=700):
    "[(mean tokens, all at their final length, at once before the first preemption, contiguous)] in 24 GiB, per pair of nominal means"
    g, out = gib24(data), []
    for prompt, output in means:
        pairs = draw_lengths(n, prompt, output)
        mean, blocks = sum(p + o for p, o in pairs)/n, sum(-(-(p + o)//16) for p, o in pairs)/n
        out.append((mean, int(g["blocks"]/blocks), capacity(g["blocks"], pairs), g["contiguous"]))
    return out


def capacity_measured():
    "What bench/capacity.py measured on a GPU, or None"
    return next((json.loads(p.read_text()) for p in sorted(RESULTS.glob("*/capacity.json"))), None)


def capacity_words(d):
    "A capacity file in a sentence"
    through = max((r for r in d["rows"] if not r["preemptions"]), key=lambda r: (r["most"] >= 50, r["tokens"]))
    return (f"on an {d['machine'].removeprefix('NVIDIA ')} held to {d['limit']}, " + ", ".join(f"{r['peak']}" + " (all there were)"*(r["peak"] == 256) for r in d["rows"][:-1]) + f" and {d['rows'][-1]['peak']} ran at once before the first preemption, at means of "
            + ", ".join(f"{r['tokens']:,.0f}" for r in d["rows"][:-1]) + f" and {d['rows'][-1]['tokens']:,.0f} tokens; {through['most']} of the mean {through['tokens']:,.0f} ran together to their end without any; contiguous {d['contiguous']}")


MEANS = [(232, 195), (1200, 400), (2650, 500), (4000, 1000)]   # nominal; the first are ShareGPT's in the sweep


def capacity(num_blocks, lengths, limit=8192):
    "Sequences that run at once in the real scheduler before it must preempt for the first time, all of them waiting from the start"
    from miniengine.config import SamplingParams
    from miniengine.kv_blocks import BlockPool
    from miniengine.scheduler import Request, Scheduler
    s = Scheduler(BlockPool(num_blocks), max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=limit)
    for i, (p, o) in enumerate(lengths): s.add(Request(str(i), [1]*p, SamplingParams(temperature=0, max_tokens=o, ignore_eos=True)))
    most = 0
    while s.has_work and not s.num_preemptions:
        b = s.schedule()
        if s.num_preemptions: break
        most = max(most, len(s.running))
        s.commit(b, [0]*sum(r.sample for r in b.rows))
    return most


def gib24(data, rest=2.0):
    "24 GiB with the 7B: what is left beside the weights and `rest` GiB (context, activations, graphs: an assumption), in tokens and blocks"
    cfg = model_config(data)
    weights = parameters(cfg)[0]*2/2**30
    per, kv = kv_bytes(cfg), 24 - weights - rest
    tokens = int(kv*2**30/per)
    return dict(weights=weights, kv=kv, per_token=per, tokens=tokens, blocks=tokens//16, contiguous=tokens//8192)


# --- the gap, and the gate ---
def switched(engines, word):
    "What a measured variation (`miniengine-no-overlap`: word `overlap`) costs, in words; None if it wasn't measured"
    name = next((n for n in variations(engines) if word in n), None)
    if not name: return None
    parts = []
    for r in [r for r in ("8", "32", "inf") if r in engines[name] and r in engines["miniengine"]]:
        a, b = engines[name][r], engines["miniengine"][r]
        parts.append(f"{r}: ITL mean {a['mean_itl_ms']/b['mean_itl_ms']:.2f}×, TTFT mean {a['mean_ttft_ms']/b['mean_ttft_ms']:.2f}×, tok/s {a['output_throughput']/b['output_throughput']:.2f}×")
    return "at req/s " + "; ".join(parts)


def gap_rows(data, kernels, steps, budget=8192):
    "[(component, measured contribution, where the fix goes)]"
    e = data["7b"]; ours, theirs = e["miniengine"]["inf"], e["vllm"]["inf"]
    p, q = prefill_rate(ours), prefill_rate(theirs)
    s = step_split(kernels, steps[0], model_config(data))
    at = lambda r, c: next(x for x in decode_rows(kernels) if x[:2] == (r, c))
    long, mid = at(128, 8192), at(32, 1024)
    fa = next(x for x in kernels["prefill"] if (x["model"], x["context"], x["rows"]) == ("qwen2.5-7b", 2048, 4))
    cost, drawn, traced = sse_cost(), read("h200/sampling.json"), read("h200/trace_cost.json")
    n = max(cost)
    share = data["1.5b"]["miniengine"]["inf"]["output_throughput"]*cost[n]/1e4
    out = [("First tokens of 1,000 prompts at once", "; ".join(f"{MODELS[m].split('-')[1]}: TTFT mean {ratio(x, 'inf', 'mean_ttft_ms'):.2f}× vLLM's ({x['miniengine']['inf']['mean_ttft_ms'] - x['vllm']['inf']['mean_ttft_ms']:+,.0f} ms)" for m, x in data.items()),
            "`server.py`, `unblocked`: changed since, not measured again on the GPU")]
    if d := prompts():
        out.append(("– the tokenizer, in the loop that launches steps", f"{1e3*d['tokenize_s']:,.0f} ms for {d['prompts']:,} ShareGPT prompts on one core of another machine, {1e3*d['tokenize_s']/d['prompts']:.1f} ms each", "`server.py`: a process of its own"))
    if p and q:
        lost = theirs["miniengine"]["prefix_cache"]["hits"] - ours["miniengine"]["prefix_cache"]["hits"]
        out += [
            ("– prefill, all requests at once", f"{p:,.0f} prompt tokens/s against {q:,.0f}: {p/q:.2f}×", "`runner.py`, `model.py`"),
            ("– prefix hits", f"{lost:,.0f} tokens of {ours['total_input_tokens']:,.0f} computed that vLLM found: {1e3*lost/p:.0f} ms in all", "none needed"),
            ("Mixed prefill and decode", f"a step of {budget:,} tokens lasts {1e3*budget/p:.0f} ms at that rate (vLLM {1e3*budget/q:.0f}), and every stream waits for it: ITL p99 {ours['p99_itl_ms']:.0f} ms, vLLM {theirs['p99_itl_ms']:.0f}",
             "`scheduler.py`: fewer prompt tokens in a step while others decode")]
    out += [
        ("Decode step above the floor, 32 × 1,024", f"{s['total']:.2f} of {s['step']:.2f} ms: the sum of the next four", ""),
        ("– attention", f"{s['attention']:.2f} ms", "`triton_attention.py`"),
        ("– small fused kernels", f"{s['fused']:.2f} ms", "`triton_attention.py`: fuse into the products"),
        ("– scheduler, packing, commit in Python", f"{s['host']:.2f} ms are visible; the overlap hides the rest", "`engine.py`, `runner.py`"),
        ("– matrix products and gaps between kernels, by subtraction", f"{s['rest']:.2f} ms: {s['products']:.2f}× the bytes of their weights", "`model.py`: cuBLAS below copy bandwidth"),
        ("Triton instead of FlashInfer, decode kernel", f"{28*(mid[2] - mid[3])/1e3:+.2f} ms a step at 32 × 1,024, {28*(long[2] - long[3])/1e3:+.2f} ms at 128 × 8,192", "`triton_attention.py`"),
        ("Triton instead of FlashInfer, prefill kernel", f"{28*(fa['us'] - fastest(fa, 'fa2_us', 'fa3_us'))/1e3:+.2f} ms a step at 4 × 512 over 2,048", "`triton_attention.py`"),
        ("Triton instead of FlashInfer, served", switched(e, "triton") or OPEN, "`triton_attention.py`"),
        ("CUDA graphs, switched off", switched(e, "eager") or OPEN, "`runner.py`"),
        ("Overlap, switched off", switched(e, "overlap") or OPEN, "`engine.py`"),
        ("Chunked prefill, switched off", switched(e, "chunk") or OPEN, "`scheduler.py`"),
        ("Continuous batching, switched off", switched(e, "static") or OPEN, "`scheduler.py`"),
        ("Prefix cache, switched off", switched(e, "cache") or OPEN + " on the GPU", "`prefix_cache.py`"),
        ("Detokenizer, JSON and HTTP in Python", f"{cost[n]:.0f} µs of CPU per token at {n:,} streams: {share:.0f} % of a core with the 1.5B, all at once", "`server.py`, `text.py`")]
    if drawn:
        x = max(drawn["results"], key=lambda r: (r["rows"], r["triton_ms"]))
        out.append((f"Drawing a token, {x['rows']} rows, {x['rules']}", f"{x['triton_ms']:.2f} ms a step (in PyTorch {x['torch_ms']:.1f}, floor {x['floor_ms']:.2f}); the sweep is greedy and pays none of it", "`triton_sampler.py`"))
    if traced:
        x = [r["trace_us"]/r["step_ms"]["off"]/10 for r in traced["runs"]]
        out.append(("The step trace, if it is on", f"{min(x):.2f} to {max(x):.2f} % of a step", "`glass.py`"))
    return out


def gap_table(*args): return md(["gap component", "measured contribution", "where the fix goes"], gap_rows(*args)).replace("---:", "---")


def accepted(number):
    "What bench/acceptance.py wrote about a criterion on any machine: (text, verdict), preferring those that decided it"
    found = []
    for p in sorted(RESULTS.glob("*/acceptance.md")):
        for line in p.read_text().splitlines():
            cells = [c.strip() for c in line.strip("|").split("|")]
            if len(cells) == 4 and cells[0] == number: found.append((f"{cells[2]} ({p.parent.name})", cells[3]))
    return max(found, key=lambda f: f[1].lower() in ("pass", "fail"), default=None)


def batching():
    "{where: (tok/s ratio, TTFT p95 ratio)} of continuous over static, offline (bench/batching.py) and served (the sweep)"
    out = {}
    for p in sorted(RESULTS.glob("*/batching.json")):
        m = json.loads(p.read_text())["modes"]
        c, s = m["continuous"], m["static"]
        out[p.parent.name] = c["output_tok_s"]/s["output_tok_s"], s["ttft_p95_ms"]/c["ttft_p95_ms"]
    e = sweep().get("7b", {})
    for r, s in e.get("miniengine-static", {}).items():
        c = e["miniengine"][r]
        out[f"h200, 7B at {r} req/s"] = c["output_throughput"]/s["output_throughput"], s["p95_ttft_ms"]/c["p95_ttft_ms"]
    return out


def static_table(engines):
    "Static beside continuous batching, both served at the same rates"
    rows = [(name, r, f"{x['output_throughput']:,.0f}", f"{x['mean_ttft_ms']:,.0f}", f"{x['p95_ttft_ms']:,.0f}", f"{x['mean_itl_ms']:.1f}", f"{x['duration']:.1f}")
            for r in engines["miniengine-static"] for name, x in (("static", engines["miniengine-static"][r]), ("continuous", engines["miniengine"][r]))]
    return md(["batching", "req/s", "output tok/s", "TTFT mean (ms)", "TTFT p95 (ms)", "ITL mean (ms)", "duration (s)"], rows)


def two_turns():
    "What bench/two_turns.py measured, on whatever machine"
    return next((json.loads(p.read_text()) for p in sorted(RESULTS.glob("*/two_turns.json"))), None)


@lru_cache
def static_steps(rows=32, n=400, prompt=232, output=195):
    "Steps that static and continuous batching need in the real scheduler for the same `n` requests, at most `rows` at once, no prefix cache"
    from miniengine.config import SamplingParams
    from miniengine.kv_blocks import BlockPool
    from miniengine.scheduler import Request, Scheduler
    out = {}
    for mode in ("static", "continuous"):
        s = Scheduler(BlockPool(100_000), max_num_seqs=rows, max_num_batched_tokens=8192, max_model_len=8192, batching=mode)
        for i, (p, o) in enumerate(draw_lengths(n, prompt, output)):
            s.add(Request(str(i), [1]*p, SamplingParams(temperature=0, max_tokens=o, ignore_eos=True)))
        steps = tokens = 0
        while s.has_work:
            b = s.schedule()
            steps += 1; tokens += sum(r.sample for r in b.rows)
            s.commit(b, [0]*sum(r.sample for r in b.rows))
        out[mode] = steps, tokens/steps
    return out


def default_steps(steps):
    "Rows of the 7B's measured decode steps, of one attention backend: FlashInfer's (the default) if they are there"
    rows = [r for d in steps if d["model"].startswith("Qwen2.5-7B") for r in d["results"]]
    kinds = {r["attn"] for r in rows}
    return sorted((r for r in rows if r["attn"] == ("flashinfer" if "flashinfer" in kinds else min(kinds))), key=lambda r: r["rows"])


def served_rates():
    "{(machine, engine): hit rate of the whole trace} of the replays against servers"
    return {k: hit_rates({x["turn"]: (x["queries"], x["hits"]) for x in d["turns"] if x["turn"] != "all"})["all"]
            for k, d in replayed_servers().items() if d.get("mode") != "open" and k[1] in SIDES}


def served_words():
    "The hit rates of all replays against servers in words, by machine and block size"
    by = {}
    for (machine, engine), d in replayed_servers().items():
        if d.get("mode") == "open": continue
        rate = hit_rates({x["turn"]: (x["queries"], x["hits"]) for x in d["turns"] if x["turn"] != "all"})["all"]
        by.setdefault((machine, d["block_size"]), []).append(f"{'vLLM' if engine.startswith('vllm') else 'ours'} {100*rate:.1f} %")
    return "; ".join(f"with blocks of {b} {' and '.join(w)} ({m})" for (m, b), w in sorted(by.items()))


def same_hits():
    "Did both engines' servers find equally many tokens where they were replayed with the same block size?"
    by = {}
    for (machine, engine), d in replayed_servers().items():
        if d.get("mode") == "turn": by.setdefault((machine, d["block_size"]), {})[engine.split("_")[0]] = sum(t["hits"] for t in d["turns"])
    pairs = [w for w in by.values() if len(w) == 2]
    return bool(pairs) and all(w["vllm"] == w["miniengine"] for w in pairs)


def gate_rows(data):
    "[(required, measured, verdict)]: pass, fail, open (not measured) or tested (by a test in the repository)"
    e = data["7b"]; tp = ratio(e, "8", "output_throughput")
    word = lambda ok: "**pass**" if ok else "**fail**"
    out, fits, real = [], capacity_rows(data, MEANS)[2], capacity_measured()
    if real: out.append(("≥ 50 sequences, 7B, 8k context, 24 GB", capacity_words(real), word(min(r["peak"] for r in real["rows"]) >= 50)))
    else: out.append(("≥ 50 sequences, 7B, 8k context, 24 GB", f"on a GPU: {OPEN}. By arithmetic {fits[1]} at a mean of {fits[0]:,.0f} tokens, {fits[3]} contiguous", "open"))
    real = accepted("2")
    out.append(("`openai` client, byte-identical text", *((real[0], word(real[1] == "pass")) if real and real[1].lower() in ("pass", "fail") else
                ("`test_the_openai_client_understands_us`, `test_streamed_text_equals_the_whole`", "tested"))))
    out.append(("ShareGPT at 8 req/s within 3× of vLLM", f"{tp:.2f}× its throughput: {e['miniengine']['8']['output_throughput']:,.0f} against {e['vllm']['8']['output_throughput']:,.0f} tok/s", word(tp > 1/3)))
    served, rows = served_rates(), trace_ids()
    pair = next((((m, served[m, "miniengine"], served[m, "vllm"])) for m, eng in served if eng == "vllm" and (m, "miniengine") in served), None)
    if pair: out.append(("prefix hit rate within 5 % of vLLM's", served_words(), word(abs(pair[1] - pair[2]) <= .05)))
    else: out.append(("prefix hit rate within 5 % of vLLM's", (f"ours in the scheduler {100*hit_rates(replay(rows))['all']:.1f} %, equal to arithmetic; " if rows else "") + f"vLLM on this trace: {OPEN}", "open"))
    same = read("cpu/compare_clients.json")
    out.append(("`bench_serve` prints what `vllm bench serve` prints", *((f"{sum(c['same'] for c in same.values())} of {len(same)} sets of options equal", word(all(c["same"] for c in same.values()))) if same else
                ("`test_report_is_the_captured_table`", "tested"))))
    out.append(("public repository, write-up, commands", "write-up and commands are here; the repository is not public yet", "open"))
    out.append(("a request's life from the book alone", "the tour follows one through all stations", "written"))
    b = batching()
    out.append(("continuous against static batching", "; ".join(f"{x:.1f}× the throughput, TTFT p95 {y:.1f}× shorter ({m})" for m, (x, y) in b.items()) or f"with a model: {OPEN}; in steps of the scheduler: chapter 3", "measured" if b else "open"))
    n = {m: len([r for r in common(x) if r != "inf"]) for m, x in data.items()}
    out.append(("latency and throughput at six rates", "; ".join(f"{MODELS[m]}: {k} rates and inf" for m, k in n.items()), "**pass**" if min(n.values()) >= 6 else "open"))
    return out


def gate_table(data): return md(["required", "measured", ""], gate_rows(data)).replace("---:", "---")


# --- size of the engine ---
ENGINE = ("config", "kv_blocks", "scheduler", "model", "weights", "attention", "triton_attention", "sampler", "triton_sampler", "runner", "prefix_cache", "text", "engine")
SURFACE = ("server", "cli", "doctor", "structured", "tools", "glass")   # what people and programs talk to; the rest is the harness


def code_lines(src):
    "Number of lines of `src` that hold code: no blank lines, no comments, no docstrings"
    doc, used = set(), set()
    for n in ast.walk(ast.parse(src)):
        if not isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not n.body: continue
        b = n.body[0]
        if isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant) and isinstance(b.value.value, str): doc |= set(range(b.lineno, b.end_lineno + 1))
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for t in tokenize.generate_tokens(io.StringIO(src).readline):
        if t.type not in skip: used |= set(range(t.start[0], t.end[0] + 1))
    return len(used - doc)


def sizes():
    "Code lines: {module: n} of the engine (chapters 1 to 12), of the surface around it, and of the harness that measures it"
    n = {p.stem: code_lines(p.read_text(encoding="utf-8")) for p in sorted((ROOT/"miniengine").glob("*.py")) if p.stem not in ("__init__", "_modidx")}
    pick = lambda names: {k: n[k] for k in names if k in n}
    return dict(engine=pick(ENGINE), surface=pick(SURFACE), harness=pick(k for k in n if k not in ENGINE + SURFACE))


def total(part): return sum(sizes()[part].values())


def about_lines(part="engine"):
    "Code lines of the engine (or another part) to the nearest hundred, as titles state them"
    return f"{round(total(part), -2):,}"
