"""What benchmarks/latency.py is made of: the models, who makes artefacts of them, and the clock over all their processes."""
