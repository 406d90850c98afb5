"""The load generator against a fake server: what it sends, what it makes of each stream, what it prints and stores."""
import asyncio
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/"bench"))

from fake_server import FakeServer  # noqa: E402

from miniengine import bench_load, bench_serve  # noqa: E402
from miniengine.bench_load import Sample  # noqa: E402

# the keys that vLLM 0.26's client wrote for the same options, in its order
KEYS = ("date endpoint_type backend label model_id tokenizer_id num_prompts a request_rate burstiness max_concurrency "
        "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
        "output_throughput total_token_throughput input_lens output_lens ttfts itls start_times generated_texts errors "
        "max_output_tokens_per_s max_concurrent_requests rtfx").split()
ARRAYS = "input_lens output_lens ttfts itls start_times generated_texts errors".split()


def stats(*percentiles):
    return [f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", *percentiles)]


class WordTokenizer:
    "One token per word; the id is the word's place in the list of all words seen"
    vocab_size, all_special_ids = 1000, [0]
    def __call__(self, text): return type("E", (), {"input_ids": self.encode(text)})
    def encode(self, text, add_special_tokens=True):
        return [int(w[1:]) if re.fullmatch(r"t\d+", w) else 1 for w in text.split()]
    def decode(self, ids): return " ".join(f"t{i}" for i in ids)
    def num_special_tokens_to_add(self): return 0
    def apply_chat_template(self, chat, **kw): return f"user: {chat[0]['content']} assistant:"


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(bench_serve, "load_tokenizer", lambda *a: WordTokenizer())
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(tmp_path, options, **server):
    "Run `bench serve` against a fake server made with `server`: (JSON or None, the FakeServer)"
    async def go():
        fake = FakeServer(**server)
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        argv = ["--port", str(runner.addresses[0][1]), "--model", "fake", "--disable-tqdm", "--request-id-prefix", "r-",
                "--result-dir", str(tmp_path), *options.split()]
        a = bench_serve.parse(argv, "serve", bench_serve.BENCHES["serve"][1])
        np.random.seed(a.seed)
        try: return await bench_serve.serve(a), fake
        finally: await runner.cleanup()
    return asyncio.run(go())


def saved(tmp_path):
    [path] = tmp_path.glob("*.json")
    return path.name, path.read_text()


TINY = "--random-input-len 5 --random-output-len 6 --num-prompts 10 --save-result --temperature 0 "


def test_json_has_the_keys_of_vllm_in_its_order(tmp_path):
    metrics = "--percentile-metrics e2el,ttft,tpot,itl --metric-percentiles 50,99.9"
    bench(tmp_path, TINY + "--save-detailed --metadata a=b " + metrics)
    name, text = saved(tmp_path)
    assert list(json.loads(text)) == KEYS + stats("p50", "p99.9") + ["miniengine"]
    assert re.fullmatch(r"openai-infqps-fake-\d{8}-\d{6}\.json", name)
    assert "\n" not in text and json.loads(text)["request_rate"] == "inf"


def test_without_save_detailed_exactly_the_arrays_are_dropped(tmp_path):
    d, _ = bench(tmp_path, TINY + "--metadata a=b --request-rate 200 --max-concurrency 3 --label L")
    assert [k for k in d if not k.endswith("_ms")] == [k for k in KEYS if k not in ARRAYS] + ["miniengine"]
    assert saved(tmp_path)[0].startswith("L-200.0qps-concurrency3-fake-")


def test_append_result_writes_json_lines(tmp_path):
    for _ in range(2): bench(tmp_path, TINY.replace("--save-result", "--append-result") + "--result-filename all.json")
    assert [json.loads(s)["completed"] for s in (tmp_path/"all.json").read_text().split("\n")] == [10, 10]


def test_ramp_up_is_in_json_and_file_name(tmp_path):
    ramp = "--ramp-up-strategy linear --ramp-up-start-rps 40 --ramp-up-end-rps 42"
    d, _ = bench(tmp_path, TINY + ramp)
    assert [e["rps"] for e in d["rps_change_events"]] == [40, 41, 42]
    keys = list(d)
    assert keys[keys.index("max_concurrency") + 1:][:3] == ["ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"]
    assert saved(tmp_path)[0].startswith("openai-ramp-up-linear-40qps-42qps-fake-")


def test_completions_count_every_event_once(tmp_path):
    d, fake = bench(tmp_path, TINY + "--save-detailed --percentile-metrics ttft,tpot,itl,e2el", itl=.002)
    assert d["completed"] == 10 and d["total_output_tokens"] == 60 and d["total_input_tokens"] == 70
    assert [len(i) for i in d["itls"]] == [5] * 10                     # 6 events, 5 gaps
    assert d["mean_tpot_ms"] == pytest.approx(d["mean_itl_ms"])
    body = fake.posts[0]["body"]
    assert list(body) == ("model prompt repetition_penalty max_tokens logprobs stream stream_options ignore_eos "
                          "temperature").split()
    assert body["stream_options"] == {"include_usage": True} and body["logprobs"] is None
    assert d["miniengine"]["warnings"] == []
    assert d["miniengine"]["prefix_cache"] == {"queries": 1000.0, "hits": 750.0}
    assert d["miniengine"]["server_info"] == {"engine": "fake", "itl": .002}


def test_chat_counts_the_role_event_and_warns_of_it(tmp_path):
    chat = "--backend openai-chat --endpoint /v1/chat/completions "
    d, fake = bench(tmp_path, TINY + chat + "--save-detailed", itl=.002)
    assert [len(i) for i in d["itls"]] == [6] * 10                     # the role is an event, too
    assert list(fake.posts[0]["body"])[:3] == ["model", "messages", "max_completion_tokens"]
    assert fake.posts[0]["body"]["messages"][0]["content"][0]["type"] == "text"
    assert any("without text" in w for w in d["miniengine"]["warnings"])
    assert not any("per token" in w for w in d["miniengine"]["warnings"])   # one event per token beside it
    other = tmp_path/"other"
    d, _ = bench(other, TINY + chat + "--save-detailed", no_role_event=True)
    assert [len(i) for i in d["itls"]] == [5] * 10 and d["miniengine"]["warnings"] == []


def test_failures_are_in_no_figure_but_stay_in_the_arrays(tmp_path, capsys):
    d, _ = bench(tmp_path, TINY + "--save-detailed", fail_every=4)
    assert (d["completed"], d["failed"]) == (8, 2) and d["total_output_tokens"] == 48
    assert [bool(e) for e in d["errors"]] == [i % 4 == 3 for i in range(10)]
    assert d["errors"][3] == "Internal Server Error" and d["output_lens"][3] == 0 and d["ttfts"][3] == 0.0
    out = capsys.readouterr()
    head = "Failed requests during benchmark run detected (capping to 10):\n"
    assert head + "Error 0: Internal Server Error\nError 1" in out.out
    assert "warning: 2 of 10 requests failed" in out.err


def test_dropped_connection_fails_and_error_event_is_told(tmp_path):
    d, _ = bench(tmp_path, TINY + "--save-detailed", cut_every=5, error_every=3)
    assert [i for i, e in enumerate(d["errors"]) if "Traceback" in e] == [4, 9]
    assert d["output_lens"] == [6, 6, 3, 6, 0, 3, 6, 6, 3, 0]            # error events come after three tokens
    text = "\n".join(d["miniengine"]["warnings"])
    for part in ("3 of 10 requests returned fewer tokens", "were broken off", "made to fail"): assert part in text


def test_all_failed_gives_zeros_and_status_0(tmp_path, capsys):
    d, _ = bench(tmp_path, TINY, fail_every=1)
    assert (d["completed"], d["failed"], d["mean_ttft_ms"], d["p99_itl_ms"]) == (0, 10, 0.0, 0.0)
    assert "tip:" not in capsys.readouterr().out


def test_without_usage_tokens_are_counted_by_the_client(tmp_path):
    d, _ = bench(tmp_path, TINY + "--save-detailed", no_usage=True)
    assert d["output_lens"] == [6] * 10 and d["input_lens"] == [5] * 10
    [warning] = d["miniengine"]["warnings"]
    assert warning.startswith("10 of 10 requests came without usage: ")


def test_stop_at_eos_is_told_but_not_called_broken(tmp_path):
    d, _ = bench(tmp_path, TINY, stop_after=4)
    [warning] = d["miniengine"]["warnings"]
    assert warning == "10 of 10 requests returned fewer tokens than asked (all together 40 of 60)"


def test_warm_up_and_ready_check_carry_no_id_and_are_not_counted(tmp_path):
    d, fake = bench(tmp_path, TINY + "--num-warmups 3 --ready-check-timeout-sec 9")
    ids = [p["headers"].get("x-request-id") for p in fake.posts]
    assert ids[:4] == [None] * 4 and sorted(ids[4:]) == sorted(f"r-{i}" for i in range(10)) and d["completed"] == 10


def test_headers_and_key(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    _, fake = bench(tmp_path, TINY + "--header X-A=1 x-b=2=3")
    h = fake.posts[0]["headers"]
    assert (h["authorization"], h["x-a"], h["x-b"], h["content-type"]) == ("Bearer k", "1", "2=3", "application/json")


def test_send_times_are_the_drawn_ones(tmp_path):
    _, fake = bench(tmp_path, TINY + "--request-rate 40 --seed 2")
    np.random.seed(2)
    times, _ = bench_load.arrival_times(10, 40)
    late = [p["t"] - (t - times[0]) for p, t in zip(fake.posts, times)]
    assert times[-1] == pytest.approx(10 / 40) and max(map(abs, late)) < .1, late


def test_concurrency_limit_holds_requests_back(tmp_path):
    d, fake = bench(tmp_path, TINY + "--max-concurrency 2 --save-detailed", ttft=.02)
    assert d["duration"] > 5 * .02 and max(d["ttfts"]) < d["duration"] / 2     # the client's queue is in no latency


def test_speculative_section(tmp_path, capsys):
    d, _ = bench(tmp_path, TINY, spec_decode=True)
    assert (d["spec_decode_num_drafts"], d["spec_decode_acceptance_rate"]) == (100, 65.0)
    assert d["spec_decode_per_position_acceptance_rates"] == [.8, .5]
    assert "  Position 1:                            50.00     \n" in capsys.readouterr().out


REPORT = """============ Serving Benchmark Result ============
Successful requests:                     998
Failed requests:                         2
Maximum request concurrency:             64
Request rate configured (RPS):           10.00
Benchmark duration (s):                  101.57
Total input tokens:                      219171
Total generated tokens:                  197712
Request throughput (req/s):              9.83
Request goodput (req/s):                 9.12
Output token throughput (tok/s):         1946.56
Peak output token throughput (tok/s):    2510.00
Peak concurrent requests:                82.00
Total token throughput (tok/s):          4104.39
---------------Time to First Token----------------
Mean TTFT (ms):                          50.43
Median TTFT (ms):                        48.28
P50 TTFT (ms):                           48.28
P99.9 TTFT (ms):                         67.32
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          21.09
Median TPOT (ms):                        21.02
P50 TPOT (ms):                           21.02
P99.9 TPOT (ms):                         22.01
---------------Inter-token Latency----------------
Mean ITL (ms):                           21.09
Median ITL (ms):                         20.75
P50 ITL (ms):                            20.75
P99.9 ITL (ms):                          35.35
----------------End-to-end Latency----------------
Mean E2EL (ms):                          366.79
Median E2EL (ms):                        364.83
P50 E2EL (ms):                           364.83
P99.9 E2EL (ms):                         388.96
---------------Speculative Decoding---------------
Acceptance rate (%):                     61.50
Acceptance length:                       2.23
Drafts:                                  1200
Draft tokens:                            2400
Accepted tokens:                         1476
Per-position acceptance (%):
  Position 0:                            71.20
  Position 1:                            51.80
=================================================="""


def test_report_is_the_captured_table():
    d = dict(completed=998, failed=2, duration=101.57, total_input_tokens=219171, total_output_tokens=197712,
             request_throughput=9.83, request_goodput=9.12, output_throughput=1946.56, max_output_tokens_per_s=2510.0,
             max_concurrent_requests=82, total_token_throughput=4104.39)
    figures = dict(ttft=(50.43, 48.28, 67.32), tpot=(21.09, 21.02, 22.01), itl=(21.09, 20.75, 35.35),
                   e2el=(366.79, 364.83, 388.96))
    for m, (mean, median, high) in figures.items():
        d |= {f"mean_{m}_ms": mean, f"median_{m}_ms": median, f"p50_{m}_ms": median, f"p99.9_{m}_ms": high}
    spec = dict(acceptance_rate=61.5, acceptance_length=2.23, num_drafts=1200, draft_tokens=2400, accepted_tokens=1476,
                per_position_acceptance_rates=[.712, .518])
    lines = bench_serve.report_lines(d, list(figures), (50, 99.9), 64, 10.0, spec)
    assert [s.rstrip() for s in lines] == REPORT.split("\n")
    assert lines[1] == f"{'Successful requests:':<40} {'998':<10}"


def test_rows_that_depend_on_options_are_left_out():
    d = bench_serve.summarize([bench_serve.Result(1, 0.0, .1, [.1], .2, "", 2, True)], 1.0)
    text = "\n".join(bench_serve.report_lines(d))
    assert "concurrency:" not in text and "configured" not in text and "goodput" not in text and "E2EL" not in text


def test_prefix_repetition_sends_no_id_and_only_whole_groups(tmp_path):
    options = ("--dataset-name prefix_repetition --num-prompts 11 --prefix-repetition-num-prefixes 4 --output-len 2 "
               "--prefix-repetition-prefix-len 6 --prefix-repetition-suffix-len 3")
    d, fake = bench(tmp_path, options)
    assert d["completed"] == 8 and d["num_prompts"] == 11
    assert all("x-request-id" not in p["headers"] and "ignore_eos" not in p["body"] for p in fake.posts)


def test_server_tokenizer_shortens_prompts(tmp_path, monkeypatch):
    sent = [Sample("t1 t2 t3", 3, 1)]
    async def go():
        async def tokenize(r): return web.json_response({"tokens": [1, 2, 3, 9]})
        async def detokenize(r): return web.json_response({"prompt": str((await r.json())["tokens"])})
        app = web.Application()
        app.router.add_post("/tokenize", tokenize)
        app.router.add_post("/detokenize", detokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with bench_serve.open_session() as session:
            await bench_serve.align_prompts(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "m", sent)
        await runner.cleanup()
    asyncio.run(go())
    assert sent[0].prompt == "[1, 2, 3]"


@pytest.mark.parametrize("argv", [
    "--backend openai-chat", "--goodput itl:3", "--goodput ttft:-1", "--goodput ttft", "--burstiness 0",
    "--ramp-up-strategy linear", "--dataset-path x", "--dataset-name custom", "--header x", "--random-range-ratio 1",
    "--ready-check-timeout-sec 1", "--metadata x"])
def test_bad_options_give_status_1(argv, capsys):
    assert bench_serve.main(["serve", "--model", "m", "--port", "9", "--num-prompts", "1", *argv.split()]) == 1
    assert "miniengine bench serve: " in capsys.readouterr().err


@pytest.mark.parametrize("argv", [
    "--profile", "--dataset-name hf", "--lora-modules a b", "--use-beam-search", "--plot_timeline", "--self-timed",
    "--skip-tokenizer-init", "--random-mm-bucket-config {}", "--backend tgi", "--nonsense"])
def test_options_we_do_not_have_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as e: bench_serve.main(["serve", *argv.split()])
    assert e.value.code == 2 and argv.split()[0].replace("_", "-") in capsys.readouterr().err


def test_namespace_begins_as_the_original(capsys):
    bench_serve.main(["serve", "--metadata", "x", "--port", "9", "--model", "m"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Namespace(subparser='bench', bench_type='serve', dispatch_function=<function ")
    names = re.findall(r"[(, ](\w+)=", first)
    assert names[3:7] == ["trust_remote_code", "seed", "num_prompts", "dataset_name"]
    assert names[-1] == "plot_dataset_stats" and len(names) == 106


def test_no_event_is_lost_when_reads_cut_messages():
    expected = "aé\n }{ 🙂"
    texts = [json.dumps({"choices": [{"text": c}]}, ensure_ascii=False) for c in expected]
    stream = "".join(f"data: {t}\n\n" for t in texts).encode()
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = sorted(rng.integers(0, len(stream), size=rng.integers(0, 12)).tolist())
        rest, got = b"", ""
        for i, j in zip([0, *cuts], [*cuts, len(stream)]):
            messages, rest = bench_serve.sse_messages(rest + stream[i:j])
            got += "".join(json.loads(m)["choices"][0]["text"] for m in messages)
        assert got == expected and not rest.strip()


def test_sharegpt_file_that_was_cut_off_keeps_what_is_complete(tmp_path, capsys):
    lengths = [(4, 4), (3, 9), (9, 3), (1025, 9), (1024, 1024), (1024, 1025)]
    talks = [{"conversations": [{"value": "t1 " * n}, {"value": "t2 " * m}]} for n, m in lengths]
    talks += [{"conversations": [{"value": "t1"}]}, {}, {"conversations": []}]
    (tmp_path/"s.json").write_text(json.dumps(talks)[:-7])
    options = "--dataset-name sharegpt --disable-shuffle --no-oversample --request-id-prefix q --dataset-path"
    a = bench_serve.parse([*options.split(), str(tmp_path/"s.json")], "serve", bench_serve.BENCHES["serve"][1])
    s = bench_load.sharegpt(a, WordTokenizer())
    assert [(x.prompt_len, x.output_len, x.id) for x in s] == [(4, 4, "q0"), (1024, 1024, "q1")]
    assert re.search(r"kept \d complete records", capsys.readouterr().err)


def test_arrivals_are_stretched_to_the_nominal_duration():
    for seed in range(5):
        np.random.seed(seed)
        times, rates = bench_load.arrival_times(37, 2.5, .7)
        assert times[-1] == pytest.approx(37 / 2.5) and times == sorted(times) and set(rates) == {2.5}
    assert bench_load.arrival_times(0, 3)[0] == [] and bench_load.arrival_times(3, math.inf)[0] == [0.0] * 3


def test_throughput_prints_the_original_lines(tmp_path, monkeypatch, capsys):
    made = []
    class LLM:
        def __init__(self, **config): made.append(config)
        def generate(self, prompts, params, use_tqdm=True):
            made.append(params)
            answer = [type("O", (), dict(token_ids=[1] * p.max_tokens)) for p in params]
            return [type("R", (), dict(prompt_token_ids=t.split(), outputs=[a])) for t, a in zip(prompts, answer)]
    monkeypatch.setattr("miniengine.engine.LLM", LLM)
    argv = f"--num-prompts 4 --input-len 5 --output-len 3 --batching static --output-json {tmp_path/'t.json'}"
    assert bench_serve.main(["throughput", *argv.split()]) == 0
    config, params = made
    assert config["batching"] == "static" and config["model"] == "smollm2"
    assert [(p.max_tokens, p.ignore_eos, p.temperature) for p in params] == [(3, True, 1.0)] * 4
    lines, n = capsys.readouterr().out.splitlines()[1:], r"\d+\.\d\d"
    assert re.fullmatch(f"Throughput: {n} requests/s, {n} total tokens/s, {n} output tokens/s", lines[0])
    assert lines[1:] == ["Total num prompt tokens:  20", "Total num output tokens:  12"]
    d = json.loads((tmp_path/"t.json").read_text())
    assert list(d) == "elapsed_time num_requests total_num_tokens requests_per_second tokens_per_second".split()
    assert d["total_num_tokens"] == 32
