"""Safetensors checkpoints whose weights are quantised: compressed-tensors, GPTQ and AWQ.

quantization_config.py reads what config.json says, packed_weight.py finds the tensors that make up a weight, and
unpack.py makes a QuantizedWeight of them.
"""
