"""llguidance beside xgrammar on a CPU: setup, compile and mask times, memory. A process per library and vocabulary.

    python bench/grammar_libs.py [--out bench/results/grammar_libs.json]

The small vocabulary is the demo model's (49,152 entries), the large one adds pairs of its words until there are
151,936, Qwen's number. Times per token are taken along one valid answer for each grammar: fill the mask of the next
token, then accept that token; `cold` is the first such walk, `warm` the median of ten more. xgrammar must be installed
by hand beside this project's environment, it is not among its requirements.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import version
from time import perf_counter

SIZES = {"smollm2": 49152, "151k": 151936}
PERSON = {"type": "object", "required": ["name", "age", "tags"], "additionalProperties": False, "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}}
KINDS = [{"type": "string", "maxLength": 200}, {"type": "number"}, {"enum": [f"v{k}" for k in range(50)]},
         {"type": "array", "items": PERSON, "maxItems": 20}]
WIDE = {"type": "object", "properties": {f"field_{i}": KINDS[i % 4] for i in range(100)},
        "required": [f"field_{i}" for i in range(0, 100, 4)], "additionalProperties": False}
ana = {"name": "Ana", "age": 31, "tags": ["tall", "a reader of long novels about the sea", "née Müller"]}
people = {"people": [ana] * 3, "n": 3.5e2, "ok": True}
fields = {f"field_{i}": ["some text", 3.25, "v7", [ana]][i % 4] for i in range(24)}
fields |= {f"field_{i}": "x" for i in range(24, 100, 4)}
CASES = {"person": (PERSON, json.dumps(ana, ensure_ascii=False)),
         "any JSON": ({"type": "object"}, json.dumps(people, ensure_ascii=False)),
         "100 fields": (WIDE, json.dumps(fields, ensure_ascii=False)),
         "regex": (r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-9:]{5} [a-z]{1,40}", "2026-12-01T14:05 reykjavik"),
         "choice of 50": ([f"option number {i}" for i in range(50)], "option number 37")}


def vocabulary(size):
    "Bytes of `size` tokens, and the id that ends a text"
    from miniengine.text import Tokenizer
    from miniengine.weights import load_tokenizer, resolve
    tok = Tokenizer(load_tokenizer(resolve("smollm2")))
    table, special = list(tok.table), [i for i, (a, b) in enumerate(zip(tok.table, tok.shown)) if a and not b]
    words = [t for t in table if t[:1] == b" " and t[1:].isalpha()]
    k = 0
    while len(table) < size:  # words of two words, each once
        table.append(words[k % 7919] + words[7919 + k // 7919]); k += 1
    return table, special, tok.eos_ids[0]


IDS = {}


def greedy(table, special, text):
    "Token ids of `text`, longest match first"
    if not IDS: IDS.update({t: i for i, t in enumerate(table) if t and i not in special})
    ids, longest, data, at, out = IDS, 24, text.encode(), 0, []
    while at < len(data):
        n = next(n for n in range(longest, 0, -1) if data[at:at + n] in ids and at + n <= len(data))
        out.append(ids[data[at:at + n]]); at += n
    return out


def llguidance(table, special, eos):
    "(compile, new matcher, fill, accept)"
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
    class Wrapper:
        eos_token_id, bos_token_id, tokens, special_token_ids, is_tokenizer_wrapper = eos, None, table, special, True
        def __call__(self, text): return greedy(table, special, text if isinstance(text, str) else text.decode())
    tok, mask = LLTokenizer(Wrapper()), allocate_token_bitmask(1, len(table))
    def compile(spec):
        if isinstance(spec, dict): g = LLMatcher.grammar_from_json_schema(spec)
        elif isinstance(spec, str): g = LLMatcher.grammar_from_regex(spec)
        else: g = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, spec)))
        m = LLMatcher(tok, g)
        assert not m.is_error(), m.get_error()
        return m
    def fill(m): fill_next_token_bitmask(m, mask); return mask
    return compile, lambda m: m.deep_copy(), fill, lambda m, t: m.consume_token(t)


def xgrammar(table, special, eos):
    "(compile, new matcher, fill, accept)"
    import xgrammar as x
    info = x.TokenizerInfo(table, x.VocabType.RAW, vocab_size=len(table), stop_token_ids=[eos])
    c, mask = x.GrammarCompiler(info, max_threads=1, cache_enabled=False), x.allocate_token_bitmask(1, len(table))
    def compile(spec):
        if spec == {"type": "object"}: return c.compile_builtin_json_grammar()
        if isinstance(spec, dict): return c.compile_json_schema(json.dumps(spec))
        if isinstance(spec, str): return c.compile_regex(spec)
        return c.compile_grammar("root ::= " + " | ".join(map(json.dumps, spec)))
    def fill(m): m.fill_next_token_bitmask(mask); return mask
    return compile, x.GrammarMatcher, fill, lambda m, t: m.accept_token(t)


def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def one(lib, size):
    "All cases of one library"
    table, special, eos = vocabulary(size)
    base, t = rss(), perf_counter()
    __import__(lib)
    imported, with_lib = perf_counter() - t, rss()
    t = perf_counter()
    compile, start, fill, accept = globals()[lib](table, special, eos)
    out = dict(lib=lib, version=version(lib), vocab=size, import_s=imported, import_mib=with_lib - base,
               setup_s=perf_counter() - t, setup_mib=rss() - with_lib, cases={})
    for name, (spec, text) in CASES.items():
        ids, times, before = greedy(table, special, text), [], rss()
        if name != "any JSON": ids = ids + [eos]
        compiles = []
        for _ in range(3):
            t = perf_counter(); g = compile(spec); compiles.append((perf_counter() - t) * 1e3)
        for _ in range(11):
            m, walk = start(g), []
            for i in ids:
                t = perf_counter(); mask = fill(m); dt = perf_counter() - t
                assert int(mask[0, i // 32]) >> (i % 32) & 1, (lib, name, table[i])
                t = perf_counter(); assert accept(m, i); walk.append((dt + perf_counter() - t) * 1e6)
            times.append(walk)
        warm = [statistics.median(c) for c in zip(*times[1:])]
        out["cases"][name] = dict(tokens=len(ids), compile_ms=min(compiles), cold_us=statistics.mean(times[0]),
                                  cold_max_us=max(times[0]), warm_us=statistics.mean(warm), warm_max_us=max(warm),
                                  mib=rss() - before)
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--one", nargs=2); ap.add_argument("--out")
    a = ap.parse_args()
    if a.one: return print(json.dumps(one(a.one[0], int(a.one[1]))))
    results = []
    for size in SIZES.values():
        for lib in "llguidance", "xgrammar":
            r = subprocess.run([sys.executable, __file__, "--one", lib, str(size)], capture_output=True, text=True)
            if r.returncode: print(f"{lib}: {r.stderr[-800:]}"); continue
            results.append(r := json.loads(r.stdout.splitlines()[-1]))
            print(f"{lib} {r['version']}, {size:,} tokens: import {r['import_s']:.2f} s and {r['import_mib']:.0f} MiB, "
                  f"tokenizer {r['setup_s']:.2f} s and {r['setup_mib']:.0f} MiB")
            for k, c in r["cases"].items():
                print(f"  {k:13} compile {c['compile_ms']:8.2f} ms, per token cold {c['cold_us']:7.1f} us "
                      f"(max {c['cold_max_us']:8.1f}), warm {c['warm_us']:6.1f} us (max {c['warm_max_us']:7.1f}), "
                      f"{c['mib']:.1f} MiB")
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    found = dict(command="python bench/grammar_libs.py", cpu=cpu, python=sys.version.split()[0], results=results)
    if a.out:
        with open(a.out, "w") as f: json.dump(found, f, indent=1)


if __name__ == "__main__": main()
