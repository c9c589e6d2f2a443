"""group_norm of a DTensor: two ranks on the CPU, results and gradients against the whole tensors."""

from __future__ import annotations

import torch

from tests.support.processes import python

RANKS = """
import sys, torch
from torch import distributed, multiprocessing
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from kserve.ops.group_norm import FastGroupNorm, Norm, reference
from kserve.ops.sharding import sharded

def whole_and_expected(x, incoming, parts):
    leaves = [x.clone().requires_grad_(), *(torch.linspace(0.5, 1.5, 8, requires_grad=True) for _ in range(2))]
    norm = Norm(2, 1e-5, True, torch.float32)
    pieces = [leaves[0]] if parts is None else leaves[0].chunk(2, parts)
    out = torch.cat([reference(piece, *leaves[1:], norm) for piece in pieces], parts or 0)
    return out.detach(), torch.autograd.grad(out, leaves, incoming)

def check(mesh, dim, n_batches=3):
    torch.manual_seed(0)
    x, incoming = torch.randn(2, n_batches, 8, 4, 4, 4).unbind()
    last = torch.channels_last_3d
    x, incoming = x.contiguous(memory_format=last), incoming.contiguous(memory_format=last)
    # Over the batch a shard has all that its statistics are of; over a voxel's axis each has its own.
    out, gradients = whole_and_expected(x, incoming, dim if dim == 2 else None)
    norm = FastGroupNorm(2, 8, activation="relu")
    placed = [Replicate()] if dim is None else [Shard(dim)]
    for name in ("weight", "bias"):
        value = distribute_tensor(torch.linspace(0.5, 1.5, 8), mesh, [Replicate()])
        setattr(norm, name, torch.nn.Parameter(value))
    leaf = distribute_tensor(x, mesh, placed).detach().requires_grad_()
    found = norm(leaf)
    assert type(found) is DTensor and found.placements == leaf.placements and found.shape == x.shape, found
    found.backward(distribute_tensor(incoming, mesh, placed))
    assert norm.ladder.last_decline(norm).reason == "not_gpu", norm.ladder.last_decline(norm)
    assert leaf.grad.placements == leaf.placements
    pairs = [(found.detach(), out), *zip((leaf.grad, norm.weight.grad, norm.bias.grad), gradients)]
    for ours, right in pairs:
        torch.testing.assert_close(ours.full_tensor(), right, rtol=1e-4, atol=1e-4)

def rank(index, path):
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=index, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 2, None):
        check(mesh, dim)
    x = torch.randn(2, 8, 4, 4, 4)
    sums = DTensor.from_local(x, mesh, [Partial()])
    of_channels = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    assert sharded(distribute_tensor(x, mesh, [Shard(0)]), None, None) is not None
    for left in ((distribute_tensor(x, mesh, [Shard(1)]), None, None), (sums, None, None),
                 (distribute_tensor(x, mesh, [Shard(0)]), of_channels, None)):
        assert sharded(*left) is None, left
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.start_processes(rank, (sys.argv[1],), 2, start_method="fork")
    print("right")
"""


def test_a_dtensor_is_served_shard_by_shard(tmp_path):
    done = python(RANKS, str(tmp_path / "meeting"), check=False, WORLD_SIZE="2")
    assert done.stdout == "right\n", done.stderr


def test_nothing_is_imported_for_a_plain_tensor():
    code = (
        "import sys, torch\nfrom kserve.ops import group_norm\n"
        "group_norm(torch.ones(1, 4, 2, 2, 2), 2)\nprint('torch.distributed.tensor' in sys.modules)"
    )
    before = python("import sys, torch\nprint('torch.distributed.tensor' in sys.modules)").stdout
    assert python(code).stdout == before


def test_another_subclass_is_left_to_torch():
    class Odd(torch.Tensor):
        pass

    from kserve.ops.sharding import sharded

    assert sharded(torch.ones(1, 4, 2, 2, 2).as_subclass(Odd), None, None) is None
