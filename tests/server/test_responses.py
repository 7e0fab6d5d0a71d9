"""/v1/responses, with the official client in strict mode and against OpenAI's published schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from server.replies.response import ResponseWriter
from server.response_store import ResponseStore

PATH = "/v1/responses"
ANSWER = "Hello world, how are you?"


def prompt(*turns: tuple[str, str]) -> str:
    written = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns]
    return "".join([*written, "<|im_start|>assistant\n"])


HELLO = prompt(("user", "Hello"))


@pytest.fixture
def client(server: Any) -> Any:
    with server.openai() as client:
        yield client


def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are those in the data and whose numbers count up."""
    import json

    response = server.post(PATH, stream=True, **body)
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def schema_of(event: dict[str, Any]) -> str:
    """`response.output_text.delta` -> `ResponseTextDeltaEvent`."""
    words = event["type"].replace("output_text", "text").replace(".", "_").split("_")
    return "".join(["" if words[0] == "response" else "Response", *map(str.title, words), "Event"])


def test_a_string_is_answered(server: Any, client: openai.OpenAI) -> None:
    server.script(HELLO, ANSWER)
    response = client.responses.create(model=server.model, input="Hello", temperature=0)
    assert response.output_text == ANSWER
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens > 0
    assert response.id.startswith("resp_")


def test_items_become_the_conversation(server: Any, client: openai.OpenAI) -> None:
    server.script(
        prompt(("system", "Be kind."), ("system", "Rhyme."), ("user", "Hello\nworld"), ("assistant", "Yes."),
               ("user", "Go on")), ANSWER
    )  # fmt: skip
    items: Any = [
        {"role": "developer", "content": "Rhyme."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "world"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
        {"type": "message", "role": "user", "content": "Go on"},
    ]  # fmt: skip
    response = client.responses.create(model=server.model, instructions="Be kind.", input=items)
    assert response.output_text == ANSWER
    assert response.instructions == "Be kind."
    count = client.responses.input_tokens.count(model=server.model, instructions="Be kind.", input=items)
    assert response.usage is not None
    assert count.input_tokens == response.usage.input_tokens


def test_calls_and_results_become_turns(server: Any) -> None:
    server.script(
        prompt(("user", "Hello"), ("assistant", 'So.\n<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>'),
               ("user", "<tool_response>\n42\n</tool_response>")), ANSWER
    )  # fmt: skip
    items = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "So."},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    body = server.post(PATH, input=items).json()
    assert body["output"][0]["content"][0]["text"] == ANSWER


def test_a_stream_has_the_events_in_order(server: Any, valid: Callable[[str, Any], None]) -> None:
    server.script(HELLO, ANSWER)
    found = events(server, input="Hello")
    for event in found:
        valid(schema_of(event), event)
    assert [event["type"].removeprefix("response.") for event in found if not event["type"].endswith("delta")] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert text == found[-4]["text"] == ANSWER
    whole = server.post(PATH, input="Hello").json()
    last = found[-1]["response"]
    valid("Response", whole)
    for body in (whole, last):
        for name in ("id", "created_at", "completed_at"):
            del body[name]
        del body["output"][0]["id"]
        del body["usage"]["input_tokens_details"]
    assert last == whole


@pytest.mark.parametrize("fields", [
    {"max_output_tokens": 2, "ignore_eos": True}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"metadata": {"a": "b"}, "user": "u", "temperature": 0.5, "top_p": 0.5, "store": False, "service_tier": "auto"},
    {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}}, "truncation": "disabled"},
])  # fmt: skip
def test_answers_are_as_published(server: Any, valid: Callable[[str, Any], None], fields: dict[str, Any]) -> None:
    fields = {"max_output_tokens": 12, "input": "Hello", **fields}
    valid("Response", server.post(PATH, **fields).json())
    for event in events(server, **fields):
        valid(schema_of(event), event)


def test_the_stream_helper_builds_the_response(server: Any, client: openai.OpenAI) -> None:
    for script in (ANSWER, ""):
        server.script(HELLO, script)
        with client.responses.stream(model=server.model, input="Hello") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == script
        assert kinds[-1] == "response.completed"


def test_a_cut_answer_is_incomplete(server: Any, valid: Callable[[str, Any], None]) -> None:
    body = server.post(PATH, input="Hello", max_output_tokens=2, ignore_eos=True).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert events(server, input="Hello", max_output_tokens=2, ignore_eos=True)[-1]["type"] == "response.incomplete"


def test_logprobs_come_when_included(server: Any) -> None:
    server.script(HELLO, ANSWER)
    fields = {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = server.post(PATH, **fields).json()["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(ANSWER)
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    streamed = [entry for event in events(server, **fields) if event["type"].endswith("text.delta")
                for entry in event["logprobs"]]  # fmt: skip
    assert streamed == part["logprobs"]


def test_responses_are_kept_until_deleted(server: Any, client: openai.OpenAI) -> None:
    made = client.responses.create(model=server.model, input="Hello", max_output_tokens=5)
    assert client.responses.retrieve(made.id) == made
    assert client.responses.cancel(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    forgotten = client.responses.create(model=server.model, input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(forgotten.id)
    streamed = events(server, input="Hello")[-1]["response"]
    assert server.http.get(f"{PATH}/{streamed['id']}").json() == streamed
    for query in ("stream=true", "starting_after=3", "include[]=reasoning.encrypted_content"):
        error = server.error(server.http.get(f"{PATH}/{streamed['id']}?{query}"), 400)
        assert (error["param"], error["code"]) == (query.partition("=")[0], "unsupported_parameter")


def test_another_key_does_not_find_a_response(serving: Any) -> None:
    with serving(api_keys=("one", "two")) as server:
        ask = {"json": {"model": server.model, "input": "Hello", "max_output_tokens": 3}}
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        response_id = server.http.post(PATH, **ask, headers=mine).json()["id"]
        assert server.http.get(f"{PATH}/{response_id}", headers=mine).json()["id"] == response_id
        for method, place in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            server.error(server.http.request(method, f"{PATH}/{response_id}{place}", headers=theirs), 404)
        follows = {"json": {**ask["json"], "previous_response_id": response_id}}
        assert server.http.post(PATH, **follows, headers=mine).status_code == 200
        assert server.error(server.http.post(PATH, **follows, headers=theirs), 404)["param"] == "previous_response_id"


def test_what_was_asked_is_listed(server: Any, client: openai.OpenAI, valid: Callable[[str, Any], None]) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "So."},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    made = client.responses.create(model=server.model, input=items, max_output_tokens=3)
    listed = client.responses.input_items.list(made.id, order="asc").data
    assert [item.type for item in listed] == [item.get("type", "message") for item in items]
    assert [item.to_dict() for item in client.responses.input_items.list(made.id)] == [
        item.to_dict() for item in reversed(listed)
    ]
    assert listed[0].to_dict()["content"] == [{"type": "input_text", "text": "Hello"}]
    assert len({item.id for item in listed}) == 5
    page = client.responses.input_items.list(made.id, order="asc", limit=2, after=listed[0].id)
    assert [item.id for item in page.data] == [item.id for item in listed[1:3]]
    assert len(list(page)) == 4, "the client asks for the rest"
    valid("ResponseItemList", server.http.get(f"{PATH}/{made.id}/input_items").json())
    assert server.error(server.http.get(f"{PATH}/{made.id}/input_items?limit=0"), 400)["param"] == "limit"
    assert server.error(server.http.get(f"{PATH}/{made.id}/input_items?after=x"), 400)["param"] == "after"
    assert server.error(server.http.get(f"{PATH}/{made.id}/input_items?before=x"), 400)["param"] == "before"
    assert server.error(server.http.get(f"{PATH}/nothing/input_items"), 404)


def test_a_response_goes_on_from_another(server: Any, client: openai.OpenAI) -> None:
    server.script(prompt(("system", "Be kind."), ("user", "Hello")), ANSWER)
    first = client.responses.create(model=server.model, input="Hello", instructions="Be kind.")
    server.script(prompt(("user", "Hello"), ("assistant", ANSWER), ("user", "And?")), "One two three")
    second = client.responses.create(model=server.model, input="And?", previous_response_id=first.id)
    assert second.output_text == "One two three"
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)  # what follows does not need it
    server.runner.scripts.clear()
    server.script(
        prompt(("user", "Hello"), ("assistant", ANSWER), ("user", "And?"), ("assistant", "One two three"),
               ("user", "More")), "four"
    )  # fmt: skip
    third = client.responses.create(model=server.model, input="More", previous_response_id=second.id)
    assert third.output_text == "four"
    error = server.error(server.post(PATH, input="x", previous_response_id=first.id), 404)
    assert error["param"] == "previous_response_id"


def test_a_background_response_can_be_cancelled(server: Any, client: openai.OpenAI) -> None:
    server.runner.step_seconds = 0.01
    fields: Any = {"model": server.model, "input": "Hello", "background": True, "extra_body": {"ignore_eos": True}}
    quick = client.responses.create(**fields, max_output_tokens=3)
    assert quick.status == "in_progress"
    slow = client.responses.create(**fields)
    error = server.error(server.post(PATH, input="x", previous_response_id=slow.id), 400)
    assert "in_progress" in error["message"]
    server.wait_until(lambda: client.responses.retrieve(quick.id).status == "incomplete")
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"
    server.assert_baseline()


def test_only_background_responses_can_be_cancelled(server: Any) -> None:
    server.runner.step_seconds = 0.01
    body = {"model": server.model, "input": "Hello", "stream": True, "ignore_eos": True}
    with server.http.stream("POST", PATH, json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        response_id = next(lines).partition('"id":"')[2].partition('"')[0]
        assert server.http.get(f"{PATH}/{response_id}").json()["status"] == "in_progress"
        assert server.error(server.http.post(f"{PATH}/{response_id}/cancel"), 400)
    server.wait_until(lambda: server.http.get(f"{PATH}/{response_id}").json()["status"] == "cancelled")


def test_a_failure_is_told_and_kept(server: Any, client: openai.OpenAI, valid: Callable[[str, Any], None]) -> None:
    server.runner.step_seconds = 0.01
    stream = client.responses.create(model=server.model, input="Hello", stream=True, extra_body={"ignore_eos": True})
    first: Any = next(stream)
    server.runner.broken = RuntimeError()
    with pytest.raises(openai.APIError, match="failed while handling"):
        list(stream)
    kept = server.http.get(f"{PATH}/{first.response.id}").json()
    assert kept["status"] == "failed"
    valid("Response", kept)
    server.runner.broken = RuntimeError()
    background = server.post(PATH, input="Hello", background=True).json()
    server.wait_until(lambda: server.http.get(f"{PATH}/{background['id']}").json()["status"] == "failed")
    assert server.complete("Hello", max_tokens=1)  # three failed steps in a row would be the end
    server.runner.broken = RuntimeError()
    assert server.error(server.post(PATH, input="Hello", stream=True), 500)


@pytest.mark.parametrize(("fields", "param"), [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"), ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 999}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"), ({"messages": []}, "messages"), ({"n": 2}, "n"),
    ({"input": "x " * 600}, "input"), ({"truncation": "auto"}, "truncation"), ({"temperature": 3}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"conversation": "c"}, "conversation"),
    ({"include": ["file_search_call.results"]}, "include[0]"), ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "background"), ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"), ({"instruction": "x"}, "instruction"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
])  # fmt: skip
def test_what_is_wrong_is_named(server: Any, fields: dict[str, Any], param: str) -> None:
    error = server.error(server.post(PATH, **{"input": "Hello", **fields}), 400)
    assert error["param"] == param
    assert param.split("[")[0] in error["message"] or error["code"] == "context_length_exceeded"


def test_the_store_forgets_the_oldest() -> None:
    def response(number: int) -> Any:
        writer = ResponseWriter.__new__(ResponseWriter)
        writer.id = str(number)
        writer.body = lambda: {"id": str(number), "filler": "x" * 100}  # type: ignore[method-assign]
        return writer

    store = ResponseStore(lambda: "", max_responses=3, max_bytes=1000)
    for number in range(5):
        store.put(response(number), [])
    assert [number for number in range(5) if str(number) in store._stored] == [2, 3, 4]
    store.put(response(9), [{"content": "x" * 700}])
    assert set(store._stored) == {"4", "9"}
    store.put(response(9), [])
    store.delete("4")
    assert store._bytes == len('[]{"id":"9","filler":""}') + 100
    store.put(response(10), [{"content": "x" * 2000}])
    assert set(store._stored) == set()
    assert store._bytes == 0
