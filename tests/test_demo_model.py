"""The demo model with its real weights, greedy in float32, against `transformers`.

Independent here: transformers itself reads the GGUF file (its own reader, dequantisation and q/k permutation; the
config is written out below). Nothing of `miniengine.weights` or `miniengine.model` is on its side. Only the token ids
of the prompts are shared: tests/test_text.py and tests/test_weights.py hold the tokenizer to account.

`transformers` picks the same 64 tokens exactly if, after each prefix of our answer, its highest score is our next one.
That takes one forward pass per prompt instead of 64; for some prompts its own `generate` is run as well.

Scores reach 45 here. In float32, transformers is up to 7e-5 away from itself in float64, and so are we; two such errors
may add up to more than 1e-4. So the limit of 1e-4 is held against float64, and twice that against float32.
"""
import copy

import pytest
import torch

from miniengine.config import SamplingParams
from miniengine.engine import LLM
from miniengine.weights import resolve

N = 64
CHATS = ["What is the capital of France? Answer in one sentence.",
         "Write a Python function that returns the sum of the squares of a list of numbers.",
         "List three uses of a paper clip, and then count from 1 to 12.",
         "Traduis en français : the weather is nice today.", "你好，请介绍一下你自己。",
         "🙂🙃 tell me a story in emoji", "12 * 34 = ?",
         "Summarise:\n" + "The fox was quick and the dog was lazy, so nothing came of it. "*16]
TEXTS = ["The", "Once upon a time", "def fibonacci(n):\n    ", "1, 1, 2, 3, 5, 8,", "    \n\n\t",
         "SELECT name FROM users WHERE", "The year is  2024 and",
         "import torch\nimport torch.nn as nn\n\nclass Block(nn.Module):\n",
         "<html>\n<head>\n<title>", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
         "Ünïcödé ist überall: naïve façade, jalapeño,", "Q: Why is the sky blue?\nA:"]


@pytest.fixture(scope="module")
def theirs():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    path, threads = str(resolve("smollm2").path), torch.get_num_threads()
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
                         rope_parameters=dict(rope_type="default", rope_theta=100000.0), tie_word_embeddings=True)
    with torch.device("meta"): names = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)["tensors"]
    model = LlamaForCausalLM(config).eval()
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]  # tied to the embedding
    yield model
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ours(theirs):
    "Prompts, answers and the scores (64, vocab) behind them: 20 at once, in chunks, the prefix cache on"
    llm = LLM("smollm2", progress=False, dtype="float32", device="cpu", max_model_len=1024, max_num_batched_tokens=256,
              max_num_seqs=20)
    tok, sampler, scores = llm.get_tokenizer(), llm.engine.runner.sampler, {}
    prompts = [tok.chat([{"role": "user", "content": c}]) for c in CHATS] + [tok.encode(t) for t in TEXTS]
    def spy(logits, rows):
        for r, l in zip(rows, logits): scores[r.req.id, r.start + r.n - r.req.num_prompt] = l.clone()
        return sampler(logits, rows)
    llm.engine.runner.sampler = spy
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=N, ignore_eos=True), use_tqdm=False)
    assert llm.engine.scheduler.prefix_hits > 0 and llm.engine.runner.dtype == torch.float32
    return [(p, o.outputs[0].token_ids, torch.stack([scores[f"{i}-0", k] for k in range(N)]))
            for i, (p, o) in enumerate(zip(prompts, outs))]


@torch.inference_mode()
def scores_of(model, prompt, answer): return model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]


def test_twenty_prompts_of_64_greedy_tokens_equal_transformers(ours, theirs):
    assert len(ours) == 20
    for prompt, answer, scores in ours:
        logits = scores_of(theirs, prompt, answer)
        assert logits.argmax(-1).tolist() == answer and len(answer) == N
        assert (logits - scores).abs().max() < 3e-4


def test_scores_are_as_near_to_the_exact_ones_as_float32_sums_are(ours, theirs):
    "The last digits depend on the order of addition: 0.9e-4 in the mean over prompts, and 0.6e-4 for transformers"
    exact = copy.deepcopy(theirs).double()
    errors = [(scores_of(exact, prompt, answer) - scores).abs().max().item() for prompt, answer, scores in ours[2::3]]
    assert max(errors) < 3e-4 and sum(errors)/len(errors) < 1.5e-4


@pytest.mark.parametrize("i", [1, 10])
def test_transformers_own_generate_says_the_same(ours, theirs, i):
    prompt, answer, _ = ours[i]
    out = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                          max_new_tokens=N, eos_token_id=None, pad_token_id=2)
    assert out[0, len(prompt):].tolist() == answer


def test_the_answer_is_the_known_one():
    "shown by transformers, vLLM in float32 and llama.cpp alike: seven tokens and the end token"
    llm = LLM("smollm2", progress=False, dtype="float32", device="cpu", max_model_len=256, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=96)
    out, = llm.chat([{"role": "user", "content": CHATS[0]}], params, use_tqdm=False)
    assert len(out.prompt_token_ids) == 42 and out.outputs[0].token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("The capital of France is Paris.", "stop")
