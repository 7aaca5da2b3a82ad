"""Qwen2 and Qwen2.5: a bias on q, k and v; upper layers may have a sliding window."""

from diptych.runtime.models.layers import DecoderWeights, LayerLoader


def load_qwen2(loader: LayerLoader) -> DecoderWeights:
    """The weights of Qwen2ForCausalLM."""
    layers = tuple(
        loader.layer(index, loader.attention(index, qkv_bias=True), loader.mlp(index))
        for index in range(loader.config.num_layers)
    )
    return loader.decoder(layers)
