"""A conversation into the prompt text its model was trained on, by the model's own Jinja template.

Rendered in a sandbox and in a worker thread: nothing here runs on the event loop. What a template refuses becomes a 400
in its own words.

Literal control tokens in contents (`<|im_end|>` typed by a user) are wrapped in markers before rendering, so that
whoever tokenises the result can tell them from those the template wrote.

Templates that do not speak of tools, or of a role, degrade by these rules: tools are listed at the end of the system
message, which is made if there is none, and asked for in the form that the Hermes parser reads; `developer` becomes
`system`; a `tool` message becomes a `user` message holding `<tool_response>` tags; an assistant's calls become
`<tool_call>` tags in its content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import orjson
from jinja2 import Template

from server.errors import InvalidRequest, bounded
from server.template_environment import TemplateEnvironment, limited

MARK_START, MARK_END = "\U0010fffa", "\U0010fffb"
OPEN_END = "\U0010fffc "  # after a message to go on with; its space shows whether the template strips contents
REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call it, the first most often
MAX_REASON_CHARS = 300

_TOOLS = """\
You can call these functions. Each line describes one as a JSON schema:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags, one pair of tags for each call:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


class ChatTemplate:
    """One template with the names it may use."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        """`named_tokens` are what templates call bos_token, eos_token and so on; `control_tokens` are all tokens that
        text from a client must not turn into."""
        self._source = source
        self._named_tokens = dict(named_tokens)
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._knows_developer = "developer" in source
        self._knows_tools = "tool" in source
        self._lists_tools = re.search(r"\btools\b", source) is not None

    @cached_property
    def _template(self) -> Template:
        return TemplateEnvironment().from_string(self._source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Control tokens in `messages`, `tools`, `documents` and `variables` are wrapped in markers.

        Raises InvalidRequest when the template refuses the conversation.
        """
        if tools and not self._lists_tools:
            messages, tools = with_tools(messages, tools), None
        conversation = self._marked([_with_reasoning(self._degraded(message)) for message in messages])
        try:
            if continue_final_message:
                said = conversation[-1]["content"]
                conversation[-1]["content"] = said + OPEN_END
            with limited():
                rendered = self._template.render(
                    **{**self._named_tokens, **self._marked(dict(variables or {}))},
                    messages=conversation,
                    tools=self._marked(list(tools)) if tools else None,
                    documents=self._marked(list(documents)) if documents else None,
                    add_generation_prompt=add_generation_prompt,
                )
            return _up_to_open_end(rendered, said) if continue_final_message else rendered
        except Exception as error:  # whatever a template does with a client's messages is the client's to know
            reason = bounded(" ".join(str(error).split()) or type(error).__name__, MAX_REASON_CHARS)
            raise InvalidRequest(f"The chat template refused the messages: {reason}", param="messages") from error

    def _degraded(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        message = dict(turn)
        if message["role"] == "developer" and not self._knows_developer:
            message["role"] = "system"
        if self._knows_tools:
            return message
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if calls := message.pop("tool_calls", None):
            texts = [orjson.dumps(call["function"]).decode() for call in calls]
            tagged = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
            message["content"] = "\n".join([*filter(None, [message["content"]]), *tagged])
        return message

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            if self._control.search(value) is None:
                return value
            value = value.replace(MARK_START, "").replace(MARK_END, "")
            return self._control.sub(f"{MARK_START}\\g<0>{MARK_END}", value)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list) else value


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under the names that templates read it by, whichever it came under."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _up_to_open_end(rendered: str, said: str) -> str:
    """What the template wrote up to the end of the last message, of the content `said`."""
    at = rendered.rfind(OPEN_END[0])
    if at < 0 or said.strip() not in rendered:
        raise ValueError("it leaves out the final message, or a part of it, so that message cannot be continued")
    before = rendered[:at]
    return before if rendered.startswith(OPEN_END, at) else before.rstrip()


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message."""
    text = _TOOLS.format(tools="\n".join(orjson.dumps(tool).decode() for tool in tools))
    first, rest = dict(messages[0]), [dict(message) for message in messages[1:]]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, first, *rest]
    first["content"] = f"{first['content']}\n\n{text}" if first["content"] else text
    return [first, *rest]
