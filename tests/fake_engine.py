"""The real engine, scheduler, cache and detokenizer, on a runner that computes nothing.

The "model" says the prompt's bytes backwards, then the end token (and over again with `ignore_eos`), so that each
request can tell whether it got its own tokens. Set `engine.answer` to say something else (a function from request to
token ids), `fail_at` to make that step raise, `step_time` to slow the steps down.
"""

from time import perf_counter
from types import SimpleNamespace

import torch

from miniengine.config import EngineConfig, ModelConfig
from miniengine.engine import AsyncEngine, Engine
from miniengine.kv_blocks import BlockPool
from miniengine.prefix_cache import PrefixCache
from miniengine.scheduler import Scheduler
from miniengine.text import plain_messages

BOS, EOS, VOCAB = 256, 257, 260


class ByteTokenizer:
    "One token a byte; 256 begins a text, 257 ends an answer, both special"

    vocab_size, eos_ids = VOCAB, (EOS,)
    table = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>", b"", b""]
    shown = table[:256] + [b""] * 4

    def encode(self, text, add_special=True):
        return [BOS] * add_special + list(text.encode())

    def token_bytes(self, i):
        return self.table[i]

    def chat(self, messages, /, add_generation_prompt=True, **kw):
        text = "".join(f"[{m['role']}]{m['content']}\n" for m in plain_messages(messages))
        return self.encode(text + "".join(f"[{k}={v}]" for k, v in kw.items()) + "[assistant]" * add_generation_prompt)

    def decode(self, ids, skip_special=True):
        table = self.shown if skip_special else self.table
        return b"".join(table[i] for i in ids if 0 <= i < len(table)).decode("utf-8", "replace")


class FakeHandle:
    "A launched step; `done_at` is when its device will be ready"

    def __init__(self, batch, tokens, logprobs, done_at):
        self.batch, self.tokens, self.lps, self.done_at = batch, tokens, logprobs, done_at

    def ready(self):
        return perf_counter() >= self.done_at

    def wait(self):
        return self.tokens

    def logprobs(self):
        return self.lps


class FakeRunner:
    "Answers from `engine.answer`; the second-best token is always '?', at minus infinity"

    def __init__(self, engine):
        self.engine, self.attn, self.said = engine, None, {}

    def prepare(self, batch):
        return (batch,)

    def run(self, job):
        e, (batch,), rows = self.engine, job, [r.req for r in job[0].rows if r.sample]
        e.steps += 1
        if e.steps == e.fail_at:
            raise ValueError("made to fail")
        tokens = []
        for r in rows:
            said = self.said[r] = [] if r.num_output == 0 and r.pending < 2 else self.said[r]
            answer = e.answer(r)
            said.append(answer[len(said) % len(answer)])
            tokens.append(said[-1])
        k = max((r.params.logprobs or 0 for r in rows), default=0)
        lps = (
            [(-0.5, [(t, -0.5), (ord("?"), float("-inf"))][:k]) for t in tokens]
            if any(r.params.logprobs is not None for r in rows)
            else None
        )
        return FakeHandle(batch, tokens, lps, perf_counter() + e.step_time)


class FakeEngine(AsyncEngine):
    def __init__(self, num_blocks=1000, max_num_seqs=64, max_model_len=512, step_time=0.0, overlap=False, **config):
        e = object.__new__(Engine)
        e.config = EngineConfig(model="fake", max_model_len=max_model_len, max_num_seqs=max_num_seqs, **config)
        e.model_config = ModelConfig(
            "llama", 8, 8, 1, 1, 1, 8, VOCAB, 1e-5, 1e4, None, max_model_len, True, False, False, (EOS,)
        )
        e.tokenizer, e.model_name, e.max_model_len, e.default_sampling = ByteTokenizer(), "fake", max_model_len, {}
        e.device, e.dtype, e.pool = (
            SimpleNamespace(type="cuda"),
            torch.float32,
            BlockPool(num_blocks),
        )  # "cuda": no thread for the steps
        e.scheduler = Scheduler(e.pool, PrefixCache(e.pool), max_num_seqs, max(2048, max_num_seqs), max_model_len)
        e.overlap, e.inflight, e.observers, e.streams, e.runner = overlap, None, [], {}, FakeRunner(self)
        super().__init__(e)
        self.step_time, self.fail_at, self.steps = step_time, None, 0

    def answer(self, req):
        return list(bytes(t for t in req.tokens[: req.num_prompt] if t < 256)[::-1]) + [EOS]

    async def stop(self, drain_s=0.0):
        if self.task is not None:
            await super().stop(drain_s)
