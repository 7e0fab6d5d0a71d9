"""Whatever our own description allows, and what it does not, is answered without an internal error, in the envelope.

`OCTAVO_FUZZ_EXAMPLES` says how many requests each operation gets, for longer runs by hand.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from server.answer import ANTHROPIC_PATH

EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "20"))


def _answered(case: Any, model: str) -> None:
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = model  # no generated name is a model's
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(case.body.get(name)) is int:
                case.body[name] %= 9  # answers stay short
        if isinstance(case.body.get("messages"), list) and len(str(case.body)) % 3:
            # Few generated conversations are good ones, and then nothing else of the request is looked at.
            case.body["messages"] = [{"role": "user", "content": "Hello"}]
    response = case.call(timeout=20)
    assert response.status_code < 500, (case.path, case.body, response.text)
    if response.status_code >= 400:
        body = response.json()
        assert set(body) == ({"type", "error", "request_id"} if case.path.startswith(ANTHROPIC_PATH) else {"error"})
        assert body["error"]["message"]


def _references(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, dict | list):
        return []
    found = [value] if isinstance(value, dict) and "$ref" in value else []
    return found + [ref for item in (value.values() if isinstance(value, dict) else value) for ref in _references(item)]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.case(14)
def test_no_request_is_an_internal_error(serving: Any, mode: GenerationMode) -> None:
    with serving() as server:
        operations = schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations()
        covered = set()
        for operation in [result.ok() for result in operations]:
            covered.add(operation.path)

            @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                      phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                _answered(case, server.model)

            with contextlib.suppress(Unsatisfiable):  # where there is no wrong way to ask
                ask()
        assert covered == set(server.http.get("/openapi.json").json()["paths"])
        server.wait_until(lambda: not (server.engine.running or server.engine.waiting or server.engine.busy))
        assert server.engine.healthy
        server.engine.kv.check_integrity()


def test_every_body_is_described_in_json_schemas_own_words(shared_server: Any) -> None:
    description = shared_server.http.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    bodies = {reference["$ref"].rpartition("/")[2] for reference in _references(description["paths"])}
    assert bodies <= set(schemas)
    assert {"CompletionRequest", "ChatCompletionRequest", "ResponseRequest", "MessageRequest"} <= bodies
    for words in ("'ge'", "'le'", "'gt'", "'lt'", "'min_length'"):
        assert words not in str(schemas)
    assert schemas["CompletionRequest"]["properties"]["n"]["anyOf"][0] == {
        "minimum": 1,
        "maximum": 128,
        "type": "integer",
    }
    assert {"type": "string"} in schemas["CompletionRequest"]["properties"]["stop"]["anyOf"]
