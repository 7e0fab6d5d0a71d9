"""A conversation into the prompt text its model was trained on, by the model's own Jinja template.

Rendered by transformers' sandboxed renderer, which is imported when the first chat is rendered, in a worker thread:
nothing here runs on the event loop. What a template refuses becomes a 400 in its own words.

Literal control tokens in contents (`<|im_end|>` typed by a user) are wrapped in markers before rendering, so that
whoever tokenises the result can tell them from those the template wrote.

Templates that do not speak of tools, or of a role, degrade by these rules: tools are listed at the end of the system
message, which is made if there is none, and asked for in the form that the Hermes parser reads; `developer` becomes
`system`; a `tool` message becomes a `user` message holding `<tool_response>` tags; an assistant's calls become
`<tool_call>` tags in its content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import orjson

from server.errors import InvalidRequest, bounded

MARK_START, MARK_END = "\U0010fffa", "\U0010fffb"
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

    def warm_up(self) -> None:
        """Import the renderer and compile the template, so that the first chat does not wait for it."""
        _renderer()[0]._compile_jinja_template(self._source)

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
        conversation = self._marked([self._degraded(message) for message in messages])
        names = {**self._named_tokens, **self._marked(dict(variables or {}))}
        try:
            renderer, limited = _renderer()
            with limited():
                rendered, _ = renderer.render_jinja_template(
                    [conversation],
                    tools=self._marked(list(tools)) if tools else None,
                    documents=self._marked(list(documents)) if documents else None,
                    chat_template=self._source,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **names,
                )
        except Exception as error:  # whatever a template does with a client's messages is the client's to know
            reason = bounded(" ".join(str(error).split()) or type(error).__name__, MAX_REASON_CHARS)
            raise InvalidRequest(f"The chat template refused the messages: {reason}", param="messages") from error
        return str(rendered[0])

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


def _renderer() -> tuple[Any, Callable[[], AbstractContextManager[None]]]:
    """What renders, and what bounds its time."""
    from transformers.utils import chat_template_utils  # most of a second, so not before it is needed

    from server.template_time import TimedEnvironment, limited

    renderer: Any = chat_template_utils
    renderer.ImmutableSandboxedEnvironment = TimedEnvironment  # NOTE: it offers no other way in
    return renderer, limited


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message."""
    text = _TOOLS.format(tools="\n".join(orjson.dumps(tool).decode() for tool in tools))
    first, rest = dict(messages[0]), [dict(message) for message in messages[1:]]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, first, *rest]
    first["content"] = f"{first['content']}\n\n{text}" if first["content"] else text
    return [first, *rest]
