"""Is the engine right on a GPU? The demo model against `transformers`, both in bf16, and its own switches side by side.

    python bench/gpu_check.py [--model smollm2] [--out FILE.json]

Greedy text of 20 prompts x 64 tokens. bf16 sums depend on the order of addition, so two right engines may part where
two logits nearly tie: each divergence is listed with the gap between the two tokens' logits in the reference, in units
of bf16's resolution at that size. The control says how much that means: `transformers` generates the same
texts with its own cache, token by token, and is held against itself computing each text at once; and everybody is held
against float32.
"""
import argparse
import json

import torch

from miniengine import LLM, SamplingParams
from miniengine.weights import load_config, resolve

PROMPTS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Explain what a hash table is.",
    "Translate to German: good morning, friend.", "List three uses of a paper clip.", "Count from one to twenty.",
    "Write a Python function that adds two numbers.", "Who wrote Romeo and Juliet?", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "What is 17 times 23?", "Tell me a joke about computers.",
    "Describe a rainy day in Hamburg.", "What is the difference between TCP and UDP?",
    "Name five animals that can fly.", "Summarise the plot of Cinderella.", "How do I boil an egg?",
    "What does HTTP 404 mean?", "Write a short letter to a friend who moved away.",
    "Continue: Once upon a time, in a small village,"]
SWITCHES = {"default": {}, "eager": dict(enforce_eager=True), "no overlap": dict(overlap=False),
            "budget 64": dict(max_num_batched_tokens=64)}


def reference(model, dtype):
    "A `transformers` model with the same weights, taken from ours (so that only the computation differs)"
    from transformers import LlamaConfig, LlamaForCausalLM
    from miniengine.weights import iter_weights
    src = resolve(model)
    m = load_config(src)
    cfg = LlamaConfig(
        hidden_size=m.hidden_size, intermediate_size=m.intermediate_size, num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_heads, num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim,
        vocab_size=m.vocab_size, rms_norm_eps=m.rms_norm_eps, max_position_embeddings=m.max_position,
        rope_parameters=dict(rope_type="default", rope_theta=m.rope_theta), tie_word_embeddings=m.tie_embeddings,
        eos_token_id=list(m.eos_ids))
    with torch.device("meta"): hf = LlamaForCausalLM(cfg)
    hf = hf.to_empty(device="cpu").eval()
    state = {k: torch.as_tensor(v) for k, v in iter_weights(src, m)}
    missing, extra = hf.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
    assert not extra and all("lm_head" in k for k in missing), (missing, extra)
    hf.tie_weights()
    hf.model.rotary_emb.__init__(cfg)
    return hf.to("cuda", dtype)


def compare(hf, prompt, ours):
    "Index of the first token that differs from greedy decoding of `hf`, and the logit gap there; None if none does"
    ids = torch.tensor([prompt + ours], device="cuda")
    with torch.no_grad(): logits = hf(ids).logits[0, len(prompt) - 1:-1].float()
    for i, tok in enumerate(ours):
        if (best := int(logits[i].argmax())) != tok:
            gap, size = float(logits[i, best] - logits[i, tok]), float(logits[i, best].abs())
            return dict(at=i, gap=gap, ulp=size*2**-8, in_ulp=gap/(size*2**-8))


def generate(hf, prompts, n=64):
    "Greedy tokens of `hf` with its own KV cache, one prompt at a time"
    out = []
    for p in prompts:
        ids = torch.tensor([p], device="cuda")
        got = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0)
        out.append(got[0, len(p):].tolist())
    return out


def follow(hf, prompts, texts):
    "How many texts are greedy decoding of `hf` to the end, and where the others leave it"
    bad = [d for p, g in zip(prompts, texts) if (d := compare(hf, p, g))]
    return len(texts) - len(bad), bad


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="smollm2"); ap.add_argument("--out")
    ap.add_argument("--attn", nargs="+", default=["flashinfer", "triton", "torch"])
    a = ap.parse_args()
    params, report, texts = SamplingParams(temperature=0, max_tokens=64), {}, {}
    hf = None
    for attn in a.attn:
        for name, kw in SWITCHES.items():
            if attn == "torch" and name != "eager": continue
            llm = LLM(a.model, attn=attn, max_num_seqs=32, max_model_len=1024, gpu_memory_utilization=0.3, **kw)
            prompts = [llm.engine.tokenizer.chat([dict(role="user", content=p)]) for p in PROMPTS]
            got = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
            if hf is None:
                hf, hf32 = reference(a.model, torch.bfloat16), reference(a.model, torch.float32)
                own = generate(hf, prompts)
                n, bad = follow(hf, prompts, own)
                n32, _ = follow(hf32, prompts, own)
                report["control: transformers"] = dict(equal_to_transformers=n, divergences=bad, follow_float32=n32)
                print(f"control, transformers bf16 with its cache: {n}/20 follow itself without, in units of bf16 "
                      f"resolution {[round(d['in_ulp'], 2) for d in bad]}; {n32}/20 follow float32", flush=True)
            (n, bad), (n32, _) = follow(hf, prompts, got), follow(hf32, prompts, got)
            texts[attn, name] = got
            same, text = (sum(g == b for g, b in zip(got, t)) for t in (texts.get((attn, "default"), got), own))
            report[f"{attn}, {name}"] = dict(equal_to_transformers=n, divergences=bad, follow_float32=n32,
                                             equal_to_default=same, text_equal_to_transformers=text)
            print(f"{attn}, {name}: {n}/20 follow transformers bf16 greedily; divergences in units of bf16 resolution "
                  f"{[round(d['in_ulp'], 2) for d in bad]}; {n32}/20 follow float32; {text}/20 the text transformers "
                  f"generates; {same}/20 equal to this backend's default", flush=True)
            del llm
            torch.cuda.empty_cache()
    if a.out:
        out = dict(machine=torch.cuda.get_device_name(), torch=torch.__version__, results=report)
        with open(a.out, "w") as f: json.dump(out, f, indent=1)


if __name__ == "__main__": main()
