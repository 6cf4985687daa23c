"""An op of one's own: a soft cap with Triton kernels, and every law of fspeed's own ops for free.

    python examples/custom_op.py
"""
import torch
import triton
import triton.language as tl

import fspeed as fs
from fspeed.ops.interpret import on
from fspeed.ops.op import Paths, op
from fspeed.testing.ops import check_op


@triton.jit
def forward_kernel(x, y, cap, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(x + i, i < n).to(tl.float32) / cap
    tl.store(y + i, cap * (2 * tl.sigmoid(2 * u) - 1), i < n)


@triton.jit
def backward_kernel(dy, y, dx, cap, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(y + i, i < n).to(tl.float32) / cap
    tl.store(dx + i, tl.load(dy + i, i < n).to(tl.float32) * (1 - u * u), i < n)


def launch(kernel, *tensors, cap):
    out = torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=tensors[0].device)
    if n := out.numel():
        on(kernel, out)[(triton.cdiv(n, 1024),)](*[t.contiguous() for t in tensors], out, cap, n, BLOCK=1024)
    return out


softcap = op(
    "softcap(Tensor x, float cap) -> Tensor",
    reference=lambda x, cap: cap * torch.tanh(x / cap),                         # says what is right; the CPU's path too
    cuda=lambda x, cap: launch(forward_kernel, x, cap=cap),
    backward=Paths(cpu=None, cuda=lambda grads, inputs, outputs: [launch(backward_kernel, grads[0], outputs[0], cap=inputs[1])]),
)

# the proof: values and gradients of the kernels, interpreted, against the reference in float64; every transform, traces, purity
if __name__ == "__main__":
    for shape in [(1,), (17,), (1025,), (9, 7, 41)]:
        for dtype in (torch.float32, torch.bfloat16):
            check_op(softcap, 3 * torch.randn(shape).to(dtype), 2.)

    # the use: curvature, gradients by example, a training step
    print("second derivatives", torch.func.hessian(lambda x: softcap(x, 2.).sum())(torch.tensor([0., 1., 9.])).diagonal())
    x, w = fs.random.normal(fs.random.key(1), (64, 8)), fs.random.normal(fs.random.key(2), (8,))
    print("by example", torch.vmap(torch.func.grad(lambda w, x: softcap(x @ w, 2.)), (None, 0))(w, x).shape)
    error = lambda params, x, key: fs.mean((softcap(x @ params["w"], 2.) - softcap(x @ w, 2.)) ** 2)
    step = fs.step(error, fs.optim.adam(0.1))
    state = step.init({"w": torch.zeros(8)})
    for _ in range(60):
        state, metrics = step(state, x)
        print(f"loss {metrics['loss']:.5f}")
