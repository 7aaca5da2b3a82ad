"""The tool loop with pydantic-ai, streamed: ``loop_with_pydantic_ai.py chat|responses|anthropic``."""

import asyncio
import sys
from collections.abc import AsyncIterable
from typing import Any

import loop
from pydantic_ai import Agent


def model(kind: str) -> Any:
    """The model by one of the three dialects."""
    if kind == "anthropic":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=loop.ROOT, api_key=loop.KEY)
        return AnthropicModel(loop.MODEL, provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=loop.URL, api_key=loop.KEY)
    return {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind](loop.MODEL, provider=provider)


async def read(context: Any, events: AsyncIterable[Any]) -> None:
    """Take what streams in, as an interface would that shows it."""
    async for _ in events:
        pass


async def main() -> None:
    """By the dialect that the first argument names. (Its run_stream would end at the first text, before the calls.)"""
    agent = Agent(model(sys.argv[1]), tools=list(loop.TOOLS.values()))
    print((await agent.run(loop.PROMPT, event_stream_handler=read)).output)


if __name__ == "__main__":
    asyncio.run(main())
