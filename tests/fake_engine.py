"""An `AsyncEngine` without a model: the real scheduler, block pool and prefix cache, and an "answer" instead of a forward pass.

The answer to a prompt is the prompt's bytes backwards, then the end token (and over again with `ignore_eos`), so that each
request can tell whether it got its own tokens. Set `engine.answer` to say something else, `engine.fail_at` to make that step
raise, `engine.step_time` to slow the steps down.
"""
import asyncio
import codecs
from collections import Counter
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from miniengine.config import EngineConfig, ModelConfig, RequestError
from miniengine.kv_blocks import BlockPool
from miniengine.prefix_cache import PrefixCache
from miniengine.scheduler import Request, Scheduler

BOS, EOS, VOCAB = 256, 257, 260


class ByteTokenizer:
    "One token a byte; 256 begins a text, 257 ends an answer, both special"
    vocab_size, eos_ids = VOCAB, (EOS,)

    def encode(self, text, add_special=True): return [BOS]*add_special + list(text.encode())
    def token_bytes(self, i): return bytes([i]) if i < 256 else b""

    def chat(self, messages, add_generation_prompt=True, **kw):
        if any(m["role"] == "alien" for m in messages): raise ValueError("the template knows no alien")
        text = "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "".join(f"[{k}={v}]" for k, v in kw.items())
        return self.encode(text + "[assistant]"*add_generation_prompt)

    def decode(self, ids, skip_special=True):
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")


class EngineError(RuntimeError): pass


@dataclass
class Delta:
    text: str
    token_ids: list
    logprobs: list | None
    finish_reason: str | None
    stop_reason: str | int | None


class Stream:
    "What `add` returns: deltas as they come, merged while nobody reads"
    def __init__(self, engine, request):
        self.engine, self.request, self.waiter = engine, request, None
        self.decoder, self.held, self.error = codecs.getincrementaldecoder("utf-8")("replace"), "", None
        self.pending, self.over = None, False

    def abort(self):
        if self.request.finish_reason is None:
            self.engine.scheduler.finish(self.request, "abort")
            self.push("", [], None)

    def push(self, text, ids, logprobs, error=None):
        r, p = self.request, self.pending
        self.error = error
        if p is None: self.pending = Delta(text, ids, logprobs, r.finish_reason, r.stop_reason)
        else:
            p.text, p.token_ids, p.finish_reason, p.stop_reason = p.text + text, p.token_ids + ids, r.finish_reason, r.stop_reason
            if logprobs: p.logprobs = p.logprobs + logprobs
        if self.waiter and not self.waiter.done(): self.waiter.set_result(None)

    def token(self, token):
        "Detokenize, look for stop strings (held back by their length - 1), publish"
        r, stop = self.request, self.request.params.stop
        self.held += self.decoder.decode(b"" if token in r.stop_ids else bytes([token]) if token < 256 else b"")
        if r.num_output == 1: r.first_token_at = perf_counter()
        at = min((i for s in stop if (i := self.held.find(s)) >= 0), default=-1)
        if at >= 0:
            r.stop_reason = next(s for s in stop if self.held.startswith(s, at))
            self.held = self.held[:at]
            self.engine.scheduler.finish(r, "stop")
            r.finish_reason = "stop"
        elif r.finish_reason: self.held += self.decoder.decode(b"", True)
        keep = 0 if r.finish_reason else max((len(s) - 1 for s in stop), default=0)
        cut = max(len(self.held) - keep, 0)
        text, self.held = self.held[:cut], self.held[cut:]
        k = r.params.logprobs
        lp = None if k is None else [(-0.5, [(token, -0.5), (ord("?"), float("-inf"))][:k])]
        self.push(text, [token], lp)

    def __aiter__(self): return self

    async def __anext__(self):
        while self.pending is None:
            if self.error: raise self.error
            if self.over: raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.error: raise self.error
        d, self.pending = self.pending, None
        self.over = d.finish_reason is not None
        return d


class FakeEngine:
    "The interface of `AsyncEngine`, as far as the server and the CLI use it"
    def __init__(self, num_blocks=1000, max_num_seqs=64, max_model_len=512, step_time=0.0, **config):
        self.config = EngineConfig(model="fake", max_model_len=max_model_len, max_num_seqs=max_num_seqs, **config)
        self.model_config = ModelConfig("llama", 8, 8, 1, 1, 1, 8, VOCAB, 1e-5, 1e4, None, max_model_len, True, False, False, (EOS,))
        self.tokenizer, self.model_name, self.max_model_len = ByteTokenizer(), "fake", max_model_len
        self.default_sampling = {}
        pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(pool, PrefixCache(pool), max_num_seqs, max(2048, max_num_seqs), max_model_len)
        self.step_time, self.fail_at, self.steps, self.healthy, self.closing = step_time, None, 0, True, False
        self.streams, self.ids, self.wake, self.task, self.finished = {}, count(), asyncio.Event(), None, Counter()

    def answer(self, req): return list(bytes(t for t in req.tokens[:req.num_prompt] if t < 256)[::-1]) + [EOS]

    def add(self, prompt_ids, params, request_id=None, salt=0):
        if self.closing: raise RequestError("the server is shutting down", status=503, type="ServiceUnavailableError")
        stop = {i: i for i in params.stop_token_ids} | ({} if params.ignore_eos else {EOS: None})
        req = Request(f"{request_id or 'r'}-{next(self.ids)}", prompt_ids, params, stop, salt)
        self.scheduler.add(req)
        self.streams[req] = Stream(self, req)
        self.wake.set()
        return self.streams[req]

    def step(self):
        self.steps += 1
        if self.steps == self.fail_at: raise ValueError("made to fail")
        batch, tokens = self.scheduler.schedule(), []
        if batch is None: return
        for row in (r for r in batch.rows if r.sample):
            answer = self.answer(row.req)
            tokens.append(answer[row.req.num_output % len(answer)])
        for req, token in self.scheduler.commit(batch, tokens): self.streams[req].token(token)
        for req in [r for r in self.streams if r.finish_reason]:
            self.finished[req.finish_reason] += 1
            del self.streams[req]

    async def run(self):
        while True:
            self.wake.clear()
            if not self.scheduler.has_work: await self.wake.wait()
            try: self.step()
            except Exception as e:
                for req, s in list(self.streams.items()):
                    self.scheduler.finish(req, "error")
                    s.push("", [], None, EngineError(f"the engine failed: {e}"))
                self.streams.clear()
            await asyncio.sleep(self.step_time)

    async def start(self): self.task = asyncio.create_task(self.run())

    async def stop(self, drain_s=0.0):
        self.closing, end = True, perf_counter() + drain_s
        while self.scheduler.has_work and perf_counter() < end: await asyncio.sleep(0.005)
        for s in list(self.streams.values()): s.abort()
        if self.task: self.task.cancel()
