"""Every buffer of a plan at a fixed address: one allocation a region, all state contiguous."""

from collections.abc import Sequence

import torch

from innerloop.contract.buffer import Role
from innerloop.contract.errors import MemoryPlanError
from innerloop.contract.plan import Plan
from innerloop.runtime.layout import ALIGN, Layout, aligned, lay_out


class Arena:
    """Zeroed memory for the buffers that `plans` share.

    `tensors` and `addresses` go by buffer name; both stay as they are for the life of the arena.
    Raises MemoryPlanError, with nothing allocated, when the device has not enough free memory.
    """

    def __init__(self, plans: Plan | Sequence[Plan], device: torch.device | str = "cpu") -> None:
        self.plans: tuple[Plan, ...] = (plans,) if isinstance(plans, Plan) else tuple(plans)
        self.device = torch.device(device)
        self.layout: Layout = lay_out(self.plans)
        self._refuse_if_too_big()
        with torch.inference_mode(False):  # inference tensors have no version counter, which checking needs
            self.regions = {name: self._region(size) for name, size in self.layout.regions.items()}
            self.tensors = {name: self._tensor(name) for name in self.layout.buffers}
        self.addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    @property
    def state(self) -> torch.Tensor:
        """All that a session owns on the device: uint8 [bytes], contiguous."""
        return self.regions[Role.STATE.value]

    def account(self) -> dict[str, int]:
        """Bytes by region, `scratch_unshared` and `total`."""
        return self.layout.account()

    def bytes_of(self, name: str) -> torch.Tensor:
        """A buffer's bytes with its alignment padding: uint8 [multiple of 256]."""
        region, offset = self.layout.places[name]
        return self.regions[region][offset : offset + aligned(self.layout.buffers[name].bytes)]

    def _refuse_if_too_big(self) -> None:
        if self.device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        account = self.account()
        if account["total"] > free:
            raise MemoryPlanError(
                f"the buffers of plan {self.plans[0].name} need {account['total']:,} bytes ({account}), but {free:,} "
                f"are free on {self.device}: free memory, or load with fewer cameras or a smaller batch"
            )

    def _region(self, size: int) -> torch.Tensor:
        whole = torch.zeros(size + ALIGN, dtype=torch.uint8, device=self.device)
        start = -whole.data_ptr() % ALIGN
        return whole[start : start + size]

    def _tensor(self, name: str) -> torch.Tensor:
        # set_ instead of a view: views of one region would share one version counter
        buffer = self.layout.buffers[name]
        region, offset = self.layout.places[name]
        base = self.regions[region]
        at = (base.storage_offset() + offset) // buffer.dtype.itemsize
        strides = torch.empty(buffer.shape, device="meta").stride()
        return torch.empty(0, dtype=buffer.dtype, device=self.device).set_(
            base.untyped_storage(), at, buffer.shape, strides
        )


def integrity_word(data: torch.Tensor) -> torch.Tensor:
    """A position-weighted checksum, int64 [], of uint8 [multiple of 256]; stays on the device, waits for nothing."""
    words = data.view(torch.int64).view(ALIGN // 8, data.numel() // ALIGN)
    # Modulo 2^64, along memory: words of 32 bits, which have to be widened, take five times as long.
    pieces = words.sum(dim=1)
    weights = torch.arange(1, 2 * pieces.numel(), 2, device=data.device)  # odd, so that no piece cancels out
    return (pieces * weights).sum()
