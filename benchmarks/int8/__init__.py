"""Our int8 against the peers': models.py (what is quantized), methods.py (how), accuracy.py (the table)."""
