"""The tool loop with CrewAI, streamed."""

import loop
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


def main() -> None:
    """By /v1/chat/completions."""
    model = LLM(model=f"openai/{loop.MODEL}", base_url=loop.URL, api_key=loop.KEY, stream=True)
    tools = [tool(name)(function) for name, function in loop.TOOLS.items()]
    reader = Agent(role="reader", goal="Read files.", backstory="You read.", llm=model, tools=tools)
    task = Task(description=loop.PROMPT, expected_output="The words.", agent=reader)
    print(Crew(agents=[reader], tasks=[task], tracing=False).kickoff())


if __name__ == "__main__":
    main()
