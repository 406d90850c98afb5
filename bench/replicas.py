#!/usr/bin/env python3
"""Two replicas of the demo model behind a router: all answers, hit rates by policy, and one replica killed in mid-run.

    python bench/replicas.py vllm-router --bin VENV/bin/vllm-router
    python bench/replicas.py ray --bin VENV/bin/python     # a Python with ray[serve] and this package's requirements

The load are agents (bench/agent_trace.py): `agents` system prompts, each with `conversations` that run side by side,
turn after turn, and send the whole history each time. Hits are what the answers' `usage` says; the answers also say
which replica they came from. Caches are empty at the beginning of each policy, since the replicas are new. The run
with the kill sends a second, different load afterwards: does the replica that came back take its share?
"""
import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from agent_trace import expected, make
from servers import HERE, MINIENGINE, ROOT, bench, environment, fetch, machine_name, run

from miniengine.bench_load import load_tokenizer
from miniengine.bench_serve import open_session

FLAGS = "smollm2 --max-model-len 2048 --kv-cache-memory 512MiB --dtype float32"
POLICIES = {"vllm-router": {"affinity": "cache_aware", "round robin": "round_robin"},
            "ray": {"affinity": "", "round robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter"}}
SERVE = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--model", "smollm2", "--dataset-name",
         "random", "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "24",
         "--request-rate", "2", "--temperature", "0", "--disable-tqdm"]


def load(a, seed: int) -> list[list[dict]]:
    "The conversations, each a list of requests in order"
    talks = []
    for agent in range(a.agents):
        rows = make(a.conversations, a.turns, 9, 14, a.max_tokens, 0, seed + agent)
        talks += [[r | {"id": f"a{agent}{r['id']}"} for r in rows if r["conversation"] == c]
                  for c in range(a.conversations)]
    return talks[::2] + talks[1::2]      # neighbours in the order of arrival belong to different agents


async def ask(session, url: str, row: dict) -> dict:
    "One streamed request: who answered, what was cached, and whether it came to its end"
    body = {k: row[k] for k in ("messages", "max_tokens", "temperature")}
    body |= dict(model="smollm2", stream=True, ignore_eos=True, stream_options={"include_usage": True})
    out = dict(id=row["id"], replica="", tokens=0, prompt=0, cached=0, error="", start=time.monotonic())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as r:
            out["replica"] = r.headers.get("x-replica", "")
            if r.status != 200: raise OSError(f"HTTP {r.status}: {(await r.text())[:200]}")
            end = ""
            async for line in r.content:
                if not line.startswith(b"data: {"):
                    end = line if line.startswith(b"data: [DONE]") else end
                    continue
                event = json.loads(line[6:])
                if "error" in event: raise OSError(event["error"]["message"])
                out["replica"] = out["replica"] or event["model"]
                out["tokens"] += len(event["choices"])
                if use := event.get("usage"):
                    out |= dict(prompt=use["prompt_tokens"], cached=use["prompt_tokens_details"]["cached_tokens"])
            if not end or out["tokens"] != row["max_tokens"]: raise OSError(f"cut off after {out['tokens']} tokens")
    except Exception as e: out["error"] = f"{type(e).__name__}: {e}"[:200]
    return out | dict(end=time.monotonic())


async def drive(url: str, talks: list[list[dict]], watch=None) -> list[dict]:
    "All conversations side by side, each turn after the one before; `watch(answers)` is called after each answer"
    answers = []
    async with open_session() as session:
        async def one(talk):
            for row in talk:
                answers.append(await ask(session, url, row))
                if watch: watch(answers)
        await asyncio.gather(*map(one, talks))
    return answers


def summary(answers: list[dict]) -> dict:
    "Counts and rates of some answers"
    good = [r for r in answers if not r["error"]]
    n, hits = sum(r["prompt"] for r in good), sum(r["cached"] for r in good)
    return dict(requests=len(answers), failed=len(answers) - len(good), prompt_tokens=n, cached_tokens=hits,
                hit_rate=round(hits/max(n, 1), 4), errors=dict(Counter(r["error"] for r in answers if r["error"])),
                per_replica=dict(sorted(Counter(r["replica"] for r in good).items())),
                seconds=round(max(r["end"] for r in answers) - min(r["start"] for r in answers), 1))


def start(words: list[str], log: Path, env=None) -> subprocess.Popen:
    "A process group of its own, with its output in `log`"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | (env or {})
    with open(log, "ab") as out:
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env)


def stop(p: subprocess.Popen):
    for s in signal.SIGTERM, signal.SIGKILL:
        if p.poll() is None:
            with contextlib.suppress(ProcessLookupError): os.killpg(p.pid, s)
            with contextlib.suppress(subprocess.TimeoutExpired): p.wait(30)


def wait(what: str, ok, timeout: float = 180) -> float:
    "Seconds until `ok()` is true"
    begin = time.monotonic()
    while not ok():
        if time.monotonic() - begin > timeout: raise RuntimeError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - begin


class VllmRouter:
    "vllm-router in front of two `miniengine serve`; a replica is known by the first of its served names"
    defaults = ("--health-failure-threshold 3 --cb-failure-threshold 10 --cb-success-threshold 3 "
                "--cb-timeout-duration-secs 60")     # the router's own, where deploy/vllm_router.sh has others

    def __init__(self, a, policy: str, logs: Path, more: str = ""):
        self.logs, self.url, ports = logs, f"http://127.0.0.1:{a.port}", (a.port + 1, a.port + 2)
        self.urls = {f"replica-{i}": f"http://127.0.0.1:{p}" for i, p in enumerate(ports)}
        self.replicas = {name: self.serve(name) for name in self.urls}
        for name, url in self.urls.items(): wait(name, lambda url=url: fetch(f"{url}/ready")[0] == 200)
        env = dict(VLLM_ROUTER=a.bin, PORT=str(a.port), POLICY=policy)
        env["ROUTER_ARGS"] = f"--prometheus-port {a.port + 3} {more}"
        self.router = start([str(ROOT/"deploy/vllm_router.sh"), *self.urls.values()], logs/"router.log", env)
        wait("the router", lambda: fetch(f"{self.url}/health")[0] == 200)

    def serve(self, name):
        words = [*MINIENGINE, "serve", *FLAGS.split(), "--port", self.urls[name].rsplit(":")[-1],
                 "--served-model-name", name, "smollm2"]
        return start(words, self.logs/f"{name}.log")

    def kill(self, name: str): os.killpg(self.replicas[name].pid, signal.SIGKILL)

    def replaced(self, name: str) -> bool: return False      # nobody does, until `revive`

    def revive(self, name: str) -> float:
        "Start the replica again; seconds until it is ready and the router has had time for two checks of it"
        self.replicas[name].wait()
        self.replicas[name] = self.serve(name)
        seconds = wait(name, lambda: fetch(f"{self.urls[name]}/ready")[0] == 200)
        time.sleep(4)
        return seconds + 4

    def survivor(self, name: str) -> dict:
        "What the metrics of replica `name` say about the ends of its requests"
        text, key = fetch(f"{self.urls[name]}/metrics")[1], 'vllm:request_success_total{'
        return {reason: int(sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith(key) and reason in x))
                for reason in ("stop", "length", "abort", "error")}

    def close(self):
        for p in (self.router, *self.replicas.values()): stop(p)


class Ray:
    "deploy/ray_serve.py on a local Ray; a replica is known by Ray's name for it"
    def __init__(self, a, policy: str, logs: Path):
        self.url, self.board = f"http://127.0.0.1:{a.port}", f"http://127.0.0.1:{a.port + 3}"
        words = [a.bin, __file__, "ray-app", "--port", str(a.port), *(["--router", policy] if policy else [])]
        self.log = logs/"ray.log"
        self.tmp = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")   # a short path: there are sockets in it
        env = dict(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=self.tmp.name)
        self.app = start(words, self.log, env)
        wait("Ray Serve", self.up)

    def up(self) -> bool:
        if self.app.poll() is not None: raise RuntimeError(f"Ray ended:\n{self.log.read_text()[-2000:]}")
        return fetch(f"{self.url}/ready")[0] == 200 and len(self.running()) == 2

    def running(self) -> dict[str, int]:
        "Replica -> process id"
        d = json.loads(fetch(f"{self.board}/api/serve/applications/")[1] or "{}")
        found = d["applications"]["default"]["deployments"]["Replica"]["replicas"] if d.get("applications") else []
        return {r["replica_id"]: r["pid"] for r in found if r["state"] == "RUNNING"}

    def kill(self, name: str): os.kill(self.running()[name], signal.SIGKILL)

    def replaced(self, name: str) -> bool: return len(self.running().keys() - {name}) == 2

    def revive(self, name: str) -> float:
        "Ray starts another one by itself: seconds until it runs"
        return wait("a new replica", lambda: self.replaced(name))

    def survivor(self, name: str) -> dict: return {}

    def close(self):
        stop(self.app)
        with contextlib.suppress(OSError): self.tmp.cleanup()


def ray_app(a):
    "The process that `Ray` starts"
    import ray
    from ray import serve

    from deploy.ray_serve import app
    ray.init(dashboard_port=a.port + 3, num_cpus=4, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": a.port})
    args = dict(flags=FLAGS, min_replicas="2", max_replicas="2", gpus="0")
    serve.run(app(args | ({"router": a.router} if a.router else {})), blocking=True)


def killed_in_mid_run(cluster, a) -> dict:
    "Kill one of two when a third has been answered; bring it back; send another load"
    talks, state, now = load(a, 100), {}, time.monotonic
    def watch(answers):
        if state and "back" not in state and cluster.replaced(state["victim"]): state["back"] = now() - state["at"]
        if len(answers) < sum(map(len, talks))//3 or state: return
        state["victim"] = Counter(r["replica"] for r in answers).most_common(1)[0][0]
        cluster.kill(state["victim"])
        state["at"] = now()
    answers = asyncio.run(drive(cluster.url, talks, watch))
    failed = [r for r in answers if r["error"]]
    other = [r["replica"] for r in failed if r["replica"] not in ("", state["victim"])]
    busy = [r for r in answers if r["start"] < state["at"] < r["end"]]
    late = [r for r in answers if r["start"] > state["at"]]
    ends = {n: cluster.survivor(n) for n in {r["replica"] for r in answers} - {"", state["victim"]}}
    back = state.get("back") or cluster.revive(state["victim"])
    again = asyncio.run(drive(cluster.url, load(a, 200)))
    return dict(run=summary(answers), victim=state["victim"], under_way_at_the_kill=len(busy),
                failed_under_way=sum(bool(r["error"]) for r in busy), failed_on_another_replica=len(other),
                failed_that_began_later=sum(bool(r["error"]) for r in late), began_later=len(late),
                survivors_metrics=ends,
                seconds_until_replaced=round(back, 1), after=summary(again))


def kills_of_few(a) -> dict:
    "The same with four conversations only, which don't trip the router's circuit breaker together: by its options"
    few, out = argparse.Namespace(**vars(a) | dict(agents=2, conversations=2, turns=3)), {}
    for name, more in {"deploy/vllm_router.sh": "", "the router's defaults": VllmRouter.defaults}.items():
        with contextlib.closing(VllmRouter(a, "cache_aware", a.logs, more)) as cluster:
            out[name] = killed_in_mid_run(cluster, few)
            print(name, json.dumps(out[name], indent=1), flush=True)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=[*POLICIES, "ray-app"])
    p.add_argument("--bin", help="vllm-router's program, or the Python that has Ray")
    for name, default in dict(agents=4, conversations=4, turns=4, max_tokens=16, port=18600).items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    p.add_argument("--router", help=argparse.SUPPRESS)
    p.add_argument("--only-few", action="store_true", help="vllm-router: only `kill_few`, into the file that is there")
    p.add_argument("--logs", type=Path, default=Path("/tmp/replicas"))
    p.add_argument("--json", type=Path, help="default: bench/results/MACHINE/replicas_WHAT.json")
    a = p.parse_args()
    if a.what == "ray-app": return ray_app(a)
    a.logs.mkdir(parents=True, exist_ok=True)
    path = a.json or HERE/"results"/machine_name()/f"replicas_{a.what.replace('-', '_')}.json"
    if a.only_few:
        out = json.loads(path.read_text()) | {"kill_few": kills_of_few(a)}
        return path.write_text(json.dumps(out, indent=1) + "\n")
    kind, rows = dict(zip(POLICIES, (VllmRouter, Ray)))[a.what], [r for t in load(a, 0) for r in t]
    want = expected(sorted(rows, key=lambda r: r["turn"]), load_tokenizer("smollm2"), 16)
    code = f"import importlib.metadata as m; print(m.version({a.what!r}))"
    version = run(str(Path(a.bin).parent/"python"), "-c", code)
    out = dict(router=f"{a.what} {version}", flags=FLAGS, replicas=2, agents=a.agents,
               conversations=a.conversations, turns=a.turns, max_tokens=a.max_tokens,
               one_unlimited_cache=round(sum(w["hits"] for w in want)/sum(w["queries"] for w in want), 4), policies={})
    for name, policy in POLICIES[a.what].items():
        with contextlib.closing(kind(a, policy, a.logs)) as cluster:
            answers = asyncio.run(drive(cluster.url, load(a, 0)))
            out["policies"][name] = summary(answers)
            print(name, out["policies"][name], flush=True)
            if name != "affinity": continue
            d = bench(cluster.url, SERVE, a.logs/"bench_serve.json")
            keys = "completed failed duration output_throughput mean_ttft_ms p99_ttft_ms mean_itl_ms p99_itl_ms".split()
            out["bench_serve"] = {k: round(d[k], 2) for k in keys if k in d}
            print("bench serve", out["bench_serve"], flush=True)
    with contextlib.closing(kind(a, POLICIES[a.what]["affinity"], a.logs)) as cluster:
        out["kill"] = killed_in_mid_run(cluster, a)
        print("kill", json.dumps(out["kill"], indent=1), flush=True)
    if kind is VllmRouter:
        with contextlib.closing(kind(a, "cache_aware", a.logs, kind.defaults)) as cluster:
            out["kill_with_the_routers_defaults"] = killed_in_mid_run(cluster, a)
        out["kill_few"] = kills_of_few(a)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(out | {"environment": environment()}, indent=1) + "\n")
    if any(s["failed"] for s in out["policies"].values()) or out["kill"]["after"]["failed"]: sys.exit("requests failed")


if __name__ == "__main__": main()
