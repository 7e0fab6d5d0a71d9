"""Routes, methods, ids, keys, body sizes: the edges of the HTTP surface."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

ROUTES = ["/v1/models", "/info", "/debug/requests", "/debug/steps", "/openapi.json", "/metrics"]


@pytest.mark.case(39)
def test_health_answers_without_the_engine(server: Any) -> None:
    server.runner.gate.clear()
    assert server.http.get("/health").json() == {"status": "alive"}
    assert server.http.head("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": "0.0"}
    assert server.http.get("/info").json() == {"model": server.model}


@pytest.mark.case(87)
def test_models_are_listed_and_found_by_every_name(server: Any) -> None:
    listed = server.http.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == [server.model, "test"]
    for entry in listed["data"]:
        assert server.http.get(f"/v1/models/{entry['id']}").json() == entry
        assert entry["max_model_len"] == 512
    assert server.error(server.http.get("/v1/models/nonsense"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["nonsense", "OCTAVO/TEST-MODEL", "octavo/test-model/", "test-model", "gpt-4o"])
@pytest.mark.case(87)
def test_a_model_that_is_not_served_is_a_404(server: Any, name: str) -> None:
    error = server.error(server.http.post("/v1/completions", json={"model": name, "prompt": "Hello"}), 404)
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")


def test_a_second_name_of_the_model_is_as_good(server: Any) -> None:
    body = server.http.post("/v1/completions", json={"model": "test", "prompt": "Hello"}).json()
    assert body["model"] == "test"


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/v1/models/", "/V1/models", "//v1/models", "/v1/embeddings"])
@pytest.mark.case(86)
def test_unknown_paths_are_404_in_the_envelope(server: Any, path: str) -> None:
    response = server.http.post(path, json={}) if path.endswith("embeddings") else server.http.get(server.url + path)
    assert server.error(response, 404)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["embeddings", "audio/speech", "audio/transcriptions", "images/generations", "moderations", "files",
             "batches", "realtime/sessions", "assistants", "vector_stores/x/search", "fine_tuning/jobs", "videos"]
)  # fmt: skip
def test_what_a_text_model_cannot_do_is_a_404_that_says_so(server: Any, path: str) -> None:
    error = server.error(server.http.post(f"/v1/{path}", json={}), 404)
    assert error["code"] == "not_served"
    assert "text" in error["message"]


@pytest.mark.parametrize(("method", "path", "allowed"), [
    ("GET", "/v1/completions", "POST"), ("PUT", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET"),
    ("DELETE", "/v1/models/test", "GET"), ("POST", "/health", "GET"), ("PATCH", "/info", "GET"),
])  # fmt: skip
@pytest.mark.case(86)
def test_wrong_methods_are_405_with_allow(server: Any, method: str, path: str, allowed: str) -> None:
    response = server.http.request(method, path)
    assert server.error(response, 405)["code"] == "method_not_allowed"
    assert allowed in response.headers["allow"]


def test_every_response_has_a_request_id(server: Any) -> None:
    own = server.http.get("/health").headers["x-request-id"]
    assert own.startswith("req-")
    assert server.http.get("/health").headers["x-request-id"] != own
    assert server.http.get("/health", headers={"x-request-id": "mine 1"}).headers["x-request-id"] == "mine 1"
    for bad in ("x" * 129, "tab\there", b"caf\xc3\xa9"):
        answer = server.http.get("/health", headers={"x-request-id": bad})
        assert answer.headers["x-request-id"].startswith("req-")
    response = server.post(prompt="Hello", max_tokens=1, request_id="from-body")
    assert response.headers["x-request-id"] == "from-body"
    events = server.post(prompt="Hello", max_tokens=1, stream=True)
    assert events.headers["x-request-id"].startswith("req-")


@pytest.mark.case(16)
def test_requests_with_the_same_id_are_two_requests(server: Any) -> None:
    server.runner.step_seconds = 0.005
    fields = {"max_tokens": 30, "ignore_eos": True, "temperature": 0, "request_id": "same"}
    first = {"model": server.model, "prompt": "One", **fields, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=first, headers={"x-request-id": "same"}) as response:
        lines = response.iter_lines()  # the stream ends with this
        next(lines)
        second = server.post(prompt="Two", **fields)  # while the first runs, and then the first is left
    assert second.json()["usage"]["completion_tokens"] == 30
    assert second.json()["choices"] == server.complete("Two", **fields)["choices"]


def test_the_life_of_a_request_can_be_asked(server: Any) -> None:
    body = server.complete("Hello", max_tokens=5, ignore_eos=True)
    life = server.http.get(f"/debug/requests/{body['id']}").json()
    assert life["output_tokens"] == 5
    assert life["finish_reasons"] == ["length"]
    kinds = [event["kind"] for event in life["events"]]
    assert kinds[0] == "queued"
    assert kinds[-1] == "finished"
    assert body["id"] in [entry["id"] for entry in server.http.get("/debug/requests").json()["requests"]]
    steps = server.http.get("/debug/steps", params={"limit": 3}).json()["steps"]
    assert len(steps) == 3
    assert steps[-1]["number"] > steps[0]["number"]
    assert server.error(server.http.get("/debug/requests/none"), 404)["param"] == "request_id"
    assert server.error(server.http.get("/debug/steps?limit=x"), 400)["param"] == "limit"
    assert server.error(server.http.get("/debug/steps?limit=0"), 400)["param"] == "limit"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("/debug/cache?cells=5000", "'cells' must be less than or equal to 4096, not '5000'."),
        ("/debug/cache?cells=-1", "'cells' must be greater than or equal to 0, not '-1'."),
        (
            "/debug/cache?limit=0&cells=5",
            "'limit' must be greater than or equal to 1, not '0'.",
        ),
        ("/debug/requests?limit=1001", "'limit' must be less than or equal to 1000, not '1001'."),
        ("/debug/requests?limit=1.5", "'limit' must be a whole number, not '1.5'."),
        ("/debug/steps?limit=", "'limit' must be a whole number, not ''."),
        ("/debug/steps?after=-1", "'after' must be greater than or equal to 0, not '-1'."),
        (f"/debug/steps?after={'9' * 5000}", f"'after' must be a whole number of fewer digits, not '{'9' * 59}…'."),
        ("/v1/responses/r/input_items?order=up", "'order' must be 'asc' or 'desc', not 'up'."),
        ("/v1/responses/r?stream=maybe", "'stream' must be a boolean, not 'maybe'."),
    ],
)
def test_a_wrong_parameter_of_a_query_is_named_in_a_sentence(server: Any, query: str, message: str) -> None:
    error = server.error(server.http.get(query), 400)
    assert error["message"] == message
    assert error["param"] == message.split("'")[1]


@pytest.mark.parametrize("path", ["requests", "requests/none", "steps", "cache"])
def test_a_parameter_that_is_not_known_is_named(server: Any, path: str) -> None:
    error = server.error(server.http.get(f"/debug/{path}", params={"cels": "5"}), 400)
    assert (error["param"], error["code"]) == ("cels", "unsupported_parameter")
    assert error["message"] == "'cels' is no parameter of this path."


def raw(server: Any, path: str, header: str | None) -> tuple[int, dict[str, str], Any]:
    """A GET whose path and header are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", path, headers={} if header is None else {"authorization": header})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, dict(response.getheaders()), body


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic right", "right", "Bearer right2"]
)
@pytest.mark.case(42)
def test_without_the_key_everything_but_open_routes_is_a_401(keyed: Any, header: str | None) -> None:
    tricks = [
        "/nothing",
        "//health",
        "/health/",
        "/HEALTH",
        "/v1/../health",
        "/health/../v1/models",
        "/v1/models?key=right",
    ]
    for path in [*ROUTES, *tricks]:
        status, headers, body = raw(keyed, path, header)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key"), path
        assert headers["www-authenticate"] == "Bearer"
        assert headers["x-request-id"]
    for path in ("/health", "/ready", "/version", "/health?x=1", "/%68ealth"):
        assert raw(keyed, path, header)[0] == 200


def test_posts_and_preflights_need_the_key_too(keyed: Any) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert keyed.error(keyed.http.post(path, json={}), 401)
        assert keyed.error(keyed.http.options(path), 401)
    assert keyed.http.head("/health").status_code == 200
    assert keyed.http.head("/info").status_code == 401


@pytest.mark.parametrize("header", ["Bearer right", "bearer right", "BEARER  right", "Bearer other-key"])
def test_with_a_key_everything_is_open(keyed: Any, header: str) -> None:
    for path in ROUTES:
        assert keyed.http.get(path, headers={"authorization": header}).status_code == 200


def test_the_key_may_come_as_anthropics_clients_send_it(keyed: Any) -> None:
    assert keyed.http.get("/v1/models", headers={"x-api-key": "right"}).status_code == 200
    assert keyed.http.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
    both = {"x-api-key": "right", "authorization": "Bearer wrong"}
    assert keyed.http.get("/v1/models", headers=both).status_code == 401


def test_errors_under_anthropics_path_have_anthropics_form(keyed: Any) -> None:
    key = {"x-api-key": "right"}
    for response, status, kind in (
        (keyed.http.post("/v1/messages"), 401, "authentication_error"),
        (keyed.http.get("/v1/messages/nothing", headers=key), 404, "not_found_error"),
    ):
        assert response.status_code == status
        body = response.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert body["error"]["message"]
        assert body["request_id"] == response.headers["x-request-id"]


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/nothing"])
@pytest.mark.case(93)
def test_preflights_of_allowed_origins_need_no_key(serving: Any, path: str) -> None:
    app = "https://app.example"
    with serving(api_keys=("right",), allowed_origins=(app, "https://b.example")) as server:
        answer = server.http.options(path, headers={"origin": app, **PREFLIGHT})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"]
        assert answer.headers["access-control-allow-origin"] == app
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        foreign = server.http.options(path, headers={"origin": "https://evil.example", **PREFLIGHT})
        assert foreign.status_code == 400
        assert "error" in foreign.json()
        assert "access-control-allow-origin" not in foreign.headers
        refused = server.http.post(path, headers={"origin": app, "authorization": "Bearer wrong"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == app
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        headers = {"origin": app, "authorization": "Bearer right"}
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 2}
        for stream in (False, True):
            answer = server.http.post("/v1/completions", headers=headers, json={**body, "stream": stream})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, app)
        answer = server.http.post("/v1/completions", headers={**headers, "origin": "https://evil.example"}, json=body)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.case(93)
def test_no_origin_is_allowed_unless_said(server: Any, keyed: Any) -> None:
    headers = {"origin": "https://app.example", **PREFLIGHT}
    assert server.error(server.http.options("/v1/completions", headers=headers), 405)
    assert server.error(keyed.http.options("/v1/completions", headers=headers), 401)
    response = server.http.post("/v1/completions", headers=headers, json={"model": server.model, "prompt": "Hello"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_two_authorization_headers_are_none(keyed: Any) -> None:
    headers = [("authorization", "Bearer wrong"), ("authorization", "Bearer right")]
    assert keyed.http.get("/v1/models", headers=headers).status_code == 401


def test_metrics_may_be_open(serving: Any) -> None:
    with serving(api_keys=("right",), open_metrics=True) as server:
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/info").status_code == 401


@pytest.fixture(scope="module")
def keyed(serving: Any) -> Any:
    with serving(api_keys=("right", "other-key")) as server:
        yield server


@pytest.fixture(scope="module")
def small(serving: Any) -> Any:
    with serving(max_body_bytes=10_000) as server:
        yield server


def test_a_body_up_to_the_limit_is_read(small: Any) -> None:
    body = json.dumps({"model": small.model, "prompt": "Hello", "user": ""}).encode()
    response = small.http.post("/v1/completions", content=body + b" " * (10_000 - len(body)),
                               headers={"content-type": "application/json"})  # fmt: skip
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("size", [10_001, 3_000_000])
@pytest.mark.case(53)
def test_a_larger_body_is_a_413(small: Any, size: int, chunked: bool) -> None:
    pieces = (b" " * min(65536, size - start) for start in range(0, size, 65536))
    content: Any = pieces if chunked else b" " * size
    response = small.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert small.error(response, 413)["code"] == "request_too_large"
    assert small.complete("Hello", max_tokens=1)


@pytest.mark.case(53)
def test_a_body_that_says_it_is_too_large_is_refused_unread(small: Any) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 536870912\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


@pytest.mark.case(53)
def test_a_full_context_of_text_fits_the_default_limit(server: Any) -> None:
    """Sixteen mebibytes are over a hundred bytes a token for a context of 128k tokens."""
    assert server.state.max_body_bytes >= 128 * 1024 * 100
    response = server.post(prompt="x" * 8_000_000)
    assert server.error(response, 400)["code"] == "context_length_exceeded"


def test_the_description_covers_the_bodies(server: Any) -> None:
    description = server.http.get("/openapi.json").json()
    for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatCompletionRequest")):
        schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert {"model", "temperature", "stream", "top_k"} <= set(
            description["components"]["schemas"][name]["properties"]
        )


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"model":'
        )
    assert server.complete("Hello", max_tokens=1)
    assert not caplog.records
