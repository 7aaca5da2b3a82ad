"""Two or three commands for the help of each command. tests/test_examples.py runs them.

What is written in capitals is the reader's own: MODEL (a directory or a file), KEY (a file), KEYS (a file), FOLDER,
BATCH (an id).
"""

SERVER = "http://127.0.0.1:8000"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "serve": (
        "diptych serve --prefill 1 --decode 1",
        "diptych serve MODEL --port 8001 --tpot-slo-ms 100",
        "diptych serve MODEL --quantize int8 --max-model-len 4096 --access-log requests.jsonl",
    ),
    "generate": (
        'diptych generate "def median(values):" --max-tokens 32',
        'diptych generate "import os" --model MODEL --temperature 0',
    ),
    "chat": ("diptych chat", f"diptych chat {SERVER}"),
    "bench": (
        "diptych bench --rate 4 --num-requests 100 --slo ttft=2s,tpot=100ms",
        f"diptych bench {SERVER} --interference --streams 2 --long-tokens 2000 --report interference.html",
        "diptych bench --find-goodput --slo ttft=2s,tpot=100ms --probe 10s",
    ),
    "simulate": (
        "diptych simulate --model llama-3-8b --hardware h100 --rate 5 --num-requests 1000",
        "diptych simulate --model llama-3-8b --hardware h100 --trace azure-conv --sweep rate=2:10:2 --slo ttft=200ms",
        "diptych simulate --list models",
    ),
    "plan": (
        "diptych plan --model llama-3.1-8b --hardware h100 --devices 2 --rate 8 --prompt-tokens 3000 "
        "--output-tokens 200 --slo ttft=1s,tpot=20ms",
    ),
    "advise": (
        f"diptych advise {SERVER}",
        "diptych advise --trace azure-conv --model llama-3.1-8b --hardware h100 --devices 2 --slo ttft=1s,tpot=50ms",
    ),
    "diagnose": (
        f"diptych diagnose {SERVER} --slo ttft=1s,tpot=50ms",
        f"diptych diagnose {SERVER} --json",
    ),
    "calibrate": ("diptych calibrate --output machine.json", "diptych calibrate --model MODEL --seconds 60"),
    "replay": ("diptych serve --record run.jsonl", "diptych replay run.jsonl"),
    "alerts": ("diptych alerts FOLDER",),
    "front": ("diptych front --engine vllm=http://127.0.0.1:8001 --engine vllm=http://127.0.0.1:8002 --port 8000",),
    "worker": (
        "diptych serve --both 0 --listen-workers 127.0.0.1:7000 --key-file KEY",
        "diptych worker --join 127.0.0.1:7000 --key-file KEY",
    ),
    "pull": ("diptych pull Qwen/Qwen3-0.6B", "diptych serve Qwen/Qwen3-0.6B --download"),
    "models": ("diptych models", "diptych models MODEL", "diptych models MODEL --json"),
    "guide": ("diptych guide", "diptych guide --port 9000 --open"),
    "cache": ("diptych serve --kv-disk FOLDER --kv-disk-gb 1", "diptych cache ls FOLDER"),
    "cache ls": ("diptych cache ls FOLDER",),
    "cache verify": ("diptych cache verify FOLDER",),
    "cache clear": ("diptych cache clear FOLDER",),
    "cache warm": ("diptych cache warm prompts.jsonl --kv-disk FOLDER",),
    "batch": ("diptych serve --batch-dir FOLDER", f"diptych batch run lines.jsonl --url {SERVER}"),
    "batch run": (
        f"diptych batch run lines.jsonl --output answers.jsonl --url {SERVER}",
        "diptych batch run lines.jsonl --model MODEL",
    ),
    "batch ls": (f"diptych batch ls --url {SERVER}",),
    "batch cancel": (f"diptych batch cancel BATCH --url {SERVER}",),
    "keys": ("diptych keys new web", "diptych keys check KEYS"),
    "keys new": (
        "diptych keys new web --requests-per-minute 600",
        "diptych keys new operator --admin",
    ),
    "keys check": ("diptych keys check KEYS",),
    "keys usage": (f"diptych keys usage --url {SERVER}",),
    "version": ("diptych version",),
}


def examples(name: str) -> str:
    """What stands below the options in the help of a command: a line for each of its examples."""
    return "\n\n".join(["Examples:" if len(EXAMPLES[name]) > 1 else "Example:", *EXAMPLES[name]])
