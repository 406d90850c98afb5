"Whatever our own OpenAPI document allows, and much that it forbids, against a server with a fake engine"
import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings
from loopback import serving

from miniengine.server import Server, ServerConfig

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import checks as ours  # noqa: E402
from schemathesis.specs.openapi import checks as openapi  # noqa: E402


CONFIG = ServerConfig(log_requests=False, glass=True, dev=True)
APP = Server(FakeEngine(), CONFIG).app().app.app  # inside CORS and the gate
schema = schemathesis.openapi.from_dict(APP.openapi()).exclude(path="/debug/events")  # never ends


@pytest.fixture(scope="module")
def url():
    "A server on loopback that must be idle at the end"
    with serving(Server(FakeEngine(max_model_len=64), CONFIG)) as url: yield url


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_document_promises(case, url):
    r = case.call(base_url=url, timeout=5)  # seconds, after which it counts as a hang
    assert r.status_code != 422
    if r.status_code >= 400:
        error = r.json()["error"]
        assert list(error) == ["message", "type", "param", "code"] and error["code"] == r.status_code
    case.validate_response(r, checks=[
        ours.not_a_server_error, openapi.status_code_conformance, openapi.content_type_conformance,
        openapi.response_schema_conformance, openapi.unsupported_method])


def test_the_document_lists_every_route_and_keeps_the_developers_ones_to_developers():
    paths = set(APP.openapi()["paths"])
    plain = set(Server(FakeEngine()).app().app.app.openapi()["paths"])
    assert paths - plain == {"/reset_prefix_cache", "/glass", "/debug/trace", "/debug/events"} and not plain - paths
    answers = [set(op["responses"]) for path in APP.openapi()["paths"].values() for op in path.values()]
    assert all(a == {"200", "4XX", "5XX"} for a in answers), "422 is FastAPI's idea, not ours"


def test_the_documentation_has_examples_that_work(url):
    assert "swagger" in httpx.get(f"{url}/docs").text
    for path in "/v1/chat/completions", "/v1/completions":
        name = APP.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        example, = APP.openapi()["components"]["schemas"][name.rsplit("/", 1)[1]]["examples"]
        assert httpx.post(url + path, json=example).json()["usage"]["completion_tokens"] > 1
