"""Costs against counts made by hand."""

from innerloop.kernels.activation import cost as activation
from innerloop.kernels.attention import cost as attention
from innerloop.kernels.cost import Cost
from innerloop.kernels.embedding import cost as embedding
from innerloop.kernels.euler import cost as euler
from innerloop.kernels.image import cost as image
from innerloop.kernels.linear import cost as linear
from innerloop.kernels.norm import cost as norm
from innerloop.kernels.rope import cost as rope


def test_bytes_and_flops() -> None:
    assert norm.norm(576, 2048).bytes == 2 * (576 * 2048 * 2 + 2048)
    assert norm.norm(576, 2048, added=True).bytes == 2 * (4 * 576 * 2048 + 2048)
    assert norm.gated_add(10, 1024).bytes == 2 * 3 * 10 * 1024 + 4 * 1024
    assert activation.glu(576, 16384).bytes == 576 * 16384 * 3 * 2
    assert linear.linear(560, 32768, 2048).flops == 2 * 560 * 32768 * 2048
    assert linear.gated(50, 4096, 1024).flops == 2 * 50 * 8192 * 1024 + 11 * 50 * 4096
    assert linear.gated(50, 4096, 1024).bytes == 2 * (50 * 1024 + 8192 * 1024 + 50 * 4096)
    assert linear.rotated(50, 8, 1, 256, 1024).bytes == 2 * (50 * 1024 + 2560 * 1024 + 50 * 2560) + 4 * 50 * 256
    assert attention.attention(712, 712, 8, 1, 256).flops == 4 * 712 * 712 * 8 * 256
    assert attention.attention(1, 700, 8, 1, 256).bytes == 2 * 256 * (16 + 1400)
    assert rope.rotate_and_store(1, 8, 1, 256).bytes == 2 * 10 * 256 * 2 + 256 * 4
    assert image.planes(512, 768, 2).bytes == 512 * 768 * (1 + 4)
    assert embedding.interleave(4, 169, 2048).bytes == 2 * 4 * 169 * 2048 * 2 + 2 * 4 * 169
    assert euler.project_in(40, 132, 1536).flops == 2 * 40 * 132 * 1536
    assert euler.project_in(40, 132, 1536).bytes == 4 * (40 * 132 + 132 * 1536 + 1536) + 2 * 40 * 1536
    assert image.frames_to_patches(1, 224, 224, 224).bytes == 224 * 224 * 3 * 3


def test_roofline() -> None:
    assert Cost(10**9, 10**6).microseconds(1e12, 1e15) == 1.0
    assert (Cost(1, 2) + Cost(3, 4)) == Cost(4, 6)
