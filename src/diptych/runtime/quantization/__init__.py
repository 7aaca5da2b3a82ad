"""Safetensors checkpoints whose weights are quantised: compressed-tensors, GPTQ, AWQ, and FP8 in all its files.

quantization_config.py reads what config.json says. Of whole numbers, packed_weight.py finds the tensors that make up a
weight, and unpack.py makes a QuantizedWeight of them; of FP8, fp8_weight.py and fp8_values.py, which makes fp32.
"""
