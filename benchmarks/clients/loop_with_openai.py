"""The tool loop with OpenAI's client, streamed: ``loop_with_openai.py chat|responses``."""

import json
import sys
from typing import Any

import loop
from openai import OpenAI


def chat(client: OpenAI) -> None:
    """By /v1/chat/completions."""
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": loop.SCHEMA, "strict": True}}
        for name, text in loop.DESCRIPTIONS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": loop.PROMPT}]
    for _ in range(loop.MOST_STEPS):
        with client.chat.completions.stream(model=loop.MODEL, messages=messages, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
        print(message.content)
        if not message.tool_calls:
            return
        messages.append(message)
        for call in message.tool_calls:
            result = loop.TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(client: OpenAI) -> None:
    """By /v1/responses; the history is the server's."""
    tools: Any = [
        {"type": "function", "name": name, "description": text, "parameters": loop.SCHEMA, "strict": True}
        for name, text in loop.DESCRIPTIONS.items()
    ]
    given: Any = loop.PROMPT
    last: str | None = None
    for _ in range(loop.MOST_STEPS):
        more: Any = {"previous_response_id": last} if last else {}
        with client.responses.stream(model=loop.MODEL, input=given, tools=tools, **more) as stream:
            response = stream.get_final_response()
        print(response.output_text)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return
        last = response.id
        results = [loop.TOOLS[call.name](**json.loads(call.arguments)) for call in calls]
        given = [
            {"type": "function_call_output", "call_id": call.call_id, "output": result}
            for call, result in zip(calls, results, strict=True)
        ]


if __name__ == "__main__":
    {"chat": chat, "responses": responses}[sys.argv[1]](OpenAI(base_url=loop.URL, api_key=loop.KEY))
