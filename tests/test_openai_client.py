"The `openai` client against a real server on loopback with the real demo model: structured output and tools, end to end"
import asyncio
import json
import threading
from typing import Literal

import openai
import pytest
import uvicorn
from pydantic import BaseModel, Field

from miniengine.config import EngineConfig
from miniengine.engine import AsyncEngine, Engine
from miniengine.server import Server, Uvicorn

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Current weather in a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}}, "required": ["city", "unit"], "additionalProperties": False}}}
CLOCK = {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]


@pytest.fixture(scope="module")
def url():
    "A server in a thread, and at the end the proof that nothing is left of any request"
    server = Server(AsyncEngine(Engine(EngineConfig(max_num_seqs=16, max_model_len=1024), progress=False)))
    up = threading.Event()
    u = Uvicorn(uvicorn.Config(server.app(), port=0, log_level="error", lifespan="off"), server, up.set)
    thread = threading.Thread(target=lambda: asyncio.run(u._serve()), daemon=True)
    thread.start()
    assert up.wait(60)
    yield f"http://127.0.0.1:{u.servers[0].sockets[0].getsockname()[1]}/v1"
    u.should_exit = True
    thread.join(30)
    s = server.engine.scheduler
    assert not thread.is_alive() and not s.has_work and s.pool.free == s.pool.usable


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as c: yield c


def ask(client, messages=ASK, **kw):
    return client.chat.completions.create(**dict(model="smollm2", messages=messages, temperature=0, max_tokens=60) | kw)


def test_parse_returns_a_pydantic_object(client):
    r = client.chat.completions.parse(model="smollm2", messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, temperature=0.8, seed=1, max_tokens=60, n=3)
    assert len({c.message.content for c in r.choices}) > 1, "each choice goes its own way"
    for c in r.choices: assert isinstance(c.message.parsed, Person) and c.finish_reason == "stop"


def test_the_stream_helper_parses_too(client):
    with client.chat.completions.stream(model="smollm2", messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, temperature=0, max_tokens=60) as s:
        kinds = [e.type for e in s]
        assert isinstance(s.get_final_completion().choices[0].message.parsed, Person)
    assert kinds.count("content.delta") > 3 and kinds[-1] != "error"


def test_json_object_and_vllms_structured_outputs(client):
    r = ask(client, [{"role": "user", "content": "Colours of the flag of France as JSON?"}], response_format={"type": "json_object"}, max_tokens=150)
    if r.choices[0].finish_reason == "stop": assert isinstance(json.loads(r.choices[0].message.content), dict)
    else: assert r.choices[0].message.content.startswith("{")
    for spec, ok in ({"choice": ["north", "south"]}, ["north", "south"]), ({"regex": "(19|20)[0-9]{2}"}, [str(y) for y in range(1900, 2100)]), ({"grammar": 'start: "a" "b"'}, ["ab"]):
        assert ask(client, extra_body={"structured_outputs": spec}).choices[0].message.content in ok
    t = client.completions.create(model="smollm2", prompt="The capital of France is", extra_body={"structured_outputs": {"choice": [" Rome", " Paris"]}}, temperature=0)
    assert t.choices[0].text == " Paris" and t.choices[0].finish_reason == "stop"


async def test_async_requests_with_different_grammars_run_together(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as c:
        async def one(k):
            extra = {"structured_outputs": {"regex": f"{k}[a-f]{{3}}{k}"}} if k % 2 else {}
            s = await c.chat.completions.create(model="smollm2", messages=ASK, temperature=1, max_tokens=12, stream=True, extra_body=extra)
            return "".join([x.choices[0].delta.content async for x in s])
        got = await asyncio.gather(*map(one, range(8)))
    for k, text in enumerate(got):
        if k % 2: assert len(text) == 5 and text[0] == text[-1] == str(k) and set(text[1:4]) <= set("abcdef")
        else: assert len(text) > 5


def test_a_tools_loop_runs_to_its_end(client):
    messages = list(ASK)
    r = ask(client, messages, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    m = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and m.content is None and len(m.tool_calls) == 1
    call = m.tool_calls[0]
    args = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and call.id.startswith("call_") and set(args) == {"city", "unit"}
    messages += [m, {"role": "tool", "tool_call_id": call.id, "content": f"It is sunny in {args['city']}, 21 degrees {args['unit']}."}]
    r = ask(client, messages, tools=[WEATHER, CLOCK], max_tokens=30)
    assert r.choices[0].message.content or r.choices[0].message.tool_calls
    assert "tool_call>" not in (r.choices[0].message.content or "")
    r = ask(client, messages, tools=[WEATHER], tool_choice="none", max_tokens=30)
    assert r.choices[0].message.content and r.choices[0].message.tool_calls is None


def test_calls_stream_as_openais_do(client):
    chunks = [x.choices[0] for x in ask(client, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, stream=True)]
    pieces = [c for x in chunks for c in x.delta.tool_calls or ()]
    first, rest = pieces[0], pieces[1:]
    assert first.id and first.type == "function" and first.function.name in ("get_weather", "get_time") and first.function.arguments == "" and first.index == 0
    assert rest and all(p.id is None and p.function.name is None and p.index == 0 for p in rest)
    assert isinstance(json.loads("".join(p.function.arguments for p in rest)), dict)
    assert not any(x.delta.content for x in chunks) and chunks[-1].finish_reason == "tool_calls" and chunks[0].delta.role == "assistant"


def test_the_stream_helper_assembles_calls(client):
    with client.chat.completions.stream(model="smollm2", messages=ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=60) as s:
        kinds = {e.type for e in s}
        m = s.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds and json.loads(m.tool_calls[0].function.arguments)["unit"] in "CF"


@pytest.mark.parametrize("bad, param", [
    (dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}), "response_format"),
    (dict(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format"),
    (dict(extra_body={"structured_outputs": {"regex": "("}}), "structured_outputs"),
    (dict(extra_body={"structured_outputs": {"choice": ["a"]}, "min_tokens": 3}), "min_tokens"),
    (dict(tools=[]), "tools"),
    (dict(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nope"}}), "tool_choice"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(tools=[WEATHER], response_format={"type": "json_object"}), "response_format"),
    (dict(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}], tool_choice="required"), "tools"),
])
def test_what_cant_be_done_is_a_400_that_names_the_field(client, bad, param):
    with pytest.raises(openai.BadRequestError) as e: ask(client, **bad)
    assert e.value.param == param
