"""Grammars that answers follow: made of schemas and tools, and tried in a process of their own."""
