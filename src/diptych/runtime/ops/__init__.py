"""Fused element-wise operations and prepacked linear layers: one interface, a native and a torch implementation."""
