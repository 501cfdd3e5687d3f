"""What benchmarks/int8_accuracy.py compares: models.py (what is quantized), methods.py (how)."""
