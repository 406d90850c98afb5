#!/usr/bin/env python3
"""Run `vllm bench serve` and ours against the same fake server, and compare what each sent, printed and stored.

    python bench/compare_clients.py --vllm /path/to/vllm --tokenizer DIR [--sharegpt FILE] [--json OUT]
    python bench/compare_clients.py ... --serve 'miniengine serve smollm2 --port {port}' --load '--num-prompts 24 ...'

Compared per case: bodies and headers of all requests; the send times; the console output with numbers masked
(without vLLM's log lines, the function's name in its Namespace line masked); the JSON's keys in order, and every value
that doesn't depend on the clock.

With `--serve`, both clients measure a real server instead, started anew for each run, in turns (ours, vLLM's, vLLM's,
ours): prompts, send times, labels and keys must be equal again, and the figures are put side by side.
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
FULL = "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99,99.9 "
CHAT = "--backend openai-chat --endpoint /v1/chat/completions "
TINY = "--random-input-len 9 --random-output-len 2 "

# name: (options of the fake server, options of both clients)
CASES = {
    "random": ("--itl 0.003", FULL + "--random-input-len 20 --random-output-len 8 --num-prompts 20 --request-rate 20 "
               "--goodput ttft:30 tpot:9 e2el:900"),
    "failures": ("--itl 0.003 --fail-every 5", TINY + "--output-len 6 --num-prompts 13 --num-warmups 2 "
                 "--max-concurrency 4 --ready-check-timeout-sec 20 --label L --metadata a=b c=1 --temperature 0"),
    "all fail": ("--fail-every 1", TINY + "--num-prompts 3 --percentile-metrics itl,ttft,x"),
    "chat": ("--ttft 0.01 --itl 0.002", FULL + CHAT + "--random-input-len 30 --random-output-len 10 --num-prompts 30 "
             "--random-range-ratio 0.5 --random-prefix-len 5 --max-concurrency 6 --temperature 0 --top-k 5 --min-p 0.1 "
             "--extra-body '{\"top_p\":0.5,\"x\":[1]}' --ignore-eos"),
    "sharegpt": ("--itl 0.001", "--dataset-name sharegpt --dataset-path {sharegpt} --num-prompts 60 --request-rate 30 "
                 "--burstiness 0.5 --seed 3 --header X-A=1 x-b=2=3 --logprobs 2 --repetition_penalty 1.2"),
    "sharegpt fixed": ("", "--dataset-name sharegpt --dataset-path {sharegpt} --num-prompts 40 --sharegpt-output-len 4 "
                       "--disable-shuffle --served-model-name served --request-rate 80 --burstiness inf"),
    "oversample": ("", "--dataset-name custom --dataset-path {custom} --num-prompts 9 --custom-output-len -1"),
    "no oversample": ("", CHAT + "--dataset-name custom --dataset-path {custom} --num-prompts 9 --no-oversample "
                      "--skip-chat-template --output-len 3"),
    "prefixes": ("", "--dataset-name prefix_repetition --num-prompts 23 --prefix-repetition-num-prefixes 4 "
                 "--prefix-repetition-prefix-len 20 --prefix-repetition-suffix-len 10 "
                 "--prefix-repetition-output-len 3 --request-rate 40"),
    "burstgpt": ("", "--dataset-name burstgpt --dataset-path {burstgpt} --num-prompts 12 --seed 7 --request-rate 60"),
    "ramp linear": ("", TINY + "--num-prompts 30 --ramp-up-strategy linear --ramp-up-start-rps 10 "
                    "--ramp-up-end-rps 40"),
    "ramp exponential": ("", TINY + "--num-prompts 30 --ramp-up-strategy exponential --ramp-up-start-rps 4 "
                         "--ramp-up-end-rps 64 --burstiness 3"),
    "speculative": ("--spec-decode", TINY + "--num-prompts 6"),
    "cut streams": ("--itl 0.002 --cut-every 3 --error-every 4", FULL + TINY + "--output-len 8 --num-prompts 12"),
    "cut chat": ("--itl 0.002 --cut-every 3 --error-every 4", FULL + CHAT + TINY + "--output-len 8 --num-prompts 12"),
    "no usage": ("--itl 0.002 --no-usage --stop-after 5", FULL + TINY + "--output-len 8 --num-prompts 6"),
    "one token": ("", FULL + TINY + "--output-len 1 --num-prompts 6"),
    "model from server": ("--model served --root {tokenizer}", TINY + "--num-prompts 4 NO_MODEL"),
    "aligned": ("--tokenizer {tokenizer} --extra-token", "--random-input-len 20 --random-output-len 2 --num-prompts 6"),
}
CLOCK = re.compile("date|duration|throughput|goodput|_ms$|ttfts|itls|start_times|max_output|max_concurrent|timestamp")
LOG_LINE = re.compile(r"(\(\w+ pid=\d+\) )?(INFO|WARNING) \d\d-\d\d|Triton is installed")


def mask(text):
    "Console output without vLLM's log lines, numbers as #, and what depends on the moment or the program"
    text = "\n".join(s for s in text.splitlines() if not LOG_LINE.match(s))
    text = re.sub(r"dispatch_function=<function [\w.<>]+ at 0x[0-9a-f]+>", "dispatch_function=F", text)
    text = re.sub(r"(result_dir|result_filename)='[^']*'", r"\1=R", text)
    text = re.sub(r'Traceback \(most recent call last\):.*?(?=\n(Error \d|tip|=====))', "TRACEBACK", text, flags=re.S)
    return re.sub(r"\d+(\.\d+)?(e-\d+)?\s*(?=\n|$)|\d+(\.\d+)?", "#", text)


def stable(value):
    "A JSON value without what depends on the clock"
    if isinstance(value, dict): return {k: None if CLOCK.search(k) else stable(v) for k, v in value.items()}
    if isinstance(value, list): return [stable(v) for v in value]
    return re.sub(r"Traceback.*", "TRACEBACK", value, flags=re.S) if isinstance(value, str) else value


def run_case(command, server_options, options, port, where):
    "Start a fake server, run one client, stop the server: dict(stdout, json, requests, file)"
    log = where/"requests.jsonl"
    where.mkdir(exist_ok=True)
    for f in where.iterdir(): f.unlink()
    fake = [sys.executable, HERE/"fake_server.py", "--port", str(port), "--log", log]
    server = subprocess.Popen(fake + server_options)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models")
                break
            except OSError: time.sleep(.1)
        options = [*command, "--port", str(port), *options, "--save-result", "--save-detailed", "--result-dir", where]
        env = os.environ | {"OPENAI_API_KEY": "secret"}
        r = subprocess.run(options, capture_output=True, text=True, env=env, cwd=where)
    finally:
        server.terminate()
        server.wait()
    files = list(where.glob("*.json"))
    if r.returncode or len(files) != 1: sys.exit(r.stdout[-2000:] + r.stderr[-3000:])
    stored = json.loads(files[0].read_text())
    (where/"stdout.txt").write_text(r.stdout)
    (where/"stderr.txt").write_text(r.stderr)
    return dict(stdout=r.stdout, json=stored, requests=[json.loads(s) for s in log.read_text().splitlines()],
                file=re.sub(r"\d{8}-\d{6}", "DATE", files[0].name))


def compare(theirs, ours):
    "[(what, difference)] of two runs, and the largest difference of send times in s"
    out, (a, b) = [], (mask(theirs["stdout"]), mask(ours["stdout"]))
    lines = [f"- {x}\n+ {y}" for x, y in zip(a.splitlines() + [""] * 99, b.splitlines() + [""] * 99) if x != y]
    if lines: out.append(("console", "\n".join(lines[:3])))
    a, b = stable(theirs["json"]), stable({k: v for k, v in ours["json"].items() if k != "miniengine"})
    if list(a) != list(b): out.append(("JSON keys", f"{[k for k in a if k not in b]} {[k for k in b if k not in a]}"))
    out += [(f"JSON {k}", f"{str(a[k])[:300]} / {str(b.get(k))[:300]}") for k in a if a[k] != b.get(k)]
    if theirs["file"] != ours["file"]: out.append(("file name", f"{theirs['file']} / {ours['file']}"))
    # by id; requests without one (warm-up, prefix_repetition) are matched by content
    def key(p): return [int(p["headers"].get("x-request-id", "r--1")[2:]), json.dumps([p["path"], p["body"]])]
    a, b = (sorted(x["requests"], key=key) for x in (theirs, ours))
    if len(a) != len(b): out.append(("requests", f"{len(a)} / {len(b)}"))
    for part in ("path", "headers", "body"):
        text = (lambda x: json.dumps(x)) if part == "body" else (lambda x: json.dumps(x, sort_keys=True))
        diff = [(text(x[part]), text(y[part])) for x, y in zip(a, b) if text(x[part]) != text(y[part])]
        if diff: out.append((part, f"{len(diff)} differ, first {diff[0][0][:300]} / {diff[0][1][:300]}"))
    return out, max((abs(x["t"] - y["t"]) for x, y in zip(a, b)), default=0)


def real_server(a, commands, load, where) -> dict:
    "Both clients against a real server, twice; what differs, and the figures of every run"
    from servers import running
    runs, url = {"ours": [], "vllm": []}, f"http://127.0.0.1:{a.port}"
    for i, who in enumerate(("ours", "vllm", "vllm", "ours")):
        out, log = where/f"{i}-{who}.json", where/"server.log"
        options = ["--port", str(a.port), "--tokenizer", a.tokenizer, *load, "--request-id-prefix", "r-",
                   "--save-detailed", "--save-result", "--result-dir", str(where), "--result-filename", out.name]
        with running(a.serve.format(port=a.port), url, log):
            r = subprocess.run([*commands[who], *options], capture_output=True, text=True)
        if r.returncode: sys.exit(r.stdout[-2000:] + r.stderr[-3000:])
        d = json.loads(out.read_text())
        d["times"] = [t - d["start_times"][0] for t in d["start_times"]]
        runs[who].append(dict(stdout=r.stdout, json=d))
    pairs = list(zip(runs["vllm"], runs["ours"]))
    same = {"console": all(mask(v["stdout"]) == mask(o["stdout"]) for v, o in pairs),
            "keys": all([k for k in v["json"]] == [k for k in o["json"] if k != "miniengine"] for v, o in pairs)}
    for key in ("completed", "failed", "input_lens", "output_lens", "generated_texts"):
        same[key] = all(v["json"][key] == o["json"][key] for v, o in pairs)
    late = max(abs(x - y) for v, o in pairs for x, y in zip(v["json"]["times"], o["json"]["times"]))
    figures = [k for k in runs["ours"][0]["json"] if re.match("mean_|median_|.*throughput|duration", k)]
    table = {k: {who: [round(r["json"][k], 2) for r in rs] for who, rs in runs.items()} for k in figures}
    return dict(serve=a.serve, load=a.load, same=same, largest_send_time_difference_ms=round(late * 1e3, 1),
                figures=table)


def data_files(where):
    "Write the files of the custom and burstgpt cases"
    rows = [json.dumps({"prompt": f"Tell me {i} things about number {i}.", "output_tokens": i + 2}) for i in range(5)]
    (where/"custom.jsonl").write_text("\n".join(rows) + "\n")
    rows = [f"{i},{'GPT-4' if i % 3 else 'ChatGPT'},{5 + i},{i % 7},{5 + i + i % 7},API log" for i in range(40)]
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (where/"burst.csv").write_text("\n".join([head, *rows]) + "\n")
    return dict(custom=where/"custom.jsonl", burstgpt=where/"burst.csv")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--vllm", required=True, help="command that runs vLLM's CLI, such as 'vllm'")
    p.add_argument("--ours", default=f"{sys.executable} {HERE/'bench_serve.py'}")
    p.add_argument("--tokenizer", required=True, help="folder with a tokenizer that both load")
    p.add_argument("--sharegpt", help="ShareGPT JSON (complete); its cases are skipped without it")
    p.add_argument("--only", nargs="*")
    p.add_argument("--port", type=int, default=8310)
    p.add_argument("--json", help="write the outcome here")
    p.add_argument("--serve", help="start this real server (with {port} in it) instead of the fake one")
    p.add_argument("--load", default="", help="options of both clients against it")
    p.add_argument("--keep", help="keep outputs in this folder")
    a = p.parse_args()
    tmp = Path(a.keep or tempfile.mkdtemp()).resolve()
    tmp.mkdir(exist_ok=True, parents=True)
    names = dict(tokenizer=a.tokenizer, sharegpt=a.sharegpt, **data_files(tmp))
    def fill(s): return shlex.split(re.sub(r"\{(\w+)\}", lambda m: str(names[m[1]]), s))
    commands = dict(vllm=shlex.split(a.vllm) + ["bench", "serve"], ours=shlex.split(a.ours))
    if a.serve:
        report = real_server(a, commands, fill(a.load), tmp)
        print(json.dumps(report, indent=1))
        if a.json: Path(a.json).write_text(json.dumps(report, indent=1) + "\n")
        return not all(report["same"].values())
    report = {}
    for n, (name, (server, options)) in enumerate(CASES.items()):
        if (a.only and name not in a.only) or ("{sharegpt}" in options and not a.sharegpt): continue
        target = ["--tokenizer", a.tokenizer, "--model", "fake"] if "NO_MODEL" not in options else []
        target += ["--request-id-prefix", "r-"] + fill(options.replace("NO_MODEL", ""))
        runs = [run_case(command, fill(server), target, a.port + n, tmp/f"{name.replace(' ', '_')}-{who}")
                for who, command in commands.items()]
        diffs, late = compare(*runs)
        report[name] = dict(options=options, same=not diffs, requests=len(runs[0]["requests"]),
                            largest_send_time_difference_ms=round(late * 1e3, 1), differences=diffs)
        print(f"{name:18} {'DIFFERENT' if diffs else 'same':9} {len(runs[0]['requests']):3} requests, "
              f"send times differ by at most {late * 1e3:.1f} ms", flush=True)
        for what, text in diffs: print(f"    {what}: {text}")
    if a.json: Path(a.json).write_text(json.dumps(report, indent=1) + "\n")
    return sum(not r["same"] for r in report.values())


if __name__ == "__main__": sys.exit(main())
