"The OpenAI surface, over an engine without a model: shapes, errors, faults, metrics"

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fake_engine import EOS, FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniengine.server import Server, ServerConfig, Uvicorn, sse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def running(config=None, **engine):
    "(client, engine) of a server in this process, without sockets"
    e = FakeEngine(**engine)
    await e.start()
    server = Server(e, config)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(server.app(), raise_app_exceptions=False), base_url="http://test"
    ) as client:
        client.server = server
        yield client, e
    await e.stop()
    assert_idle(e)


def assert_idle(e):
    "Nothing is left of any request"
    assert not e.scheduler.has_work and e.scheduler.pool.free == e.scheduler.pool.usable
    e.scheduler.pool.check([])


def events(text):
    "The JSON objects of an event stream, which must be well-formed and end with [DONE]"
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def post(client, path, body, **kw):
    r = await client.post(path, json=body, **kw)
    assert r.status_code == 200, r.text
    return events(r.text) if body.get("stream") else r.json()


def said(evs, i=0):
    "Text of choice `i` in a list of events"
    cs = [c for e in evs for c in e["choices"] if c["index"] == i]
    return "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in cs)


# --- shapes ---


async def test_chat_has_vllms_fields_in_vllms_order():
    async with running() as (c, e):
        r = await post(c, CHAT, {"messages": HI, "max_tokens": 4})
        assert (
            list(r)
            == (
                "id object created model choices service_tier system_fingerprint usage prompt_logprobs "
                "prompt_token_ids prompt_text "
                "kv_transfer_params ec_transfer_params metrics"
            ).split()
        )
        assert (
            list(r["choices"][0]) == "index message logprobs finish_reason stop_reason token_ids routed_experts".split()
        )
        assert (
            list(r["choices"][0]["message"]) == "role content refusal annotations audio function_call reasoning".split()
        )
        assert r["object"] == "chat.completion" and r["id"].startswith("chatcmpl-") and r["model"] == "fake"
        assert r["choices"][0]["message"]["content"] == "]tna" and r["choices"][0]["finish_reason"] == "length"


async def test_text_completion_has_vllms_fields_in_vllms_order():
    async with running() as (c, e):
        r = await post(c, TEXT, {"prompt": "abc"})
        assert (
            list(r)
            == (
                "id object created model choices service_tier system_fingerprint usage kv_transfer_params "
                "ec_transfer_params metrics"
            ).split()
        )
        assert (
            list(r["choices"][0])
            == (
                "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids "
                "routed_experts"
            ).split()
        )
        assert r["object"] == "text_completion" and r["id"].startswith("cmpl-")
        assert (
            r["choices"][0]["text"] == "cba"
            and r["choices"][0]["finish_reason"] == "stop"
            and r["choices"][0]["stop_reason"] is None
        )
        u = r["usage"]
        assert (u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) == (4, 4, 8), (
            "BOS in the prompt, EOS in the output"
        )


async def test_stream_has_one_event_per_token_and_the_role_in_the_first():
    async with running() as (c, e):
        for usage in False, True:
            evs = await post(
                c, CHAT, {"messages": HI, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": usage}}
            )
            if usage:
                last = evs.pop()
                assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5 and last["system_fingerprint"]
            assert len(evs) == 5 and len({(x["id"], x["created"], x["model"]) for x in evs}) == 1
            assert all(x["object"] == "chat.completion.chunk" and "usage" not in x for x in evs)
            assert evs[0]["choices"][0]["delta"] == {"role": "assistant", "content": "]"}
            assert [list(x["choices"][0]["delta"]) for x in evs[1:]] == [["content"]] * 4
            assert [x["choices"][0]["finish_reason"] for x in evs] == [None] * 4 + ["length"]
            assert list(evs[1]["choices"][0]) == "index delta logprobs finish_reason token_ids".split()
            assert list(evs[-1]["choices"][0]) == "index delta logprobs finish_reason stop_reason token_ids".split()
            assert ("system_fingerprint" in evs[-1]) == (not usage)


async def test_end_token_gets_an_event_of_its_own_with_no_text():
    async with running() as (c, e):
        evs = await post(c, TEXT, {"prompt": "ab", "stream": True})
        assert [x["choices"][0]["text"] for x in evs] == ["b", "a", ""] and evs[-1]["choices"][0][
            "finish_reason"
        ] == "stop"
        assert (
            list(evs[0]["choices"][0])
            == "index text logprobs finish_reason stop_reason prompt_token_ids token_ids".split()
        )


async def test_continuous_usage_counts_up():
    async with running() as (c, e):
        opts = {"include_usage": True, "continuous_usage_stats": True}
        evs = await post(c, TEXT, {"prompt": "abcd", "max_tokens": 3, "stream": True, "stream_options": opts})
        assert [x["usage"]["completion_tokens"] for x in evs] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "text", ["plain", "漢字かな", "🙂👩‍👩‍👧", 'quotes " \\ and \n breaks \u2028', "mixed é🙂漢 end"]
)
async def test_streamed_text_equals_the_whole(text):
    async with running() as (c, e):
        e.answer = lambda r: list(text.encode()) + [EOS]
        body = {"prompt": "x", "max_tokens": 200}
        assert (
            said(await post(c, TEXT, body | {"stream": True}))
            == (await post(c, TEXT, body))["choices"][0]["text"]
            == text
        )


async def test_choices_are_numbered_prompt_major_and_each_gets_its_own_answer():
    async with running() as (c, e):
        body = {"prompt": ["ab", "cd"], "n": 2, "seed": 5}
        r = await post(c, TEXT, body)
        assert [(x["index"], x["text"]) for x in r["choices"]] == [(0, "ba"), (1, "ba"), (2, "dc"), (3, "dc")]
        assert r["usage"]["prompt_tokens"] == 6 and r["usage"]["completion_tokens"] == 12, "each prompt counts once"
        evs = await post(c, TEXT, body | {"stream": True})
        assert [said(evs, i) for i in range(4)] == ["ba", "ba", "dc", "dc"]
        ids = await post(c, TEXT, {"prompt": [[97, 98], [99]]})
        assert [x["text"] for x in ids["choices"]] == ["ba", "c"]
        assert (await post(c, TEXT, {"prompt": [97, 98]}))["choices"][0]["text"] == "ba"


async def test_choices_of_one_prompt_get_consecutive_seeds():
    async with running() as (c, e):
        seeds = []
        e.answer = lambda r: seeds.append(r.params.seed) or [EOS]
        await post(c, TEXT, {"prompt": ["a", "b"], "n": 2, "seed": 5})
        assert sorted(seeds) == [5, 5, 6, 6]


async def test_stop_strings_and_stop_tokens():
    async with running() as (c, e):
        e.answer = lambda r: list(b"one two three")
        r = (await post(c, TEXT, {"prompt": "x", "max_tokens": 50, "stop": "two"}))["choices"][0]
        assert (r["text"], r["finish_reason"], r["stop_reason"]) == ("one ", "stop", "two")
        evs = await post(c, TEXT, {"prompt": "x", "max_tokens": 50, "stop": ["xx", "thr"], "stream": True})
        assert said(evs) == "one two " and evs[-1]["choices"][0]["stop_reason"] == "thr"
        r = (await post(c, TEXT, {"prompt": "x", "max_tokens": 50, "stop_token_ids": [ord("w")]}))["choices"][0]
        assert (r["finish_reason"], r["stop_reason"]) == ("stop", ord("w"))


async def test_echo_puts_the_prompt_before_the_answer():
    async with running() as (c, e):
        assert (await post(c, TEXT, {"prompt": "ab", "echo": True}))["choices"][0]["text"] == "abba"
        evs = await post(c, TEXT, {"prompt": [97, 98], "echo": True, "stream": True})
        assert evs[0]["choices"][0]["text"] == "abb" and said(evs) == "abba"


async def test_logprobs_of_both_kinds():
    async with running() as (c, e):
        chat = (await post(c, CHAT, {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}))["choices"][
            0
        ]["logprobs"]
        first = chat["content"][0]
        assert first["token"] == "]" and first["bytes"] == [93] and first["logprob"] == -0.5
        assert [t["logprob"] for t in first["top_logprobs"]] == [-0.5, -9999.0], "minus infinity isn't JSON"
        none = (await post(c, CHAT, {"messages": HI, "max_tokens": 2, "logprobs": True}))["choices"][0]["logprobs"]
        assert none["content"][0]["top_logprobs"] == []
        body = {"prompt": "abc", "max_tokens": 3, "logprobs": 1}
        text = (await post(c, TEXT, body))["choices"][0]["logprobs"]
        assert text == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [-0.5] * 3,
            "tokens": ["c", "b", "a"],
            "top_logprobs": [{"c": -0.5}, {"b": -0.5}, {"a": -0.5}],
        }
        evs = await post(c, TEXT, body | {"stream": True})
        assert [x["choices"][0]["logprobs"]["text_offset"] for x in evs] == [[0], [1], [2]]


async def test_stream_is_off_unless_asked_for():
    async with running() as (c, e):
        for body in {}, {"stream": None}, {"stream": False}:
            r = await c.post(CHAT, json={"messages": HI} | body)
            assert r.headers["content-type"] == "application/json" and r.json()["object"] == "chat.completion"
        r = await c.post(CHAT, json={"messages": HI, "stream": True})
        assert r.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_content_may_be_a_list_of_text_parts():
    async with running() as (c, e):
        part = lambda t: {"type": "text", "text": t}
        whole, parts = [
            (await post(c, "/tokenize", {"messages": [{"role": "user", "content": x}]}))["tokens"]
            for x in ("hi\nyou", [part("hi"), part("you")])
        ]
        assert whole == parts
        r = await c.post(
            CHAT, json={"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
        )
        assert r.status_code == 400 and r.json()["error"]["param"] == "messages[0].content[0]"


async def test_chat_template_arguments_reach_the_template():
    async with running() as (c, e):
        r = await post(
            c,
            "/tokenize",
            {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False},
        )
        assert bytes(t for t in r["tokens"] if t < 256) == b"[user]hi\n[enable_thinking=False]"


async def test_generation_config_gives_defaults_that_a_request_overrides():
    async with running() as (c, e):
        seen = []
        e.answer, e.default_sampling = (
            lambda r: seen.append(r.params) or [EOS],
            {"temperature": 0.3, "top_k": 20, "max_tokens": 7},
        )
        await post(c, CHAT, {"messages": HI, "top_k": 5})
        await post(c, TEXT, {"prompt": "x", "temperature": None})
        assert [(p.temperature, p.top_k, p.max_tokens) for p in seen] == [(0.3, 5, 7), (0.3, 20, 16)]


# --- errors ---

REFUSED = [  # path, body, status, words in the message, param
    (TEXT, {"prompt": ""}, 400, "empty", "prompt"),
    (TEXT, {"prompt": []}, 400, "empty", "prompt"),
    (TEXT, {"prompt": ["a", ""]}, 400, "empty", "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "empty", "prompt"),
    (TEXT, {}, 400, "required", "body.prompt"),
    (CHAT, {"messages": []}, 400, "at least one message", "messages"),
    (CHAT, {}, 400, "required", "body.messages"),
    (CHAT, {"messages": 5}, 400, "list", "body.messages"),
    (CHAT, {"messages": ["x"]}, 400, "", "body.messages"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "object with a role", "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "a string or a list", "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "audio"}]}]},
        400,
        "text part",
        "messages[1].content[0]",
    ),
    (TEXT, {"prompt": [-1]}, 400, "outside", "prompt"),
    (TEXT, {"prompt": [10**9]}, 400, "outside", "prompt"),
    (TEXT, {"prompt": [260]}, 400, "outside", "prompt"),
    (TEXT, {"prompt": "a", "stop_token_ids": [260]}, 400, "stop_token_ids", "stop_token_ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"260": 1}}, 400, "logit_bias", "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "", "body.logit_bias"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, 400, "integer", "body.max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "abc"}, 400, "integer", "body.max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 511}, 400, "512 tokens: 2 prompt and 511 output", "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature"),
    (TEXT, {"prompt": "a", "temperature": 2.1}, 400, "temperature", "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p", "top_p"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "n must", "n"),
    (TEXT, {"prompt": "a", "n": 2, "temperature": 0}, 400, "n must", "n"),
    (TEXT, {"prompt": "a", "n": 129}, 400, "129 choices", "n"),
    (TEXT, {"prompt": ["a"] * 65, "n": 2}, 400, "130 choices", "n"),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop", "stop"),
    (TEXT, {"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "min_tokens"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": -1}, 400, "logprobs", "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 1, "echo": True}, 400, "echo", "echo"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "logprobs=true", "top_logprobs"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream=true", "stream_options"),
    (CHAT, {"messages": HI, "cache_salt": ""}, 400, "cache_salt", "cache_salt"),
    (CHAT, {"messages": HI, "model": "gpt-9"}, 404, "gpt-9", "model"),
    (TEXT, {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9", "model"),
    ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9", "model"),
    ("/tokenize", {}, 400, "required", None),
    ("/detokenize", {"tokens": [-1]}, 400, "greater", "body.tokens"),
    ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "gpt-9", "model"),
    *(
        (CHAT, {"messages": HI, k: v}, 400, k, k)
        for k, v in dict(
            echo=True,
            suffix="x",
            prompt_logprobs=1,
            allowed_token_ids=[1],
            bad_words=["x"],
            use_beam_search=True,
            length_penalty=2.0,
            best_of=2,
            chat_template="x",
            truncate_prompt_tokens=5,
            thinking_token_budget=9,
            kv_transfer_params={},
            add_special_tokens=True,
        ).items()
    ),
    (TEXT, {"prompt": "a", "suffix": "x"}, 400, "suffix", "suffix"),
    (TEXT, {"prompt": "a", "tools": [{}]}, 400, "tools", "tools"),
]


@pytest.mark.parametrize(
    "path, body, status, words, param", REFUSED, ids=lambda x: json.dumps(x)[:60] if isinstance(x, dict) else ""
)
async def test_refuses_with_openais_error_object_and_goes_on(path, body, status, words, param):
    async with running() as (c, e):
        for stream in ({}, {"stream": "stream_options" not in body}):
            r = await c.post(path, json=body | stream)
            assert r.status_code == status and r.headers["content-type"] == "application/json"
            err = r.json()["error"]
            assert (
                list(err) == ["message", "type", "param", "code"] and err["code"] == status and words in err["message"]
            )
            assert param is None or err["param"] == param
            assert err["type"] == {404: "NotFoundError"}.get(status) or err["type"] in (
                "Bad Request",
                "BadRequestError",
            )
        assert (await post(c, TEXT, {"prompt": "ab"}))["choices"][0]["text"] == "ba"


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"null",
        b'"x"',
        b"5",
        b'{"prompt": ',
        b"",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt":' + b"[" * 5000,
        b'{"temperature": 1e999, "prompt": "a"}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_object_is_400(path, content):
    async with running() as (c, e):
        r = await c.post(path, content=content, headers={"content-type": "application/json"})
        assert r.status_code == 400 and r.json()["error"]["type"] == "Bad Request"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_wrong_content_type_is_400(kind):
    async with running() as (c, e):
        r = await c.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": kind} if kind else {})
        assert r.status_code == 400 and r.json()["error"]["code"] == 400
        r = await c.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": "application/json; charset=utf-8"})
        assert r.status_code == 200


async def test_errors_do_not_repeat_the_input():
    async with running() as (c, e):
        for body in (
            {"prompt": "a", "n": "x" * 100_000},
            {"prompt": "a", "stop": [{"a": "x" * 100_000}]},
            {"prompt": ["a", 1] * 5000},
            {"prompt": "a", "model": "x" * 100_000},
            {"prompt": "a", "stream_options": dict.fromkeys(map(str, range(10_000)), "x")},
        ):
            r = await c.post(TEXT, json=body)
            assert r.status_code in (400, 404) and len(r.content) < 1000


async def test_harmless_values_and_unknown_fields_are_accepted():
    async with running() as (c, e):
        await post(
            c,
            CHAT,
            {
                "messages": HI,
                "user": "me",
                "service_tier": "auto",
                "store": True,
                "metadata": {"a": "b"},
                "foo": 1,
                "tools": None,
                "response_format": {"type": "text"},
                "tool_choice": "none",
                "best_of": 1,
                "length_penalty": 1.0,
                "use_beam_search": False,
                "repetition_penalty": 1.0,
                "reasoning_effort": "low",
                "model": "",
                "temperature": "0.5",
                "top_k": -1,
                "seed": -1,
                "priority": 3,
                "parallel_tool_calls": True,
                "max_tokens": "3",
            },
        )
        await post(
            c,
            TEXT,
            {
                "prompt": "a",
                "logprobs": None,
                "ignore_eos": True,
                "repetition_penalty": 1.0,
                "model": None,
                "suffix": None,
            },
        )


async def test_context_of_512_tokens_to_the_last():
    async with running() as (c, e):
        ids = lambda n: {"prompt": [97] * n, "ignore_eos": True}
        r = await post(c, TEXT, ids(511) | {"max_tokens": 1})
        assert r["choices"][0]["finish_reason"] == "length" and r["usage"]["completion_tokens"] == 1
        for n in 512, 513:
            assert (await c.post(TEXT, json=ids(n) | {"max_tokens": 1})).status_code == 400
        for n in 511, 512:
            assert (await c.post(TEXT, json=ids(n))).status_code == 400, "the implied 16 tokens don't fit"
        free = 512 - len((await post(c, "/tokenize", {"messages": HI}))["tokens"])
        r = await post(c, CHAT, {"messages": HI, "ignore_eos": True})
        assert r["usage"]["completion_tokens"] == free and r["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_that_can_never_fit_the_cache_is_400_and_takes_its_siblings_back():
    async with running(num_blocks=5) as (c, e):
        r = await c.post(TEXT, json={"prompt": [[97] * 10, [97] * 100], "max_tokens": 20})
        assert r.status_code == 400 and "KV blocks" in r.json()["error"]["message"]


async def test_unknown_paths_and_methods():
    async with running() as (c, e):
        for r, status in ((await c.get("/nope"), 404), (await c.get(CHAT), 405), (await c.head("/health"), 405)):
            assert r.status_code == status and (r.request.method == "HEAD" or r.json()["error"]["code"] == status)


# --- small routes ---


async def test_models_and_names():
    async with running(ServerConfig(served_model_name=["a", "org/b"])) as (c, e):
        cards = (await c.get("/v1/models")).json()["data"]
        assert (
            [x["id"] for x in cards] == ["a", "org/b"]
            and cards[0]["max_model_len"] == 512
            and cards[0]["root"] == "fake"
        )
        assert (await post(c, TEXT, {"prompt": "x", "model": "org/b"}))["model"] == "a", "answers carry the first name"
        assert (await c.post(TEXT, json={"prompt": "x", "model": "fake"})).status_code == 404
        assert (await c.get("/v1/models/org/b")).json()["id"] == "org/b" and (
            await c.get("/v1/models/c")
        ).status_code == 404


async def test_health_version_and_info():
    async with running(ServerConfig(api_key=["secret"])) as (c, e):
        for path in "/health", "/ping":
            assert (await c.get(path)).content == b""
        assert (await c.post("/ping")).status_code == 200 and "version" in (await c.get("/version")).json()
        info = await c.get("/server_info")
        assert (
            info.json()["engine_config"]["max_num_seqs"] == 64
            and "torch" in info.json()["versions"]
            and "secret" not in info.text
        )
        e.healthy = False
        assert (await c.get("/health")).status_code == 503
        r = await c.post(TEXT, json={"prompt": "a"}, headers={"authorization": "Bearer secret"})
        assert r.status_code == 503 and r.json()["error"]["code"] == 503


async def test_ready_is_not_health():
    async with running(ServerConfig(api_key=["secret"])) as (c, e):
        assert (await c.get("/ready")).status_code == 200
        e.draining = True
        assert ((await c.get("/ready")).status_code, (await c.get("/health")).status_code) == (503, 200)
        e.draining, e.healthy = False, False
        assert ((await c.get("/ready")).status_code, (await c.get("/health")).status_code) == (503, 503)


async def test_tokenize_and_detokenize():
    async with running() as (c, e):
        r = await post(c, "/tokenize", {"prompt": "hé"})
        assert r == {"count": 4, "max_model_len": 512, "tokens": [256, 104, 195, 169], "token_strs": None}
        assert (await post(c, "/tokenize", {"prompt": "hé", "add_special_tokens": False}))["tokens"] == [104, 195, 169]
        assert await post(c, "/detokenize", {"tokens": [104, 195, 169, 10**6]}) == {"prompt": "hé"}


async def test_api_key_guards_v1_only():
    async with running(ServerConfig(api_key=["k1", "k2"])) as (c, e):
        for headers in (
            {},
            {"authorization": "Bearer k3"},
            {"authorization": "Basic k1"},
            {"authorization": "k1"},
            {"authorization": "Bearer "},
        ):
            r = await c.post(TEXT, json={"prompt": "a"}, headers=headers)
            assert r.status_code == 401 and r.json()["error"]["code"] == 401 and r.headers["x-request-id"]
        for key in "Bearer k1", "bearer k2":
            assert (await c.get("/v1/models", headers={"authorization": key})).status_code == 200
        for path in "/health", "/metrics", "/version":
            assert (await c.get(path)).status_code == 200
        assert (await c.post("/tokenize", json={"prompt": "a"})).status_code == 200


async def test_a_developers_server_forgets_cached_prefixes_when_asked_to():
    async with running(ServerConfig(dev=True)) as (c, e):
        body, cached = {"prompt": "x" * 100, "max_tokens": 2}, []
        for reset in False, False, True:
            if reset:
                assert (await c.post("/reset_prefix_cache", json={})).status_code == 200
            cached.append((await post(c, TEXT, body))["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 96, 0]
        task = asyncio.create_task(post(c, TEXT, {"prompt": "y" * 40, "max_tokens": 300, "ignore_eos": True}))
        while not e.scheduler.running:
            await asyncio.sleep(0)
        assert (await c.post("/reset_prefix_cache")).status_code == 200
        assert (await task)["usage"]["completion_tokens"] == 300, "what runs isn't disturbed"
    async with running() as (c, e):
        assert (await c.post("/reset_prefix_cache")).status_code == 404
    async with running(ServerConfig(dev=True, api_key=["k"])) as (c, e):
        assert (await c.post("/reset_prefix_cache")).status_code == 401
        assert (await c.post("/reset_prefix_cache", headers={"authorization": "Bearer k"})).status_code == 200


async def test_an_empty_api_key_is_refused():
    with pytest.raises(ValueError, match="api_key"):
        ServerConfig(api_key=[""])


async def test_web_pages_may_call_us():
    async with running() as (c, e):
        ask = {
            "origin": "http://page",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,authorization",
        }
        r = await c.options(CHAT, headers=ask)
        assert r.status_code == 200 and r.text == "OK"
        r = await c.post(CHAT, json={"messages": HI, "stream": True}, headers={"origin": "http://page"})
        assert r.headers["access-control-allow-origin"] == "*" and len(events(r.text)) > 3
    async with running(ServerConfig(allowed_origins=["http://good"])) as (c, e):
        assert "access-control-allow-origin" not in (await c.get("/health", headers={"origin": "http://page"})).headers


async def test_request_id_comes_back():
    async with running() as (c, e):
        r = await c.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "mine"})
        assert r.json()["id"] == "cmpl-mine" and r.headers["x-request-id"] == "mine"
        assert (await post(c, TEXT, {"prompt": "a", "request_id": "body"}))["id"] == "cmpl-body"
        r = await c.post(TEXT, json={"prompt": "a"})
        assert r.json()["id"] == "cmpl-" + r.headers["x-request-id"] and re.fullmatch(
            "[0-9a-f]{16}", r.headers["x-request-id"]
        )
        r = await c.post(TEXT, json={"prompt": "ab", "stream": True}, headers={"x-request-id": 'a"\\b'})
        assert {x["id"] for x in events(r.text)} == {'cmpl-a"\\b'} and said(events(r.text)) == "ba"


async def test_two_live_requests_with_the_same_id_get_their_own_tokens():
    async with running(step_time=0.002) as (c, e):
        ask = lambda p: post(c, TEXT, {"prompt": p, "stream": True, "max_tokens": 30}, headers={"x-request-id": "same"})
        a, b = await asyncio.gather(ask("0123456789"), ask("abcdefghij"))
        assert (said(a), said(b)) == ("9876543210", "jihgfedcba")


async def test_body_limit():
    async with running(ServerConfig(max_body=1000)) as (c, e):

        async def chunks():
            for _ in range(20):
                yield b" " * 100

        for content in b'{"prompt": "' + b"a" * 1000 + b'"}', chunks():
            r = await c.post(TEXT, content=content, headers={"content-type": "application/json"})
            assert r.status_code == 413 and r.json()["error"]["code"] == 413


async def test_full_queue_is_503_with_retry_after():
    async with running(ServerConfig(max_queue=1), max_num_seqs=2, step_time=0.005) as (c, e):
        long = {"prompt": "a", "ignore_eos": True, "max_tokens": 100}
        tasks = [asyncio.create_task(post(c, TEXT, long)) for _ in range(3)]
        await asyncio.sleep(0.05)
        r = await c.post(TEXT, json=long)
        assert (
            r.status_code == 503 and r.headers["retry-after"] and r.json()["error"]["type"] == "ServiceUnavailableError"
        )
        assert all(x["usage"]["completion_tokens"] == 100 for x in await asyncio.gather(*tasks))
        await post(c, TEXT, long)


# --- faults ---


async def asgi(app, path, body, leave_after=None, leave_when=None):
    "Call an ASGI app; the client leaves after that many sent messages, or when `leave_when()` holds"
    sent, asked, left = [], [{"type": "http.request", "body": json.dumps(body).encode()}], asyncio.Event()

    async def receive():
        if asked:
            return asked.pop()
        if leave_when:
            while not leave_when():
                await asyncio.sleep(0)
        else:
            await left.wait()
        return {"type": "http.disconnect"}

    async def send(m):
        sent.append(m)
        if leave_after and len(sent) == leave_after:
            left.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("me", 1),
        "root_path": "",
    }
    await app(scope, receive, send)
    return sent


LONG = {"prompt": "a", "ignore_eos": True, "max_tokens": 400}


async def test_a_streaming_client_that_leaves_is_aborted_within_two_steps():
    async with running() as (c, e):
        sent = await asgi(c.server.app(), TEXT, LONG | {"stream": True}, leave_after=4)
        assert_idle(e)
        assert e.steps <= 6 and len(sent) < 8 and c.server.metrics.counts["abort"] == 1


async def test_a_client_that_leaves_while_waiting_for_the_whole_answer_is_aborted():
    async with running() as (c, e):
        await asgi(c.server.app(), TEXT, LONG | {"n": 3}, leave_when=lambda: e.steps >= 5)
        assert_idle(e)
        assert e.steps <= 8


async def test_a_client_that_leaves_the_queue_is_aborted():
    async with running(max_num_seqs=1, step_time=0.002) as (c, e):
        first = asyncio.create_task(post(c, TEXT, LONG))
        while not e.scheduler.running:
            await asyncio.sleep(0)
        for stream in True, False:
            await asgi(c.server.app(), TEXT, LONG | {"stream": stream}, leave_when=lambda: len(e.scheduler.waiting) > 0)
            assert len(e.scheduler.waiting) == 0
        assert (await first)["usage"]["completion_tokens"] == 400


async def test_a_cancelled_handler_aborts_its_requests():
    async with running(step_time=0.001) as (c, e):
        for stream in True, False:
            task = asyncio.create_task(asgi(c.server.app(), TEXT, LONG | {"stream": stream, "n": 2}))
            while len(e.scheduler.running) < 2:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert_idle(e)


async def test_the_engine_gets_a_turn_between_the_prompts_of_a_crowd():
    async with running(num_blocks=4000) as (c, e):
        encode, seen = e.tokenizer.encode, []

        def slow(*a):
            seen.append(e.steps)
            time.sleep(0.002)
            return encode(*a)

        e.tokenizer.encode = slow
        first = asyncio.create_task(post(c, TEXT, {"prompt": "x", "max_tokens": 400, "ignore_eos": True}))
        while not e.scheduler.running:
            await asyncio.sleep(0)
        await asyncio.gather(*(post(c, TEXT, {"prompt": "hello", "max_tokens": 4}) for _ in range(40)))
        runs = [seen[1:].count(n) for n in set(seen[1:])]
        assert max(runs) <= 8 and len(runs) >= 4, seen  # 10 ms worth of prompts, then a step
        await first


async def test_a_long_trace_is_written_beside_the_loop():
    async with running(ServerConfig(glass=True)) as (c, e):
        report = c.server.trace.report
        c.server.trace.report = lambda: (time.sleep(1), report())[1]
        slow = asyncio.create_task(c.get("/debug/trace"))
        await asyncio.sleep(0.05)
        await post(c, TEXT, {"prompt": "hello", "max_tokens": 4})
        assert not slow.done()
        assert (await slow).json()["format"] == "miniengine trace 1"


async def test_a_failed_step_ends_its_requests_with_an_error_and_the_server_goes_on():
    async with running() as (c, e):
        for body in {"n": 1}, {"n": 2}:
            e.fail_at = e.steps + 4
            r = await c.post(TEXT, json=LONG | body | {"stream": True})
            evs = events(r.text)
            assert (
                r.status_code == 200
                and evs[-1]["error"]["type"] == "InternalServerError"
                and evs[-1]["error"]["code"] == 500
            )
            assert "made to fail" in evs[-1]["error"]["message"] and sum("error" in x for x in evs) == 1
            e.fail_at = e.steps + 4
            r = await c.post(TEXT, json=LONG | body)
            assert r.status_code == 500 and r.json()["error"]["type"] == "InternalServerError"
            assert (await post(c, TEXT, {"prompt": "ab"}))["choices"][0]["text"] == "ba"
        assert c.server.metrics.counts["error"] == 6


async def test_a_crash_in_the_server_is_a_500_with_openais_object():
    async with running() as (c, e):
        c.server.models = None
        e.tokenizer.encode = lambda *a: 1 / 0
        r = await c.post(TEXT, json={"prompt": "ab"})
        assert r.status_code == 500 and r.json()["error"]["message"].startswith("ZeroDivisionError")


async def test_no_task_is_left_when_requests_have_ended():
    async with running() as (c, e):
        before = asyncio.all_tasks()
        for body in {}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}, {"max_tokens": 0}:
            await c.post(TEXT, json={"prompt": "abc"} | body)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


# --- metrics ---


def scrape(text):
    "{'name{labels}': value}, labels sorted and without those that all metrics have"
    out = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line).groups()
        rest = [x for x in re.findall(r'\w+="[^"]*"', labels or "") if x not in ('model_name="fake"', 'engine="0"')]
        key = name + ("{" + ",".join(sorted(rest)) + "}" if rest else "")
        assert key not in out, f"{key} twice"
        out[key] = float(value)
    return out


async def test_a_scrape_equals_what_the_client_counted():
    "The client knows prompts, answers and its own clock; every counter and histogram follows from them"
    step, seen, walls, cached = 0.004, [], [], 0  # seen: (prompt tokens, output tokens, n, most output tokens, reason)
    async with running(step_time=step) as (c, e):
        for path, body in (
            (TEXT, {"prompt": "abc"}),
            (TEXT, {"prompt": "a" * 40, "stream": True}),
            (TEXT, {"prompt": "a" * 40, "max_tokens": 3}),
            (TEXT, {"prompt": ["ab", "cdef"], "n": 2}),
            (CHAT, {"messages": HI}),
            (CHAT, {"messages": HI, "max_tokens": 5, "stream": True}),
        ):
            t, usage = time.perf_counter(), {"stream_options": {"include_usage": True}} if "stream" in body else {}
            got = await post(c, path, body | usage)
            walls.append(time.perf_counter() - t)
            u, n = (got[-1] if "stream" in body else got)["usage"], body.get("n", 1)
            cached += u["prompt_tokens_details"]["cached_tokens"]
            ends = {}  # text and finish reason of each choice
            for x in (x for g in (got if "stream" in body else [got]) for x in g["choices"]):
                text = x["text"] if "text" in x else (x.get("delta") or x["message"])["content"]
                ends[x["index"]] = ends.get(x["index"], ("",))[0] + text, x["finish_reason"]
            prompts = body.get("prompt", "")
            sizes = [len(p) + 1 for p in prompts] if isinstance(prompts, list) else [u["prompt_tokens"]]
            assert sum(sizes) == u["prompt_tokens"]
            for i, (text, reason) in sorted(ends.items()):
                most = body.get("max_tokens", 16 if path == TEXT else 512 - sizes[0])
                seen.append((sizes[i // n], len(text) + (reason == "stop"), n, most, reason))
            assert u["completion_tokens"] == sum(out for _, out, *_ in seen[-len(ends) :])
        steps, r = e.steps, await c.get("/metrics")
        assert r.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        m = scrape(r.text)
        prompt, output, ns, limits, reasons = map(list, zip(*seen))
        assert {k.replace("vllm:", "miniengine:"): v for k, v in m.items() if k.startswith("vllm:")} == {
            k: v for k, v in m.items() if k.startswith("miniengine:")
        }

        def v(k):
            return m[f"vllm:{k}"]

        def equals(name, values):
            "Does histogram `name` hold just these values, in the right buckets?"
            edges = [float(k.split('"')[1]) for k in m if k.startswith(f"vllm:{name}_bucket")]
            assert len(edges) > 3 and edges == sorted(edges) and edges[-1] == float("inf")
            for edge in edges:
                label = "+Inf" if edge == float("inf") else edge
                assert v(f'{name}_bucket{{le="{label}"}}') == sum(x <= edge for x in values), (name, edge)
            assert v(f"{name}_count") == len(values) and v(f"{name}_sum") == sum(values)

        assert cached == 32 + 16 * (prompt[-1] // 16), "two whole blocks of 41 tokens, and the chat's"
        assert v("prompt_tokens_total") == v("prefix_cache_queries_total") == sum(prompt)
        assert v("prefix_cache_hits_total") == v("prompt_tokens_cached_total") == cached
        assert v("generation_tokens_total") == sum(output) and v("num_preemptions_total") == 0
        for reason in "stop", "length", "abort", "error":
            assert v(f'request_success_total{{finished_reason="{reason}"}}') == reasons.count(reason)
        hits = [0] * len(seen)
        hits[2], hits[-1] = 32, cached - 32
        equals("request_prompt_tokens", prompt)
        equals("request_generation_tokens", output)
        equals("request_params_n", ns)
        equals("request_params_max_tokens", limits)
        equals("request_prefill_kv_computed_tokens", [p - h for p, h in zip(prompt, hits)])
        # each request computes its prompt, but for what was cached, and every output token but the last
        assert v("iteration_tokens_total_sum") == sum(prompt) - cached + sum(output) - len(seen)
        assert v("iteration_tokens_total_count") == steps
        most = sum(w * k for w, k in zip(walls, (1, 1, 1, 4, 1, 1)))
        for name, count, least in (
            ("time_to_first_token_seconds", len(seen), step * len(seen)),
            ("inter_token_latency_seconds", sum(output) - len(seen), 0),
            ("e2e_request_latency_seconds", len(seen), step * sum(output)),
            ("request_queue_time_seconds", len(seen), 0),
            ("request_prefill_time_seconds", len(seen), step * len(seen)),
            ("request_decode_time_seconds", len(seen), step * (sum(output) - len(seen))),
            ("request_inference_time_seconds", len(seen), step * sum(output)),
            ("request_time_per_output_token_seconds", len(seen), step * sum(o > 1 for o in output)),
        ):
            assert v(f"{name}_count") == v(f'{name}_bucket{{le="+Inf"}}') == count, name
            assert least <= v(f"{name}_sum") <= most, name
        parts = v("request_prefill_time_seconds_sum") + v("request_decode_time_seconds_sum")
        assert abs(v("request_inference_time_seconds_sum") - parts) < 1e-6
        assert v("num_requests_running") == v("num_requests_waiting") == v("kv_cache_usage_perc") == 0
        assert any(k.startswith("vllm:cache_config_info{") and 'block_size="16"' in k for k in m)
        assert "process_cpu_seconds_total" in m


async def test_a_scrape_counts_what_ended_badly():
    async with running() as (c, e):
        body = LONG | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        sent = await asgi(c.server.app(), TEXT, body, leave_after=6)
        last = json.loads([x["body"] for x in sent if b"usage" in x.get("body", b"")][-1][6:])["usage"]
        e.fail_at = e.steps + 4
        evs = events((await c.post(TEXT, json=body)).text)
        assert "error" in evs[-1]
        ok = await post(c, TEXT, {"prompt": "abc"})
        for bad in {"prompt": ""}, {"prompt": "a", "n": 0}, {"prompt": "a", "model": "x"}:
            assert (await c.post(TEXT, json=bad)).status_code >= 400
        m = scrape((await c.get("/metrics")).text)
        for reason, times in dict(stop=1, length=0, abort=1, error=1).items():
            assert m[f'vllm:request_success_total{{finished_reason="{reason}"}}'] == times, reason
        tokens = last["completion_tokens"], evs[-2]["usage"]["completion_tokens"], ok["usage"]["completion_tokens"]
        assert m["vllm:generation_tokens_total"] == sum(tokens) and m["vllm:prompt_tokens_total"] == 2 + 2 + 4
        assert m["vllm:time_to_first_token_seconds_count"] == m["vllm:request_generation_tokens_count"] == 3
        assert m["vllm:inter_token_latency_seconds_count"] == sum(tokens) - 3
        assert m["vllm:num_requests_running"] == m["vllm:kv_cache_usage_perc"] == 0


async def test_gauges_show_running_and_waiting():
    async with running(max_num_seqs=2, step_time=0.005) as (c, e):
        tasks = [asyncio.create_task(post(c, TEXT, LONG | {"max_tokens": 50})) for _ in range(5)]
        while (len(e.scheduler.running), len(e.scheduler.waiting)) != (2, 3):
            await asyncio.sleep(0)
        m = scrape((await c.get("/metrics")).text)
        assert (m["vllm:num_requests_running"], m["vllm:num_requests_waiting"]) == (2, 3) and 0 < m[
            "vllm:kv_cache_usage_perc"
        ] < 1
        await asyncio.gather(*tasks)


async def test_one_log_line_for_each_finished_request(caplog):
    caplog.set_level("INFO", "miniengine.requests")
    async with running() as (c, e):
        await post(c, TEXT, {"prompt": "abc", "n": 2}, headers={"x-request-id": "7"})
        lines = [r.getMessage() for r in caplog.records if r.name == "miniengine.requests"]
        assert len(lines) == 2 and re.fullmatch(
            r"cmpl-7-0: prompt 4 tokens \(0 cached\), output 4, first after \d+ ms, then one per \d+\.\d ms, stop",
            lines[0],
        )


async def test_statistics_are_logged_when_there_is_something_to_say(caplog):
    caplog.set_level("INFO", "miniengine")
    async with running() as (c, e):
        task = asyncio.create_task(c.server.report(0.05))
        await asyncio.sleep(0.08)
        assert not [r for r in caplog.records if "tok/s" in r.getMessage()], "silent when idle"
        await post(c, TEXT, {"prompt": "abc"})
        tokens, deadline = [], time.monotonic() + 10
        while sum(tokens) < 8 and time.monotonic() < deadline:  # the answer may straddle two lines
            await asyncio.sleep(0.01)
            lines = [r.getMessage() for r in caplog.records if "tok/s" in r.getMessage()]
            tokens = [float(x) * 0.05 for line in lines for x in re.findall(r"([\d.]+) tok/s", line)]
        assert sum(tokens[::2]) == sum(tokens[1::2]) == pytest.approx(4), lines
        assert "running 0, waiting 0" in lines[-1]
        await asyncio.sleep(0.12)
        assert len([r for r in caplog.records if "tok/s" in r.getMessage()]) == len(lines), "silent again"
        task.cancel()


# --- whatever comes ---

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=6,
)
sound = st.sampled_from(
    [
        {"type": "json_object"},
        {"choice": ["a", "b"]},
        {"regex": "[ab]+"},
        {"json": {"type": "integer"}},
        [{"type": "function", "function": {"name": "f"}}],
        "required",
        {"include_usage": True},
        {"97": 5.0},
        True,
    ]
)
small = st.integers(-3, 30) | st.floats(-1, 3) | sound | json_values
FIELDS = st.sampled_from(
    """n temperature top_p top_k min_p seed max_tokens min_tokens stop stop_token_ids ignore_eos presence_penalty
    frequency_penalty repetition_penalty logprobs top_logprobs logit_bias stream stream_options echo model
    max_completion_tokens add_generation_prompt request_id cache_salt chat_template_kwargs continue_final_message
    skip_special_tokens tools tool_choice parallel_tool_calls response_format structured_outputs suffix
    best_of""".split()
)
prompts = (
    st.text(max_size=20)
    | st.lists(st.integers(-1, 300), max_size=5)
    | st.lists(st.text(max_size=5), max_size=3)
    | json_values
)
messages = (
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", ""]), "content": st.text(max_size=9) | json_values}
        ),
        max_size=3,
    )
    | json_values
)


@pytest.mark.parametrize("path, key, value", [(TEXT, "prompt", prompts), (CHAT, "messages", messages)])
def test_no_body_makes_the_server_fail_or_hang(path, key, value):
    loop, e = asyncio.new_event_loop(), FakeEngine(max_model_len=64)
    loop.run_until_complete(e.start())
    app = Server(e).app()

    async def ask(body):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as c:
            content = json.dumps(body).encode()
            r = await asyncio.wait_for(c.post(path, content=content, headers={"content-type": "application/json"}), 5)
        assert r.status_code in (200, 400, 404), r.text
        if r.status_code != 200:
            assert list(r.json()["error"]) == ["message", "type", "param", "code"]
        elif r.headers["content-type"].startswith("text/event-stream"):
            assert not any("error" in x for x in events(r.text))
        else:
            assert all(x["finish_reason"] in ("stop", "length") for x in r.json()["choices"])

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(value, st.dictionaries(FIELDS, small, max_size=4))
    def bodies(v, more):
        loop.run_until_complete(ask({key: v} | more))
        assert not e.scheduler.has_work

    try:
        bodies()
    finally:
        loop.run_until_complete(e.stop())
        loop.close()
    assert_idle(e)


# --- with sockets ---


@asynccontextmanager
async def listening(config=None, **engine):
    "(url, engine, server) of a real uvicorn on loopback"
    e = FakeEngine(**engine)
    s = Server(e, config)
    u = Uvicorn(uvicorn.Config(s.app(), port=0, log_level="error", lifespan="off", access_log=False), s)
    task = asyncio.create_task(u._serve())
    while not u.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{u.servers[0].sockets[0].getsockname()[1]}", e, u
    finally:
        u.should_exit = True
        await task
    assert_idle(e)


async def test_a_closed_connection_aborts_streaming_and_whole_answers():
    async with listening(step_time=0.002) as (url, e, u):
        async with httpx.AsyncClient(base_url=url) as c:
            async with c.stream("POST", TEXT, json=LONG | {"stream": True}) as r:
                lines = r.aiter_lines()
                for _ in range(3):
                    await anext(lines)
            with pytest.raises(httpx.TimeoutException):
                await c.post(TEXT, json=LONG, timeout=0.1)
            before = e.steps
            while e.scheduler.has_work:
                await asyncio.sleep(0)
            assert e.steps - before < 20, "aborted, not run to its end"


async def test_a_slow_reader_loses_nothing_and_holds_up_nobody():
    async with listening(max_model_len=30_000, num_blocks=4000) as (url, e, u):
        u.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # its connections inherit it
        body = json.dumps(LONG | {"max_tokens": 25_000, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]), limit=1024)
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (TEXT.encode(), len(body))
            + body
        )
        async with httpx.AsyncClient(base_url=url) as c:
            assert (await post(c, TEXT, {"prompt": "ab"}))["choices"][0]["text"] == "ba"
        while e.scheduler.has_work:
            await asyncio.sleep(0.01)  # all is computed while the client reads nothing
        got = (await reader.read(-1)).decode()
        text = re.findall(r'"text":"(a*)"', got)
        assert len(text) < 5000, "what the socket didn't take was joined, not queued event by event"
        assert sum(map(len, text)) == 12_500 and got.rstrip().endswith("0") and "[DONE]" in got, (
            "every other token is the end token"
        )
        writer.close()


async def test_shutdown_finishes_what_runs_and_cuts_what_takes_too_long():
    for drain, tokens, reason in (5.0, 100, "length"), (0.2, 100_000, "abort"):
        async with listening(ServerConfig(drain=drain), step_time=0.002, max_model_len=200_000, num_blocks=20_000) as (
            url,
            e,
            u,
        ):
            async with httpx.AsyncClient(base_url=url, timeout=20) as c:
                ask = asyncio.create_task(c.post(TEXT, json=LONG | {"max_tokens": tokens, "stream": True}))
                while not e.scheduler.running:
                    await asyncio.sleep(0.01)
                u.should_exit = True
                evs = events((await ask).text)
                assert evs[-1]["choices"][0]["finish_reason"] == reason


SERVER = """
import logging, sys; sys.path.insert(0, {tests!r}); logging.basicConfig(level="INFO")
from fake_engine import FakeEngine
from miniengine.server import serve, ServerConfig
config = ServerConfig(port={port}, drain={drain})
serve(lambda: FakeEngine(step_time=0.005), config, lambda url, server: print(url, flush=True))
"""


def start(drain=0.5, port=0):
    code = SERVER.format(tests=str(Path(__file__).parent), drain=drain, port=port)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_process_ends_with_status_0(sig):
    p = start()
    try:
        url = p.stdout.readline().strip()
        with httpx.stream("POST", url + TEXT, json=LONG | {"stream": True}, timeout=10) as r:
            lines = r.iter_lines()
            next(lines)
            p.send_signal(sig)
            rest = [x for x in lines if x]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"abort"' in rest[-2]
        assert p.wait(10) == 0
        err = p.stderr.read()
        assert "Traceback" not in err and "output" in err, err
    finally:
        p.kill()


def test_a_taken_port_is_reported_before_the_model_is_loaded():
    p = start()
    try:
        url = p.stdout.readline().strip()
        q = start(port=int(url.rsplit(":", 1)[1]))
        assert q.wait(20) != 0
        assert "in use" in q.stderr.read()
    finally:
        p.terminate()
        assert p.wait(10) == 0


async def test_the_openai_client_understands_us():
    openai = pytest.importorskip("openai")
    async with listening(ServerConfig(api_key=["k"])) as (url, e, u):
        c = openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0)
        assert [m.id async for m in c.models.list()] == ["fake"] and (await c.models.retrieve("fake")).id == "fake"
        r = await c.chat.completions.create(model="fake", messages=HI, max_tokens=4, logprobs=True, top_logprobs=1)
        assert (
            r.choices[0].message.content == "]tna"
            and r.usage.completion_tokens == 4
            and len(r.choices[0].logprobs.content) == 4
        )
        stream = await c.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [x async for x in stream]
        whole = (await c.chat.completions.create(model="fake", messages=HI)).choices[0].message.content
        assert (
            "".join(x.choices[0].delta.content for x in chunks if x.choices) == whole and chunks[-1].usage.total_tokens
        )
        async with c.chat.completions.stream(model="fake", messages=HI) as s:
            async for _ in s:
                pass
            assert (await s.get_final_completion()).choices[0].message.content == whole
        r = await c.completions.create(model="fake", prompt=["ab", "cd"], extra_body={"min_p": 0.1, "top_k": 5})
        assert [x.text for x in r.choices] == ["ba", "dc"]
        with pytest.raises(openai.BadRequestError) as x:
            await c.chat.completions.create(model="fake", messages=HI, temperature=9)
        assert x.value.param == "temperature" and x.value.request_id
        with pytest.raises(openai.NotFoundError):
            await c.chat.completions.create(model="other", messages=HI)
        e.fail_at = e.steps + 3
        with pytest.raises(openai.APIError, match="made to fail"):
            async for _ in await c.chat.completions.create(model="fake", messages=HI, stream=True):
                pass
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0).models.list()
        await c.close()


def test_an_event_is_one_line():
    assert sse({"a": "x\ny\r\u2028"}).count(b"\n") == 2
