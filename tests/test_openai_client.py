"The `openai` client against a real server on loopback with the real demo model: all that we support, end to end"
import asyncio
import json
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
INVENT = [{"role": "user", "content": "Invent a person."}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather in a city", "parameters": {
        "type": "object", "required": ["city", "unit"], "additionalProperties": False,
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}}}}}
CLOCK = {"type": "function", "function": {
    "name": "get_time", "description": "The time",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
CAPITAL = "The capital of France is"


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]


@pytest.fixture(scope="module")
def client(demo_url):
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="-", max_retries=0, timeout=60) as c: yield c


def ask(client, messages=ASK, **kw):
    return client.chat.completions.create(**dict(model="smollm2", messages=messages, temperature=0, max_tokens=60) | kw)


def say(client, prompt=CAPITAL, **kw):
    return client.completions.create(**dict(model="smollm2", prompt=prompt, temperature=0, max_tokens=8) | kw)


def ids_of(url, text):
    body = {"prompt": text, "add_special_tokens": False}
    return httpx.post(f"{url}/tokenize", json=body).json()["tokens"]


# --- sampling ---


def test_models_are_listed_and_others_unknown(client):
    assert [m.id for m in client.models.list()] == ["smollm2"] and client.models.retrieve("smollm2").object == "model"
    for call in (lambda: client.models.retrieve("gpt-9"), lambda: ask(client, model="gpt-9")):
        with pytest.raises(openai.NotFoundError) as e: call()
        assert e.value.param == "model" and e.value.request_id


def test_a_seed_repeats_an_answer_and_choices_differ(client):
    wild = dict(temperature=1.5, seed=7, max_tokens=8, n=3)
    a, b = ([c.message.content for c in ask(client, **wild).choices] for _ in range(2))
    assert a == b and len(set(a)) == 3
    assert a[0] != ask(client, **wild | dict(seed=8, n=1)).choices[0].message.content


@pytest.mark.parametrize("filter", [dict(top_p=1e-6), dict(extra_body={"top_k": 1}), dict(extra_body={"min_p": 1.0})])
def test_filters_that_leave_one_token_are_greedy(client, filter):
    assert say(client, temperature=2, **filter).choices[0].text == say(client).choices[0].text


def test_penalties_and_bias_change_what_is_said(client, demo_url):
    plain = say(client, "1 1 1 1 1 1 1 1 1 1 1 1").choices[0].text
    assert plain.split() == ["1"]*4
    for kw in dict(frequency_penalty=2, presence_penalty=2), dict(extra_body={"repetition_penalty": 5.0}):
        assert say(client, "1 1 1 1 1 1 1 1 1 1 1 1", **kw).choices[0].text.split() != ["1"]*4
    cat, = ids_of(demo_url, " cat")
    assert say(client, logit_bias={str(cat): 100}, max_tokens=3).choices[0].text == " cat cat cat"


def test_where_answers_end(client, demo_url):
    text = say(client, max_tokens=12).choices[0].text
    tokens = ids_of(demo_url, text)
    r = say(client, stop=[text[10:14]]).choices[0]
    assert (r.text, r.finish_reason, r.stop_reason) == (text[:10], "stop", text[10:14])
    r = say(client, extra_body={"stop_token_ids": [tokens[3]]})
    assert r.choices[0].stop_reason == tokens[3] and r.usage.completion_tokens == tokens.index(tokens[3]) + 1
    r = say(client, stop=[text[:2]], max_tokens=12, extra_body={"min_tokens": 6, "include_stop_str_in_output": True})
    assert r.usage.completion_tokens >= 6
    r = ask(client, max_tokens=None, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 3


def test_prompts_of_every_kind(client, demo_url):
    ids, whole = ids_of(demo_url, CAPITAL), say(client, max_tokens=4).choices[0].text
    for prompt, n in ((ids, 1), ([CAPITAL]*2, 2), ([ids]*3, 3)):
        r = say(client, prompt, max_tokens=4)
        assert [(c.index, c.text) for c in r.choices] == [(i, whole) for i in range(n)]
        assert r.usage.prompt_tokens == n*len(ids)
    assert say(client, echo=True, max_tokens=4).choices[0].text == CAPITAL + whole
    r = say(client, [CAPITAL, "Two and two are"], n=2, temperature=1, max_tokens=2, echo=True)
    assert [c.text.startswith(CAPITAL) for c in r.choices] == [True, True, False, False]


def test_log_probabilities_belong_to_the_tokens(client):
    c = ask(client, logprobs=True, top_logprobs=3, max_tokens=6).choices[0]
    assert "".join(t.token for t in c.logprobs.content) == c.message.content and len(c.logprobs.content) == 6
    for t in c.logprobs.content:
        assert t.logprob <= 0 and bytes(t.bytes).decode() == t.token and len(t.top_logprobs) == 3
        assert t.top_logprobs[0].token == t.token, "greedy"
    lp = say(client, logprobs=2, max_tokens=4).choices[0].logprobs
    assert lp.text_offset[0] == 0 and len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == 4


def test_streams_say_the_same_and_count_their_tokens(client):
    for call, text in ((ask, lambda c: c.delta.content), (say, lambda c: c.text)):
        whole = call(client, max_tokens=5)
        *chunks, last = call(client, max_tokens=5, stream=True, stream_options={"include_usage": True})
        said = whole.choices[0].message.content if call is ask else whole.choices[0].text
        assert "".join(text(x.choices[0]) for x in chunks) == said and len(chunks) == 5
        assert last.usage.completion_tokens == whole.usage.completion_tokens == 5 and not last.choices
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [x.usage.completion_tokens for x in say(client, max_tokens=3, stream=True, stream_options=options)]
    assert counts == [1, 2, 3, 3]


def test_a_request_keeps_the_id_it_brings(client):
    r = client.chat.completions.with_raw_response.create(
        model="smollm2", messages=ASK, max_tokens=1, extra_headers={"x-request-id": "mine"})
    assert r.headers["x-request-id"] == "mine" and r.parse().id == "chatcmpl-mine"


def test_a_closed_stream_ends_its_request(client, demo_url):
    with ask(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True}) as stream: next(iter(stream))
    for _ in range(200):
        gauges = [x for x in httpx.get(f"{demo_url}/metrics").text.splitlines() if x.startswith("vllm:num_requests")]
        if all(float(x.split()[-1]) == 0 for x in gauges): return
    raise AssertionError(gauges)


# --- structured output ---


def test_parse_returns_a_pydantic_object(client):
    r = client.chat.completions.parse(model="smollm2", messages=INVENT, response_format=Person, temperature=0.8,
                                      seed=1, max_tokens=60, n=3)
    assert len({c.message.content for c in r.choices}) > 1, "each choice goes its own way"
    for c in r.choices: assert isinstance(c.message.parsed, Person) and c.finish_reason == "stop"


def test_the_stream_helper_parses_too(client):
    with client.chat.completions.stream(model="smollm2", messages=INVENT, response_format=Person, temperature=0,
                                        max_tokens=60) as s:
        kinds = [e.type for e in s]
        assert isinstance(s.get_final_completion().choices[0].message.parsed, Person)
    assert kinds.count("content.delta") > 3 and kinds[-1] != "error"


def test_json_object_and_vllms_structured_outputs(client):
    flag = [{"role": "user", "content": "Colours of the flag of France as JSON?"}]
    c = ask(client, flag, response_format={"type": "json_object"}, max_tokens=30).choices[0]
    if c.finish_reason == "stop": assert isinstance(json.loads(c.message.content), dict)
    else: assert c.message.content.startswith("{")
    for spec, ok in (({"choice": ["north", "south"]}, ["north", "south"]), ({"grammar": 'start: "a" "b"'}, ["ab"]),
                     ({"regex": "(19|20)[0-9]{2}"}, [str(y) for y in range(1900, 2100)])):
        assert ask(client, extra_body={"structured_outputs": spec}).choices[0].message.content in ok
    t = say(client, extra_body={"structured_outputs": {"choice": [" Rome", " Paris"]}}).choices[0]
    assert t.text == " Paris" and t.finish_reason == "stop"


async def test_async_requests_with_different_grammars_run_together(demo_url):
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="-", max_retries=0, timeout=60) as c:
        async def one(k):
            extra = {"structured_outputs": {"regex": f"{k}[a-f]{{3}}{k}"}} if k % 2 else {}
            s = await c.chat.completions.create(model="smollm2", messages=ASK, temperature=1, max_tokens=12,
                                                stream=True, extra_body=extra)
            return "".join([x.choices[0].delta.content async for x in s])
        async def parsed():
            r = await c.chat.completions.parse(model="smollm2", messages=INVENT, response_format=Person, max_tokens=60)
            return r.choices[0].message.parsed
        async def helper():
            async with c.chat.completions.stream(model="smollm2", messages=ASK, max_tokens=900, temperature=0) as s:
                async for event in s:
                    if event.type == "content.delta": return event.delta  # and away
        *got, person, first = await asyncio.gather(*map(one, range(8)), parsed(), helper())
    for k, text in enumerate(got):
        if k % 2: assert len(text) == 5 and text[0] == text[-1] == str(k) and set(text[1:4]) <= set("abcdef")
        else: assert len(text) > 5
    assert isinstance(person, Person) and first


# --- tools ---


def test_a_tools_loop_runs_to_its_end(client):
    messages, tools = list(ASK), [WEATHER, CLOCK]
    named = {"type": "function", "function": {"name": "get_weather"}}
    r = ask(client, messages, tools=tools, tool_choice=named)
    m = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and m.content is None and len(m.tool_calls) == 1
    call = m.tool_calls[0]
    args = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and call.id.startswith("call_") and set(args) == {"city", "unit"}
    result = f"It is sunny in {args['city']}, 21 degrees {args['unit']}."
    messages += [m, {"role": "tool", "tool_call_id": call.id, "content": result}]
    r = ask(client, messages, tools=tools, max_tokens=12)
    assert r.choices[0].message.content or r.choices[0].message.tool_calls
    assert "tool_call>" not in (r.choices[0].message.content or "")
    r = ask(client, messages, tools=[WEATHER], tool_choice="none", max_tokens=12)
    assert r.choices[0].message.content and r.choices[0].message.tool_calls is None


def test_calls_stream_as_openais_do(client):
    must = dict(tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)
    chunks = [x.choices[0] for x in ask(client, **must, stream=True)]
    first, *rest = [c for x in chunks for c in x.delta.tool_calls or ()]
    assert first.id and first.type == "function" and first.function.name in ("get_weather", "get_time")
    assert first.function.arguments == "" and first.index == 0
    assert rest and all(p.id is None and p.function.name is None and p.index == 0 for p in rest)
    assert isinstance(json.loads("".join(p.function.arguments for p in rest)), dict)
    assert not any(x.delta.content for x in chunks)
    assert chunks[-1].finish_reason == "tool_calls" and chunks[0].delta.role == "assistant"


def test_the_stream_helper_assembles_calls(client):
    with client.chat.completions.stream(model="smollm2", messages=ASK, tools=[WEATHER], tool_choice="required",
                                        parallel_tool_calls=False, temperature=0, max_tokens=60) as s:
        kinds = {e.type for e in s}
        m = s.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert json.loads(m.tool_calls[0].function.arguments)["unit"] in "CF"


# --- what we refuse ---

NO_SUCH_TYPE = {"type": "objekt"}


@pytest.mark.parametrize("bad, param", [
    (dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": NO_SUCH_TYPE}}),
     "response_format"),
    (dict(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format"),
    (dict(extra_body={"structured_outputs": {"regex": "("}}), "structured_outputs"),
    (dict(extra_body={"structured_outputs": {"choice": ["a"]}, "min_tokens": 3}), "min_tokens"),
    (dict(tools=[]), "tools"),
    (dict(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nope"}}), "tool_choice"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(tools=[WEATHER], response_format={"type": "json_object"}), "response_format"),
    (dict(tools=[{"type": "function", "function": {"name": "f", "parameters": NO_SUCH_TYPE}}], tool_choice="required"),
     "tools"),
    (dict(temperature=9), "temperature"),
    (dict(max_tokens=5000), "max_tokens"),
    (dict(extra_body={"prompt_logprobs": 1}), "prompt_logprobs"),
])
def test_what_cant_be_done_is_a_400_that_names_the_field(client, bad, param):
    with pytest.raises(openai.BadRequestError) as e: ask(client, **bad)
    assert e.value.param == param
