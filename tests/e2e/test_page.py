"""The daemon's page in Chromium, over the real daemon on the default model, with others asking it for answers."""

from __future__ import annotations

import http.server
import io
import os
import random
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from PIL import Image
from support.browser import CHROMIUM, Page, browser

from loadtest import servers
from loadtest.servers import Server, daemon, free_port, started

ROOT = Path(__file__).parents[2]
WORDS = (ROOT / "tests" / "data" / "page.txt").read_text().split()
MARKUP = "Say hi. <img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
PICTURE_BYTES = 200_000

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium"),
]


@contextmanager
def load(server: Server, streams: int = 4) -> Iterator[None]:
    """Others, who ask again and again; their prompts begin alike."""
    done = threading.Event()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        while not done.is_set():
            start, words = rng.choice([0, 40]), rng.randrange(20, 200)
            prompt = " ".join([*WORDS[start : start + 80], str(rng.random()), *WORDS[-words:]])
            size = {"max_tokens": rng.randrange(20, 80), "n": rng.choice([1, 1, 2]), "ignore_eos": True}
            with suppress(httpx.HTTPError):
                httpx.post(
                    server.url + "/v1/completions", json={"model": server.model, "prompt": prompt, **size}, timeout=60
                )

    with ThreadPoolExecutor(streams) as pool:
        for seed in range(streams):
            pool.submit(ask, seed)
        try:
            yield
        finally:
            done.set()


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    with daemon(["--kv-memory", "96MiB", "--max-model-len", "1024"]) as server:
        prefix = {"prompt": " ".join(WORDS[:60])}
        pinned = httpx.post(server.url + "/v1/cache/prefixes", json=prefix, timeout=60)
        assert pinned.status_code == 200, pinned.text
        with load(server):
            yield server


@pytest.fixture(scope="module")
def opened(busy: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        page.open(busy.url + "/")
        page.wait_for("document.querySelectorAll('#requests tr').length > 0")
        yield page


@pytest.fixture
def page(opened: Page, busy: Server) -> Iterator[Page]:
    """The page that the tests share. It must not complain, and ask nobody but its daemon."""
    yield opened
    assert opened.complaints == []
    assert {url for url in opened.requests if not url.startswith((busy.url + "/", "data:"))} == set()


def painted(page: Page, canvas: str, colours: int) -> None:
    """Until a canvas shows so many different colours."""
    page.wait_for(f"""(() => {{
        const canvas = document.querySelector("{canvas}");
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {{ willReadFrequently: true }});
        copy.drawImage(canvas, 0, 0);
        const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(data.buffer)).size > {colours};
    }})()""")


def say(page: Page, text: str, max_tokens: int) -> None:
    """Until the model has answered."""
    page.value(f"document.querySelector('#max-tokens').value = {max_tokens}")
    page.type("#say", text)
    page.press("Enter", "\r")
    page.wait_for("document.querySelector('#stop').disabled")
    page.wait_for("document.querySelector('#talk .assistant:last-of-type small').innerText.includes('to the first')")


def test_the_figures_of_a_busy_server_appear(page: Page, busy: Server) -> None:
    page.wait_for("[...document.querySelectorAll('.tile b')].every((tile) => /[1-9]|^0/.test(tile.innerText))")
    page.wait_for("Number(document.querySelector('.tile b').innerText) > 0")
    assert busy.model in page.text("#facts")
    assert page.text("#status") == "live"
    painted(page, ".tile canvas", 1)


def test_the_timeline_has_steps_that_the_keyboard_chooses(page: Page) -> None:
    painted(page, "#steps", 3)
    page.wait_for("document.querySelector('#step').innerText.includes('decode')")
    page.value("document.querySelector('#steps').focus()")
    page.press("Home")
    first = page.text("#step")
    page.press("ArrowRight")
    second = page.text("#step")
    numbers = [int(text.split()[1]) for text in (first, second)]
    assert numbers[1] == numbers[0] + 1
    page.press("Escape")
    page.wait_for(f"Number(document.querySelector('#step').innerText.split(' ')[1]) > {numbers[1]}")


def test_the_pool_shows_who_holds_pages_and_the_tree_what_is_cached(page: Page) -> None:
    page.wait_for("document.querySelectorAll('#owners li').length > 0")
    painted(page, "#pool", 4)  # free or cached, the pinned prefix, two holders
    assert "pinned prefixes 1" in page.text("#pool-key")
    page.wait_for("document.querySelectorAll('#tree details').length > 2")
    depth = "document.querySelectorAll('#tree ul ul details').length"
    page.wait_for(f"{depth} > 0")
    page.value("document.querySelector('#tree summary').click()")
    assert page.value("document.querySelector('#tree details').open") is False


def test_a_request_is_followed_to_its_end(page: Page) -> None:
    page.wait_for(
        "[...document.querySelectorAll('#requests tr')].some((row) => row.cells[1].innerText === 'answering')"
    )
    page.value("[...document.querySelectorAll('#requests tr')].find((row) => row.cells[1].innerText === 'answering')"
               ".querySelector('button').click()")  # fmt: skip
    page.wait_for("document.querySelector('#events').innerText.includes('finished')")
    for kind in ("queued", "admitted", "first token"):
        assert kind in page.text("#events")
    spans = page.value("[...document.querySelectorAll('.strip div')].map((span) => span.className)")
    assert {"prompt", "answer"} <= set(spans)
    assert page.value("document.querySelector('.chosen').title") == page.text("#life h3")


def test_the_chat_box_answers_and_text_stays_text(page: Page) -> None:
    say(page, MARKUP, 12)
    assert page.text("#talk .user") == MARKUP
    assert page.text("#life h3").startswith("chatcmpl-")
    assert page.value("document.querySelectorAll('main img, main script').length") == 0
    page.value("document.querySelector('#max-tokens').value = 100000")
    page.type("#say", "And now at length.")
    page.press("Enter", "\r")
    page.wait_for("document.querySelector('#talk .error')?.innerText.includes('tokens')")
    page.value("document.querySelector('#forget').click()")
    assert page.text("#talk") == ""
    page.complaints[:] = [one for one in page.complaints if "400 (Bad Request)" not in one]  # that was to be refused
    assert "pwned" not in page.value("document.title")


def test_at_most_one_thing_is_asked_a_second_and_nothing_by_a_hidden_tab(page: Page) -> None:
    began, before = time.monotonic(), len(page.requests)
    page.wait_for(f"performance.now() > {page.value('performance.now()') + 3000}")
    assert 1 < len(page.requests) - before <= time.monotonic() - began + 1
    page.value("Object.defineProperty(document, 'hidden', { value: true, configurable: true }), 0")
    page.wait_for(f"performance.now() > {page.value('performance.now()') + 1000}")
    before = len(page.requests)
    page.wait_for(f"performance.now() > {page.value('performance.now()') + 2000}")
    assert len(page.requests) == before
    page.value("delete document.hidden, 0")
    page.wait_for("performance.getEntriesByType('resource').some((one) => one.startTime > performance.now() - 1000)")


def test_a_picture_of_it_is_small(page: Page, tmp_path: Path) -> None:
    """PICTURES names a folder that keeps it: `make picture`."""
    folder = os.environ.get("PICTURES")
    if folder:
        page.value("document.querySelector('#temperature').value = 0")
        say(page, "What is the opposite of hot?", 60)
        page.wait_for(f"performance.now() > {page.value('performance.now()') + 20_000}")
    file = Path(folder or tmp_path) / "page.png"
    with Image.open(io.BytesIO(page.picture(1180))) as picture:
        assert picture.width == 1180
        assert picture.height > 1000
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    assert file.stat().st_size < PICTURE_BYTES


def test_it_wants_the_key_shows_drafts_and_outlives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "first_model", lambda url: "")  # it would need the key
    port = free_port()
    flags = ["--port", str(port), "--kv-memory", "96MiB", "--max-model-len", "1024"]
    drafting = '{"method": "ngram", "adaptive": false}'
    flags += ["--api-key", "right", "--admin-api-key", "boss", "--speculative-config", drafting]
    command = [sys.executable, "-m", "server.cli", "serve", *flags]
    shown = "!document.querySelector('main').hidden"
    with browser(tmp_path / "profile") as page:
        with started("the daemon", command, port, "/ready") as server:
            page.open(server.url + "/")
            page.wait_for("document.querySelector('#status').className === 'locked'")
            for key, state in (("wrong", "locked"), ("right", "live"), ("boss", "live")):
                assert page.value(shown) is (key == "boss")
                page.type("#key", key)
                page.press("Enter", "\r")
                page.wait_for(f"document.querySelector('#status').className === '{state}'")
                if key == "right":  # a user's: for /debug that is not enough
                    page.wait_for("document.querySelector('[data-of=steps]').dataset.denied?.includes('admin key')")
                    assert page.value("document.querySelector('#steps').checkVisibility()") is False
            page.value("document.querySelector('#temperature').value = 0")
            say(page, "Repeat: red green blue red green blue red green blue red green blue red green blue", 60)
            asked = "performance.getEntriesByType('resource').filter((one) => one.name.includes('debug/steps')).length"
            page.wait_for(f"{asked} > {page.value(asked)} + 1")
            page.value("document.querySelector('#steps').focus()")
            last = int(page.text("#step").split()[1])
            page.press("End")
            while not re.search(r"[1-9]\d* drafted", step := page.text("#step")):
                page.press("ArrowLeft")
                assert page.text("#step") != step, "no step had a draft"
        page.wait_for("document.querySelector('#status').className === 'down'")
        with started("the daemon", command, port, "/ready"):
            page.wait_for("document.querySelector('#status').className === 'live'")
            assert page.value("document.querySelector('#key').value") == ""
            say(page, "Hello.", 4)  # fewer steps than before
            page.wait_for(f"Number(document.querySelector('#step').innerText.split(' ')[1]) < {last}")
    assert all("401" in one or "ERR_" in one for one in page.complaints), page.complaints


def test_it_works_behind_a_path_prefix(busy: Server, tmp_path: Path) -> None:
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith("/models/octavo/")
            with urllib.request.urlopen(busy.url + self.path.removeprefix("/models/octavo"), timeout=30) as answer:
                self.send_response(answer.status)
                for name in ("content-type", "content-security-policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                self.wfile.write(answer.read())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy, browser(tmp_path / "profile") as page:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        page.open(f"http://127.0.0.1:{proxy.server_port}/models/octavo/")
        page.wait_for("document.querySelectorAll('#owners li').length > 0")
        proxy.shutdown()
        thread.join()
    assert page.complaints == []
