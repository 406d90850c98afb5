#!/usr/bin/env python3
"""Rewrite the marked regions of README.md from bench/results, so that none of its figures is typed by hand; also the size in the blog's title.

    python tools/readme_tables.py            # rewrite
    python tools/readme_tables.py --check    # exit 1 if something would change

A region stands between `<!-- results: NAME -->` and `<!-- end -->`; NAME is a function below.
"""
import re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/"bench"))
import report as R  # noqa: E402

REGION = re.compile(r"(<!-- results: (\w+) -->\n).*?(\n<!-- end -->)", re.S)
DATA, ENV, KERNELS, STEPS = R.sweep(), R.environment(), R.read("h200/kernels.json"), R.step_files()
SEVEN, STATIC = DATA["7b"], R.batching()


def title():
    return (f"**A ~{R.about_lines()}-line inference engine with continuous batching, paged KV, prefix caching, and OpenAI-compatible streaming; built to learn, benchmarked\n"
            "against vLLM to keep honest.**")


def size():
    return (f"The engine, from a prompt to its tokens, offline or streamed, is about {R.about_lines()} lines of code, without blank lines, comments and docstrings; the surface around it (HTTP server, command line, structured output, tool calls, the glass engine, the doctor) about {R.about_lines('surface')}, "
            f"and the harness that measures it about {R.about_lines('harness')}. `make test` prints the exact count per module and fails above 2,000 for the engine.")


def caption():
    r = lambda k: [R.ratio(SEVEN, x, k) for x in R.common(SEVEN) if x != "inf"]
    t, i = r("p95_ttft_ms"), r("p95_itl_ms")
    lost = [x for x in R.losses(DATA) if max(x[5], 1/x[5]) > 1.02]
    of = lambda m: R.MODELS[m].split("-")[1]
    inf = [f"{name} {x:.2f}× ({of(m)})" for m, rate, name, _, _, x in lost if rate == "inf"]
    rest = [f"{name} {x:.2f}× at {rate} req/s ({of(m)})" for m, rate, name, _, _, x in lost if rate != "inf"]
    won = " and ".join(f"{R.ratio(e, 'inf', 'output_throughput'):.2f} ({of(m)})" for m, e in DATA.items())
    return (f"At 1 to 32 requests a second, TTFT p95 of the 7B is {min(t):.2f} to {max(t):.2f} times vLLM's and ITL p95 {min(i):.2f} to {max(i):.2f} times; with all requests at once it delivers {won} times the tokens per second. "
            + (f"**Where we lose:** with all requests at once, {', '.join(inf)}. " if inf else "") + (f"Also {', '.join(rest)}." if rest else "")).strip()


def machine():
    e = ENV; v = e["versions"]
    rounds = max(x["rounds"] for s in R.SIDES for x in SEVEN[s].values())
    return (f"{e['machine']}; torch {v['torch']}, FlashInfer {v['flashinfer']}, Triton {v['triton']}, vLLM {v['vllm']}; {e['date']}, commit `{e['commit']}`. ShareGPT prompts, greedy, outputs of the data set's lengths, random weights, both engines "
            f"on one machine in one session, one after the other at each rate, one client. " + (f"Median of up to {rounds} runs." if rounds > 1 else "One run per point, so a per cent or two means nothing."))


def losses(): return R.losses_table(DATA)


def versus():
    parts = []
    for m in DATA:
        gone = [r for r in R.missing_rates(DATA)[m]]
        parts.append(f"**{R.MODELS[m]}**, vLLM / miniengine" + (f" (rates {', '.join(gone)} {R.OPEN})" if gone else "") + "\n\n" + R.versus_table(DATA[m]))
    return "\n\n".join(parts)


def ablations(): return R.ablation_table(SEVEN, ("output_throughput", "mean_ttft_ms", "p95_ttft_ms", "mean_itl_ms", "p95_itl_ms"))


def static():
    e = SEVEN["miniengine-static"]
    return R.static_table(SEVEN) + (f"\n\nStatic batching at unlimited rate: {R.OPEN} on the GPU." if "inf" not in e else "")


def time():
    "How long the measurements take, from the sweep's own durations and starts"
    runs = [x for m in DATA.values() for e in m.values() for x in e.values()]
    starts = sum(len(m) for m in DATA.values()); slow = max(int(s) for n in ENV["notes"] for s in re.findall(r"(\d+) s\b", n))
    shown, all_in = sum(x["duration"] for x in runs)/60, (sum(x["duration"] for x in runs) + starts*slow)/60
    return (f"The sweep's {len(runs)} runs last {shown:.0f} minutes by their own clocks; {starts} starts of a server, if each took the {slow} s of the slowest cold start seen, add {starts*slow/60:.0f}. That makes {all_in:.0f} minutes, of two hours, "
            f"and leaves about {(120 - all_in)/8:.0f} for each of the other eight scripts that want the GPU, `kernels.py` being the longest with its 240 seconds and a few more to compile.")


def gap(): return R.gap_table(DATA, KERNELS, STEPS)


def gate(): return R.gate_table(DATA)


def blocks():
    c = R.model_config(DATA); per = R.kv_bytes(c); g = R.gib24(DATA); frag = {b: 100*R.draw_waste(b) for b in (1, 16, 128)}
    rows = R.capacity_rows(DATA, R.MEANS)
    row = min(rows, key=lambda r: abs(r[0] - 2600))
    real, pr = R.capacity_measured(), R.prompts()
    lengths = f"the lengths of {pr['prompts']:,} ShareGPT prompts and answers" if pr else "log-normal lengths around ShareGPT's means"
    return (f"The arithmetic, for {R.MODELS['7b']} in bf16: a token costs 2 (K and V) × {c['num_layers']} layers × {c['num_kv_heads']} KV heads × {c['head_dim']} × 2 bytes = {per:,} bytes, so a contiguous reservation of 8,192 tokens takes {8192*per/2**20:.0f} MiB "
            f"however short the answer turns out to be. A block of 16 tokens takes {16*per/2**10:.0f} KiB, and only a sequence's last block is partly empty: 7.5 tokens on average, {100*7.5/507.5:.1f} % of a 500-token sequence. Below 16 there is little left to win, "
            f"while the block table of an 8k sequence would grow from {8192//16} entries to 8,192, and each read would shrink from 16 consecutive tokens to one.\n\n"
            f"*Measured:* with {lengths}, {frag[16]:.1f} % of the allocated memory is empty at block 16, {frag[128]:.1f} % at 128. In 24 GiB ({g['kv']:.1f} GiB of it for the cache, {g['blocks']:,} blocks) {row[1]} sequences of {row[0]:,.0f} tokens on average fit at full length; "
            f"the real scheduler runs {row[2]} at once before its first preemption, and contiguous reservations allow {row[3]}. " + (f"For real, {R.capacity_words(real)}." if real else f"On a GPU: {R.OPEN}."))


def kernel():
    c = R.model_config(DATA); group = c["num_heads"]//c["num_kv_heads"]
    at = {r: q for r, ctx, *_, q, _ in R.decode_rows(KERNELS) if ctx == 1024}
    rs = R.decode_rows(KERNELS); worst = min(rs, key=lambda r: r[4]); pre = [R.fastest(x, "fa2_us", "fa3_us")/x["us"] for x in KERNELS["prefill"] if x["model"] == "qwen2.5-7b"]
    return (f"The arithmetic: in decode each cached number (2 bytes) takes part in one multiply-add for each of the {group} query heads that share it, so {2*group} operations per 2 bytes, or {group} per byte. A GPU with 989 TFLOP/s in bf16 and 4.8 TB/s "
            f"(an H200 on its data sheet) needs {989/4.8:.0f} per byte before arithmetic becomes the limit. Decode attention is a matter of reading memory in order, which Triton expresses as well as CUDA does.\n\n"
            "*Measured*, FlashInfer's time over ours, one layer of the 7B, 1,024 tokens of context: " + ", ".join(f"{q:.2f} at batch {r}" for r, q in at.items()) +
            f". The worst decode shape of {len(rs)} is {worst[4]:.2f} ({worst[0]} × {worst[1]:,}). Prefill is slower: {min(pre):.2f} to {max(pre):.2f}. "
            + (f"Served with `--attn triton`, the 7B delivers {SEVEN['miniengine-triton']['inf']['output_throughput']/SEVEN['miniengine']['inf']['output_throughput']:.2f} times the tokens per second with all requests at once." if "inf" in SEVEN.get("miniengine-triton", {}) else ""))


def loop():
    cost = R.sse_cost(); a, b = (SEVEN[e]["8"]["mean_ttft_ms"] for e in ("miniengine", "vllm"))
    tok = 32*200
    return (f"The arithmetic: 32 requests per second with 200 output tokens each are {tok:,} tokens per second, so one core has {1e6/tok:.0f} µs for everything that a token costs on the host. That is room for asyncio, as long as work is done per step and not per token "
            "where it can be. Whoever needs several processes is better served by vLLM; this engine's job is to teach and to benchmark.\n\n"
            f"*Measured:* {min(cost.values()):.0f} to {max(cost.values()):.0f} µs of CPU per streamed token, all in, at {min(cost)} to {max(cost):,} streams. Mean TTFT of the 7B at 8 requests a second: {a:.1f} ms, vLLM {b:.1f} ms. "
            "The price: what blocks the loop blocks everybody.")


def prefix():
    rows = R.trace_ids()
    rate = R.hit_rates(R.replay(rows)) if rows else {}
    text = ("The arithmetic: a dict of 16-token blocks misses at most the last 15 tokens of a shared prefix, 7.5 on average; in an agent loop that sends 3,000 tokens of history again every turn that is "
            f"{100*7.5/3000:.2f} % of the hit rate that a tree could have. Equality is compared on the token ids themselves, so a hash collision is a miss and never a wrong answer. The radix tree is the upgrade for a second version.\n\n")
    if rate: text += ("*Measured* on an agent's trace (8 conversations, 6 turns, the whole history sent again), through the real scheduler: " +
                      ", ".join(f"{100*x:.1f} % on turn {t + 1}" for t, x in rate.items() if t != "all") + f"; {100*rate['all']:.1f} % in all, equal to the count by hand. ")
    return text + (f"Over HTTP, both engines' servers: {R.served_words()}." if R.served_words() else f"vLLM on the same trace: {R.OPEN}.")


def rewrite(text):
    def fill(m): return f"{m[1]}\n{globals()[m[2]]()}\n{m[3]}"
    return REGION.sub(fill, text)


def blog_title(text): return re.sub(r"# A [\d,]+-line inference engine", f"# A {R.about_lines()}-line inference engine", text)


def main():
    old_new = []
    for path, change in (ROOT/"README.md", rewrite), (ROOT/"nbs"/"90_blog.ipynb", blog_title):
        old = path.read_text(encoding="utf-8")
        if (new := change(old)) != old: old_new.append((path, new))
    if "--check" in sys.argv and old_new:
        sys.exit(f"{', '.join(p.name for p, _ in old_new)}: not what bench/results and the package say; run `python tools/readme_tables.py`")
    for path, new in old_new: path.write_text(new, encoding="utf-8")


if __name__ == "__main__": main()
