"The rules of 01_config, over more inputs than the chapter shows"
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniengine.config import EngineConfig, ModelConfig, RequestError, SamplingParams, parse_size

LLAMA3 = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
BASE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=100, max_position_embeddings=256)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                   "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", 1.5, True])
def test_wrong_size_in_config_json_is_named(field, value):
    with pytest.raises(ValueError, match=field): ModelConfig.from_hf(BASE | {field: value})


def test_defaults_follow_hugging_face():
    m = ModelConfig.from_hf(BASE)
    assert (m.num_kv_heads, m.head_dim, m.rope_theta, m.rope_scaling, m.rms_norm_eps) == (4, 16, 10000.0, None, 1e-6)
    assert (m.qkv_bias, m.qk_norm, m.tie_embeddings, m.eos_ids) == (False, False, False, ())
    assert ModelConfig.from_hf(BASE | dict(head_dim=128)).head_dim == 128
    assert ModelConfig.from_hf(BASE | dict(head_dim=None)).head_dim == 16


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [None, dict(rope_type="linear", factor=2.0), dict(rope_type="llama3", **LLAMA3)])
def test_config_saved_by_transformers_is_read_the_same_in_old_and_new_form(arch, rope):
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config
    cls = dict(llama=LlamaConfig, qwen2=Qwen2Config, qwen3=Qwen3Config)[arch]
    size = {k: v for k, v in BASE.items() if k != "model_type"} | dict(num_key_value_heads=2, eos_token_id=[7, 8])
    theirs = cls(**size, rope_parameters={"rope_theta": 5e5, **(rope or {"rope_type": "default"})})
    new = json.loads(theirs.to_json_string())
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | dict(rope_theta=5e5, rope_scaling=rope)
    m = ModelConfig.from_hf(new)
    assert m == ModelConfig.from_hf(old)
    assert (m.arch, m.qkv_bias, m.qk_norm, m.eos_ids, m.rope_theta) == (
        arch, arch == "qwen2", arch == "qwen3", (7, 8), 5e5)
    assert m.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert m.rope_scaling is None if rope is None else m.rope_scaling["rope_type"] == rope["rope_type"]


@pytest.mark.parametrize("bad", [
    dict(model_type="mistral"), dict(model_type="qwen3_moe"), dict(model_type=None),
    dict(architectures=["LlamaForSequenceClassification"]),
    dict(use_sliding_window=True), dict(model_type="qwen2", use_sliding_window=True),
    dict(layer_types=["full_attention", "sliding_attention"]),
    dict(num_local_experts=8), dict(num_experts=2), dict(quantization_config=dict(quant_method="gptq")),
    dict(hidden_act="gelu"),
    dict(mlp_bias=True), dict(attention_bias=True), dict(model_type="qwen3", attention_bias=True),
    dict(partial_rotary_factor=0.5),
    dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))])
def test_model_that_would_compute_something_else_is_refused_by_name(bad):
    name = list(bad)[-1]
    name = "partial_rotary_factor" if name == "rope_parameters" else name
    with pytest.raises(ValueError, match=f"{name}="): ModelConfig.from_hf(BASE | bad)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope", "", 5])
def test_unknown_rope_type_is_refused_in_both_forms(kind):
    for cfg in [dict(rope_scaling=dict(type=kind, factor=2.0)),
                dict(rope_parameters=dict(rope_type=kind, factor=2.0, rope_theta=1e4))]:
        with pytest.raises(ValueError, match="rope_type"): ModelConfig.from_hf(BASE | cfg)


def test_fields_that_say_no_are_not_refused():
    ModelConfig.from_hf(BASE | dict(model_type="qwen2", use_sliding_window=False, sliding_window=32768,
                                    max_window_layers=28))
    ModelConfig.from_hf(BASE | dict(model_type="qwen2", attention_bias=True))      # Qwen2 always has it, and only there
    ModelConfig.from_hf(BASE | dict(attention_bias=False, mlp_bias=False, num_experts=None, hidden_act="silu"))


def test_end_ids_are_the_union_of_both_files():
    three = [128001, 128008, 128009]
    assert ModelConfig.from_hf(BASE | dict(eos_token_id=128001), dict(eos_token_id=three)).eos_ids == tuple(three)
    assert ModelConfig.from_hf(BASE | dict(eos_token_id=three), {}).eos_ids == tuple(three)
    assert ModelConfig.from_hf(BASE | dict(eos_token_id=0), None).eos_ids == (0,)


@given(st.integers(1, 2**40))
def test_sizes_in_bytes_pass_unchanged(n):
    assert parse_size(n) == parse_size(str(n)) == parse_size(f"{n}B") == n
    assert parse_size(f"{n} KiB") == n * 1024 and parse_size(f"{n}kb") == n * 1000


@pytest.mark.parametrize("bad", [
    dict(attn="xformers"), dict(batching="dynamic"), dict(load_format="gguf"), dict(dtype=None), dict(device="cuda:"),
    dict(device="mps"), dict(block_size=0), dict(block_size=4), dict(block_size=8, attn="flashinfer"),
    dict(max_num_seqs=True), dict(max_model_len=0), dict(num_blocks=1), dict(gpu_memory_utilization=0),
    dict(gpu_memory_utilization=1.1), dict(gpu_memory_limit="24G"), dict(kv_cache_memory="lots"),
    dict(prefix_caching="yes"), dict(seed=-1), dict(max_num_batched_tokens=255)])
def test_bad_engine_setting_is_named(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"): EngineConfig(**bad)


def test_good_engine_settings():
    c = EngineConfig(max_num_seqs=4, max_num_batched_tokens=4, block_size=8, attn="torch", kv_cache_memory="2GiB",
                     device="cuda:1")
    assert c.kv_cache_memory == 2**31
    assert EngineConfig() == EngineConfig()


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
                     st.lists(st.integers(), max_size=2),
                     st.dictionaries(st.text(max_size=2), st.integers(), max_size=2), st.just(10**400))
FIELDS = [f for f in SamplingParams.__dataclass_fields__ if f != "structured"]


@given(st.sampled_from(FIELDS), anything)
def test_any_value_is_accepted_in_strict_form_or_refused_by_name(name, value):
    try: p = SamplingParams(**{name: value})
    except RequestError as e:
        assert e.param in (name, "min_tokens", "n") and e.status == 400 and len(e.message) < 300
        return
    assert (p.temperature == 0 or 0.01 <= p.temperature <= 2) and 0 < p.top_p <= 1 and p.top_k >= 0
    assert p.seed != -1 and isinstance(p.stop, list) and all(p.stop) and isinstance(p.stop_token_ids, list)
    assert p.logit_bias is None or all(isinstance(k, int) and -100 <= v <= 100 for k, v in p.logit_bias.items())
    assert p == SamplingParams(**{f: getattr(p, f) for f in FIELDS})     # checking twice changes nothing


def test_ranges_of_the_api():
    ranges = dict(
        temperature=([0, 2, 1e-9], [-1e-9, 2.01]), top_p=([1e-9, 1], [0, 1.01]), top_k=([-1, 0, 1], [-2]),
        min_p=([0, 1], [-0.1, 1.1]), presence_penalty=([-2, 2], [-2.1, 2.1]), frequency_penalty=([-2, 2], [2.1]),
        repetition_penalty=([1e-9, 3], [0, -1]), n=([1, 16384], [0, 16385]), max_tokens=([1, None], [0, -1]),
        seed=([-1, None, 2**63 - 1, -2**63], [2**63]), logprobs=([None, 0, 20], [-1, 21]))
    for name, (good, bad) in ranges.items():
        for v in good: SamplingParams(**{name: v})
        for v in bad:
            with pytest.raises(RequestError) as e: SamplingParams(**{name: v})
            assert e.value.param == name


def test_tiny_temperature_is_raised_and_is_not_greedy():
    p = SamplingParams(temperature=1e-6)
    assert p.temperature == 0.01 and not p.greedy and SamplingParams(temperature=0).greedy


def test_token_ids_beyond_the_vocabulary_are_refused():
    for bad in dict(stop_token_ids=[100]), dict(logit_bias={"100": 1}):
        SamplingParams(**bad).check_vocab(101)
        with pytest.raises(RequestError) as e: SamplingParams(**bad).check_vocab(100)
        assert e.value.param == next(iter(bad))
