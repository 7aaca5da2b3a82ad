"""OLMo 3: OLMo 2 with three layers of a sliding window to each with full attention; only the latter have YaRN."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.model_config import FULL, SLIDING, read_layer_kinds, read_ropes_by_kind, read_windows
from diptych.runtime.models.olmo2 import DEFAULTS, read_olmo

OLMO3_DEFAULTS: Mapping[str, Any] = {**DEFAULTS, "sliding_window": 4096}
DEFAULT_THETA = 500_000.0


class Olmo3(Decoder):
    """A LanguageModel: OLMo 3: OLMo 2 with windows on three of four layers."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(OLMO3_DEFAULTS)
        num_layers = fields.integer("num_hidden_layers")
        kinds = read_layer_kinds(fields, [SLIDING if (i + 1) % 4 else FULL for i in range(num_layers)])
        # transformers takes the theta beside the objects for full attention alone
        thetas = {FULL: fields.number("rope_theta", DEFAULT_THETA), SLIDING: DEFAULT_THETA}
        ropes = read_ropes_by_kind(fields, thetas)
        return read_olmo(fields, [ropes[kind] for kind in kinds], read_windows(fields, kinds))
