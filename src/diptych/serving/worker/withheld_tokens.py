"""First tokens of prompts that were computed before their decode workers had blocks for them: no client gets one before
the stream has a place to go on."""

from diptych.control.engine.worker_core import WorkerCore
from diptych.control.step import StepTokens, TokenLogprobs


class WithheldTokens:
    """Tokens of one worker that are computed and not given yet."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._tokens: dict[str, tuple[int, TokenLogprobs | None]] = {}

    def hold_back(self, tokens: StepTokens | None) -> StepTokens | None:
        """The tokens of a step that may be given now; the others stay here."""
        held = {name for name in tokens.request_ids if self._core.is_withheld(name)} if tokens else set()
        if tokens is None or not held:
            return tokens
        given = StepTokens([], [], prompt_logprobs=tokens.prompt_logprobs, embeddings=tokens.embeddings)
        for index, (name, token_id) in enumerate(zip(tokens.request_ids, tokens.token_ids, strict=True)):
            logprobs = tokens.logprobs.get(index)
            if name in held:
                self._tokens[name] = (token_id, logprobs)
            else:
                _give(given, name, token_id, logprobs)
        return given

    def release(self) -> StepTokens | None:
        """The tokens that may be given since the last call; what became of dropped attempts is forgotten."""
        free = [name for name in self._tokens if not self._core.is_withheld(name)]
        released = StepTokens([], [])
        for name in free:
            token_id, logprobs = self._tokens.pop(name)
            if name in self._core.engine.requests:
                _give(released, name, token_id, logprobs)
        return released if released.request_ids else None


def _give(tokens: StepTokens, name: str, token_id: int, logprobs: TokenLogprobs | None) -> None:
    if logprobs is not None:
        tokens.logprobs[len(tokens.token_ids)] = logprobs
    tokens.request_ids.append(name)
    tokens.token_ids.append(token_id)
