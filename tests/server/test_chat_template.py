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


TURNS = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " What is 1 < 2 & 'é'?\n"},
    {"role": "assistant", "content": "  Let me see.\n ", "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": 3}', "tool_call_id": "1"},
    {"role": "assistant", "content": "It is so. \n"},
]
EACH = "{% for m in messages %}"
TEMPLATES = {
    "blocks": f"  {EACH}\n    {{% if loop.first %}}\n  {{{{ m.content }}}}\n  {{% endif %}}\n  {{% endfor %}}\n",
    "trims": f"{EACH}<{{{{ m['role'] }}}}>{{{{- m.content | trim -}}}} |{{% endfor %}}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[1] | tojson(ensure_ascii=true) }}"
    "{{ messages[2] | tojson(separators=(',', ':'), sort_keys=true) }}",
    "namespace": f"{{% set ns = namespace(n=0, self=1) %}}{EACH}{{% set ns.n = ns.n + m.content|length %}}"
    "{% endfor %}{{ ns.n }}{{ ns.self }}",
    "private": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "private from the start": "{{ namespace(_x=1)._x }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys('ab', 0) }}{{ dict.mro }}",
    "generation": f"{EACH}{{% generation %}}{{% set x = m.role %}}{{{{ x }}}}"
    "{% endgeneration %}|{{ x }},{% endfor %}",
    "loops": f"{EACH}{{% if loop.index == 2 %}}{{% continue %}}{{% endif %}}{{{{ m.role }}}}"
    "{% if loop.index == 4 %}{% break %}{% endif %}{% endfor %}",
    "reasoning": f"{EACH}{{{{ m.reasoning_content }}}}/{{{{ m.thinking }}}}/{{{{ m.reasoning }}}} {{% endfor %}}",
    "time": "{{ strftime_now('%Y') }}",
    "refusal": "{{ raise_exception('No.') }}",
    "names": "{{ mood }}{{ documents }}{{ eos_token }}{{ add_generation_prompt }}{{ none_such }}",
    "macros": "{% macro say(m) %}[{{ m.role }}]{{ caller() }}{% endmacro %}"
    f"{EACH}{{% call say(m) %}}{{{{ m.content }}}}{{% endcall %}}{{% endfor %}}",
    "only the users": f"{EACH}{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("continued", [False, True])
def test_templates_write_what_transformers_lets_them_write(source: str, continued: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tool = {"type": "function", "function": {"name": "add", "description": "a < b"}}
    options: dict[str, Any] = {
        "tools": [tool],
        "documents": [{"title": "t"}],
        "add_generation_prompt": not continued,
        "continue_final_message": continued,
    }
    source += "{# tools #}"
    try:
        [expected], _ = render_jinja_template([TURNS], chat_template=source, eos_token="<end>", mood="calm", **options)
    except Exception:
        with pytest.raises(InvalidRequest):
            rendered(source, TURNS, variables={"mood": "calm"}, **options)
    else:
        assert rendered(source, TURNS, variables={"mood": "calm"}, **options) == expected


def test_serving_and_rendering_need_no_transformers() -> None:
    code = (
        "import sys, server.app\n"
        "from server.chat_template import ChatTemplate\n"
        "ChatTemplate('x', {}, []).render([{'role': 'user', 'content': 'x'}], add_generation_prompt=True)\n"
        "assert not {'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
