"The rules of 11_text: what is streamed is the answer, byte for byte, for any tokens and any stop strings"
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miniengine.config import RequestError
from miniengine.text import Detokenizer, Tokenizer, byte_alphabet, plain_messages
from miniengine.weights import load_tokenizer, resolve

tok = Tokenizer(load_tokenizer(resolve("smollm2")))
BYTE = {tok.token_bytes(i): i for i in range(tok.vocab_size) if len(tok.token_bytes(i)) == 1}    # byte -> its token
ids = st.lists(st.integers(0, tok.vocab_size + 20), max_size=12)
raw = st.lists(st.sampled_from(sorted(BYTE)), max_size=12).map(lambda bs: [BYTE[b] for b in bs])   # mostly broken UTF-8
text = st.text(max_size=8).map(lambda s: tok.encode(s.replace("\x00", ""), add_special=False))
tokens = st.one_of(ids, raw, text, st.tuples(raw, text, ids).map(lambda t: [*t[0], *t[1], *t[2]]))


def stream(tokens, **kw):
    "All pieces, the last from finish(), and the detokenizer"
    d = Detokenizer(tok, **kw)
    return [*map(d.step, tokens), d.finish()], d


def first_stop(whole, stop):
    "(end, start, stop string) of the stop string that is complete first, found one character at a time"
    for end in range(1, len(whole) + 1):
        hits = [s for s in stop if whole[:end].endswith(s)]
        if hits:
            s = max(hits, key=len)
            return end, end - len(s), s


@given(tokens, st.booleans())
@example([], True)
@example([1, 2, 0, 10**6], False)
def test_pieces_joined_are_the_one_shot_decode_of_transformers(tokens, skip):
    whole = tok.hf.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tok.decode(tokens, skip) == whole
    assert "".join(stream(tokens, skip_special=skip)[0]) == whole


@given(tokens)
def test_what_was_sent_is_a_prefix_of_every_later_text(tokens):
    d, sent = Detokenizer(tok), ""
    for n, t in enumerate(tokens, 1):
        sent += d.step(t)
        whole = tok.decode(tokens[:n])
        assert whole.startswith(sent)
        assert all(c == "\ufffd" for c in whole[len(sent):])       # only an unfinished character is missing


@st.composite
def tokens_and_stops(draw):
    "Stop strings that have a chance: pieces of the text, pieces with a change, and short ones from few characters"
    t = draw(tokens)
    whole = tok.decode(t)
    pieces = st.tuples(st.integers(0, 10), st.integers(1, 6)).map(lambda p: whole[p[0]:p[0] + p[1]])
    s = st.one_of(pieces, pieces.map(lambda p: p + "x"), st.text("ab \ufffd", max_size=3))
    return t, [x for x in draw(st.lists(s, min_size=1, max_size=3)) if x]


@given(tokens_and_stops(), st.booleans())
def test_answer_ends_at_the_first_stop_string_however_it_is_cut_into_tokens(case, include):
    t, stop = case
    whole = tok.decode(t)
    pieces, d = stream(t, stop=stop, include_stop=include)
    hit = first_stop(whole, stop)
    assert d.stopped == (hit and hit[2])
    assert "".join(pieces) == (whole if hit is None else whole[:hit[0 if include else 1]])


@given(tokens_and_stops())
def test_only_a_suffix_that_may_become_a_stop_string_is_held_back(case):
    t, stop = case
    d, sent = Detokenizer(tok, stop), ""
    for n, i in enumerate(t, 1):
        sent += d.step(i)
        if d.stopped is not None: break
        text = "".join(stream(t[:n])[0][:-1])                       # without the flush: whole characters only
        assert text.startswith(sent)
        held = text[len(sent):]
        longest = max((k for s in stop for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
        assert len(held) == longest


def cut(*pieces): return [i for p in pieces for i in (tok.encode(p, add_special=False) if isinstance(p, str) else p)]


def test_d1_character_split_over_tokens_is_sent_whole_and_once():
    for char in "ď🙂世":
        split = [BYTE[bytes([b])] for b in char.encode()]
        pieces, _ = stream(cut("a", split, "b"))
        assert pieces == ["a", *[""] * (len(split) - 1), char, "b", ""]


def test_d2_text_after_an_unfinished_character_is_not_sent_twice():
    world = [BYTE[bytes([b])] for b in "世".encode()]
    pieces, _ = stream(cut("A ", world, world[:2], "ab"))
    assert "".join(pieces) == "A 世\ufffdab" == tok.decode(cut("A ", world, world[:2], "ab"))


def test_d3_answer_cut_inside_a_character_ends_as_the_one_shot_decode_does():
    smile = [BYTE[bytes([b])] for b in "🙂".encode()]
    for n in range(1, 4):
        pieces, d = stream(cut("world", smile[:n]))
        assert "".join(pieces[:-1]) == "world" and pieces[-1] == "\ufffd"
        assert d.finish() == ""                                    # asked twice, it sends nothing twice


def test_d6_stop_string_over_several_tokens_never_leaks():
    pieces, d = stream(cut("abc", "DEF", "G", "HI", "J", "K"), stop=["DEFGHIJ"])
    assert "".join(pieces) == "abc" and d.stopped == "DEFGHIJ"


def test_d7_stop_string_off_the_token_boundary_cuts_the_token():
    pieces, d = stream(cut("The capital is", " Paris", " and"), stop=["Pari"])
    assert "".join(pieces) == "The capital is " and d.stopped == "Pari"


def test_d8_text_held_for_a_stop_that_never_comes_is_delivered():
    d = Detokenizer(tok, ["own fox"])
    sent = "".join(map(d.step, cut("the quick br", "own")))
    assert sent == "the quick br" and d.finish() == "own" and d.stopped is None
    d = Detokenizer(tok, ["a stop string of many characters"])
    assert "".join(map(d.step, cut("nothing like it"))) == "nothing like it"   # not held for the longest stop's length


def test_nothing_follows_a_stop_string():
    d = Detokenizer(tok, ["b"])
    assert [d.step(i) for i in cut("a", "b", "c")] + [d.finish()] == ["a", "", "", ""]
    d = Detokenizer(tok, ["b"], include_stop=True)
    assert [d.step(i) for i in cut("a", "bc", "d")] + [d.finish()] == ["a", "b", "", ""]


def test_stop_strings_count_only_after_min_tokens():
    t = cut("a", "b", "a", "b", "c")
    assert "".join(stream(t, stop=["b"], min_tokens=2)[0]) == "aba"
    assert "".join(stream(t, stop=["b"], min_tokens=9)[0]) == "ababc"


def test_special_tokens_are_hidden_or_shown():
    t = [1, *tok.encode("hi"), 2]
    assert "".join(stream(t)[0]) == "hi"
    assert "".join(stream(t, skip_special=False)[0]) == "<|im_start|>hi<|im_end|>"


def test_c13_padded_vocabulary_row_decodes_to_nothing():
    t = [tok.vocab_size, *tok.encode("hi"), tok.vocab_size + 500]
    assert tok.decode(t) == "".join(stream(t)[0]) == "".join(stream(t, stop=["x"])[0]) == "hi"


@given(st.text(max_size=30))
def test_text_survives_the_way_through_tokens_if_the_vocabulary_has_its_bytes(s):
    if all(bytes([b]) in BYTE for b in s.encode()) and "<" not in s:
        assert "".join(stream(tok.encode(s, add_special=False))[0]) == s


def test_alphabet_is_gpt2s():
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    a = byte_alphabet()
    assert {b: chr(c) for c, b in a.items() if b < 256} == bytes_to_unicode()


def other(decoder, special=("<s>",), post=None):
    "A small transformers tokenizer with that decoder"
    from tokenizers import AddedToken, Tokenizer as Fast, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    chars = [chr(c) for c, b in byte_alphabet().items() if b < 256]
    fast = Fast(models.BPE({c: i for i, c in enumerate(chars)}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoder
    fast.add_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast.post_processor = processors.TemplateProcessing(single=["<s>", "$A"],
                                                        special_tokens=[("<s>", fast.token_to_id("<s>"))])
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}" \
               "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", chat_template=template)


def test_tokenizer_of_another_kind_is_refused():
    from tokenizers import decoders
    for decoder in decoders.Metaspace(), decoders.WordPiece(), decoders.Sequence([decoders.ByteFallback(),
                                                                                  decoders.Fuse()]):
        with pytest.raises(ValueError, match="byte-level"): Tokenizer(other(decoder))
    with pytest.raises(ValueError, match="byte-level"): Tokenizer(object())


def test_e13_start_token_comes_once_from_the_template_and_once_from_encode():
    from tokenizers import decoders
    t = Tokenizer(other(decoders.ByteLevel()))
    bos = t.hf.bos_token_id
    assert t.chat([{"role": "user", "content": "hi"}]).count(bos) == 1 and t.chat([{"role": "user",
                                                                                    "content": "hi"}])[0] == bos
    assert t.encode("hi")[0] == bos and t.encode("hi").count(bos) == 1
    assert bos not in t.encode("hi", add_special=False)
    with pytest.raises(RequestError, match="no tools") as e: t.chat([{"role": "tool", "content": "x"}])
    assert e.value.status == 400 and e.value.param == "messages"


def test_added_tokens_outside_the_byte_alphabet_decode_as_transformers_does():
    from tokenizers import decoders
    hf = other(decoders.ByteLevel(), special=["<s>", "é", "é é", "世", "\u0100", "a\xadb"])
    t = Tokenizer(hf)
    for i in range(t.vocab_size): assert t.decode([i, 65, i], False) == hf.decode([i, 65, i]), t.table[i]


def test_truncation_and_padding_of_a_tokenizer_file_do_not_reach_prompts():
    hf = load_tokenizer(resolve("smollm2"))
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=4)
    assert len(Tokenizer(hf).encode("one two three four five six seven")) > 6 and len(Tokenizer(hf).encode("one")) == 1


@pytest.mark.parametrize("content, plain", [
    ("hi", "hi"), ("", ""), (None, ""), ([], ""), ([{"type": "text", "text": "hi"}], "hi"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb")])
def test_e14_content_is_a_string_or_text_parts(content, plain):
    m = [{"role": "user", "content": content, "name": "x"}]
    assert plain_messages(m) == [{"role": "user", "content": plain, "name": "x"}] and m[0]["content"] is content
    tok.chat(m)


@pytest.mark.parametrize("messages, param", [
    ([], "messages"), (None, "messages"), ({}, "messages"), ("hi", "messages"), ([None], "messages[0]"),
    ([{}], "messages[0]"),
    ([{"role": 5, "content": "x"}], "messages[0]"), ([{"role": "user", "content": 0}], "messages[0].content"),
    ([{"role": "user", "content": {}}], "messages[0].content"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": ""},
                                                                     {"type": "image_url"}]}],
     "messages[1].content[1]")])
def test_messages_that_cannot_be_used_are_refused_by_place(messages, param):
    with pytest.raises(RequestError) as e: tok.chat(messages)
    assert e.value.param == param and e.value.status == 400


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "conversation"])
def test_template_arguments_of_a_client_cannot_replace_ours(name):
    with pytest.raises(RequestError, match=name): tok.chat([{"role": "user", "content": "hi"}], **{name: "x"})


def test_lone_surrogate_is_the_requests_fault():
    for f in lambda: tok.encode("\ud83d"), lambda: tok.chat([{"role": "user", "content": "a\udc00"}]):
        with pytest.raises(RequestError, match="Unicode"): f()


def test_long_stop_strings_stay_fast():
    "A stop string of 10,000 characters must not make a step slow, whether or not the text looks like it"
    from time import perf_counter
    t = random.Random(0).choices(range(17, tok.vocab_size), k=2000)
    d, t0 = Detokenizer(tok, ["x" * 10_000, "\n" * 5000]), perf_counter()
    for i in t: d.step(i)
    for i in tok.encode(("x" * 3000 + "y") * 10): d.step(i)
    assert perf_counter() - t0 < 3
