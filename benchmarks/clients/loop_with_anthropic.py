"""The tool loop with Anthropic's client, streamed."""

from typing import Any

import loop
from anthropic import Anthropic


def main() -> None:
    """By /v1/messages."""
    client = Anthropic(base_url=loop.ROOT, auth_token=loop.KEY, api_key=None)
    tools: Any = [
        {"name": name, "description": text, "input_schema": loop.SCHEMA} for name, text in loop.DESCRIPTIONS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": loop.PROMPT}]
    for _ in range(loop.MOST_STEPS):
        with client.messages.stream(model=loop.MODEL, max_tokens=2000, messages=messages, tools=tools) as stream:
            message = stream.get_final_message()
        print("".join(block.text for block in message.content if block.type == "text"))
        if message.stop_reason != "tool_use":
            return
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": loop.TOOLS[block.name](**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


if __name__ == "__main__":
    main()
