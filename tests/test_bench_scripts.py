"""The scripts around the load generator: the sweep's order and files, the agent trace and its arithmetic."""
import json
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/"bench"))

import agent_trace  # noqa: E402
import servers  # noqa: E402
import sweep  # noqa: E402


class Words:
    "A tokenizer with one token per word"
    def __init__(self): self.ids = {}
    def apply_chat_template(self, messages, **kw):
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages) + " <go>"
    def __call__(self, texts, add_special_tokens=False):
        ids = [[self.ids.setdefault(w, len(self.ids)) for w in t.split()] for t in texts]
        return type("E", (), {"input_ids": ids})


def turn(t, c, *contents):
    return dict(turn=t, conversation=c, messages=[dict(role="user", content=x) for x in contents])


def test_expected_hits_are_whole_blocks_of_shared_prefix():
    rows = [turn(0, 0, "a b c d e f"), turn(0, 1, "a b c x"), turn(1, 0, "a b c d e f", "g")]
    # prompts of 8, 6 and 10 words: `<user> a b c d e f <go>`, ...
    turns = agent_trace.expected(rows, Words(), block=3)
    assert turns == [dict(turn=0, queries=14, hits=3), dict(turn=1, queries=10, hits=6)]


def test_a_wholly_cached_prompt_still_computes_a_token():
    rows = [turn(0, 0, "a b c d"), turn(1, 0, "a b c d")]                  # 6 words twice
    assert agent_trace.expected(rows, Words(), block=3)[1]["hits"] == 3    # not 6: the last block is computed again
    assert agent_trace.expected(rows, Words(), block=4)[1]["hits"] == 4


def test_trace_in_the_repository_is_what_its_generator_makes():
    rows = agent_trace.make(conversations=8, turns=6, tools=9, rules=14, max_tokens=32, gap=.5, seed=0)
    assert rows == [json.loads(s) for s in (ROOT/"bench"/"traces"/"agent.jsonl").read_text().splitlines()]
    assert len(rows) == 48 and [r["turn"] for r in rows] == sorted(r["turn"] for r in rows)
    first, last = rows[0]["messages"], rows[40]["messages"]
    assert last[:2] == first and len(last) == 2 + 2 * 5                     # the history is sent again, and grows


CONFIG = """
rounds = 2
rates = [300, "inf"]
num_prompts = 6
port = 1
load = "--random-input-len 5 --random-output-len 4 --temperature 0"
[models.m]
tokenizer = "{tokenizer}"
[engines.a]
url = "{url}"
[engines.b]
url = "{url}"
rates = ["inf"]
fresh = "seed"
[engines.c]
serve = "no-such-command {port}"
models = ["m"]
[engines.other]
serve = "x"
models = ["another"]
"""


@pytest.fixture
def fake(tmp_path):
    "A fake server in a thread: its URL"
    import asyncio

    from aiohttp import web
    from fake_server import FakeServer
    loop, up, address = asyncio.new_event_loop(), threading.Event(), []
    async def start():
        runner = web.AppRunner(FakeServer(model="m").app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(runner.addresses[0][1])
        up.set()
    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True)
    thread.start()
    assert up.wait(10)
    yield f"http://127.0.0.1:{address[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def test_sweep_alternates_engines_and_resumes(tmp_path, fake, monkeypatch, capsys):
    config = tmp_path/"s.toml"
    config.write_text(CONFIG.replace("{tokenizer}", "smollm2").replace("{url}", fake))
    calls = []
    def bench(url, options, out, command=None):
        calls.append((out.parent.name, out.name, options))
        out.parent.mkdir(parents=True, exist_ok=True)
        d = dict(completed=6, failed=0, output_throughput=1.0, miniengine=dict(prefix_cache=dict(hits=0, queries=0)))
        out.write_text(json.dumps(d))
        return d
    monkeypatch.setattr(sweep, "bench", bench)
    s = sweep.Sweep(config, tmp_path/"results", {}, tmp_path/"logs")
    order = [(r, e) for _, r, e, _ in s.plan()]
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]
    for m, r, e, rate in s.plan():
        assert rate is None
        if run := s.measure(m, r, e): s.record(m, run)
    files = sorted(str(p.relative_to(tmp_path/"results")) for p in (tmp_path/"results").rglob("*.json"))
    assert files == ["environment.json", "m/a/300.2.json", "m/a/300.json", "m/a/inf.2.json", "m/a/inf.json",
                     "m/b/inf.2.json", "m/b/inf.json"]
    assert "no command no-such-command" in capsys.readouterr().out
    number = [c[2][c[2].index("--num-prompts") + 1] for c in calls if c[1] == "300.json"]
    assert number == ["6"]
    assert "--seed" not in calls[1][2] and any(c[0] == "b" and "--seed" in c[2] for c in calls)
    runs = json.loads((tmp_path/"results"/"environment.json").read_text())["runs"]
    assert [(x["engine"], x["round"]) for x in runs] == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    n = len(calls)
    for m, r, e, _ in s.plan(only_engine=["a", "b"]): assert not s.todo(m, r, e)     # nothing left to do
    assert len(calls) == n


def test_engines_that_run_already_take_turns_at_every_rate(tmp_path, fake):
    config = tmp_path/"s.toml"
    config.write_text(CONFIG.replace("{tokenizer}", "smollm2").replace("{url}", "http://127.0.0.1:9"))
    s = sweep.Sweep(config, tmp_path/"results", {}, tmp_path/"logs", urls=dict(a=fake, b=fake))
    plan = list(s.plan(["m"], ["a", "b"]))
    assert plan[:4] == [("m", 0, "a", 300), ("m", 0, "b", 300), ("m", 0, "b", "inf"), ("m", 0, "a", "inf")]
    for m, r, e, rate in plan[:4]: s.measure(m, r, e, rate)
    files = sorted(str(p.relative_to(tmp_path/"results")) for p in (tmp_path/"results").rglob("*.json"))
    assert files == ["m/a/300.json", "m/a/inf.json", "m/b/inf.json"]                 # b has no rate 300
    d = json.loads((tmp_path/"results"/"m"/"b"/"inf.json").read_text())
    assert d["completed"] == d["num_prompts"] == 6                                   # the client really ran, in process


def test_committed_configs_can_be_read():
    for name in ("sweep_cpu.toml", "sweep_h200.toml"):
        s = sweep.Sweep(ROOT/"bench"/name, Path("r"), {"vllm_model": "v"}, Path("l"))
        for model, r, engine, _ in s.plan():
            command = s.fill(s.cfg["engines"][engine]["serve"], model, port="1")
            assert "{" not in command and s.get(model, engine, "load", "")


def test_a_server_that_ends_is_an_error_with_its_log(tmp_path):
    command = [sys.executable, "-c", "print('broken on purpose')"]
    with pytest.raises(RuntimeError, match="broken on purpose"):
        with servers.running(command, "http://127.0.0.1:9", tmp_path/"x.log"): pass
