"""The tool loop with the OpenAI Agents SDK, streamed: ``loop_with_openai_agents.py responses|chat``."""

import asyncio
import sys

import loop
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


async def main() -> None:
    """By the model that the first argument names."""
    set_tracing_disabled(True)
    kind = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[sys.argv[1]]
    model = kind(loop.MODEL, AsyncOpenAI(base_url=loop.URL, api_key=loop.KEY))
    tools = [function_tool(tool) for tool in loop.TOOLS.values()]
    result = Runner.run_streamed(Agent(name="reader", model=model, tools=tools), loop.PROMPT)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
