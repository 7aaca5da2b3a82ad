"""Granite 3 with experts: Granite whose layers are mixtures; the weights of a token's experts are a softmax of their
logits alone."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.experts import read_experts, read_routing
from diptych.runtime.models.granite import DEFAULTS, read_granite

DEFAULT_EXPERTS, DEFAULT_TOP_K = 8, 2  # what a config means that does not say


class GraniteMoe(Decoder):
    """A LanguageModel: Granite 3 with experts."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        routing = read_routing(fields, DEFAULT_EXPERTS, DEFAULT_TOP_K, scoring="softmax_of_top")
        return read_granite(fields, experts=read_experts(fields, routing))
