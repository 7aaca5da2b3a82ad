"""vLLM's offline engine behind a line protocol, so that it can be measured in turns with another engine.

Run by benchmarks/engine.py with the Python of vLLM's own environment. Reads one JSON command a line, answers with one:
    {"do": "prefill", "tokens": 2048}                        -> {"tok_s": ...}
    {"do": "decode", "batch": 8, "context": 512, "steps": 64} -> {"tok_s": ...}
"""

import json
import random
import sys
import time


def main() -> None:
    """Serve commands until standard input ends."""
    from vllm import LLM, SamplingParams

    answers = sys.stdout
    sys.stdout = sys.stderr  # vLLM logs to it
    llm = LLM(
        model=sys.argv[1], dtype="bfloat16", max_model_len=8192, max_num_seqs=32,
        enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    engine, rng, number = llm.llm_engine, random.Random(0), 0

    def add(num_tokens: int, num_outputs: int) -> str:
        nonlocal number
        number += 1
        prompt = {"prompt_token_ids": [rng.randrange(300, 16000) for _ in range(num_tokens)]}
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=num_outputs, temperature=0, ignore_eos=True))
        return str(number)

    def prefill(num_tokens: int) -> float:
        add(num_tokens, 1)
        began = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return num_tokens / (time.perf_counter() - began)

    def decode(batch: int, context: int, steps: int) -> float:
        ids = [add(context, steps + 64) for _ in range(batch)]
        counts = dict.fromkeys(ids, 0)
        began, first = 0.0, 0
        while True:
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if not began and min(counts.values()) > 0:
                began, first = time.perf_counter(), sum(counts.values())
            elif began and sum(counts.values()) - first >= batch * steps:
                rate = (sum(counts.values()) - first) / (time.perf_counter() - began)
                engine.abort_request(ids)
                while engine.has_unfinished_requests():
                    engine.step()
                return rate

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "prefill":
            rate = prefill(command["tokens"])
        else:
            rate = decode(command["batch"], command["context"], command["steps"])
        print(json.dumps({"tok_s": rate}), file=answers, flush=True)


if __name__ == "__main__":
    main()
