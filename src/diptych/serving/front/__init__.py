"""Engines that others run, as workers behind our edge: vLLM, SGLang, llama.cpp, any OpenAI-compatible server."""
