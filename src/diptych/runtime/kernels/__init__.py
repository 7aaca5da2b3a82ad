"""The native library: loading it, and choosing the instructions that it computes with."""
