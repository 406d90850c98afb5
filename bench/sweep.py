#!/usr/bin/env python3
"""Measure engines x models x request rates, as a config file says, and keep what is needed to trust the numbers.

    python bench/sweep.py bench/sweep_cpu.toml --set vllm=/path/to/vllm [--only-engine miniengine vllm] [--dry-run]

For each model and each round, every engine is started in turn (in reversed order every other round), warmed up with
random prompts, measured at every rate, and stopped. All engines get the same prompts at the same times from the same
client. Prompts seen at one rate would come out of the prefix cache at the next, so the cache is emptied in between; a
server that can't do that is started again. (`fresh = "seed"` in the config draws other prompts for each rate instead:
quicker, but a few per cent of them are seen twice, as the stored counters tell.)

Servers that run already are named by --url ENGINE=URL. If all of them do, the engines take turns at every rate.

Written: <results>/<machine>/<model>/<engine>/<rate>.json (<rate>.2.json for round 2, and so on), the report beside it
as .txt, and <machine>/environment.json with the machine, versions and command lines. What is there already is kept,
so an interrupted sweep goes on where it stopped (`--again` measures anew).
"""
import argparse
import contextlib
import json
import shlex
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from servers import bench, environment, fetch, machine_name, running, sharegpt

WARM_UP = ("--dataset-name random --random-input-len 200 --random-output-len 16 --num-prompts 16 --seed 987 "
           "--temperature 0 --disable-tqdm")


class Sweep:
    def __init__(self, config: Path, results: Path, variables: dict, logs: Path, again: bool = False, urls={}):
        self.config, self.results, self.logs, self.again = config, results, logs, again
        self.urls, self.warm = dict(urls), set()
        self.cfg = tomllib.loads(config.read_text())
        self.vars = {"sharegpt": sharegpt()} | self.cfg.get("vars", {}) | variables

    def plan(self, only_model=None, only_engine=None):
        "(model, round, engine, rate) in the order they are measured; rate None: all, with one start of the server"
        for model in self.cfg["models"]:
            if only_model and model not in only_model: continue
            engines = [e for e, o in self.cfg["engines"].items() if model in o.get("models", [model])]
            engines = [e for e in engines if not only_engine or e in only_engine]
            for r in range(self.cfg.get("rounds", 1)):
                if self.urls.keys() >= set(engines):
                    rates = list(dict.fromkeys(x for e in engines for _, x in self.todo(model, r, e)))
                    for i, x in enumerate(rates, r):
                        yield from ((model, r, e, x) for e in engines[::-1 if i % 2 else 1])
                else: yield from ((model, r, e, None) for e in engines[::-1 if r % 2 else 1])

    def get(self, model: str, engine: str, key: str, default):
        "A setting: the engine's, else the model's, else that of the whole sweep"
        parts = self.cfg["engines"][engine], self.cfg["models"][model], self.cfg
        return next((p[key] for p in parts if key in p), default)

    def fill(self, text: str, model: str, **more) -> str:
        "`text` with {names} replaced by variables and by the model's settings, which may hold further names"
        names = self.vars | self.cfg["models"][model] | dict(name=model) | more
        for _ in range(3): text = text.format_map(names)
        return text

    def path(self, model: str, engine: str, rate, r: int) -> Path:
        return self.results/model/engine/f"{rate}{f'.{r + 1}' if r else ''}.json"

    def todo(self, model: str, r: int, engine: str) -> list[tuple]:
        "(number of the rate, rate) that have no result yet; a rate has the same number for all engines"
        rates, all_rates = self.get(model, engine, "rates", ["inf"]), self.cfg.get("rates", [])
        number = {x: i for i, x in enumerate(dict.fromkeys([*all_rates, *rates]))}
        return [(number[x], x) for x in rates if self.again or not self.path(model, engine, x, r).exists()]

    def measure(self, model: str, r: int, engine: str, only=None) -> dict|None:
        "All rates of one engine in one round (or one rate); how it was run, or None if there was nothing to do"
        todo, e = self.todo(model, r, engine), self.cfg["engines"][engine]
        if only is not None: todo = [x for x in todo if x[1] == only]
        url = self.urls.get(engine) or e.get("url", f"http://127.0.0.1:{self.cfg.get('port', 8123)}")
        serve = self.fill(e["serve"], model, port=url.rsplit(":", 1)[1]) if "serve" in e else None
        command = serve if engine not in self.urls else None
        if command and not shutil.which(word := shlex.split(command)[0]) and word != "miniengine":
            print(f"{model:14} {engine:18} left out: no command {word}")
            return None
        m = self.cfg["models"][model]
        base = shlex.split(self.fill(f"--model {m.get('served', model)} --tokenizer {m['tokenizer']}", model))
        load = shlex.split(self.fill(self.get(model, engine, "load", ""), model)) + ["--disable-tqdm"]
        seconds = self.get(model, engine, "seconds", 1e9)
        fresh, run, starts = self.get(model, engine, "fresh", "reset"), None, []
        while todo:
            log, server = self.logs/f"{model}-{engine}-{r + 1}.log", contextlib.nullcontext()
            if command: server = running(command, url, log, e.get("timeout", 900), e.get("env"))
            with server as took:
                starts.append(took and round(took, 1))
                if command or url not in self.warm: bench(url, base + shlex.split(WARM_UP), self.logs/"warm_up.json")
                self.warm.add(url)
                while todo:
                    i, rate = todo.pop(0)
                    n = self.get(model, engine, "num_prompts", 1000)
                    if rate != "inf": n = min(n, max(self.cfg.get("at_least", 1), round(rate * seconds)))
                    options = [*base, *load, "--request-rate", str(rate), "--num-prompts", str(n)]
                    if fresh == "seed": options += ["--seed", str(i)]
                    fetch(f"{url}/reset_prefix_cache", body={})
                    self.show(model, engine, r, rate, bench(url, options, self.path(model, engine, rate, r)))
                    can_reset = fresh == "seed" or fetch(f"{url}/reset_prefix_cache", body={})[0] == 200
                    if todo and command and not can_reset: break
            run = dict(engine=engine, round=r + 1, serve=serve or url, environment=e.get("env", {}), start_s=starts,
                       client=shlex.join([*base, *load]), fresh=fresh)
        return run

    def show(self, model, engine, r, rate, d):
        cache = d["miniengine"]["prefix_cache"]
        print(f"{model:14} {engine:18} round {r + 1} rate {rate:>4}: {d['completed']} done, {d['failed']} failed, "
              f"{d['output_throughput']:8.1f} tok/s, TTFT p95 {d.get('p95_ttft_ms', 0):8.1f} ms, "
              f"ITL p95 {d.get('p95_itl_ms', 0):6.1f} ms, cached {cache['hits']} of {cache['queries']}", flush=True)

    def record(self, model: str, run: dict):
        "Add a run to the machine's environment.json"
        path, run = self.results/"environment.json", dict(model=model) | run
        def key(x): return x["model"], x["engine"], x["round"]
        old = json.loads(path.read_text()).get("runs", []) if path.exists() else []
        runs = [x for x in old if key(x) != key(run)] + [run]
        path.write_text(json.dumps(environment() | dict(config=self.config.name, runs=runs), indent=1) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("config", type=Path)
    p.add_argument("--results", type=Path, default=Path(__file__).resolve().parent/"results")
    p.add_argument("--machine", default=machine_name(), help="folder in the results")
    p.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of the config")
    p.add_argument("--url", nargs="*", default=[], metavar="ENGINE=URL", help="servers that run already")
    p.add_argument("--only-model", nargs="*")
    p.add_argument("--only-engine", nargs="*")
    p.add_argument("--logs", type=Path, help="folder for the servers' logs (default: a temporary one)")
    p.add_argument("--again", action="store_true", help="measure what is there already, too")
    p.add_argument("--dry-run", action="store_true", help="print what would be measured")
    a = p.parse_args()
    variables, logs = dict(s.split("=", 1) for s in a.set), a.logs or Path(tempfile.mkdtemp())
    urls = dict(s.split("=", 1) for s in a.url)
    sweep, failed = Sweep(a.config, a.results/a.machine, variables, logs, a.again, urls), 0
    for model, r, engine, rate in sweep.plan(a.only_model, a.only_engine):
        rates = [x for _, x in sweep.todo(model, r, engine) if rate in (None, x)]
        if a.dry_run: print(f"{model:14} {engine:18} round {r + 1}: rates {' '.join(map(str, rates)) or '(all there)'}")
        elif rates:
            try: run = sweep.measure(model, r, engine, rate)
            except RuntimeError as error:
                print(f"{model} {engine}: {error}", file=sys.stderr, flush=True)
                failed += 1
            else:
                if run: sweep.record(model, run)
    return failed


if __name__ == "__main__": sys.exit(main())
