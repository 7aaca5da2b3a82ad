"""A fleet as one worker: what the workers' Ready messages say together, for clients and for the checks of requests."""

from collections.abc import Mapping, Sequence

from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError
from diptych.control.router.topology import ROLES, Role
from diptych.serving.link.messages import Ready


def longest_sequence(ready: Ready) -> int:
    """Tokens of the longest prompt and answer that this worker takes."""
    return min(ready.max_model_len, ready.kv_capacity_tokens)


def joint_ready(roles: Mapping[int, Role], known: Mapping[int, Ready]) -> Ready:
    """What all workers in ``roles`` know, and the longest context of a decode worker, to which longer prompts go.
    Raises ConfigError for workers that cannot serve one model together."""
    workers = [known[number] for number in roles]
    if len({ready.block_size for ready in workers}) > 1:
        raise ConfigError("the workers' block sizes differ", param="block_size")
    if len({tuple(ready.eos_token_ids) for ready in workers}) > 1:
        raise ConfigError("the workers' models end their answers with different tokens", param="model")
    decoders = [known[number] for number, role in roles.items() if role != "prefill"]
    prefillers = [known[number] for number, role in roles.items() if role != "decode"]
    first, largest = workers[0], max(decoders, key=longest_sequence)
    return Ready(
        min(ready.vocab_size for ready in workers),
        largest.max_model_len,
        largest.kv_capacity_tokens,
        sum(ready.max_waiting for ready in prefillers),
        sum(ready.max_num_seqs for ready in decoders),
        first.eos_token_ids,
        _description(list(roles.values()), workers),
        num_blocks=sum(ready.num_blocks for ready in workers),
        block_size=first.block_size,
        instruction_set=first.instruction_set,
        weights=" + ".join(dict.fromkeys(ready.weights for ready in workers)),
        processor=first.processor,
        sequence_limits=sorted({longest_sequence(ready) for ready in decoders}),
        embedding_size=first.embedding_size,
        summary=fleet_summary(list(roles.values()), workers),
    )


def fleet_summary(roles: Sequence[Role], workers: Sequence[Ready]) -> str:
    """The fleet in words: "1 prefill + 1 decode worker, 1 core each"."""
    counts = [f"{roles.count(role)} {role}" for role in ROLES if role in roles]
    if set(roles) == {"both"}:
        counts = [str(len(roles))]
    plural = "s" if len(roles) > len(counts) or len(roles) > 2 else ""
    shares = dict.fromkeys(_units(ready.share) for ready in workers)
    units = " and ".join(filter(None, shares))
    each = " each" if units and len(roles) > 1 and len(shares) == 1 else ""
    return f"{' + '.join(counts)} worker{plural}" + (f", {units}{each}" if units else "")


def _units(share: ComputeShare) -> str:
    count, noun = (share.num_threads, "core") if share.num_threads else (share.num_sms, "multiprocessor")
    return f"{count} {noun}{'s' if count > 1 else ''}" if count else ""


def _description(roles: Sequence[Role], workers: Sequence[Ready]) -> str:
    """The roles, and each kind of worker once, in words."""
    if len(workers) == 1:
        return workers[0].description
    counts = " + ".join(f"{roles.count(role)} {role}" for role in ROLES if role in roles)
    kinds: dict[tuple[int, str], int] = {}
    for ready in workers:
        kind = (ready.max_model_len, ready.description)
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) == 1:
        return f"{counts}; each: {workers[0].description}"
    lines = [f"{count} x context {length:,}: {text}" for (length, text), count in kinds.items()]
    return f"{counts}; {'; '.join(lines)}"
