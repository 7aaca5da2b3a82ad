"""``diptych cache ls | verify | clear | warm``: the disk tier of the KV cache, from outside of a server."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli import shared_help
from diptych.cli.command_line import Command
from diptych.cli.error_messages import errors_in_words
from diptych.cli.examples import examples
from diptych.cli.options import GB, KERNEL_NAMES, model_path, tier_memory
from diptych.cli.output import print_tables
from diptych.control.config import DTypeName, KVDTypeName, ModelImplName, QuantizeName
from diptych.control.errors import ConfigError
from diptych.report.text import Table
from diptych.runtime.tiers import folder_view
from diptych.runtime.tiers.extent_format import DiskCodecName
from diptych.runtime.tiers.segment_folder import SegmentFolder
from diptych.serving.link.engine_options import (
    DeviceOptions,
    EngineOptions,
    InstructionSetName,
    MemoryOptions,
)
from diptych.serving.start_checks import check_start

NS_PER_HOUR = 3600 * 10**9

Folder = Annotated[Path, typer.Argument(help="Folder that --kv-disk names.")]
cache = typer.Typer(help="Look at, check, clear or fill the disk tier of the KV cache.", no_args_is_help=True)


@cache.command("ls", cls=Command, epilog=examples("cache ls"))
def list_formats(folder: Folder) -> None:
    """Say what a disk tier holds, by model."""
    with errors_in_words():
        rows = [_row(found) for found in folder_view.summaries(_opened(folder))]
        columns = (
            "model",
            "dtype",
            "kernels",
            "format",
            "tokens",
            "blocks",
            "extents",
            "segments",
            "GB",
            "used, h ago",
        )
        print_tables([Table(str(folder), columns, tuple(rows))], ())


@cache.command(cls=Command, epilog=examples("cache verify"))
def verify(folder: Folder) -> None:
    """Read everything and compare checksums. Damaged extents are dropped; the exit status is 1 if there were any."""
    with errors_in_words():
        opened, total = _opened(folder), folder_view.Verification()
        for segment in opened.segments():
            found = folder_view.verify(opened, segment)
            total.num_blocks += found.num_blocks
            total.num_damaged += found.num_damaged
            total.num_unreadable_bytes += found.num_unreadable_bytes
            if found.num_damaged or found.num_unreadable_bytes:
                print(
                    f"{segment.path.name}: {found.num_damaged} blocks damaged, {found.num_unreadable_bytes} bytes lost"
                )
        print(f"{total.num_blocks:,} blocks read, {total.num_damaged:,} damaged")
    if total.num_damaged or total.num_unreadable_bytes:
        raise typer.Exit(1)


@cache.command(cls=Command, epilog=examples("cache clear"))
def clear(
    folder: Folder,
    only: Annotated[
        str, typer.Option("--format", help="Clear only this format, by the beginning of its name in ls. Default: all.")
    ] = "",
) -> None:
    """Delete what a disk tier holds. What a running server writes to or reads stays."""
    with errors_in_words():
        freed, num_in_use = folder_view.clear(_opened(folder), only)
    print(f"{freed / GB:.3f} GB freed" + (f"; {num_in_use} segments are in use and stay" if num_in_use else ""))


@cache.command(cls=Command, epilog=examples("cache warm"))
def warm(
    file: Annotated[
        Path, typer.Argument(help='File of JSON lines: a text, or {"prompt": ...}, or {"messages": [...]}.')
    ],
    kv_disk: Annotated[Path, typer.Option(help="Folder to fill.")],
    kv_disk_gb: Annotated[float | None, typer.Option(help=shared_help.KV_DISK_GB)] = None,
    kv_disk_codec: Annotated[DiskCodecName, typer.Option(help=shared_help.KV_DISK_CODEC)] = "none",
    model: Annotated[
        Path | None, typer.Option(help="Model directory, or GGUF file. Default: the bundled model.")
    ] = None,
    model_impl: Annotated[ModelImplName, typer.Option(help=shared_help.MODEL_IMPL)] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 32,
    kv_dtype: Annotated[KVDTypeName, typer.Option(help=shared_help.KV_DTYPE)] = "auto",
    dtype: Annotated[DTypeName, typer.Option(help=shared_help.DTYPE)] = "auto",
    threads: Annotated[int | None, typer.Option(help=shared_help.THREADS)] = None,
    instruction_set: Annotated[InstructionSetName, typer.Option(*KERNEL_NAMES, help=shared_help.KERNELS)] = "auto",
    quantize: Annotated[QuantizeName, typer.Option(help=shared_help.QUANTIZE_AS_SERVE)] = "none",
) -> None:
    """Compute prompts ahead of time, so that a server that starts on this folder finds them.

    Model, what computes it, block size, arithmetic, kernels, quantization and dtype of the cache must be the server's.
    """
    with errors_in_words():
        entries = read_prompts(file)
        disk = {"kv_disk": kv_disk, "kv_disk_gb": kv_disk_gb, "kv_disk_codec": kv_disk_codec}
        given = {"kv_host_gb": 0.0, **disk, "prefix_cache": True}
        options = EngineOptions(
            model=str(model_path(model)),
            model_impl=model_impl,
            device=DeviceOptions(dtype=dtype, threads=threads, instruction_set=instruction_set, quantize=quantize),
            memory=MemoryOptions(block_size=block_size, kv_dtype=kv_dtype, **tier_memory(given)),
        )
        check_start(options)
        from diptych.control.request import SamplingParams
        from diptych.serving.llm import LLM

        llm = LLM(options=options)
        tokens = [_tokens(llm.tokenizer, entry) for entry in entries]
        llm.generate(tokens, SamplingParams(max_tokens=1, temperature=0.0))
        llm.close()
    print(f"{len(tokens)} prompts of {sum(map(len, tokens)):,} tokens are in {kv_disk}")


def read_prompts(file: Path) -> list[Any]:
    """The entries of a file for ``warm``. Raises ConfigError naming the line."""
    entries: list[Any] = []
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param="file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of {file} is no JSON: {error}", param="file") from None
        is_chat = isinstance(entry, dict) and isinstance(entry.get("messages"), list)
        if not is_chat and not isinstance(
            entry["prompt"] if isinstance(entry, dict) and "prompt" in entry else entry, str
        ):
            raise ConfigError(
                f'line {number} of {file} is neither a text nor {{"prompt": ...}} nor {{"messages": [...]}}',
                param="file",
            )
        entries.append(entry)
    if not entries:
        raise ConfigError(f"{file} holds no prompt", param="file")
    return entries


def _row(found: folder_view.FormatSummary) -> tuple[str, ...]:
    words = [str(found.description.get(name, "?")) for name in ("name", "dtype", "kernels")]
    counts = [f"{n:,}" for n in (found.num_tokens, found.num_blocks, found.num_extents, found.num_segments)]
    age_h = max(0.0, (time.time_ns() - found.used_ns) / NS_PER_HOUR)
    return (*words, found.format[:12], *counts, f"{found.num_bytes / GB:.3f}", f"{age_h:.1f}")


def _tokens(tokenizer: Any, entry: Any) -> list[int]:
    if isinstance(entry, str):
        return list(tokenizer.encode(entry))
    if "messages" in entry:
        return list(tokenizer.encode_chat(entry["messages"], add_generation_prompt=False))
    return list(tokenizer.encode(entry["prompt"]))


def _opened(folder: Path) -> SegmentFolder:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", param="folder")
    return SegmentFolder(folder, 1 << 62)
