"""Compare the ranks' programs before their first step."""

from __future__ import annotations

import hashlib

import torch

from workbench.core.program import Program, require_same


def require_one_program(group: torch.distributed.ProcessGroup, program: Program) -> None:
    """Compare the ranks' programs before their first step; every rank of the group takes part.

    Raises ScheduleError on every rank, naming the first operation that differs, if a rank has another program than rank 0.
    """
    text = program.to_text().encode()
    own = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([digests], [own]).wait()
    other = next((rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])), None)
    if other is None:
        return
    texts = []
    for root in (0, other):
        length = torch.tensor([len(text)])
        _from(group, root, length)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank() == root:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        _from(group, root, content)
        texts.append(bytes(content.tolist()).decode())
    require_same(*texts, ranks=(0, other))


def _from(group: torch.distributed.ProcessGroup, root: int, tensor: torch.Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()
