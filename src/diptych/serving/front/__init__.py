"""Adapters that put external engines behind the router: vLLM, SGLang, llama.cpp, any OpenAI-compatible server."""
