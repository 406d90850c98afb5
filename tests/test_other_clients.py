"""Two libraries that wrap OpenAI's interface, against a real server with the real demo model. Optional: skipped where
they aren't installed (`pip install -e '.[clients]'`; passed with langchain-openai 1.7.4 and litellm 1.110.2)."""
import pytest

QUESTION = "What is the capital of France?"


def test_langchain(demo_url):
    chat = pytest.importorskip("langchain_openai", reason="needs langchain-openai, an optional test").ChatOpenAI
    kw = dict(base_url=f"{demo_url}/v1", api_key="-", model="smollm2", temperature=0, max_tokens=6, max_retries=0)
    whole = chat(**kw).invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"] == 6
    assert whole.response_metadata["finish_reason"] == "length"
    chunks = list(chat(stream_usage=True, **kw).stream(QUESTION))
    assert len(chunks) >= 6 and "".join(c.content for c in chunks) == whole.content
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == 6


def test_litellm(demo_url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look for a price list in the net
    litellm = pytest.importorskip("litellm", reason="needs litellm, an optional test")
    kw = dict(model="openai/smollm2", api_base=f"{demo_url}/v1", api_key="-", temperature=0, max_tokens=6,
              messages=[{"role": "user", "content": QUESTION}])
    whole = litellm.completion(**kw)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 6
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **kw))
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content and len(chunks) >= 6
    assert chunks[-1].usage.completion_tokens == 6
    with pytest.raises(litellm.BadRequestError): litellm.completion(**kw | {"max_tokens": 5000})
