"""Distil, quantize, export and gate Vision Transformers for edge devices."""

__version__ = "0.1.0"
