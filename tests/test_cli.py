"The command line: flags from dataclasses, instant help, one-line errors, chat and generate on a model that echoes"

import argparse
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from miniengine import __version__, cli
from miniengine.config import EngineConfig, ServerConfig

RESULTS = Path(__file__).resolve().parent.parent / "bench/results"
RUN = [sys.executable, "-c", "import sys; from miniengine.cli import main; sys.exit(main())"]


def run(*args, **kw):
    return subprocess.run([*RUN, *args], capture_output=True, text=True, timeout=120, **kw)


def parse(*args):
    return cli.parser().parse_args(args)


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_each_field_is_a_flag_with_help(cls):
    p = argparse.ArgumentParser()
    cli.add_flags(p, cls)
    flags = {a.dest: a for a in p._actions}
    for f in fields(cls):
        assert f"--{f.name.replace('_', '-')}" in flags[f.name].option_strings and len(flags[f.name].help) > 5, f.name
    assert cli.made(cls, p.parse_args([])) == cls(), "no flags, no change"


def test_flags_reach_the_configs():
    a = parse(
        "serve",
        "some/model",
        "--max-num-seqs",
        "8",
        "--no-overlap",
        "--dtype",
        "float16",
        "--gpu-memory-limit",
        "24GiB",
        "--api-key",
        "a",
        "b",
        "--drain",
        "2.5",
        "--no-log-requests",
        "--max-model-len",
        "100",
    )
    assert cli.made(EngineConfig, a) == EngineConfig(
        model="some/model", max_num_seqs=8, overlap=False, dtype="float16", gpu_memory_limit=24 << 30, max_model_len=100
    )
    assert cli.made(ServerConfig, a) == ServerConfig(api_key=["a", "b"], drain=2.5, log_requests=False)
    assert cli.made(EngineConfig, parse("serve", "--model", "x")).model == "x"
    assert cli.made(EngineConfig, parse("generate", "a text", "x")).model == "x"


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], *([c, "--help"] for c in "serve chat generate doctor".split())]
)
def test_help_comes_without_anything_heavy(args):
    heavy = "torch transformers fastapi pydantic uvicorn numpy plotly".split()
    code = (
        "import sys, miniengine.cli as c\ntry: c.main(%r)\nexcept SystemExit as e: assert not e.code\n"
        "print([m for m in %r if m in sys.modules], file=sys.stderr)"
    ) % (args, heavy)
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert r.returncode == 0 and r.stderr.strip() == "[]" and r.stdout


def test_the_package_imports_in_a_moment_and_names_its_public_parts():
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import miniengine, sys; assert 'torch' not in sys.modules"], check=True)
    assert time.perf_counter() - start < 2, "0.1 s on an idle machine"
    assert run("--version").stdout.strip() == f"miniengine {__version__}"
    import miniengine

    assert miniengine.SamplingParams(n=2).n == 2 and "LLM" in miniengine.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        miniengine.Nothing


@pytest.mark.parametrize(
    "args, words",
    [
        (["serve", "--max-num-seqs", "0"], "max_num_seqs must be"),
        (["serve", "--port", "70000"], "port must be"),
        (["serve", "--block-size", "12"], "block_size must be"),
        (["chat", "--temperature", "3"], "temperature must be"),
        (["generate", "hi", "--top-p", "0"], "top_p must be"),
        (["generate", "hi", "/no/such/model"], "/no/such/model"),
        (
            ["bench", "serve", "--dataset-name", "random", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"],
            "miniengine bench",
        ),
    ],
)
def test_what_the_user_did_wrong_is_told_in_one_line(args, words):
    r = run(*args, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert r.returncode == 1 and words in r.stderr and "Traceback" not in r.stderr, r.stderr
    assert len([line for line in r.stderr.splitlines() if line.startswith("miniengine")]) == 1


@pytest.mark.parametrize(
    "module, args, words",
    [
        (
            "aiohttp",
            ["bench", "serve", "--dataset-name", "random", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"],
            "No module named 'aiohttp'; pip install 'miniengine[bench]'",
        ),
        ("fastapi", ["serve"], "No module named 'fastapi'"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(module, args, words):
    code = (
        "import sys; sys.modules[%r] = None\nfrom miniengine.cli import main\nsys.exit(main(sys.argv[1:]))" % module
    )
    r = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)
    lines = [line for line in r.stderr.splitlines() if line.startswith("miniengine:")]
    assert r.returncode == 1 and "Traceback" not in r.stderr and len(lines) == 1, r.stderr
    text = lines[0].replace(f"import of {module} halted; None in sys.modules", f"No module named '{module}'")
    assert text == f"miniengine: {words}"


# --- the doctor ---


def test_the_doctor_finds_nothing_wrong_here():
    r = run("doctor", "--device", "cpu", env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = r.stdout.splitlines()
    assert r.returncode == 0 and lines[-1] == "nothing wrong", r.stdout + r.stderr
    assert lines[0].startswith(f"miniengine  {__version__}, Python 3.")
    found = {word: [line for line in lines if line.split()[0] == word] for word in ("attention", "self-test", "device")}
    assert len(found["attention"]) == 3 and "torch: usable, the default" in found["attention"][2]
    assert len(found["self-test"]) == 1 and "right, " in found["self-test"][0] and "cpu: " in found["device"][-1]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/doctor.txt")), ids=lambda p: p.parent.name)
def test_the_doctor_found_nothing_wrong_where_we_measured(path):
    lines = path.read_text().splitlines()
    usable = [line.split()[1] for line in lines if line.startswith("attention") and ": usable" in line]
    tested = [line.split()[1] for line in lines if line.startswith("self-test") and ": right, " in line]
    assert lines[-1] == "nothing wrong" and usable == tested and tested


def test_the_doctor_notices_a_wrong_computation_and_an_error(monkeypatch):
    from miniengine import doctor, model

    said, norm = [], model.TorchOps.rms_norm
    monkeypatch.setattr(doctor, "gpus_of_driver", lambda: [])
    monkeypatch.setattr(doctor, "reference", lambda *a, real=doctor.reference: real(*a).roll(1, -1))
    assert doctor.main("cpu", said.append) == 1 and "WRONG" in said[-3] and said[-1] == "1 problem"
    monkeypatch.setattr(model.TorchOps, "add_rms_norm", staticmethod(lambda *a: 1 / 0))
    assert doctor.main("cpu", said.append) == 1 and norm is model.TorchOps.rms_norm
    assert said[-2] == "PROBLEM     attention backend torch: ZeroDivisionError: division by zero"


def test_the_doctor_names_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    import torch

    from miniengine import doctor

    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Card X, 580.1'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "the driver sees Card X, 580.1, but torch" in doctor.devices(lambda line: None)[0]
    assert doctor.backends(True)["torch"] == "" and doctor.backends(False)["triton"] == "needs a CUDA GPU"


def test_the_doctor_says_which_requirements_lack(monkeypatch):
    from miniengine import doctor

    texts, said = ["torch>=99", "no-such-thing>=1", "numpy>=1", "x-y-z; extra == 'gpu'", "w>1; os_name == 'x'"], []
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: texts)
    problems = doctor.packages(said.append)
    assert [p.split(" (")[0] for p in problems] == ["miniengine needs torch>=99", "miniengine needs no-such-thing>=1"]
    assert any("[gpu] lacks x-y-z: pip install 'miniengine[gpu]'" in line for line in said)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: doctor.metadata.distribution("no-such-thing"))
    assert doctor.packages(said.append) == [] and "source tree" in said[-1]


def test_the_log_has_the_level_and_the_format_that_were_asked_for(fake, monkeypatch, capsys):
    import logging

    from miniengine import server

    def serve(*args):
        logging.getLogger("x").info("one")
        logging.getLogger("x").warning("two")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    for flags, lines in ([], ["INFO one", "WARNING two"]), (["--log-level", "warning"], ["WARNING two"]), (
        ["--log-format", "{name}: {message}"], ["x: one", "x: two"]
    ):
        monkeypatch.setattr(logging.root, "handlers", [])
        cli.main(["serve", *flags])
        got = capsys.readouterr().err.splitlines()
        assert len(got) == len(lines) and all(map(str.endswith, got, lines))
    monkeypatch.setattr(logging.root, "handlers", [])
    assert cli.main(["serve", "--log-format", "{nope"]) == 1 and "invalid format" in capsys.readouterr().err


def test_unknown_commands_and_flags_are_refused():
    for args in [], ["fly"], ["serve", "--wings"], ["serve", "--max-num", "3"]:
        assert run(*args).returncode == 2


def test_a_traceback_for_those_who_want_it():
    r = run("serve", "--port", "70000", env=os.environ | {"MINIENGINE_TRACEBACK": "1"})
    assert "Traceback" in r.stderr


# --- generate and chat, in this process ---


@pytest.fixture
def fake(monkeypatch):
    "The engine behind the commands; its model says the prompt backwards"
    e = FakeEngine().engine
    monkeypatch.setattr(cli, "engine", lambda args: e)
    return e


def test_generate_prints_the_text_and_its_speed(fake, capsys, monkeypatch):
    assert cli.main(["generate", "!dlrow olleh"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "hello world!" and "[13 tokens, " in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("cba"))
    cli.main(["generate", "-", "--max-tokens", "2"])
    assert capsys.readouterr().out.strip() == "ab"


def test_chat_remembers_what_was_said_until_new(fake, monkeypatch, capsys):
    said, asked = iter(["one", "", "two", "/new", "three"]), []
    fake.tokenizer.chat = lambda messages: asked.append(messages) or [97, 98]

    def answer(prompt):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    assert cli.main(["chat", "--system", "be brief"]) == 0
    roles = [[(m["role"], m["content"]) for m in ms] for ms in asked]
    system, a = ("system", "be brief"), ("assistant", "ba")
    assert roles == [
        [system, ("user", "one")],
        [system, ("user", "one"), a, ("user", "two")],
        [system, ("user", "three")],
    ]


def test_chat_goes_on_after_a_message_that_does_not_fit(fake, monkeypatch, capsys):
    said = iter(["x" * 600, "ok"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said, None) or (_ for _ in ()).throw(EOFError))
    assert cli.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert "context is 512 tokens" in err and "]tnatsissa[" in out


def test_ctrl_c_stops_an_answer_and_leaves_the_engine_usable(fake, monkeypatch, capsys):
    real, steps = fake.runner.run, []

    def interrupted(job):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(job)

    fake.runner.run = interrupted
    params = cli.SamplingParams(max_tokens=50, ignore_eos=True)
    assert cli.say(fake, list(b"0123456789abcdefghij"), params) == "jih"
    assert not fake.has_work and fake.pool.free == fake.pool.usable and len(fake.scheduler.cache) == 0
    assert cli.say(fake, list(b"0123456789abcdefghij"), cli.SamplingParams(max_tokens=50)) == "jihgfedcba9876543210"


def test_api_keys_may_come_from_the_environment(monkeypatch, fake):
    got = []
    monkeypatch.setattr("miniengine.server.serve", lambda make, config, ready: got.append(config.api_key))
    monkeypatch.setenv("MINIENGINE_API_KEY", "k1 k2")
    cli.main(["serve"])
    cli.main(["serve", "--api-key", "k3"])
    assert got == [["k1", "k2"], ["k3"]]


@pytest.mark.slow
def test_serve_with_the_demo_model_from_start_to_ctrl_c():
    import httpx

    p = subprocess.Popen([*RUN, "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(p.stdout.readline, "")
        url = next(x for x in lines if "serves" in x).split(" at ")[1].split()[0]
        body = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        r = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in r.json()["choices"][0]["message"]["content"]
        p.send_signal(signal.SIGINT)
        assert p.wait(20) == 0 and "Traceback" not in p.stderr.read()
    finally:
        p.kill()
