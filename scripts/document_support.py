"""docs/supported.md and the table at the head of README.md: what is supported, from the tables of the code.

Facts that no table of the code holds (what an instruction set needs, which published models an architecture is) are
here, keyed by the names of the code: a name without one is an error.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from document_settings import table_row

from diptych.control.config import QuantizeName
from diptych.runtime.dtypes import COMPUTE_DTYPES, DTYPES
from diptych.runtime.gguf.ggml_types import GGML_TYPES
from diptych.runtime.gguf.gguf_config import ARCHITECTURES
from diptych.runtime.kernels.instruction_set import NATIVE_SETS
from diptych.runtime.models.registry import MODELS
from diptych.runtime.quantization.quantization_config import METHODS
from diptych.runtime.transfer import CONNECTORS
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.api import messages_request, protocol, responses_request
from diptych.serving.api.app import build_app
from diptych.serving.api.bodies import WITHOUT_EFFECT
from diptych.serving.api.parameters import UNSUPPORTED
from diptych.serving.async_llm import AsyncLLM
from diptych.simulation.fleet.links import LINKS
from diptych.simulation.hardware import hardware_names
from diptych.simulation.model_catalogue import model_names
from diptych.simulation.serving_engine import engine_names
from diptych.workload.packed import BUNDLED

ROOT = Path(__file__).parents[1]
NEEDS = {
    "amx": "Intel AMX tiles in bfloat16 (Sapphire Rapids and later)",
    "avx512_bf16": "AVX-512 with BF16 (AMD Zen 4 and later, Intel Cooper Lake)",
    "avx512": "AVX-512 (F, BW, VL, DQ)",
    "avx2": "AVX2 and FMA",
}
TITLES = {"amx": "AMX", "avx512_bf16": "AVX512-BF16", "avx512": "AVX-512", "avx2": "AVX2"}
PUBLISHED = {
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (also as `Gemma3ForConditionalGeneration`: the text part)",
    "Glm4MoeForCausalLM": "GLM-4.5, GLM-4.5-Air and GLM-4.6",
    "GptOssForCausalLM": "gpt-oss 20b and 120b, in MXFP4 as published or in bf16",
    "GraniteForCausalLM": "Granite 3 and 4 without experts and without state-space layers",
    "GraniteMoeForCausalLM": "Granite 3 with experts (without shared experts)",
    "Lfm2ForCausalLM": "LFM2 and LFM2.5 without experts",
    "LlamaForCausalLM": "Llama 2, 3, 3.1 and 3.2, SmolLM2, and others of that architecture",
    "Ministral3ForCausalLM": "Ministral 3 and Devstral 2 (also as `Mistral3ForConditionalGeneration`: the text part)",
    "MistralForCausalLM": "Mistral 7B, with and without a sliding window; Mistral Small 3 (also as "
    "`Mistral3ForConditionalGeneration`: the text part)",
    "MixtralForCausalLM": "Mixtral",
    "MuseGlimmerForConditionalGeneration": "Muse Glimmer: the text part",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5 and Phi-4 mini and medium, Phi-4",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "Qwen2ForCausalLM": "Qwen 2 and 2.5",
    "Qwen3ForCausalLM": "Qwen 3 without experts",
    "Qwen3MoeForCausalLM": "Qwen 3 with experts: 30B-A3B, 235B-A22B, Coder",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
}
# How an architecture is proven; every one of them also by RANDOM.
RANDOM = "random weights against transformers, in fp32"
REAL = {
    "Gemma3ForCausalLM": "a real checkpoint (Gemma 3 270M, GGUF)",
    "LlamaForCausalLM": "a real checkpoint (SmolLM2-135M)",
}
OTHERS = """
Other architectures whose attention goes through the attention interface of the package transformers are computed by
it with `--model-impl transformers`, at PyTorch's speed and without the promise of equal bits
([checkpoints.md](checkpoints.md#other-classes-of-transformers)). Proven by random weights against transformers, in
fp32: Apertus, Arcee, BitNet, Cohere, Cohere2, Dots1, Ernie4_5, Ernie4_5_Moe, Exaone4, FlexOlmo, GPTNeoX, Gemma, Glm,
Glm4, Helium, HunYuanDenseV1, Jais2, MiniMaxM2, OPT, Olmo, Persimmon, Phi, Qwen2Moe and Starcoder2.
"""
GGUF_NOTES = {  # beside the architecture of that name, or instead of one
    "MistralForCausalLM": "as `llama`, with a window",
    "MixtralForCausalLM": "as `llama`, with experts",
    "Ministral3ForCausalLM": "as `mistral3`, with a temperature of queries",
    "Olmo3ForCausalLM": "as `olmo2`, with a window",
}
# Paths that clients of other servers may look for; those that this server has are left out of the page.
ELSEWHERE = (
    *("/v1/embeddings", "/v1/files", "/v1/batches", "/v1/audio/transcriptions", "/v1/images/generations"),
    *("/v1/moderations", "/v1/fine_tuning/jobs", "/v1/rerank", "/score", "/pooling", "/classify"),
)
MACHINES = """
`auto` takes the first of these that the processor has. The tests of the kernels run on every set of the machine that
runs them, and on AMX emulated in plain C++ where there is none. Weights of 8 and 4 bits use the dot products of VNNI
where they exist. Answers are bitwise reproducible within one set ([determinism.md](determinism.md)).

macOS, Windows and processors other than x86-64 are not tested. Several workers share memory on Linux only.

## GPUs

CUDA by PyTorch, one GPU for each worker; weights in floating point (quantised checkpoints are widened when they are
loaded). Not tested in continuous integration: `pytest -m cuda` runs the tests of it where there is a GPU. The figures
of the engine in the benchmarks are of CPUs; the GPUs of the simulator are priced from published measurements
([simulation.md](simulation.md#where-durations-come-from)).
"""
METHODS_OF_HTTP = ("get", "post", "put", "delete")
HEAD = """# What is supported

This page is written by `scripts/docs tables` from the tables of the code; a test compares it with them. What a
checkpoint or a request asks for beyond it is refused by name.

"""


def supported_page() -> str:
    """The whole page."""
    api = openapi()
    parts: Iterable[Iterable[str]] = (
        [HEAD, readme_table(api)],
        _machines(),
        _models(),
        _parallelism(),
        _routes(api),
        *(_fields(path, schema) for path, schema in _bodies(api)),
        _refusals(),
        _catalogue(),
    )
    return "".join(text for part in parts for text in part)


def openapi() -> dict[str, Any]:
    """What /openapi.json of a server says."""
    return build_app(AsyncLLM(), "model").openapi()


def readme_table(api: Mapping[str, Any] | None = None) -> str:
    """The short form, for README.md."""
    routes = [path for path, operations in (api or openapi())["paths"].items() if "post" in operations]
    served = [path for path in routes if not path.startswith("/admin") and "{" not in path]
    rows = {
        "systems": f"Linux, Python {_python()}; a C++ compiler for the native kernels",
        "processors": f"x86-64 with {_join([TITLES[name] for name in _sets()])} by native kernels; others by those of "
        "PyTorch",
        "GPUs": "NVIDIA by PyTorch and CUDA, one GPU for each worker. **Continuous integration has no GPU**: the tests "
        "marked `cuda` run only where there is one",
        "models": f"{_join([_class(name) for name in MODELS])} architectures, text only: each proven by {RANDOM}, and "
        f"{_join([_class(name) for name in REAL])} by real checkpoints, too",
        "weights": f"safetensors in {_join(list(DTYPES))}; {_join(list(METHODS))}; GGUF. On a CPU also "
        f"`--quantize {'`, `'.join(name for name in get_args(QuantizeName) if name != 'none')}`",
        "parallelism": "one device for each worker, any number of workers that prefill, decode or do both. No tensor, "
        "pipeline or expert parallelism in `serve` (the simulator has them)",
        "API": ", ".join(f"`{path}`" for path in served),
    }
    return "| | |\n|---|---|\n" + _rows(rows.items())


def _rows(rows: Iterable[Iterable[str]]) -> str:
    return "".join(table_row(*row) for row in rows)


def _join(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _class(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


def _sets() -> list[str]:
    return list(dict.fromkeys(name for sets in NATIVE_SETS.values() for name in reversed(sets)))


def _python() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["requires-python"]).removeprefix(">=") + " or newer"


def _machines() -> Iterator[str]:
    yield "\n## Processors\n\n| `--kernels` | needs | bfloat16 | float32 |\n|---|---|---|---|\n"
    for name in reversed(_sets()):
        marks = ("yes" if name in NATIVE_SETS[dtype] else "" for dtype in (torch.bfloat16, torch.float32))
        yield table_row(f"`{name}`", NEEDS[name], *marks)
    yield table_row("`torch`", "any processor for which PyTorch exists", "yes", "yes")
    yield MACHINES


def _models() -> Iterator[str]:
    yield "\n## Models\n\n| architecture in `config.json` | published models | proven by | in GGUF |\n"
    yield "|---|---|---|---|\n"
    for name in MODELS:
        kept = [f"`{key}`" for key, architecture in ARCHITECTURES.items() if architecture == name]
        proofs = [*([REAL[name]] if name in REAL else []), RANDOM]
        stored = ", ".join([*kept, *([GGUF_NOTES[name]] if name in GGUF_NOTES else [])])
        yield table_row(f"`{name}`", PUBLISHED[name], "; ".join(proofs), stored)
    yield OTHERS
    types = [kind.name for kind in GGML_TYPES.values() if kind.num_bytes is not None]
    rows = {
        "dtypes of weights": ", ".join(f"`{name}`" for name in DTYPES),
        "arithmetic (`--dtype`)": ", ".join(f"`{name}`" for name in COMPUTE_DTYPES),
        "`quant_method`": ", ".join(f"`{name}`" for name in METHODS),
        "GGUF weights": ", ".join(f"`{name}`" for name in types),
        "tool calls and reasoning": ", ".join(f"`{name}`" for name in TEMPLATES),
    }
    yield "\nDetails and limits of each format: [checkpoints.md](checkpoints.md), [structured.md](structured.md).\n\n"
    yield "| | |\n|---|---|\n" + _rows(rows.items())


def _parallelism() -> Iterator[str]:
    yield "\n## Workers and parallelism\n\n| | `serve` | `simulate`, `plan` |\n|---|---|---|\n"
    yield table_row("workers that prefill, decode or do both", "yes, roles change live", "yes")
    for name in ("tensor", "pipeline", "expert", "data"):
        yield table_row(f"{name} parallelism", "no (several workers instead)" if name == "data" else "no", "yes")
    yield table_row("KV between workers", ", ".join(f"`{name}`" for name in CONNECTORS), "links by name, below")
    yield table_row("hosts", "workers of other hosts join over TLS (`diptych worker --join`)", "any number")


def _routes(api: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Routes\n\n| | |\n|---|---|\n"
    for path, operations in api["paths"].items():
        for method in METHODS_OF_HTTP:
            if method in operations:
                about = operations[method].get("description", "").split(". ")[0].rstrip(".")
                yield table_row(f"`{method.upper()} {path}`", about.replace("``", "`"))
    missing = ", ".join(f"`{path}`" for path in ELSEWHERE if path not in api["paths"])
    yield f"\nNot served (404): {missing}.\n"


def _bodies(api: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, schema of its body) of the routes that clients send bodies to."""
    for path, operations in api["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        found = None if body is None else body["content"].get("application/json")  # not of uploads
        if found is not None and not path.startswith("/admin"):
            reference = found["schema"]["$ref"]
            yield path, api["components"]["schemas"][reference.rpartition("/")[2]]


def _fields(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## Fields of `{path}`\n\n| field | values | |\n|---|---|---|\n"
    for name, field in sorted(schema["properties"].items()):
        is_required = name in schema.get("required", ())
        yield table_row(f"`{name}`" + " (required)" * is_required, schema_words(field), field.get("description", ""))


def schema_words(field: Mapping[str, Any]) -> str:
    """What a value may be, from its JSON schema."""
    if "$ref" in field:
        return "object"
    if "anyOf" in field:
        words = [schema_words(each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "any")
    names = {"integer": "whole number", "string": "text", "boolean": "`true`, `false`"}
    if kind == "array":
        most = f", at most {field['maxItems']:,}" if "maxItems" in field else ""
        return f"list of: {schema_words(field.get('items', {}))}{most}"
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    parts = [f"{word} {_number(field[key])}" for key, word in limits.items() if key in field]
    return " ".join([names.get(kind, kind), *parts])


def _number(value: float) -> str:
    powers = {2**exponent - 1: f"2^{exponent} - 1" for exponent in (31, 32, 63)} | {
        -(2**31): "-2^31",
        -(2**63): "-2^63",
    }
    return powers.get(value, f"{value:g}")  # type: ignore[call-overload, no-any-return]


def _refusals() -> Iterator[str]:
    yield "\n## Fields that are refused\n\nWith 400 and `unsupported`, unless they have a value that changes nothing.\n"
    yield "\n| API | field | accepted all the same |\n|---|---|---|\n"
    of_responses: Mapping[str, tuple[Any, ...]] = responses_request._UNSUPPORTED
    tables: dict[str, Mapping[str, tuple[Any, ...]]] = {
        "completions, chat": UNSUPPORTED,
        "responses": of_responses,
    }
    for api, fields in tables.items():
        for name, harmless in sorted(fields.items()):
            values = dict.fromkeys(str(value).lower() if isinstance(value, bool) else repr(value) for value in harmless)
            serves_chat = fields is UNSUPPORTED and name in protocol.ChatBody.model_fields
            yield table_row(
                "completions" if serves_chat else api, f"`{name}`", ", ".join(f"`{value}`" for value in values)
            )
    known = protocol.ChatBody.model_fields.keys()
    of_messages = ", ".join(f"`{name}`" for name in sorted(messages_request.WITHOUT_EFFECT))
    yield "\nTaken without an effect: " + ", ".join(f"`{name}`" for name in sorted(WITHOUT_EFFECT - known))
    yield f"; of messages {of_messages}.\n"
    yield "Left out of messages and named: " + ", ".join(f"`{name}`" for name in messages_request.LEFT_OUT) + ".\n"
    yield "Any other field is ignored and named in the header `x-ignored-fields`, or refused with `--strict`.\n"


def _catalogue() -> Iterator[str]:
    names = {
        "`--model`": model_names(),
        "`--hardware`": hardware_names(),
        "`--link`": LINKS,
        "`--engine`": engine_names(),
        "`--trace`": BUNDLED,
    }
    yield "\n## The catalogue of the simulator\n\n| option | names |\n|---|---|\n"
    yield _rows((option, ", ".join(f"`{name}`" for name in sorted(known))) for option, known in names.items())
