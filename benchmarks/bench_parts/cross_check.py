"""Three load generators against one server: do guidellm, aiperf and ``diptych bench`` measure the same?

    python benchmarks/bench.py cross_check --guidellm VENV --aiperf VENV [--url URL | --fake | --model DIR]

Without --url a server with the bundled model, or that of --model, is started. Where there are several cores, all of it
is on the first and the clients are on the last, so that a client's own processor time is not in what it measures. With
--fake it is the make-believe server, whose pace is known (first token after 30 ms, the others 10 ms apart) and does not
depend on the machine. Each tool sends the same number of requests at the same even rate, with prompts that ``diptych
bench`` would make (every run has texts of its own, so that no cache helps) and answers of one length; the tools take
turns. Compared: TTFT (median and mean over requests) from the actual sending, which is what the other two measure, and
ITL as they define it: per request the time from the first to the last token over the tokens after the first (our TPOT),
then median and mean over requests. A client on another core still shares memory and caches with the server and slows it
down; so a server of ours is also asked (its timeline) what the requests of each run took by its own clock, and each
tool's medians are compared with that: "/ server's".
Peers: pip install guidellm==0.8.* and aiperf==0.13.*, each into an environment of its own.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import HERE, OtherLoad, report

from diptych.bench.prompts import as_text
from diptych.bench.session import drive
from diptych.bench.target import Target, TargetConfig, client_for
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.workload.spec import RequestSpec

PACE = {"ttft_ms": 30.0, "itl_ms": 10.0}
COLUMNS = ("TTFT p50", "TTFT mean", "ITL p50", "ITL mean")


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The address of the server that is asked."""
    if options.url:
        yield options.url
        return
    fake = [sys.executable, str(HERE / "fake_sse_server.py"), "--pace", json.dumps(PACE)]
    real = [str(Path(sys.executable).parent / "diptych"), "serve", "--port", "0", "--cores", "0"]
    real += ["--model", str(options.model)] if options.model else []
    process = subprocess.Popen(fake if options.fake else on_core(real, 0), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"served at (http://\S+)|(http://127\S+:\d+)", line):
                yield (match[1] or match[2]).removesuffix("/v1")
                break
    finally:
        process.terminate()
        process.wait(20)


def on_core(command: Sequence[str], core: int) -> list[str]:
    """The command on one core, where there are several."""
    several = (os.cpu_count() or 1) > 1 and shutil.which("taskset")
    return ["taskset", "-c", str(core), *command] if several else list(command)


def run(command: Sequence[str], **environment: str) -> None:
    """A client to its end. Raises CalledProcessError with what it said."""
    last = (os.cpu_count() or 1) - 1
    done = subprocess.run(on_core(command, last), env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        done.check_returncode()


def ours(url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """``diptych bench``."""
    records = folder / "records.jsonl"
    run(
        [
            str(Path(sys.executable).parent / "diptych"), "bench", "--url", url, "--arrivals", "constant",
            "--rate", f"{options.rate}", "--num-requests", f"{options.requests}", "--prompts", "text",
            "--prompt-tokens", f"{options.prompt_tokens}", "--output-tokens", f"{options.output_tokens}",
            "--records", str(records),
        ]
    )  # fmt: skip
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert all(row["outcome"] == "completed" for row in rows), "a request failed"
    ttft = [1e3 * (row["arrival_s"] + row["ttft_s"] - row["sent_s"]) for row in rows]
    return figures(ttft, [1e3 * row["tpot_s"] for row in rows], [row["prompt_tokens"] for row in rows])


async def texts(url: str, options: argparse.Namespace, salt: str) -> list[str]:
    """Prompts of the wanted number of tokens, as this server counts them."""
    config = TargetConfig(url=url, prompts="text")
    client = client_for(config)
    maker = (await Target.find(config, client)).prompt_maker(salt)
    await client.close()
    spec = RequestSpec(arrival_ns=0, prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens)
    return [as_text(maker.units(spec, number)) for number in range(options.requests)]


def prompt_file(url: str, options: argparse.Namespace, folder: Path, **names: str) -> Path:
    """The prompts as JSON lines; names: what the tool calls the prompt and the number of tokens of its answer."""
    path = folder / "prompts.jsonl"
    rows = [
        {names["prompt"]: text, names["output"]: options.output_tokens}
        for text in drive(texts(url, options, folder.name + options.salt))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def guidellm(url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """guidellm 0.8."""
    path = folder / "guidellm.json"
    prompts = prompt_file(url, options, folder, prompt="prompt", output="output_tokens_count")
    run(
        [
            str(options.guidellm / "bin/guidellm"), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model={model_of(url)},request_format=/v1/completions",
            "--profile", f"kind=constant,rate={options.rate}",
            "--constraint", f"kind=max_requests,count={options.requests}",
            "--tokenizer", f"kind=hf_auto,model={options.tokenizer}", "--data", f"kind=json_file,path={prompts}",
            "--output", f"kind=json,path={path}",
        ],
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    rows = json.loads(path.read_text())["benchmarks"][0]["requests"]["successful"]
    ttft, itl = ([row[name] for row in rows] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return figures(ttft, itl, [row["prompt_tokens"] for row in rows])


def aiperf(url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """aiperf 0.13."""
    prompts = prompt_file(url, options, folder, prompt="text", output="output_length")
    run(
        [
            str(options.aiperf / "bin/aiperf"), "profile", "-m", model_of(url), "--url", url,
            "--endpoint-type", "completions", "--streaming", "--request-rate", f"{options.rate}",
            "--arrival-pattern", "constant", "--request-count", f"{options.requests}",
            "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
            "--tokenizer", str(options.tokenizer),
            "--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / "aiperf"),
            "--ui", "none",
        ]
    )  # fmt: skip
    found = json.loads((folder / "aiperf/profile_export_aiperf.json").read_text())
    ttft, itl = found["time_to_first_token"], found["inter_token_latency"]
    lengths = found["usage_prompt_tokens"], found["usage_completion_tokens"]
    assert lengths[1]["min"] == lengths[1]["max"] == options.output_tokens, "answers of another length"
    values = (ttft["p50"], ttft["avg"], itl["p50"], itl["avg"], ttft["count"], lengths[0]["avg"])
    return dict(zip((*COLUMNS, "requests", "prompt tokens"), values, strict=True))


def by_server(url: str, since: str, output_tokens: int) -> tuple[str, dict[str, float]]:
    """(the newest record of the server's timeline, medians of TTFT and ITL in milliseconds by its own clock over the
    requests that ended after record ``since``); without medians where there is no timeline or no request."""
    ended: list[dict[str, Any]] = []
    while True:
        try:
            with urllib.request.urlopen(f"{url}/timeline/records?since={since}&limit=1000") as reply:
                page = json.load(reply)
        except urllib.error.HTTPError:
            return since, {}
        ended += [record["detail"] for record in page["records"] if record.get("what") == "finished"]
        if not page["records"]:
            break
        since = page["next"]
    ended = [request for request in ended if request["num_output_tokens"] == output_tokens]
    if not ended:
        return since, {}
    ttft = [(request["queue_ns"] + request["prefill_ns"]) / 1e6 for request in ended]
    itl = [request["decode_ns"] / 1e6 / (output_tokens - 1) for request in ended]
    return since, {"server's TTFT p50": statistics.median(ttft), "server's ITL p50": statistics.median(itl)}


def figures(ttft: Sequence[float], itl: Sequence[float], prompts: Sequence[float]) -> dict[str, float]:
    """Median and mean of both, in milliseconds."""
    values = (statistics.median(ttft), statistics.fmean(ttft), statistics.median(itl), statistics.fmean(itl))
    counts = (len(ttft), statistics.fmean(prompts))
    return dict(zip((*COLUMNS, "requests", "prompt tokens"), values + counts, strict=True))


def model_of(url: str) -> str:
    """The served model's name."""
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        return str(json.load(reply)["data"][0]["id"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--guidellm", type=Path, help="its virtual environment")
    parser.add_argument("--aiperf", type=Path, help="its virtual environment")
    parser.add_argument("--url")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--model", type=Path, help="a directory: what is served, and whose tokenizer the tools load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--salt", default=f"{time.time_ns():x}", help="which texts the prompts are")


def main(options: argparse.Namespace) -> None:
    """Let the tools take turns, print each run and the medians beside ours."""
    options.tokenizer = options.model or Path(BUNDLED_MODEL).resolve()
    tools: dict[str, Any] = {"diptych bench": ours}
    tools |= {"guidellm": guidellm} if options.guidellm else {}
    tools |= {"aiperf": aiperf} if options.aiperf else {}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    loads = []
    with server(options) as url, tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, measure in tools.items():
                place = Path(folder) / f"{name}-{number}"
                place.mkdir()
                time.sleep(2)
                newest, _ = by_server(url, "0", options.output_tokens)
                load = OtherLoad()
                runs[name].append(measure(url, options, place))
                runs[name][-1] |= by_server(url, newest, options.output_tokens)[1]
                loads.append(load.cores())
                print(number, name, {key: round(value, 2) for key, value in runs[name][-1].items()}, file=sys.stderr)
    rows = []
    medians = {
        name: {key: statistics.median(sample[key] for sample in samples) for key in COLUMNS}
        for name, samples in runs.items()
    }
    for name, values in medians.items():
        row: dict[str, Any] = {"tool": name, **{f"{key} ms": round(value, 3) for key, value in values.items()}}
        for key in COLUMNS:
            row[f"{key} / ours"] = round(values[key] / medians["diptych bench"][key], 3)
        for key in ("TTFT p50", "ITL p50"):
            shares = [sample[key] / sample[f"server's {key}"] for sample in runs[name] if f"server's {key}" in sample]
            if shares:
                row[f"{key} / server's"] = round(statistics.median(shares), 3)
        rows.append(row)
    kind = "fake" if options.fake else options.url or (options.model.name if options.model else "bundled model")
    report(f"cross-check, {kind}", rows, options.json, runs=runs, others_cores=[round(load, 2) for load in loads])
