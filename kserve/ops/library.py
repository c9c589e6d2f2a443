"""The ops as torch knows them: `torch.ops.kserve.<op>`, with versions that only compute shapes, so that they can be traced.

`Library.define` and `impl` cost a call 3 us; `torch.library.custom_op` costs 8. A front door calls its op through torch only
where something has to see it: a tracer, a mode, a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("kserve", "FRAGMENT")


def define(
    schema: str, *, run: Callable[..., Any], shapes: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Callable[..., Any]:
    """Register an op; what calls it through torch's dispatcher.

    Args:
        schema: `name(Tensor x, …) -> Tensor`, as torch writes it.
        run:    the op on real tensors.
        shapes: the same for tensors without memory.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tuple(tags))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kserve::{name}", shapes, lib=_LIBRARY)
    found: Callable[..., Any] = getattr(torch.ops.kserve, name).default
    return found
