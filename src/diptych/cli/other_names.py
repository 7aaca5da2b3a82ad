"""Options under the names that other engines and other commands have for them.

What means the same is taken under either name; of the rest, a sentence says what there is instead.
"""

from collections.abc import Collection, Sequence

# Another name -> the option of ours that means the same, in the commands that have it.
SAME = {
    "--model-path": "--model",
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--chunked-prefill-size": "--max-batched-tokens",
    "--context-length": "--max-model-len",
    "--max-num-partial-prefills": "--max-partial-prefills",
    "--long-prefill-token-threshold": "--long-prefill-threshold",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--disable-radix-cache": "--no-prefix-cache",
    "--scheduling-policy": "--order",
    "--preemption-mode": "--preemption",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--uvicorn-log-level": "--log-level",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--tp": "--tensor-parallel",
    "--pipeline-parallel-size": "--pipeline-parallel",
    "-pp": "--pipeline-parallel",
    "--replicas": "--both",
    "--base-url": "--url",
    "--num-prompts": "--num-requests",
    "--request-rate": "--rate",
    "--max-concurrency": "--concurrency",
    "--random-input-len": "--prompt-tokens",
    "--random-output-len": "--output-tokens",
    "--trace": "--workload",
    "--workload": "--trace",
    "--out": "--output",
    # names that these options had before
    "--edge-depth": "--max-prefills-in-flight-per-worker",
    "--guess-coverage": "--draft-coverage",
    "--guess-acceptance": "--draft-acceptance",
    "--max-untouched-per-worker": "--max-prefills-in-flight-per-worker",
    "--deflection": "--local-prefill",
}

# Of the commands that simulate: --workers is how many serve, and processes are asked for by another name.
_PROCESSES = "--workers is the number of workers of a server; here: --processes (of this command), --replicas (workers)"
_ONE_DEVICE = "a worker computes on one device; here: --workers N for one worker on each of N devices"
_ADDRESS = "the address of a server stands alone, such as diptych chat http://127.0.0.1:8000"
_NONE = "there is no such option"
_KEYS = (
    f"{_NONE} here: diptych serve and diptych front ask for keys; other commands of this machine have none to ask for"
)

# Another name -> what there is instead; in commands that do not have the option.
INSTEAD = {
    "--workers": _PROCESSES,
    "--tensor-parallel-size": _ONE_DEVICE,
    "--tensor-parallel": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": "here: --workers N",
    "-dp": "here: --workers N",
    "--api-server-count": f"{_NONE}: one process answers clients; here: --workers N for more engines",
    "--distributed-executor-backend": f"{_NONE}: workers are processes of one host",
    "--enable-expert-parallel": f"{_NONE}: models with experts are simulated, not served",
    "--gpu-memory-utilization": "here: --kv-cache-memory SIZE for each worker (default: a share of the free memory)",
    "--mem-fraction-static": "here: --kv-cache-memory SIZE for each worker (default: a share of the free memory)",
    "--num-gpu-blocks-override": "here: --kv-cache-memory SIZE for each worker",
    "--swap-space": "here: --kv-host-gb GB, for each worker",
    "--cpu-offload-gb": f"{_NONE}: weights stay on the device that computes",
    "--enable-chunked-prefill": "prompts are computed in chunks by default; here: --shape chunked",
    "--no-enable-chunked-prefill": "here: --shape unified",
    "--kv-cache-dtype": "here: --kv-dtype int8 makes a KV cache of 8 bits on a CPU (default: the dtype of the model)",
    "--quantization": "the format is read from the checkpoint; here: --quantize int8 makes weights of 8 bits on a CPU",
    "-q": "the format is read from the checkpoint; here: --quantize int8 makes weights of 8 bits on a CPU",
    "--load-format": f"{_NONE}: safetensors and GGUF are recognised",
    "--enforce-eager": f"{_NONE}: leave it out; nothing is compiled at the start",
    "--compilation-config": f"{_NONE}: nothing is compiled at the start",
    "-O": f"{_NONE}: nothing is compiled at the start",
    "--trust-remote-code": f"{_NONE}: leave it out; code of a checkpoint is never run",
    "--tokenizer": f"{_NONE}: the tokenizer is that of the model's directory",
    "--tokenizer-mode": f"{_NONE}: the tokenizer is that of the model's directory",
    "--skip-tokenizer-init": f"{_NONE}: requests may send token ids, and get them with return_token_ids",
    "--chat-template": f"{_NONE}: the template is that of the model's directory",
    "--generation-config": f"{_NONE}: of generation_config.json only the end-of-text tokens are taken",
    "--hf-overrides": f"{_NONE}: edit config.json of the model's directory",
    "--revision": f"{_NONE}: give the directory of that revision",
    "--download-dir": f"{_NONE}: nothing is downloaded; hf download NAME --local-dir DIR does it",
    "--speculative-config": "here: --speculation auto, on or off (tokens are guessed from the prompt and the answer)",
    "--speculative-model": "here: --speculation auto, on or off (tokens are guessed from the prompt and the answer)",
    "--enable-lora": f"{_NONE}: adapters are not supported; merge one into the checkpoint first",
    "--lora-modules": f"{_NONE}: adapters are not supported; merge one into the checkpoint first",
    "--reasoning-parser": f"{_NONE}: leave it out; it is found from the model's chat template",
    "--tool-call-parser": "here: --tool-format; it is found from the model's chat template, mostly leave it out",
    "--enable-auto-tool-choice": f"{_NONE}: leave it out; tools are on",
    "--limit-mm-per-prompt": f"{_NONE}: models for text only",
    "--disable-log-requests": f"{_NONE}: leave it out; requests are not logged (--access-log FILE logs them)",
    "--no-enable-log-requests": f"{_NONE}: leave it out; requests are not logged (--access-log FILE logs them)",
    "--enable-log-requests": "here: --access-log FILE (-: standard error)",
    "--disable-log-stats": f"{_NONE}: leave it out; figures are at /metrics and /ui, not in the log",
    "--allowed-origins": "here: --cors-origin ORIGIN, repeatable",
    "--root-path": f"{_NONE}: pages and API use relative paths, so a proxy may serve them below a path of its own",
    "--ssl-keyfile": f"{_NONE}: put a proxy that speaks TLS in front",
    "--ssl-certfile": f"{_NONE}: put a proxy that speaks TLS in front",
    "--seed": f"{_NONE}: each request has its own (seed)",
    "--max-logprobs": f"{_NONE}: a request may ask for up to 20",
    "--kv-transfer-config": "here: --prefill N --decode N",
    "--disaggregation-mode": "here: --prefill N --decode N start all workers",
    "--disaggregation-transfer-backend": "here: --transfer",
    "--goodput": "here: --slo ttft=2s,tpot=50ms, and --find-goodput for the highest rate",
    "--dataset-name": "here: --prompt-tokens and --output-tokens, or --workload FILE",
    "--dataset-path": "here: --workload FILE",
    "--backend": "any OpenAI-compatible server is measured; here: --api completions or chat",
    "--endpoint": "here: --api completions or chat",
    "--percentile-metrics": f"{_NONE}: all are shown",
    "--save-result": "here: --output FILE",
    "--url": _ADDRESS,
    "--base-url": _ADDRESS,
    "--api-keys": _KEYS,
    "--api-key": _KEYS,
    "--admin-key": _KEYS,
    "--admin-key-file": _KEYS,
}


def translate(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line with other names replaced by the options that this command has. known: its options.

    Raises ValueError with a sentence for a name that has something else instead.
    """
    translated: list[str] = []
    for at, word in enumerate(words):
        if word == "--":
            return [*translated, *words[at:]]
        name, equals, value = word.partition("=")
        if name in known or not name.startswith("-"):
            translated.append(word)
        elif SAME.get(name) in known:
            translated.append(f"{SAME[name]}{equals}{value}")
        elif name in INSTEAD:
            raise ValueError(f"{name}: {INSTEAD[name]}")
        else:
            translated.append(word)
    return translated
