"""Post-training quantization to the canonical int8 graph, on torchao's PT2E flow."""

import logging

# Importing torchao 0.18 on torch 2.14 logs a deprecation of its own making, which no user can mend.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
