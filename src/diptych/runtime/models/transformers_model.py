"""The family of all models that the package transformers computes: see transformers_config.py for which these are, and
layers/transformers_layers.py for how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.runtime.models.transformers_config import TransformersConfig, read_transformers_config

if TYPE_CHECKING:
    import torch

    from diptych.runtime.layers.forward_pass import ForwardPass
    from diptych.runtime.layers.layer_loader import LayerLoader
    from diptych.runtime.models.config_fields import ConfigFields


class TransformersModel:
    """A LanguageModel whose layers are a class of transformers, with the engine's attention."""

    fits_cuda_graphs = False

    def __init__(self, config: TransformersConfig, load: LayerLoader) -> None:
        self.config = config
        self._layers = load.transformers_layers(config)

    @classmethod
    def read_config(cls, fields: ConfigFields) -> TransformersConfig:
        """Read a config.json by its class of transformers; raises as read_transformers_config does."""
        return read_transformers_config(fields)

    def forward(self, step: ForwardPass) -> torch.Tensor:
        """Compute all tokens of the batch; returns the last hidden states of its sample_rows: [num_samples, hidden]."""
        hidden = self._layers.hidden(step)
        return hidden if step.batch.is_decode else hidden[step.batch.sample_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] as from ``forward`` -> [rows, vocab]."""
        return self._layers.logits(hidden)
