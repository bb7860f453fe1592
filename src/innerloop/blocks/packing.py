"""Action heads whose products can lie as the few-row kernels read them."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import nn

from innerloop.kernels import skinny


class Packable(nn.Module):
    """A head that knows which of its weights those kernels take.

    packed_rows: up to how many rows of one robot they are the faster way; more go to dense weights.
    """

    packed_rows = 32  # one pass of theirs

    @abstractmethod
    def packable(self) -> Mapping[str, int]:
        """Parameter name -> distance of paired rows (skinny.pack); none where widths do not suit."""

    def pack(self, keep: bool = False) -> bool:
        """Lay them out so; False, and no change, where there are none.

        keep: hold on to the dense weights as well, for batches of more rows than those kernels take.
        """
        pairs = self.packable()
        for name, pair in pairs.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            packed = skinny.pack(getattr(module, leaf).data, pair, keep=keep)
            delattr(module, leaf)
            setattr(module, leaf, packed)
        return bool(pairs)
