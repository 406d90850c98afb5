"""miniengine on a Ray cluster: any number of replicas, prefix-affinity routing, autoscaling on the number of requests.

    pip install 'miniengine[ray]'
    serve run --working-dir . deploy.ray_serve:app flags="Qwen/Qwen2.5-7B-Instruct --max-model-len 8192" max_replicas=8

To be called in this repository's folder (Ray takes `deploy/` from there to every machine). `flags` are those of
`miniengine serve`. Two deployments: a `Replica` is the engine with the ASGI application of chapter 13, one GPU each;
the `Front` takes HTTP and reads the body, because Ray's own proxy hands the router no prompt.
"""
import asyncio
import json
import shlex
from collections import Counter

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.responses import StreamingResponse

from deploy.prefix_affinity import Affinity, beginnings
from miniengine import cli
from miniengine.config import EngineConfig, ServerConfig


class PrefixRouter(RequestRouter):
    "Ray's request router with the rule of `Affinity`; the first argument of a call is the prompt"
    def initialize_state(self, chunk: int = 256, **limits):
        self.chunk, self.rule, self.going = chunk, Affinity(**limits), Counter()

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        "The replicas in order of preference, each a rank of its own"
        found = {r.replica_id: r for r in candidate_replicas}
        parts = beginnings(pending_request.args[0], self.chunk)
        return [[found[r]] for r in self.rule.order(parts, {r: self.going[r] for r in found})]

    def on_request_routed(self, pending_request, replica_id, result): self.going[replica_id] += 1

    def on_request_completed(self, replica_id, internal_request_id): self.going[replica_id] -= 1


class Replica:
    "An engine and its ASGI application; Ray restarts it when `check_health` raises"
    async def __init__(self, flags: list[str]):
        from miniengine.engine import AsyncEngine
        from miniengine.server import Server
        args = cli.parser().parse_args(["serve", *flags])
        self.engine = AsyncEngine.load(cli.made(EngineConfig, args))
        self.app = Server(self.engine, cli.made(ServerConfig, args)).app()
        self.name = serve.get_replica_context().replica_id.unique_id.encode()
        await self.engine.start()

    def check_health(self):
        if not self.engine.healthy: raise RuntimeError("the engine has failed")

    async def __call__(self, prompt: str, scope: dict, body: bytes):
        "First status and headers, then the parts of the body; a caller that goes away cancels us, and so the request"
        out, todo = asyncio.Queue(64), [{"type": "http.request", "body": body}]
        async def receive(): return todo.pop() if todo else await asyncio.Future()
        task = asyncio.create_task(self.app(scope, receive, out.put))
        try:
            head = await out.get()
            yield head["status"], [*head["headers"], (b"x-replica", self.name)]
            while True:
                part = await out.get()
                yield part.get("body", b"")
                if not part.get("more_body"): return
        finally: task.cancel()


class Front:
    "Any request, passed on with its prompt in front, for the router"
    def __init__(self, replicas): self.replicas = replicas.options(stream=True)

    async def __call__(self, request):
        body = await request.body()
        try: prompt = json.loads(body)
        except ValueError: prompt = {}
        if isinstance(prompt, dict): prompt = prompt.get("messages") or prompt.get("prompt")
        scope = {k: request.scope[k] for k in "type method path raw_path query_string headers server client".split()}
        parts = self.replicas.remote(json.dumps(prompt), scope, body)
        status, headers = await anext(parts)
        answer = StreamingResponse(parts, status)
        answer.raw_headers = headers
        return answer


def app(args: dict[str, str]) -> serve.Application:
    "Arguments of `serve run`: see the defaults; `ongoing` is the number of requests per replica to aim at"
    a = dict(flags="", min_replicas="1", max_replicas="8", ongoing="64", gpus="1", slack="16") | args
    scale = AutoscalingConfig(min_replicas=int(a["min_replicas"]), max_replicas=int(a["max_replicas"]),
                              target_ongoing_requests=float(a["ongoing"]))
    router = RequestRouterConfig(request_router_class=a.get("router", PrefixRouter),
                                 request_router_kwargs={} if "router" in a else {"slack": int(a["slack"])})
    replicas = serve.deployment(Replica).options(
        autoscaling_config=scale, max_ongoing_requests=10_000, request_router_config=router,
        graceful_shutdown_timeout_s=30, ray_actor_options={"num_gpus": float(a["gpus"])})
    front = serve.deployment(Front).options(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
    return front.bind(replicas.bind(shlex.split(a["flags"])))
