"""Models in the GGUF format: architecture, tokenizer and weights in one file."""
