"""Llama and Mistral: biases only where a Llama config asks for them; Mistral may have a sliding window."""

from diptych.runtime.models.layers import DecoderWeights, LayerLoader


def load_llama(loader: LayerLoader) -> DecoderWeights:
    """The weights of LlamaForCausalLM and MistralForCausalLM."""
    config = loader.config
    bias = config.attention.bias
    layers = tuple(
        loader.layer(
            index,
            loader.attention(index, qkv_bias=bias, output_bias=bias),
            loader.mlp(index, bias=config.mlp_bias),
        )
        for index in range(config.num_layers)
    )
    return loader.decoder(layers)
