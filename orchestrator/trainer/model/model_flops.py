"""Model FLOPs utilisation (MFU): the share of a card's peak that the model's own products need.

Chowdhery et al. 2022, appendix B. Counted are the products of one forward pass, and twice as many for the
backward pass. What is computed again under `train.activation_checkpointing` does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.trainer.model.factory_output import without_weights

# FLOP/s of a card for dense products, in bfloat16 and in float32 without TF32, from the makers' data sheets.
# A name must be words of the device's name; the first one counts.
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A10G": (70e12, 35e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "MI300X": (1307e12, 163.4e12),
    "MI250X": (191.5e12, 23.9e12),  # of one of its two dies, which torch shows as a device
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Returns the FLOP/s of a card under a `train.precision`; None if `PEAKS` does not have it."""
    cards = (peaks for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    of_card = next(cards, None)
    if of_card is None:
        return None
    return of_card[1] if precision == "float32" else of_card[0]


def forward_flops(model: nn.Module, seq_len: int) -> int | None:
    """Returns the FLOPs of one forward pass of a sample of `seq_len` tokens; None if it needs values.

    Runs the model on torch's meta device, which computes nothing and takes no memory. All of a sample's
    positions count as attended to, as is usual.
    """
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    ids = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), without_weights(), FlopCounterMode(display=False) as counter:
            functional_call(model, shapes, (ids,))
    except Exception:  # noqa: BLE001  a user's model; its errors are reported where it is trained
        return None
    return counter.get_total_flops() or None


class Utilisation:
    """Computes the MFU of steps. It is None if the card or the model's FLOPs are not known."""

    def __init__(self, flops_per_token: float | None, peak: float | None) -> None:
        """`flops_per_token`: of forward and backward pass. `peak`: FLOP/s of each worker's card."""
        self._per_token, self._peak = flops_per_token, peak

    @classmethod
    def of(
        cls,
        model: nn.Module,
        seq_len: int,
        precision: str,
        device: torch.device,
        device_name: Callable[[Any], str] = torch.cuda.get_device_name,
    ) -> Utilisation:
        """Reads the card's name, and counts the FLOPs of `model` if `PEAKS` has the card."""
        peak = peak_flops(device_name(device), precision) if device.type == "cuda" else None
        flops = forward_flops(model, seq_len) if peak is not None else None
        return cls(None if flops is None else 3 * flops / seq_len, peak)

    def of_step(self, tokens: int, step_s: float, world_size: int) -> float | None:
        """Returns the MFU of a step of `tokens` positions, from 0 to 1."""
        if self._per_token is None or self._peak is None or step_s <= 0:
            return None
        return tokens * self._per_token / (step_s * world_size * self._peak)
