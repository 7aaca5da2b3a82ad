"""A workload in one phrase, to say what is about to be measured or simulated."""

from diptych.workload.description import LengthConfig, WorkloadConfig

DEFAULT_RATE, DEFAULT_REQUESTS = 1.0, 1000  # of WorkloadConfig


def workload_words(workload: WorkloadConfig, *, has_count: bool = True) -> str:
    """ "1,000 requests at 1/s (poisson), prompts of 512 tokens, answers of 128". has_count False: something else ends
    it, so its number of requests is left out."""
    arrivals = workload.arrivals
    if workload.trace is not None:
        number = f"{workload.num_requests:,} requests of " if workload.num_requests is not None else ""
        pace = f" at {workload.rate:g}/s" if workload.rate is not None else ""
        pace += f", {workload.trace.scale:g} times as fast" if workload.trace.scale != 1.0 else ""
        return f"{number}the trace {workload.trace.path}{pace}"
    count = f"{workload.num_requests or DEFAULT_REQUESTS:,} requests" if has_count else "requests"
    if arrivals.kind == "closed":
        what = f"{count} of {arrivals.concurrency} clients that wait for their answers"
    else:
        what = f"{count} at {workload.rate or DEFAULT_RATE:g}/s ({arrivals.kind})"
    if workload.classes:
        return f"{what}, of {len(workload.classes)} classes"
    if workload.lengths.pairs:
        return f"{what}, lengths of {workload.lengths.pairs}"
    prompt, output = (_length_words(length) for length in (workload.lengths.prompt, workload.lengths.output))
    return f"{what}, prompts of {prompt} tokens, answers of {output}"


def _length_words(length: LengthConfig) -> str:
    if length.kind == "fixed":
        return f"{length.mean:g}"
    if length.kind == "uniform":
        return f"{length.min} to {length.max}"
    if length.kind == "empirical":
        return "drawn"
    return f"about {length.median or length.mean:g}"
