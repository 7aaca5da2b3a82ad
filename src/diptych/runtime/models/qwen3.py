"""Qwen3 (dense): RMS norm on each query and key head; biases only where the config asks for them."""

from diptych.runtime.models.layers import DecoderWeights, LayerLoader


def load_qwen3(loader: LayerLoader) -> DecoderWeights:
    """The weights of Qwen3ForCausalLM."""
    bias = loader.config.attention.bias
    layers = tuple(
        loader.layer(
            index,
            loader.attention(index, qkv_bias=bias, output_bias=bias, qk_norm=True),
            loader.mlp(index),
        )
        for index in range(loader.config.num_layers)
    )
    return loader.decoder(layers)
