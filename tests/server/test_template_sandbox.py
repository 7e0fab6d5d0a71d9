"""A chat template is code that came with a model: it gets the conversation and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from server import template_environment
from server.chat_template import ChatTemplate
from server.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


def rendered(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    template = ChatTemplate(source, {"eos_token": "<end>"}, ["<end>"])
    return template.render(messages, add_generation_prompt=False, variables=variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends 'base.html' %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ lipsum(1000) }}",
    ],
)
def test_what_reaches_beyond_the_conversation_is_refused_without_telling_what_is_there(source: str) -> None:
    try:
        shown = rendered(source)
    except InvalidRequest as error:
        shown = error.message
    for secret in ("root:", "uid=", "subclasses", "<class", "/server/", "Traceback", "<module", "<p>"):
        assert secret not in shown, shown


ENDLESS = {
    "ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "lists": "{% set a = 'x' * 99999 %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "sums": "{% for i in range(99999) %}{% set sum = range(99999)|sum %}{% endfor %}",
    "recursion": "{% for i in [1] * 9 recursive %}{{ loop([1] * 9) if loop.depth < 30 }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_not_end_is_refused_and_the_others_go_on(
    serving: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_environment, "SECONDS", 0.1)
    source = "{% if messages[0].content == 'Loop' %}" + source + "{% endif %}{{ messages[0].content }}"
    with serving(template=source) as server:
        error = server.error(server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Loop"}]), 400)
        assert (error["param"], "longer than 0.1 seconds" in error["message"]) == ("messages", True)
        assert server.chat("Hello", max_tokens=1)


def test_loops_are_what_they_were() -> None:
    source = (
        "{% for a in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ a }}{{ loop.nextitem }}"
        "{{ ',' if not loop.last }}{% endfor %}"
        "{% for k, v in {'x': 1}.items() if v %}{{ k }}{% endfor %}{% for n in none_such %}{% else %}none{% endfor %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert rendered(source) == "1/3ab,2/3bc,3/3cxnone01"


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{% raw %}", "{# gone #}", "{{ messages }}"])
def test_what_a_client_writes_is_text_and_not_a_template(text: str) -> None:
    source = "{{ messages[0].content }}|{{ mood }}"
    assert rendered(source, [{"role": "user", "content": text}], mood=text) == f"{text}|{text}"


@pytest.mark.parametrize(
    "name", ["messages", "raise_exception", "tools", "eos_token", "chat_template", "add_generation_prompt"]
)
def test_a_client_cannot_put_a_template_or_its_names_in_the_place_of_the_models(server: Any, name: str) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 1}
    plain = server.post("/v1/chat/completions", **chat).json()["usage"]["prompt_tokens"]
    response = server.post("/v1/chat/completions", **chat, chat_template_kwargs={name: "{{ 7 * 7 }}"})
    assert response.status_code == 400 or response.json()["usage"]["prompt_tokens"] == plain
    refused = server.error(server.post("/v1/chat/completions", **chat, chat_template="{{ 1 }}"), 400)
    assert refused["param"] == "chat_template"
