"""A model that the package transformers computes, with the engine's attention over the paged cache in place of its own.

Tokens of all sequences of a step go through the layers as one row of tokens; only attention knows sequences. Before a
model is served it is tried on a few tokens: beside another sequence and in chunks its hidden states must be those that
transformers' own attention gives, or the model keeps something else than keys and values, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.models.model_config import SLIDING, LayerAttention
from diptych.runtime.models.transformers_config import TransformersConfig, load_package

if TYPE_CHECKING:
    from diptych.runtime.attention.attention_backend import AttentionBackend
    from diptych.runtime.layers.parts import RopeAndCache

INTERFACE = "diptych"  # the name of this attention in transformers' table
ATTEND = "diptych_attend"  # the argument that brings it to the layers of one model
HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_router_logits"})
TRIAL_TOKENS, TRIAL_SPLIT, TRIAL_OTHER = 24, 17, 9  # of one sequence, of its first chunk, of a neighbour
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.3  # of hidden states, in parts of their length; in fp32, else


class TransformersLayers:
    """The layers of one model and what comes behind them. Making them reads the weights, and raises
    UnsupportedModelError for a model whose attention cannot be replaced."""

    def __init__(
        self, config: TransformersConfig, rope: RopeAndCache, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        self.config = config
        self._rope = rope  # without a rotation: keys and values come rotated
        self._model = _read_model(config, dtype, backend.device)
        self._head = _head_of(self._model)
        self._windows: dict[int, int | None] = {}  # that a layer has asked for
        try:
            self._try(backend)
        except (ConfigError, UnsupportedModelError):
            raise
        except Exception as error:  # of any kind: it is not our code
            why = (str(error).splitlines() or [""])[0][:200]
            raise self._unsupported(f"it fails with the engine's attention ({type(error).__name__}: {why})") from error

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        return self._head(hidden)

    def hidden(self, step: ForwardPass) -> torch.Tensor:
        """The last hidden states of all tokens of a step, [num_tokens, hidden]."""
        batch, attend = step.batch, _Attend(self, step)
        given = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None], ATTEND: attend}
        hidden: torch.Tensor = self._model.base_model(**given, use_cache=False, return_dict=True).last_hidden_state[0]
        if attend.layers != list(range(self.config.num_layers)):
            silent = sorted(set(range(self.config.num_layers)) - set(attend.layers))
            raise self._unsupported(
                f"layers {silent or attend.layers} keep no keys and values of their own (a state, those of another "
                "layer, or they attend by another way)"
            )
        return hidden

    def attend(self, step: ForwardPass, layer: int, parts: Sequence[torch.Tensor], how: LayerAttention) -> torch.Tensor:
        """Write keys and values of a layer and attend. parts: q, k, v [1, heads, num_tokens, head_dim] each."""
        heads = self.config.attention
        wanted = [(count, heads.head_dim) for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        found = [(part.shape[1], part.shape[3]) for part in parts]
        if found != wanted:
            raise self._unsupported(
                f"layer {layer} attends with queries, keys and values of (heads, values of a head) {found}; its config "
                f"says {wanted}"
            )
        self._windows[layer] = how.window
        cache = step.begin_layer(layer)
        rows = [part[0].transpose(0, 1).flatten(1) for part in parts]
        q = self._rope(torch.cat(rows, dim=1).to(self._model.dtype), cache, step)
        return step.attend(q, cache, how).view(1, len(q), heads.num_heads, heads.head_dim)

    def _unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.config.path}: {self.config.architecture} with model_impl transformers: {why}", param="model_impl"
        )

    # ---------------------------------------------------------------- the trial

    def _try(self, backend: AttentionBackend) -> None:
        """Raise UnsupportedModelError unless the model computes with this attention what it does with its own."""
        tokens = [7919 * (place + 1) % self.config.vocab_size for place in range(TRIAL_TOKENS + TRIAL_OTHER)]
        first, other = tokens[:TRIAL_TOKENS], tokens[TRIAL_TOKENS:]
        with torch.inference_mode():
            self._model.set_attn_implementation("eager")
            ids = torch.tensor([first], device=backend.device)
            own = self._model.base_model(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state[0]
            self._model.set_attn_implementation(INTERFACE)
            layers = self.config.num_layers
            both = self.hidden(Trial(backend, layers).step((0, 0, first), (1, 0, other)))[:TRIAL_TOKENS]
            trial = Trial(backend, layers)
            begun = self.hidden(trial.step((0, 0, first[:TRIAL_SPLIT])))
            rest = self.hidden(trial.step((1, 0, other), (0, TRIAL_SPLIT, first[TRIAL_SPLIT:])))[TRIAL_OTHER:]
        is_exact = backend.geometry.dtype == str(self._model.dtype).removeprefix("torch.") == "float32"
        self._check_windows()
        for what, hidden in (("beside another sequence", both), ("in chunks", torch.cat((begun, rest)))):
            difference = float((hidden.float() - own.float()).norm() / own.float().norm())
            if not difference <= (TOLERANCE if is_exact else ROUNDED_TOLERANCE):
                raise self._unsupported(
                    f"hidden states of {TRIAL_TOKENS} tokens differ by {difference:.2g} of their length from those of "
                    f"its own attention when they are computed {what}: it keeps more than keys and values, or attends "
                    "by other means"
                )

    def _check_windows(self) -> None:
        """A layer that has a window must say it where it attends: its own mask is not made."""
        own = self._model.config
        kinds, window = getattr(own, "layer_types", None), getattr(own, "sliding_window", None)
        if kinds is None or window is None:
            return
        for layer, kind in enumerate(kinds):
            if (self._windows[layer] is not None) != (kind == SLIDING):
                raise self._unsupported(
                    f"layer {layer} is of the kind {kind}, and attends with the window {self._windows[layer]}"
                )


class Trial:
    """A cache of its own for two short sequences, and steps of them."""

    def __init__(self, backend: AttentionBackend, num_layers: int) -> None:
        self._backend, self._size = backend, backend.geometry.block_size
        self._blocks = -(-TRIAL_TOKENS // self._size)
        self._caches = [backend.allocate(2 * self._blocks) for _ in range(num_layers)]

    def step(self, *chunks: tuple[int, int, Sequence[int]]) -> ForwardPass:
        """chunks: (sequence, its position, tokens) each."""
        device = self._backend.device

        def ints(values: Sequence[object], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        tables = [range(sequence * self._blocks, (sequence + 1) * self._blocks) for sequence, _, _ in chunks]
        positions = [place for _, start, tokens in chunks for place in range(start, start + len(tokens))]
        slots = [
            table[place // self._size] * self._size + place % self._size
            for table, (_, start, tokens) in zip(tables, chunks, strict=True)
            for place in range(start, start + len(tokens))
        ]
        starts = [sum(len(tokens) for _, _, tokens in chunks[:count]) for count in range(len(chunks) + 1)]
        contexts = [start + len(tokens) for _, start, tokens in chunks]
        batch = InputBatch(
            token_ids=ints([token for _, _, tokens in chunks for token in tokens], torch.int64),
            positions=ints(positions, torch.int64),
            slot_mappings=(ints(slots, torch.int64),),
            query_start=ints(starts),
            context_lens=ints(contexts),
            block_tables=(ints([list(table) for table in tables]),),
            sample_rows=ints([], torch.int64),
            num_decodes=0,
            max_query_len=max(len(tokens) for _, _, tokens in chunks),
            max_context_len=max(contexts),
        )
        return ForwardPass(batch, self._caches, self._backend)


class _Attend:
    """What the layers of one model call in one step. layers: those that have, in order."""

    def __init__(self, model: TransformersLayers, step: ForwardPass) -> None:
        self._model, self._step = model, step
        self.layers: list[int] = []

    def __call__(self, module: Any, parts: Sequence[torch.Tensor], how: LayerAttention) -> torch.Tensor:
        layer = int(module.layer_idx)
        self.layers.append(layer)
        return self._model.attend(self._step, layer, parts, how)


def attend_paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention: q, k, v [1, heads, num_tokens, head_dim] ->
    [1, num_tokens, heads, head_dim]. Raises UnsupportedModelError for what this attention does not compute."""
    attend = others.pop(ATTEND, None)
    unknown = [name for name, given in others.items() if given is not None and name not in HARMLESS]
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unknown.append("is_causal")
    if attention_mask is not None:
        unknown.append("attention_mask")
    if attend is None or unknown or not hasattr(module, "layer_idx"):
        what = f"arguments {sorted(unknown)}" if unknown else "no way to the engine"
        raise UnsupportedModelError(
            f"{type(module).__name__} with model_impl transformers: its attention has {what}", param="model_impl"
        )
    how = LayerAttention(query.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap)
    return attend(module, (query, key, value), how), None


def _read_model(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of the directory. Raises UnsupportedModelError for a class that transformers has not, or whose
    attention cannot be replaced, ConfigError for tensors that are missing or too many."""
    package = load_package()
    package.AttentionInterface.register(INTERFACE, attend_paged)
    package.utils.logging.disable_progress_bar()
    made = getattr(package, config.architecture, None)
    if made is None or not getattr(made, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{config.path}: {config.architecture} with model_impl transformers: transformers {package.__version__} "
            f"has {'no such class' if made is None else 'it, but its attention cannot be replaced'}",
            param="model_impl",
        )
    model, info = made.from_pretrained(
        config.path, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    for kind, what in (
        ("missing_keys", "missing in the checkpoint"),
        ("unexpected_keys", "not part of this architecture"),
    ):
        if names := sorted(info[kind]):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"{config.path}: tensor {names[0]}{more} is {what}", param="model")
    return model.to(device).eval()


def _head_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden [rows, hidden] -> logits [rows, vocab], by all that the class does behind its layers: itself, with a
    stand-in for these."""

    class Layers(torch.nn.Module):
        """Gives what it was told to, also as any of its parts."""

        hidden: torch.Tensor

        def forward(self, *_: Any, **__: Any) -> Any:
            return outputs(last_hidden_state=self.hidden)

        def __getattr__(self, name: str) -> Any:
            return self if name in model.base_model._modules else super().__getattr__(name)

    outputs = load_package().modeling_outputs.MoeModelOutputWithPast  # the fields of all
    layers, head = Layers(), copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: layers}

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        layers.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        found: torch.Tensor = head(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        return found

    return logits
