"""What a model is told of tools when its chat template has no place for them.

The text goes to the end of the system message, which is made if there is none. It asks for the form of calls that the
Hermes parser reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_TEXT = """\
You can call these functions. Each line describes one as a JSON schema:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags, one pair of tags for each call:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message."""
    text = _TEXT.format(tools="\n".join(orjson.dumps(tool).decode() for tool in tools))
    first, rest = dict(messages[0]), [dict(message) for message in messages[1:]]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, first, *rest]
    first["content"] = f"{first['content']}\n\n{text}" if first["content"] else text
    return [first, *rest]
