"""What all tests share."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# The machine's cores are for the workers of pytest-xdist; sums in another order would also make equal bits a matter of luck.
torch.set_num_threads(1)

# The same examples everywhere, so that what passes on one machine passes on the next; KAPSI_EXAMPLES=new draws new ones.
settings.register_profile(
    "kapsi",
    derandomize=os.environ.get("KAPSI_EXAMPLES") != "new",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # of how busy the machine is
)
settings.load_profile("kapsi")
