"""What is behind the daemon's page: its files, and what it asks of the other routes. The page itself: tests/e2e."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvstore.store import KVStore
from server.page_map import CACHED, FIRST_OWNER, FREE, PINNED, SHARED, page_map
from server.routes.page import FILES, PATHS


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_page_is_open_and_may_load_nothing_but_itself(serving: Any, path: str) -> None:
    with serving(api_keys=("right",)) as served:
        for method in ("GET", "HEAD"):
            answer = served.http.request(method, path)
            assert answer.status_code == 200
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
            assert policy.pop("default-src") == "'none'"
            assert set(policy.values()) == {"'self'", "'none'", "'script'"}
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert served.error(served.http.get("/page"), 401)


def test_what_is_beside_the_page_is_refused_in_the_envelope(server: Any) -> None:
    for path in ("/page", "/page/", "/page/index.html", "/page/../config/settings.py", "/index.html", "/favicon.ico"):
        assert server.error(server.http.get(server.url + path), 404)
    for path in ("/", "/page/page.js"):
        response = server.http.post(path)
        assert server.error(response, 405)["code"] == "method_not_allowed"
        assert "GET" in response.headers["allow"]


def test_the_files_have_relative_addresses_and_never_make_html_of_text() -> None:
    for path, file in FILES.items():
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r"""(?:href|src|from|url\(|call\(|get\(|json\()\s*[=(]?\s*["'`](?:/|\w+:)""", text), path
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=|\bon\w+=", text
        ), path


def test_steps_can_be_asked_for_from_one_on(server: Any) -> None:
    server.complete("Hello", max_tokens=5, ignore_eos=True)
    last = server.http.get("/debug/steps?limit=1").json()["steps"][0]["number"]
    assert server.http.get(f"/debug/steps?after={last}").json()["steps"] == []
    two = server.http.get(f"/debug/steps?after={last - 2}").json()["steps"]
    assert [step["number"] for step in two] == [last - 1, last]
    assert server.http.get(f"/debug/steps?after={last - 2}&limit=1").json()["steps"] == two[1:]
    assert server.error(server.http.get("/debug/steps?after=-1"), 400)["param"] == "after"


def test_the_age_of_a_request_goes_on_after_its_end(server: Any) -> None:
    life = server.http.get(f"/debug/requests/{server.complete('Hello', max_tokens=2)['id']}").json()
    assert life["age_seconds"] > life["finished_after_seconds"] > 0


def test_the_map_is_there_when_it_is_asked_for(server: Any) -> None:
    server.complete(list(range(60, 100)), max_tokens=2, cache_salt="map")
    assert server.http.get("/debug/cache").json()["map"] is None
    view = server.http.get("/debug/cache?cells=1024").json()
    assert view["map"]["pages_per_cell"] == 1
    assert view["map"]["cells"].count(CACHED) == view["pages"]["evictable"] > 0
    assert len(server.http.get("/debug/cache?cells=100").json()["map"]["cells"]) <= 100
    assert server.error(server.http.get("/debug/cache?cells=5000"), 400)["param"] == "cells"


def test_a_page_is_shown_as_its_holders_have_it() -> None:
    kv = KVStore(num_pages=32, page_size=4, max_sequences=4, max_model_len=64)

    def run(*tokens: int, n: int) -> Any:
        prompt = np.array([*tokens, *range(100, 100 + n)], np.int32)
        sequence = kv.open(prompt)
        assert sequence is not None
        assert kv.reserve(sequence, len(prompt))
        kv.drain_copies()
        kv.commit(sequence, prompt, len(prompt))
        return sequence, prompt

    pinned, prompt = run(1, n=7)
    kv.close(pinned, prompt, len(prompt))
    assert kv.pin(prompt) is not None
    closed, prompt = run(2, n=11)
    kv.close(closed, prompt, len(prompt))
    shared, prompt = run(3, n=15)
    fork = kv.fork(shared)
    assert fork is not None
    own, _ = run(4, n=19)

    def counts(cells: int, *owners: Any) -> dict[int, int]:
        found = page_map(kv, owners, cells)["cells"]
        return {what: found.count(what) for what in sorted(set(found))}

    assert counts(32, shared, own) == {FREE: 18, CACHED: 3, SHARED: 4, PINNED: 2, FIRST_OWNER + 1: 5}
    assert counts(32) == {FREE: 18, CACHED: 3, SHARED: 9, PINNED: 2}
    kv.close(fork, prompt, fork.computed)
    assert counts(32, shared, own)[FIRST_OWNER] == 4
    assert page_map(kv, (), 10) == {
        "pages_per_cell": 4,
        "cells": [PINNED, SHARED, SHARED, SHARED, FREE, FREE, FREE, FREE],
    }
