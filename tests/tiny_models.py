"""Tiny random models with a byte-level tokenizer beside them, saved by transformers; and what it says they say."""
import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps; 0 1 2 3 42, for ever and ever. "
TEMPLATE = ("{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
COMMON = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=256, initializer_range=0.3, pad_token_id=0)
ARCHS = {
    "llama3": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64), tie_word_embeddings=False)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(num_attention_heads=7, num_key_value_heads=1, hidden_size=112,
                                                 tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=32, tie_word_embeddings=False)),
}


def make_tokenizer(path):
    "A byte-level BPE of 256 bytes, a few merges and three special tokens: 300 entries"
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator([WORDS]*20, trainers.BpeTrainer(vocab_size=297, show_progress=False, min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>", "<|stop|>")])
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>", chat_template=TEMPLATE)
    hf.save_pretrained(path)
    return hf


def make_model(arch, path, extra_rows=0, eos=None):
    """Save a random `arch` at `path` with its tokenizer and return it (float32, eval). `extra_rows`: vocabulary rows
    beyond the tokenizer's; `eos`: the end tokens that generation_config.json names."""
    vocab = len(make_tokenizer(path))
    Config, Model, more = ARCHS[arch]
    torch.manual_seed(sum(map(ord, arch)))
    with torch.no_grad():
        config = Config(vocab_size=vocab + extra_rows, eos_token_id=None, bos_token_id=None, **COMMON | more)
        model = Model(config).eval()
        for name, p in model.named_parameters():  # they begin as ones and zeros, where a mistake wouldn't show
            if "norm" in name: p.uniform_(0.5, 1.5)
            if name.endswith("bias"): p.normal_(0, 0.5)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(path)
    return model


def saved_eos(path, eos):
    "Rewrite the end tokens of a saved model"
    file = path/"generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(eos_token_id=eos)))


@torch.no_grad()
def hf_greedy(model, prompt, n):
    "`n` greedy tokens by `transformers`' own generate, and the logits (n, vocab) they were picked from"
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         do_sample=False, max_new_tokens=n, eos_token_id=None, pad_token_id=0,
                         return_dict_in_generate=True, output_logits=True)
    return out.sequences[0, len(prompt):].tolist(), torch.cat(out.logits)
