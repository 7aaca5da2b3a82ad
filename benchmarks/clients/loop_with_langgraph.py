"""The tool loop with LangGraph, as LangChain's agent, streamed."""

import loop
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def main() -> None:
    """By /v1/chat/completions."""
    model = ChatOpenAI(model=loop.MODEL, base_url=loop.URL, api_key=loop.KEY, streaming=True)
    agent = create_agent(model, tools=list(loop.TOOLS.values()))
    for step in agent.stream({"messages": [{"role": "user", "content": loop.PROMPT}]}, stream_mode="values"):
        print(step["messages"][-1].text)


if __name__ == "__main__":
    main()
