"""Lets vLLM's CPU worker start with adapters in its vision tower and a connector: named as `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from benchmarks.vllm_probe import Probe

__all__ = ["CLASS", "Probe"]

CLASS = f"{__name__}.Probe"

_make = PunicaWrapperCPU.__init__


def _make_without_adapters(self: PunicaWrapperCPU, *arguments: Any, **named: Any) -> None:
    """To measure its widths vLLM 0.32 encodes before any mapping to adapters is set: from indices that are not
    initialised, which only CUDA's kernels survive. Until one is set, no token has an adapter.
    """
    _make(self, *arguments, **named)
    self.is_prefill = self.no_lora = True


PunicaWrapperCPU.__init__ = _make_without_adapters
