"""How the list of layers is cut into pipeline stages."""

from __future__ import annotations

from megatron_simple.model.transformer import LayerSpec


def blocks_per_stage(layers: int, stages: int) -> tuple[int, ...]:
    """As even as possible; what is left over goes to the inner stages first, as the first and the last stage also hold
    the embedding and the head. No stage is empty: `layers` >= `stages`."""
    each, left = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda stage: (stage == stages - 1) * 2 + (stage == 0))
    return tuple(each + (stage in inner_first[:left]) for stage in range(stages))


def stage_bounds(specs: list[LayerSpec], blocks: tuple[int, ...]) -> list[int]:
    """Positions in `specs` where stages begin, and its length at the end: embeddings go with the first block, final norm
    and head with the last."""
    first = next(i for i, spec in enumerate(specs) if spec.name == "layers.0")
    bounds = [0]
    for count in blocks[:-1]:
        bounds.append((first if len(bounds) == 1 else bounds[-1]) + count)
    return [*bounds, len(specs)]
