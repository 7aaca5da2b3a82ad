"""What an answer says: content, reasoning and tool calls, read from its text by a declarative description."""
