"""Decoder-only transformer families, read from their Hugging Face directories."""
