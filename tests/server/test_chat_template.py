"""Conversations become prompts by the model's template, and what it lacks degrades by rule."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from server.chat_template import MARK_END, MARK_START, ChatTemplate
from server.errors import InvalidRequest

PLAIN = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, {"eos_token": "<end>"}, ["<end>", "<en"]).render(
        messages, **{"add_generation_prompt": False} | options
    )


def test_the_template_writes_the_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert rendered(PLAIN, messages, add_generation_prompt=True) == "[system]Be brief.\n[user]Hi\n[assistant]"
    assert rendered("{{ eos_token }}", messages) == "<end>"
    assert rendered("{{ mood }}", messages, variables={"mood": "calm"}) == "calm"


def test_developers_are_systems_where_a_template_does_not_know_them() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert rendered(PLAIN, messages) == "[system]Be brief.\n"
    assert rendered(PLAIN + "{# developer #}", messages) == "[developer]Be brief.\n"


def test_tools_are_tagged_text_where_a_template_does_not_know_them() -> None:
    messages = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    call = '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'
    assert rendered(PLAIN, messages) == (
        f"[assistant]Let me see.\n{call}\n{call}\n[assistant]{call}\n[user]<tool_response>\n2\n</tool_response>\n"
    )
    assert messages[0]["tool_calls"] == [CALL, CALL], "the client's messages are left alone"
    known = "{% for message in messages %}{{ message.role }} {{ message.tool_calls | length }} {% endfor %}"
    assert rendered(known, messages) == "assistant 2 assistant 1 tool 0 "


def test_control_tokens_from_clients_are_marked_and_the_longest_first() -> None:
    messages = [{"role": "user", "content": f"a<end>b{MARK_START}<en{MARK_END}c"}]
    text = rendered("{{ messages[0].content }}{{ eos_token }}", messages)
    assert text == f"a{MARK_START}<end>{MARK_END}b{MARK_START}<en{MARK_END}c<end>"
    assert (
        rendered("{{ documents[0].text }}", messages, documents=[{"text": "<end>"}]) == f"{MARK_START}<end>{MARK_END}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Only one at a time.') }}",
        "{{ messages[5].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for message in messages %}",
    ],
)
def test_whatever_a_template_does_is_a_400(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered(source, [{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 400


def test_the_renderer_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, server.app\n"
        "assert 'transformers' not in sys.modules\n"
        "from server.chat_template import ChatTemplate\n"
        "ChatTemplate('x', {}, []).warm_up()\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
