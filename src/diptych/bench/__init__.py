"""Load on any OpenAI-compatible server, and what came of it: latencies, goodput, stalls, interference."""
