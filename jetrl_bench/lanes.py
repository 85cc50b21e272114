"""Arithmetic in fp32 with one result everywhere: sums of a fixed shape (16 or 4 lanes, then a tree), exp and log as
fixed polynomials without fused operations. csrc/vectors.h has the same, bit for bit.
"""

import torch


def pad(x: torch.Tensor, multiple: int, dim: int = -1, value: float = 0.0) -> torch.Tensor:
    size = x.shape[dim]
    extra = -size % multiple
    if not extra:
        return x
    shape = list(x.shape)
    shape[dim] = extra
    return torch.cat([x, x.new_full(shape, value)], dim)


def fold(x: torch.Tensor) -> torch.Tensor:
    """Tree sum of the last dimension (a power of two): i + (i + width / 2), repeatedly."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def lane_sum(x: torch.Tensor, lanes: int = 16) -> torch.Tensor:
    """Sum of the last dimension: `lanes` partial sums (index mod lanes), each in order, then a tree."""
    x = pad(x, lanes).unflatten(-1, (-1, lanes))
    total = torch.zeros_like(x[..., 0, :])
    for i in range(x.shape[-2]):
        total = total + x[..., i, :]
    return fold(total)


def lane_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., M, K] @ [..., K, N] in fp32 with four lanes over K (k mod 4), each in order, then a tree."""
    a = pad(a, 4).unflatten(-1, (-1, 4))
    b = pad(b, 4, -2).unflatten(-2, (-1, 4))
    total = torch.zeros((), dtype=torch.float32, device=a.device)
    for i in range(a.shape[-2]):
        total = total + a[..., :, i, :, None] * b[..., None, i, :, :]
    return fold(total.transpose(-1, -2))


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x in fp32 (Cephes' polynomial, no fused operations): relative error below 2e-7; 0 below -87."""
    x = torch.where(x > 88.0, 88.0, x)
    zero = x < -87.0
    x = torch.where(zero, -87.0, x)
    n = (x * 1.44269504088896341 + 12582912.0) - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    y = (p * (r * r) + r) + 1.0
    y = y * ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(zero, 0.0, y)


def log(x: torch.Tensor) -> torch.Tensor:
    """ln x in fp32 for normal positive x (Cephes' polynomial, no fused operations)."""
    bits = x.view(torch.int32)
    e = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = m < 0.707106781186547524
    e = torch.where(small, e - 1, e).float()
    m = torch.where(small, m + m - 1.0, m - 1.0)
    z = m * m
    p = torch.full_like(m, 7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1):
        p = p * m + c
    for c in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = p * m + c
    p = (p * m) * z
    p = p + e * -2.12194440e-4
    p = p + z * -0.5
    return (m + p) + e * 0.693359375


def bf(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()
