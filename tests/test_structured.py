"Structured output: what is asked for, what the masks allow, one matcher per request, and the engine's loop around them"
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engine import EOS, ByteTokenizer, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from miniengine.config import EngineConfig, RequestError, SamplingParams
from miniengine.engine import Engine
from miniengine.structured import Grammars, Matcher, wanted

TOK = ByteTokenizer()
GRAMMARS = Grammars(TOK, (258,))
PERSON = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "sex": {"enum": ["f", "m", None]}},
          "required": ["name", "age"], "additionalProperties": False}


# control characters would have to be escaped
TEXT = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=4)
SIMPLE = st.none() | st.booleans() | st.integers() | TEXT | st.lists(st.integers(), max_size=3)
ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


def allowed(m):
    return np.flatnonzero(np.unpackbits(np.frombuffer(m.bits.result(), np.uint8), bitorder="little")[:260]).tolist()


def follow(kind, spec, text):
    "May `text` be said, and may the answer end there?"
    m = Matcher(GRAMMARS.compile(kind, spec).start)
    for t in text.encode():
        if t not in allowed(m): return False
        m.advance(t)
    return EOS in allowed(m)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_picked_among_the_allowed_tokens_a_finished_answer_is_valid(data):
    m, out = Matcher(GRAMMARS.compile("json", PERSON).start), []
    for _ in range(120):
        ok = allowed(m)
        assert ok, "a grammar must always allow something"
        if EOS in ok:
            v = json.loads(bytes(out))
            assert set(v) in ({"name", "age"}, {"name", "age", "sex"}) and 0 <= v["age"] <= 150 and len(v["name"]) <= 8
        t = data.draw(st.sampled_from(ok))
        if t in (EOS, 258): break
        assert t < 256
        out.append(t)
        m.advance(t)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(TEXT, SIMPLE, max_size=3))
def test_any_object_can_be_said(v):
    assert follow("json_object", True, json.dumps(v, ensure_ascii=False))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(ANY, min_size=1, max_size=6), min_size=1, max_size=5, unique=True), st.data())
def test_choices_are_what_can_be_said_and_nothing_else(choices, data):
    assert all(follow("choice", choices, c) for c in choices)
    other = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
    assert follow("choice", choices, other) == (other in choices)


@settings(max_examples=50, deadline=None)
@given(st.text("ab1", max_size=6))
def test_patterns_match_whole_answers(text):
    assert follow("regex", "a+(b|1){1,2}", text) == bool(re.fullmatch("a+(b|1){1,2}", text))


def test_the_end_is_allowed_only_when_the_answer_is_complete():
    m = Matcher(GRAMMARS.compile("choice", ["ab", "abc"]).start)
    seen = []
    for t in b"abc":
        seen.append(EOS in allowed(m))
        m.advance(t)
    assert seen == [False, False, True] and allowed(m) == [EOS, 258]
    m.advance(EOS)
    assert allowed(m) == [EOS, 258]


def test_a_broken_matcher_allows_only_the_end():
    m = Matcher(GRAMMARS.compile("choice", ["ab"]).start)
    m.advance(ord("z"))
    assert allowed(m) == [EOS, 258]


def test_matchers_of_one_grammar_are_independent():
    g = GRAMMARS.compile("choice", ["ab", "cd"])
    a, b = (g.attach(SamplingParams(structured=g)).structured for _ in range(2))
    a.advance(ord("a"))
    assert allowed(a) == [ord("b")] and allowed(b) == [ord("a"), ord("c")]


def test_compiled_grammars_are_kept():
    assert GRAMMARS.compile("json", PERSON).start is GRAMMARS.compile("json", json.dumps(PERSON)).start


def test_masks_touch_only_their_rows_and_any_width():
    g = GRAMMARS.compile("choice", ["b", "d"])
    held = [(i, g.attach(SamplingParams()).structured) for i in (1, 3)]
    held[1][1].advance(ord("b"))
    for width in (255, 258, 260):
        logits = torch.zeros(4, width)
        held[0][1].mask(logits, held)
        assert (logits[[0, 2]] == 0).all()
        assert (logits[1] == 0).nonzero()[:, 0].tolist() == [ord("b"), ord("d")]
        assert (logits[3] == 0).nonzero()[:, 0].tolist() == [t for t in (EOS, 258) if t < width]


@pytest.mark.parametrize("response_format, structured_outputs, param", [
    ({"type": "yaml"}, None, "response_format"), ({}, None, "response_format"),
    ({"type": "json_schema"}, None, "response_format"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, None, "response_format"),
    ({"type": "json_schema", "json_schema": {"schema": "x"}}, None, "response_format"),
    (None, {"regex": "a", "choice": ["b"]}, "structured_outputs"), (None, {"cfg": "a"}, "structured_outputs"),
    ({"type": "json_object"}, {"regex": "a"}, "structured_outputs"),
    (None, {"structural_tag": "{}"}, "structured_outputs"),
])
def test_unknown_requests_are_refused_by_name(response_format, structured_outputs, param):
    with pytest.raises(RequestError) as e: wanted(response_format, structured_outputs)
    assert e.value.param == param and e.value.status == 400


@pytest.mark.parametrize("kind, spec", [
    ("json", {"type": "objekt"}), ("json", {"type": "array", "uniqueItems": True}), ("json", {"$ref": "#/x"}),
    ("json", {"$ref": "http://example.org/x"}), ("json", "{"), ("json", 3),
    ("json", {"type": "string", "pattern": "("}), ("regex", "(a"), ("regex", "a(?=b)"), ("regex", ""), ("regex", 5),
    ("regex", "a\\"), ("choice", []),
    ("choice", ["a", 1]), ("choice", [""]), ("choice", "ab"), ("grammar", "start: ("), ("grammar", "x: /a/"),
])
def test_bad_specs_are_refused_by_name(kind, spec):
    with pytest.raises(RequestError) as e: GRAMMARS.compile(kind, spec, "response_format")
    assert e.value.param == "response_format" and e.value.status == 400
    assert e.value.message.startswith("response_format: ")


@pytest.mark.parametrize("field, value", [("min_tokens", 2), ("ignore_eos", True)])
def test_what_contradicts_a_grammar_is_refused(field, value):
    g = GRAMMARS.compile("choice", ["a"])
    with pytest.raises(RequestError) as e: g.attach(SamplingParams(structured=g, **{field: value}))
    assert e.value.param == field


# --- in the engine ---


@pytest.fixture(scope="module")
def small():
    "The demo model with so few blocks that requests preempt each other"
    return Engine(EngineConfig(max_num_seqs=4, max_model_len=128, num_blocks=14), progress=False)


def run(engine, params, n):
    ids = engine.tokenizer.chat([{"role": "user", "content": "Describe a person."}])
    streams = [engine.add(ids, p) for p in params for _ in range(n)]
    while engine.has_work: engine.step()
    return [(s.take(), s.request) for s in streams]


def test_answers_follow_their_grammar_through_preemption(small):
    g = Grammars(small.tokenizer, small.model_config.eos_ids)
    names = ["name", "town", "job"]
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "string", "maxLength": 20}),
              "required": names, "additionalProperties": False}
    held = SamplingParams(temperature=1, max_tokens=80, seed=3, structured=g.compile("json", schema))
    got = run(small, [SamplingParams(temperature=0, max_tokens=80, ignore_eos=True), held], 2)
    assert any(r.num_preemptions for _, r in got[2:]), "a request with a grammar must have been preempted"
    for d, r in got[2:]:
        assert not r.params.structured.at.is_error()
        if d.finish_reason == "stop": assert set(json.loads(d.text)) == {"name", "town", "job"}
    assert [r.num_output for _, r in got[:2]] == [80, 80]
    assert small.pool.free == small.pool.usable


@pytest.mark.parametrize("overlap", [False, True])
async def test_the_matcher_sees_every_token_once_and_is_one_per_choice(overlap):
    e = FakeEngine(overlap=overlap)
    await e.start()
    e.answer = lambda r: [*b"yes", EOS]
    params = SamplingParams(max_tokens=9, structured=GRAMMARS.compile("choice", ["yes", "no"]))
    streams = [e.add([1, 2], params) for _ in range(5)]
    assert len({id(s.request.params.structured) for s in streams}) == 5
    for s in streams:
        assert "".join([d.text async for d in s]) == "yes" and s.request.finish_reason == "stop"
        assert allowed(s.request.params.structured) == [EOS, 258] and not s.request.params.structured.at.is_error()
    await e.stop()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_answers_are_valid_and_neighbours_notice_nothing(dtype, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parent.parent/"bench"), *sys.path])
    from gpu_structured import check
    found = check(os.environ.get("MINIENGINE_TEST_MODEL", "smollm2"), dtype, "triton")
    assert found["overlap"] and all(k["valid"] == 8 for k in found["kinds"].values())
