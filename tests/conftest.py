"""What all tests share."""

from __future__ import annotations

import torch

# The machine's cores are for the workers of pytest-xdist; sums in another order would also make equal bits a matter of luck.
torch.set_num_threads(1)
