"Tool calls: the parser under random answers and random cuts, requests, and both directions of the translation"
import json

import pytest
from fake_engine import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from miniengine.config import RequestError
from miniengine.engine import Delta
from miniengine.structured import Grammars, Matcher
from miniengine.tools import HERMES, LLAMA, TAUGHT, ToolParser, Tools, call_grammar, join_calls, render, style_of

ONE_TEXT = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
F = [{"type": "function", "function": {"name": n, "parameters": ONE_TEXT}} for n in ("f", "g_2")]
TOOLS = Tools.of(F)


def parse(style, pieces, tools=TOOLS):
    "(list of content pieces, calls)"
    p, said, calls = ToolParser(style, tools), [], []
    for i, piece in enumerate([*pieces, ""]):
        text, more = p.feed(piece, i == len(pieces))
        said.append(text)
        join_calls(calls, more)
    return said, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def pieces(text, cuts):
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:])]


words = st.text(st.sampled_from(list("ab {}[]\"'\\,:;.\n") + ["é", "🙂"]), max_size=20)
values = st.recursive(st.none() | st.booleans() | st.integers() | words | st.just("</tool_call><tool_call>"),
                      lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6)
calls = st.tuples(st.sampled_from(["f", "g_2"]), st.dictionaries(words, values, max_size=3))
cuts = st.lists(st.integers(0, 10**4), max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.lists(words | calls, max_size=5), cuts, st.sampled_from([None, 1]), st.sampled_from(["", "\n"]))
def test_hermes_answers_come_apart_whatever_the_cuts(parts, cuts, indent, line):
    text, said, want = "", "", []
    for p in parts:
        if isinstance(p, str):
            text += p
            said += p
        else:
            args = json.dumps(p[1], ensure_ascii=False, indent=indent)
            text += f'<tool_call>{line}{{"name": "{p[0]}", "arguments": {args}}}{line}</tool_call>'
            want.append((p[0], args))
    content, got = parse(HERMES, pieces(text, cuts))
    assert got == want
    assert "".join("".join(content).split()) == "".join(said.split())   # blanks around calls belong to the markup
    if not want: assert "".join(content) == said
    for piece in content: assert "<" not in piece


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, min_size=1, max_size=4), cuts, st.sampled_from(["; ", ";", "\n", ", "]),
       st.sampled_from(["", "<|python_tag|>"]))
def test_llama_answers_come_apart_whatever_the_cuts(parts, cuts, between, tag):
    want = [(n, json.dumps(a)) for n, a in parts]
    text = tag + between.join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in want)
    content, got = parse(LLAMA, pieces(text, cuts))
    assert (got, "".join(content)) == (want, "")


BITS = [*'{}[]"\\ab,: \n<', "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "<tool_", "<|python_tag|>"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(BITS), max_size=40).map("".join), cuts, st.sampled_from([HERMES, LLAMA]))
def test_any_text_parses_the_same_however_it_is_cut(text, cuts, style):
    one, many = parse(style, [text]), parse(style, pieces(text, cuts))
    assert ("".join(one[0]), one[1]) == ("".join(many[0]), many[1])


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from(list("<tool_cal>/ \n")), max_size=40), cuts)
def test_text_without_calls_is_kept_to_the_last_blank(text, cuts):
    if "<tool_call>" in text: return
    got = "".join(parse(HERMES, pieces(text, cuts))[0])
    rest = text[len(got):]
    assert text.startswith(got) and (not rest or "<tool_call>".startswith(rest) and len(rest) >= 5)


def test_plain_llama_text_is_untouched_and_streams_at_once():
    assert parse(LLAMA, ["Hi", " {", '"name"']) == (["Hi", " {", '"name"', ""], [])


def test_only_the_first_call_counts_when_parallel_calls_are_off():
    one = '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>'
    tools = Tools.of(F, None, False)
    assert parse(HERMES, [one + one], tools)[1] == parse(HERMES, [one], tools)[1] == [("f", '{"x": "1"}')]


def test_an_answer_that_ends_by_itself_with_a_call_has_the_reason_tool_calls():
    p = ToolParser(HERMES, TOOLS)
    d = p(Delta('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [1, 2], None, "stop"))
    assert d.finish_reason == "tool_calls" and d.text == "" and [c["index"] for c in d.tool_calls] == [0, 0]
    p = ToolParser(HERMES, TOOLS)
    assert p(Delta('<tool_call>{"name": "f", "arguments": {"x": "', [1], None, "length")).finish_reason == "length"
    assert ToolParser(HERMES, TOOLS)(Delta("no", [1], None, "stop")).finish_reason == "stop"


# --- requests ---


@pytest.mark.parametrize("tools, choice, param", [
    ([], None, "tools"), ([{"type": "x"}], None, "tools[0]"),
    ([{"type": "function", "function": {"name": ""}}], None, "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], None, "tools[0].function.parameters"),
    (F, "any", "tool_choice"), (F, {"type": "function"}, "tool_choice"), (None, "required", "tool_choice"),
    (F, {"type": "function", "function": {"name": "h"}}, "tool_choice"), (F, {}, "tool_choice"),
])
def test_bad_tools_are_refused_by_name(tools, choice, param):
    with pytest.raises(RequestError) as e: Tools.of(tools, choice)
    assert e.value.param == param


def test_choices():
    assert Tools.of(None) is None and Tools.of(F, "none") is None and Tools.of(None, "auto") is None
    assert not Tools.of(F, "auto").forced and len(Tools.of(F, "required").forced) == 2
    named = Tools.of(F, {"type": "function", "function": {"name": "g_2"}})
    assert [f["name"] for f in named.forced] == ["g_2"] and not named.parallel


right = st.fixed_dictionaries({"x": st.text(st.sampled_from(list('ab"\\{<é')), max_size=6)})
some_calls = st.lists(st.tuples(st.sampled_from(["f", "g_2"]), right), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([HERMES, LLAMA]), some_calls)
def test_required_calls_pass_the_grammar_and_come_back_from_the_parser(style, parts):
    tok, tools = ByteTokenizer(), Tools.of(F, "required")
    line = "\n" * bool(style.open)
    want = [(n, json.dumps(a, ensure_ascii=False)) for n, a in parts]
    text = style.between.join(
        f'{style.open}{line}{{"name": "{n}", "{style.arguments}": {a}}}{line}{style.close}' for n, a in want)
    m = Matcher(GRAMMARS.compile("grammar", call_grammar(style, tools)).start)
    m.bits.result()
    for t in tok.encode(text, False): assert m.at.consume_token(t), text
    assert m.at.is_accepting()
    assert parse(style, list(text), tools) == ([""] * (len(text) + 1), want)


GRAMMARS = Grammars(ByteTokenizer())


# --- towards the model ---


def test_the_style_comes_from_the_template():
    assert style_of(ByteTokenizer()) == TAUGHT and not TAUGHT.native


def called(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_and_results_become_text_for_a_template_without_tools():
    history = [{"role": "system", "content": "Be brief."},
               {"role": "user", "content": [{"type": "text", "text": "hi"}]},
               {"role": "assistant", "content": "ok", "tool_calls": [called("f", '{"x": "é"}')]},
               {"role": "tool", "tool_call_id": "1", "content": "42"}]
    out, more = render(TAUGHT, history, TOOLS)
    assert more == {} and [m["role"] for m in out] == ["system", "user", "assistant", "user"]
    assert out[0]["content"].startswith("Be brief.\n\nYou may call") and '"g_2"' in out[0]["content"]
    assert out[2]["content"] == 'ok\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert "42" in out[3]["content"]
    assert "tool_calls" not in out[2]


@pytest.mark.parametrize("calls", ["x", [1], [{"function": {}}], [called("f", "{")], [called("f", "[1]")]])
def test_bad_calls_in_the_history_are_refused(calls):
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(RequestError) as e: render(HERMES, [said], None)
    assert e.value.param.startswith("messages[0].tool_calls")


QWEN = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}{%- endfor %}
Return calls within <tool_call></tool_call> XML tags<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""


def test_a_template_with_tools_gets_them_and_the_calls_as_objects():
    from miniengine.text import Tokenizer
    from miniengine.weights import load_tokenizer, resolve
    tok = Tokenizer(load_tokenizer(resolve("smollm2")))
    tok.hf.chat_template = QWEN
    assert style_of(tok) == HERMES
    history = [{"role": "user", "content": "hi"},
               {"role": "assistant", "content": None, "tool_calls": [called("f", '{"x":"1"}')]},
               {"role": "tool", "tool_call_id": "1", "content": "42"}]
    messages, more = render(HERMES, history, TOOLS)
    text = tok.decode(tok.chat(messages, **more), False)
    assert text.count('"g_2"') == 1 and '{"name": "f", "arguments": {"x": "1"}}' in text
    assert "<|im_start|>tool\n42" in text
    messages, more = render(HERMES, history[:1], None)
    assert more == {} and "Tools" not in tok.decode(tok.chat(messages), False)
