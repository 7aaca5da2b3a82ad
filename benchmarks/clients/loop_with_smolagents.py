"""The tool loop with smolagents, streamed; its last answer is a call, too."""

import loop
from smolagents import OpenAIModel, ToolCallingAgent, tool


def main() -> None:
    """By /v1/chat/completions."""
    model = OpenAIModel(model_id=loop.MODEL, api_base=loop.URL, api_key=loop.KEY)
    agent = ToolCallingAgent(tools=[tool(each) for each in loop.TOOLS.values()], model=model, stream_outputs=True)
    print(agent.run(loop.PROMPT, max_steps=loop.MOST_STEPS))


if __name__ == "__main__":
    main()
