"""Recognises calls of an op that are like each other, from their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kserve.config import load_settings

PLAIN = (torch.Tensor, torch.nn.Parameter)
# (key, size of each letter), or None for tensors that do not fit.
Match = Callable[..., tuple[Any, ...] | None]


def matcher(pattern: str) -> Match:
    """What tells calls of one op apart, compiled where the compiled launcher is.

    Tensors fit that are dense, of no subclass, have elements and the shapes of the pattern, equal sizes where it has equal
    letters. The key is equal for calls with the same dtypes, device and sizes of upper-case letters.

    Args:
        pattern: "n H, n H, H": for each tensor a letter or a digit (1 to 9: that size) for every dimension.
    """
    if load_settings().launcher != "python":
        from kserve.client.compiled import compiled_match

        found = compiled_match(pattern, torch)
        if found is not None:
            return found
    namespace: dict[str, Any] = {"_plain": PLAIN}
    exec(compile(match_source(pattern), f"<match of {pattern}>", "exec"), namespace)  # noqa: S102 - our own text
    generated: Match = namespace["match"]
    return generated


def match_source(pattern: str) -> str:
    """The text of the match function in plain Python: one condition a tensor, in the order of the pattern."""
    tensors = [f"_{position}" for position in range(pattern.count(",") + 1)]
    lines, known = [f"def match({', '.join(tensors)}):"], list[str]()
    for tensor, dims in zip(tensors, pattern.replace(" ", "").split(","), strict=True):
        lines.append(f"    if type({tensor}) not in _plain or not {tensor}.is_contiguous(): return None")
        fresh = [dim for dim in dict.fromkeys(dims) if dim.isalpha() and dim not in known]
        shape = f"({''.join(f'{dim}, ' for dim in dims)})"
        if fresh:
            lines.append(f"    if {tensor}.dim() != {len(dims)}: return None")
            place = f"({''.join(f'{dim}, ' if dim in fresh else '_, ' for dim in dims)})"
            lines.append(f"    {place} = {tensor}.shape")
            lines.append(f"    if not ({' and '.join(fresh)}): return None")
            known += fresh
        if len(fresh) < len(dims):
            lines.append(f"    if {tensor}.shape != {shape}: return None")
    key = [f"{tensor}.dtype" for tensor in tensors] + [f"{tensors[0]}.device"] + [dim for dim in known if dim.isupper()]
    return "\n".join([*lines, f"    return ({', '.join(key)}), {', '.join(known)}"]) + "\n"
