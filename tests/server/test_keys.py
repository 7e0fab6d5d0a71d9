"""Named keys from a file, what each may use, and how they change while the server runs."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from server.cli import main
from server.keys import KeyRing, digest, read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def new(capsys: pytest.CaptureFixture[str], file: Path, name: str, *flags: str) -> str:
    assert main(["keys", "new", name, "--file", str(file), *flags]) == 0
    return capsys.readouterr().out.strip()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_new_key_is_shown_once_and_kept_as_a_digest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alice = new(capsys, file, "alice", "--tokens-per-minute", "500")
    file.write_text(file.read_text() + "# a comment stays\n")
    boss = new(capsys, file, "boss", "--admin")
    assert file.stat().st_mode & 0o077 == 0
    text = file.read_text()
    assert alice not in text
    assert "# a comment stays" in text
    keys = read(file)
    assert [(key.name, key.admin, key.tokens_per_minute) for key in keys] == [
        ("alice", False, 500),
        ("boss", True, None),
    ]
    assert [key.sha256 for key in keys] == [digest(alice), digest(boss)]
    assert len(alice) == len(boss) == 46
    assert main(["keys", "list", "--file", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown
    assert digest(alice)[:16] not in shown
    assert main(["keys", "new", "alice", "--file", str(file)]) == 2
    assert main(["keys", "new", "a b", "--file", str(file)]) == 2


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_of_nothing_is_not_taken_for_none(file: Path, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "alice", "--file", str(file), "--max-concurrent", limit]) == 2
    assert "limits are positive" in capsys.readouterr().err
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none" / "keys.yaml"
    assert main(["keys", "new", "alice", "--file", str(file)]) == 2
    assert capsys.readouterr() == ("", f"octavo: error: --file {file}: cannot be written: no such file or directory\n")


def test_a_file_that_cannot_be_read_is_named_by_the_flag_it_was_given_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "list", "--file", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"octavo: error: --file {tmp_path}: cannot be read: is a directory\n"
    (file := tmp_path / "keys.yaml").write_text("{")
    for action in ["list"], ["new", "alice"]:
        assert main(["keys", *action, "--file", str(file)]) == 2
        assert capsys.readouterr().err.startswith(f"octavo: error: --file {file}: is not YAML")


def test_a_key_is_added_to_what_was_written_by_hand_or_the_file_stays_as_it_was(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = f"{{name: by.hand, sha256: {'a' * 64}}}"
    file.write_text(f"# without an end of line\n- {entry}")
    new(capsys, file, "alice")
    assert [key.name for key in read(file)] == ["by.hand", "alice"]
    for text in (f"[{entry}]\n", "[]", f"  - {entry}\n", f"- {entry}\n...\n"):
        file.write_text(text)
        assert main(["keys", "new", "alice", "--file", str(file)]) == 2
        assert "no line can be added to it" in capsys.readouterr().err
        assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not YAML: it must be a list of keys, like `- {name: alice, sha256: ...}`"),
        ("!!int x", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("name: x", "must be a list of keys, like `- {name: alice, sha256: ...}`"),
        ("{}", "must be a list of keys"),
        ("- x", "entry 0 must be an object"),
        ("- {name: x}", "entry 0.sha256 is required"),
        ("- {name: x, sha256: secret}", "entry 0.sha256"),
        (f"- {{name: x, sha256: {'a' * 64}, tokens: 5}}", "entry 0.tokens is not known"),
        (f"- {{name: x, sha256: {'a' * 64}, max_concurrent: 0}}", "entry 0.max_concurrent"),
        (f"- {{name: x, sha256: {'a' * 64}}}\n- {{name: x, sha256: {'b' * 64}}}", "the name x is there twice"),
        (f"- {{name: x, sha256: {'a' * 64}}}\n- {{name: y, sha256: {'a' * 64}}}", "the sha256 aaaa"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_without_what_is_in_it(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {says}")) as error:
        KeyRing(file=file)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.case(42)
def test_an_empty_file_lets_nobody_in(file: Path, serving: Any) -> None:
    file.write_text("# nobody yet\n")
    with serving(key_file=file) as server:
        assert server.error(server.http.get("/v1/models"), 401)
        assert server.http.get("/health").status_code == 200


@pytest.mark.case(42)
def test_keys_change_while_the_server_runs(file: Path, serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = new(capsys, file, "first")
    with serving(key_file=file, api_keys=("from the command line",)) as server:
        models = "/v1/models"
        second = new(capsys, file, "second", "--admin")
        assert server.http.get(models, headers=bearer(second)).status_code == 401
        assert server.state.keys.reload() == 3
        assert server.http.get(models, headers=bearer(second)).status_code == 200
        assert server.http.post("/v1/cache/reset", headers=bearer(second)).status_code == 200
        assert server.http.post("/v1/cache/reset", headers=bearer(first)).status_code == 401
        file.write_text("\n".join(line for line in file.read_text().splitlines() if "first" not in line))
        server.state.keys.reload()
        assert server.http.get(models, headers=bearer(first)).status_code == 401
        assert server.http.get(models, headers=bearer("from the command line")).status_code == 200
        file.write_text("nonsense")
        with pytest.raises(ConfigError):
            server.state.keys.reload()
        assert server.http.get(models, headers=bearer(second)).status_code == 200, "all stays as it was"


def test_requests_and_tokens_a_minute_are_limited_and_say_when_to_come_back(
    file: Path, serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    few = bearer(new(capsys, file, "few", "--requests-per-minute", "3"))
    small = bearer(new(capsys, file, "small", "--tokens-per-minute", "60"))
    free = bearer(new(capsys, file, "free"))
    now = [1000.0]
    with serving(key_file=file, clock=lambda: now[0]) as server:
        body = {"model": server.model, "prompt": [5, 6], "max_tokens": 1, "ignore_eos": True}

        def ask(headers: dict[str, str], **fields: Any) -> Any:
            return server.http.post("/v1/completions", json={**body, **fields}, headers=headers)

        assert ask(few, n=2).status_code == 200
        assert ask(few).status_code == 200
        response = ask(few)
        error = server.error(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "3 requests a minute" in error["message"]
        assert response.headers["retry-after"] == "20"
        now[0] += 21
        assert ask(few, stream=True).status_code == 200

        assert ask(small, max_tokens=98).status_code == 200  # 100 tokens of 60: in debt
        response = ask(small)
        assert "60 tokens a minute" in server.error(response, 429)["message"]
        assert response.headers["retry-after"] == "41"
        now[0] += 42
        assert ask(small).status_code == 200
        assert all(ask(free, n=4, max_tokens=50).status_code == 200 for _ in range(5))
        metrics = server.http.get("/metrics", headers=free).text
        assert 'octavo_refused_requests_total{reason="key_limit"} 2.0' in metrics


def test_requests_at_once_are_limited_by_key(file: Path, serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    two = bearer(new(capsys, file, "two", "--max-concurrent", "2"))
    other = bearer(new(capsys, file, "other"))
    with serving(key_file=file) as server:
        server.runner.gate.clear()
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 2}
        answers: list[int] = []

        def ask(headers: dict[str, str]) -> None:
            answers.append(server.http.post("/v1/completions", json=body, headers=headers).status_code)

        threads = [threading.Thread(target=ask, args=(headers,)) for headers in (two, two, other)]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.engine.running + server.engine.waiting == 3)
        response = server.http.post("/v1/completions", json=body, headers=two)
        assert "2 choices at once, and has 2" in server.error(response, 429)["message"]
        assert int(response.headers["retry-after"]) >= 1
        server.runner.gate.set()
        for thread in threads:
            thread.join(20)
        assert answers == [200, 200, 200]
        for field, more in ("n", {"n": 3}), ("prompt", {"prompt": ["a", "b", "c"]}):  # more than it may ever have
            error = server.error(server.http.post("/v1/completions", json=body | more, headers=two), 400)
            assert (error["param"], "3 choices" in error["message"]) == (field, True)
        assert server.http.post("/v1/completions", json=body | {"n": 2}, headers=two).status_code == 200
        assert server.http.post("/v1/completions", json=body, headers=two).status_code == 200


def test_a_key_that_asks_for_much_does_not_make_the_others_wait(
    file: Path, serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    much, little = bearer(new(capsys, file, "much")), bearer(new(capsys, file, "little"))
    with serving(key_file=file, limits={"max_num_seqs": 1}) as server:
        server.runner.gate.clear()
        ended: list[str] = []

        def ask(name: str, headers: dict[str, str]) -> None:
            body = {"model": server.model, "prompt": f"{name} Hello world", "max_tokens": 2, "ignore_eos": True}
            assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
            ended.append(name)

        asked = [("much", much)] * 10 + [("little", little)]
        threads = [threading.Thread(target=ask, args=one) for one in asked]
        for thread in threads[:10]:
            thread.start()
        server.wait_until(lambda: server.engine.running + server.engine.waiting == 10)
        threads[10].start()
        server.wait_until(lambda: server.engine.running + server.engine.waiting == 11)
        server.runner.gate.set()
        for thread in threads:
            thread.join(20)
        assert len(ended) == 11
        assert ended.index("little") <= 3
