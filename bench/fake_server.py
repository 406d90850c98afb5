#!/usr/bin/env python3
"""A server that speaks the OpenAI streaming protocol and has no model: load generators are tested and compared on it.

    python bench/fake_server.py --port 8300 --ttft 0.02 --itl 0.005 --log requests.jsonl

Every request gets exactly the tokens it asks for, one event each (`--stop-after` ends earlier, as an EOS would). With
`--log`, each POST is written down: when it arrived (seconds since the first), its path, its headers and its body.
Faults on every k-th request, counted by the number that its x-request-id ends in, so that they don't depend on the
order of arrival: `--fail-every` answers 500, `--cut-every` drops the connection after 3 tokens, `--error-every` sends
an error event after 3 tokens and then ends the stream properly.
"""
import argparse
import asyncio
import json
import re
import time

from aiohttp import web

WORDS = "the quiet harbour sorts a small engine and then closes every green turbine".split()
SETTINGS = dict(port=8300, ttft=0.0, itl=0.0, stop_after=0, fail_every=0, cut_every=0, error_every=0,
                model="fake", root="", tokenizer="", log="", no_usage=False, no_role_event=False, spec_decode=False,
                extra_token=False)


class FakeServer:
    def __init__(self, **settings):
        self.__dict__.update(SETTINGS | settings)
        self.posts, self.started = [], None                       # every generation request; time of the first
        self.file = open(self.log, "w") if self.log else None

    def app(self):
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/server_info", self.info)
        if self.tokenizer:
            from transformers import AutoTokenizer
            self.tok = AutoTokenizer.from_pretrained(self.tokenizer)
            app.router.add_post("/tokenize", self.tokenize)
            app.router.add_post("/detokenize", self.detokenize)
        return app

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": self.model, "root": self.root or self.model}]})

    async def info(self, request):
        return web.json_response({"engine": "fake", "itl": self.itl, "system_env": {"PASSWORD": "not to be stored"}})

    async def tokenize(self, request):
        ids = self.tok.encode((await request.json())["prompt"], add_special_tokens=False)
        return web.json_response({"tokens": ids + ids[-1:] * self.extra_token})       # a tokenizer that disagrees

    async def detokenize(self, request):
        return web.json_response({"prompt": self.tok.decode((await request.json())["tokens"])})

    async def metrics(self, request):
        n, label = len(self.posts), f'{{model_name="{self.model}"}}'
        lines = [f"vllm:prefix_cache_queries_total{label} {n * 100}.0",
                 f"vllm:prefix_cache_hits_total{label} {n * 75}.0"]
        if self.spec_decode:
            stem = "vllm:spec_decode_num"
            lines += [f"{stem}_drafts_total {n * 10}", f"{stem}_draft_tokens_total {n * 20}",
                      f"{stem}_accepted_tokens_total {n * 13}",
                      f'{stem}_accepted_tokens_per_pos_total{{position="0"}} {n * 8}',
                      f'{stem}_accepted_tokens_per_pos_total{{position="1"}} {n * 5}']
        return web.Response(text="\n".join(lines) + "\n")

    async def generate(self, request):
        now = time.perf_counter()
        self.started = self.started or now
        body, chat = json.loads(await request.read()), "chat" in request.path
        unset = ("host", "user-agent", "content-length")
        headers = {k.lower(): v for k, v in request.headers.items() if k.lower() not in unset}
        self.posts.append(dict(t=now - self.started, path=request.path, headers=headers, body=body))
        if self.file: print(json.dumps(self.posts[-1]), file=self.file, flush=True)
        number = re.search(r"\d+$", headers.get("x-request-id", ""))
        n = int(number[0]) + 1 if number else len(self.posts)
        if self.fail_every and n % self.fail_every == 0: return web.Response(status=500, text="made to fail")
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        return await self.stream(request, n, chat, min(asked, self.stop_after or asked))

    async def stream(self, request, n, chat, tokens):
        r = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await r.prepare(request)
        head = dict(id=f"fake-{n}", object="chat.completion.chunk" if chat else "text_completion", model=self.model)
        async def send(**kw): await r.write(b"data: " + json.dumps(head | kw, separators=(",", ":")).encode() + b"\n\n")
        async def event(finish=None, **kw):
            await send(choices=[dict(index=0, **kw, logprobs=None, finish_reason=finish)])
        def bad(every): return every and n % every == 0
        await asyncio.sleep(self.ttft)
        if chat and not self.no_role_event: await event(delta={"role": "assistant", "content": ""})
        for i in range(tokens):
            if i: await asyncio.sleep(self.itl)
            if i == 3 and bad(self.cut_every):
                request.transport.abort()
                return r
            if i == 3 and bad(self.error_every):
                await send(error=dict(message="made to fail", type="InternalServerError", param=None, code=500))
                break
            text, done = " " + WORDS[i % len(WORDS)], "stop" if self.stop_after == tokens else "length"
            piece = dict(delta={"content": text}) if chat else dict(text=text)
            await event(done if i == tokens - 1 else None, **piece)
        else:
            usage = dict(prompt_tokens=7, total_tokens=7 + tokens, completion_tokens=tokens)
            if not self.no_usage: await send(choices=[], usage=usage)
        await r.write(b"data: [DONE]\n\n")
        return r


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SETTINGS.items():
        kind = dict(action="store_true") if value is False else dict(type=type(value), default=value)
        p.add_argument(f"--{name.replace('_', '-')}", **kind)
    a = p.parse_args(argv)
    web.run_app(FakeServer(**vars(a)).app(), host="127.0.0.1", port=a.port, print=None, access_log=None)


if __name__ == "__main__": main()
