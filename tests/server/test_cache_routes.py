"""The prefix cache in the operator's hands, and out of other tenants'."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

PROMPT = list(range(2, 40))


class Caller:
    """Somebody with a key."""

    def __init__(self, served: Any, key: str) -> None:
        self._http, self._headers = served.http, {"authorization": f"Bearer {key}"}

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._http, method), headers=self._headers)


def cached(client: Any, model: str, prompt: list[int] = PROMPT, **body: Any) -> int:
    answer = client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_are_exact_and_counted_once_for_all_choices(server: Any) -> None:
    size = server.engine.kv.page_size
    for length in (size - 1, size, size + 1, 2 * size + 1, len(PROMPT)):
        prompt = [length + 2, *PROMPT[1:length]]
        assert cached(server.http, server.model, prompt, n=3) == 0
        assert cached(server.http, server.model, prompt, n=3) == length - 1  # the last token is always computed
        assert cached(server.http, server.model, [*prompt, 3, 4]) >= length


@pytest.mark.case(44)
def test_salts_do_not_share(server: Any) -> None:
    assert cached(server.http, server.model, cache_salt="a") == 0
    assert cached(server.http, server.model, cache_salt="b") == 0
    assert cached(server.http, server.model) == 0
    assert cached(server.http, server.model, cache_salt="a") > 0
    for salt in ("", 3, "x" * 200):
        response = server.post(prompt=PROMPT, cache_salt=salt)
        assert server.error(response, 400)["param"] == "cache_salt"


@pytest.mark.case(4)
def test_look_alikes_do_not_share(server: Any) -> None:
    size = server.engine.kv.page_size
    a, b = PROMPT[:size], PROMPT[size : 2 * size]

    def found(*prompt: int) -> int:
        return cached(server.http, server.model, list(prompt), cache_salt="look-alikes")

    found(*a, *b, 50)
    assert found(*b, *a, 50) == 0
    assert found(51, *b, 50) == 0
    assert found(*a, *b, 51) == 2 * size


@pytest.mark.case(44)
def test_api_keys_do_not_share_under_isolation(serving: Any) -> None:
    with serving(api_keys=("one", "two"), isolates_keys=True) as served:
        one, two = Caller(served, "one"), Caller(served, "two")
        assert cached(one, served.model) == 0
        rows = served.engine.journal.steps[-1].number
        assert cached(two, served.model) == 0
        assert cached(two, served.model, cache_salt="x") == 0
        assert cached(one, served.model) == len(PROMPT) - 1
        assert cached(two, served.model) == len(PROMPT) - 1
        assert served.engine.journal.steps[-1].number > rows
        registered = one.post("/v1/cache/prefixes", json={"prompt": PROMPT}).json()
        assert two.get("/v1/cache/prefixes").json()["data"] == []
        assert two.delete(f"/v1/cache/prefixes/{registered['id']}").status_code == 404
        assert one.delete(f"/v1/cache/prefixes/{registered['id']}").status_code == 200
        served.assert_baseline()


def test_the_admin_key_opens_what_others_do_not(serving: Any) -> None:
    with serving(api_keys=("user",), admin_keys=("boss",)) as served:
        user, boss = Caller(served, "user"), Caller(served, "boss")
        cached(user, served.model)
        for path in ("/v1/cache/reset", "/v1/cache/save", "/v1/cache/load"):
            assert user.post(path).status_code == 401
        assert user.get("/debug/cache").status_code == 401
        assert user.get("/debug/requests").status_code == 401
        assert boss.get("/debug/requests").status_code == 200
        assert boss.post("/v1/cache/reset").json()["freed_pages"] > 0
        assert cached(boss, served.model) == 0
        assert boss.post("/v1/cache/save").json()["error"]["message"].endswith("--kv-cache-dir.")


def test_without_an_admin_key_nobody_resets(server: Any) -> None:
    assert server.error(server.http.post("/v1/cache/reset"), 401)["code"] == "invalid_api_key"
    assert server.http.get("/debug/cache").status_code == 200


def test_a_prefix_is_pinned_listed_hit_and_dropped(server: Any) -> None:
    size = server.engine.kv.page_size
    one = server.http.post("/v1/cache/prefixes", json={"prompt": PROMPT}).json()
    assert (one["tokens"], one["hits"]) == (len(PROMPT) // size * size, 0)
    again = server.http.post("/v1/cache/prefixes", json={"prompt": PROMPT}).json()
    assert again["id"] == one["id"]
    assert cached(server.http, server.model, [*PROMPT, 9]) == len(PROMPT)
    server.engine.kv.reset()
    assert cached(server.http, server.model, [*PROMPT, 9]) >= one["tokens"]
    [listed] = server.http.get("/v1/cache/prefixes").json()["data"]
    assert listed["hits"] == 2
    assert listed["last_hit_seconds_ago"] >= 0
    assert server.http.delete(f"/v1/cache/prefixes/{one['id']}").json()["deleted"]
    assert server.error(server.http.delete(f"/v1/cache/prefixes/{one['id']}"), 404)
    server.assert_baseline()


def test_a_system_message_can_be_pinned(server: Any) -> None:
    text = "one two three four five six seven eight " * 4
    messages = [{"role": "system", "content": text}]
    one = server.http.post("/v1/cache/prefixes", json={"messages": messages})
    assert one.status_code == 200, one.text
    answer = server.chat([*messages, {"role": "user", "content": "Hello"}], max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= one.json()["tokens"] > 0
    assert server.http.delete(f"/v1/cache/prefixes/{one.json()['id']}").status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [2]}, "a page has"),
        ({"prompt": [2] * 100_000}, "more can be pinned"),
        ({}, "prompt"),
        ({"prompt": [-4]}, "prompt"),
    ],
)
def test_what_cannot_be_pinned_is_refused(server: Any, body: dict[str, Any], said: str) -> None:
    assert said in server.error(server.http.post("/v1/cache/prefixes", json=body), 400)["message"]


def test_pins_leave_half_of_the_pool_to_others_also_when_they_come_together(serving: Any) -> None:
    with serving(num_pages=256) as served:
        served.runner.gate.clear()

        def pin(first: int) -> Any:
            return served.http.post("/v1/cache/prefixes", json={"prompt": [first] * 400})

        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(pin, range(2, 6))
            served.wait_until(lambda: served.engine.running + served.engine.waiting == 4)
            served.runner.gate.set()
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 2
        for answer in [*refused, pin(7)]:
            error = served.error(answer, 400)
            assert error["param"] == "prompt"
            assert "224 more can be pinned: all pins may hold half of the KV pool" in error["message"]


def test_the_cache_shows_its_tree_owners_and_evictions(server: Any) -> None:
    for first in range(2, 60):
        cached(server.http, server.model, [first, *PROMPT])
    view = server.http.get("/debug/cache?limit=5").json()
    assert len(view["tree"]) == 5
    assert view["tree"][0]["positions"][1] > 0
    assert view["pages"]["total"] == view["pages"]["free"] + view["pages"]["evictable"] + view["pages"]["used"]
    assert view["owners"] == []
    assert view["second_tier"] is None
    for eviction in view["evictions"]:
        assert eviction["reason"].startswith("slot ")
